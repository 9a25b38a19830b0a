"""Who may pickle and unpickle while the tests run: only `ALLOWED` callers, and ckptstore where a
test passes allow_pickle=True.

`tests/conftest.py` imports this file in pytest's own process and puts its folder on PYTHONPATH, so
that every Python that a test starts imports it first, by its name, as Python's `site` does. All of
pickle's entrances, those of `_pickle` and `torch.load` and `torch.save` are replaced. Who comes by
without leave gets a `PickleReached`, and is written to the file that `REPORT` names: an exception
that somebody swallows, in whatever process, still fails the test.

Only the standard library is imported, and little of it: this runs at the start of each command that
a test measures.

For the same reason it ends a process sooner: the interpreter's last collections look through all
of torch, a fifth of what a process costs that imports it. `WHOLE_EXIT` leaves them alone.
"""

import _pickle
import atexit
import gc
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

PERMIT = "CKPTSTORE_TEST_PICKLES"
"""Set to 1 while a test runs that is marked `pickles`."""

REPORT = "CKPTSTORE_TEST_PICKLE_REPORT"
"""The file that takes the names of callers who were refused."""

WHOLE_EXIT = "CKPTSTORE_TEST_WHOLE_EXIT"
"""Set to 1 where a test wants a process that ends as a user's does."""

ALLOWED = (
    "multiprocessing",
    "concurrent.futures.process",
    "torch.multiprocessing",
    "torch.distributed",
    "torch.serialization",
    "torch.storage",
    "torch._dynamo",
    "torchsnapshot",
    "torch_checkpointing",
    "jinja2",
    "moto",
    "accelerate",
    "datasets",
    "deepspeed",
    "dill",
    "lightning",
    "megatron",
    "peft",
    "pytorch_lightning",
    "ray",
    "torchtitan",
    "transformers",
    "trl",
)
"""Modules, and those below them, whose pickles are no affair of ckptstore's: worker processes,
DCP's and FSDP's collectives, the compiler (which takes hashes of them), the peers' and the
trainers' wheels, the S3 server of the tests; and torch's own file, behind `torch.load` and
`torch.save`, which are guarded themselves."""

OURS = ("ckptstore.state.inflate", "ckptstore.plugins.foreign.kinds")
"""Where ckptstore may, if the caller asks for it."""

HARMLESS = {
    (
        "ckptstore.plugins.foreign.inert_pickles",
        "pickle.Unpickler",
    ): "gives records that do nothing, and refuses every other name",
    (
        "ckptstore.plugins.foreign.plain_pickles",
        "torch.save",
    ): "writes the file that the user asked for, and objects for those who read what DCP writes",
    ("ckptstore.interop.deepspeed", "torch.save"): "writes the files that the user asked for",
}
"""What ckptstore does without being asked for it, and why it may."""


FUNCTIONS = ("load", "loads", "dump", "dumps")
CLASSES = ("Unpickler", "Pickler")


class PickleReached(BaseException):
    """Not an `Exception`, so that little catches it."""


def check(what: str, caller: str) -> None:
    """Raise unless the module `caller` may use `what`."""
    if (
        caller.startswith(ALLOWED)
        or (caller, what) in HARMLESS
        or (os.environ.get(PERMIT) == "1" and caller.startswith((*OURS, "tests.")))
    ):
        return
    report = os.environ.get(REPORT)
    if report:
        with open(report, "a", encoding="utf-8") as file:
            file.write(f"{caller} reached {what}\n")
    raise PickleReached(
        f"{caller} reached {what}; only a test marked `pickles` may, and ckptstore only with "
        "allow_pickle=True"
    )


class _Guarded:
    """A function that asks who calls it. No function itself: as a class attribute it must not
    become a method."""

    def __init__(self, what: str, function: Callable[..., Any]) -> None:
        self._what, self._function = what, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        if (
            self._what != "torch.load" or options.get("weights_only") is not True
        ):  # which reads tensors and plain values only
            check(self._what, sys._getframe(1).f_globals.get("__name__", "?"))
        return self._function(*args, **options)


def _guarded_class(what: str, cls: Any) -> Any:
    class Guarded(cls):  # type: ignore[misc]  # of a class known only here
        def __init__(self, *args: Any, **options: Any) -> None:
            check(what, sys._getframe(1).f_globals.get("__name__", "?"))
            super().__init__(*args, **options)

    Guarded.__name__ = Guarded.__qualname__ = cls.__name__
    return Guarded


def _guard_pickle() -> None:
    for module in (pickle, _pickle):
        for name in (*FUNCTIONS, *(f"_{name}" for name in FUNCTIONS)):
            if hasattr(module, name):
                setattr(module, name, _Guarded(f"{module.__name__}.{name}", getattr(module, name)))
        for name in (*CLASSES, *(f"_{name}" for name in CLASSES)):
            if hasattr(module, name):
                setattr(
                    module, name, _guarded_class(f"{module.__name__}.{name}", getattr(module, name))
                )


class _OnImport:
    """A finder that lets others find `torch.serialization` and guards it once it has run: the guard
    itself does not import torch."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch.serialization":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]  # a finder, though not by inheritance
        from importlib.util import find_spec

        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                _guard_torch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _guard_torch(serialization: Any) -> None:
    for name in ("load", "save"):
        setattr(serialization, name, _Guarded(f"torch.{name}", getattr(serialization, name)))


def install() -> None:
    """Guard this process, once."""
    if not isinstance(getattr(pickle, "guard", None), str):
        # two copies of this file may be imported, under two names
        pickle.guard = __name__  # type: ignore[attr-defined]
        _guard_pickle()
        # a finder, though not by inheritance
        sys.meta_path.insert(0, _OnImport())  # type: ignore[arg-type]
        if os.environ.get(WHOLE_EXIT) != "1":
            atexit.register(gc.freeze)  # the first that is registered is the last that runs


install()
