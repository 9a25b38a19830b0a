"""How does a training with Accelerate save into a store? `attach` makes `save_state` commit and
`load_state` restore (docs/accelerate.md).

The directories that a script names stay. Each has a pointer file instead of the state, written when
the commit is durable, so that a directory without one is no checkpoint.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from ckptstore import Ranks, Store, write_pointer
from ckptstore import open as open_store
from ckptstore.errors import CkptStoreError, Conflict, Corrupt, InvalidInput, NotFound
from ckptstore.interop.background_saves import BackgroundSaves, as_first_rank, together
from ckptstore.interop.oldest import check_version
from ckptstore.plugin.model import CommitId
from ckptstore.plugin.pointers import is_pointer, read_pointer
from ckptstore.plugin.snapshots import Snapshot

try:
    import accelerate
    from accelerate import Accelerator

    from ckptstore.interop.accelerate.folders import (
        POINTER,
        commit_at,
        existing,
        is_checkpoint,
        leaving_file,
        number_of,
        numbered,
        numbered_folder,
        step_of,
    )
    from ckptstore.interop.accelerate.hook_files import KEY, Listing, files_in, fill, written_since
    from ckptstore.interop.accelerate.state import (
        call_save_hooks,
        is_sharded,
        key_of,
        live_state,
        loaders_with_lost_order,
        state_to_save,
    )
    from ckptstore.interop.leaving import read_leaving, write_leaving
except ImportError as error:
    raise ImportError(
        f'attach needs Accelerate: pip install "ckptstore[accelerate]" ({error})'
    ) from error

__all__ = ["Attached", "attach"]

logger = logging.getLogger("ckptstore")

OLDEST = (1, 6)
"""The oldest Accelerate that this has been tested with."""

PROTECTED = 2
"""So many of the newest commits of a run are not forgotten when their directories go."""

_ELSEWHERE = {
    "DEEPSPEED": "ckptstore.interop.deepspeed.StoreCheckpointEngine.install(model, store) on the "
    "prepared model stores what DeepSpeed saves, also in save_state",
    "MEGATRON_LM": "Megatron-LM writes its own checkpoints; `ckptstore adopt DIRECTORY` commits "
    "them",
    "XLA": "tensors of XLA devices cannot be copied in the background",
}


def attach(
    accelerator: Accelerator,
    store: Store | str | os.PathLike[str],
    *,
    wait: bool = False,
    ranks: Ranks | None = None,
    allow_pickle: bool = False,
) -> "Attached":
    """Let `accelerator.save_state` commit to `store`, and `accelerator.load_state` restore from it.

    `save_state` copies the state and returns; hashing and writing go on beside the training. The
    next `save_state`, `load_state` or `end_training` raises what failed meanwhile, on all ranks.

    Args:
        accelerator: The accelerator of this process; every rank attaches its own.
        store: An open store, or the place of one, which is closed by `close` or `end_training`.
        wait: Return from `save_state` only when the commit is durable.
        ranks: As in `Store.commit`, for commits and restores.
        allow_pickle: Pickle values of registered objects that have no safe encoding.

    Returns:
        What is attached: `wait`, `detach`, `close`, and the `store`.

    Raises:
        InvalidInput: The version or the kind of training is not supported, or the accelerator is
            attached already.

    Example:
        >>> attach(accelerator, "checkpoints")
        >>> accelerator.save_state("out/step_100")
    """
    _check_supported(accelerator)
    owned = not isinstance(store, Store)
    opened = store if isinstance(store, Store) else open_store(store)
    return Attached(accelerator, opened, owned, wait, ranks or Ranks(), allow_pickle)


def _check_supported(accelerator: Accelerator) -> None:
    check_version("Accelerate", accelerate.__version__, OLDEST, "accelerate")
    if advice := _ELSEWHERE.get(kind := accelerator.distributed_type.name):
        raise InvalidInput(f"attach does not support trainings of kind {kind}: {advice}")
    if "_attached" in vars(accelerator):
        raise InvalidInput("a store is attached to this accelerator already; detach it first")


def _with_store(cls: type[Accelerator]) -> type[Accelerator]:
    """`cls` with the methods of what is attached. A pickle or a copy of an accelerator is one of
    `cls` again, without the store."""

    class WithStore(cls):  # type: ignore[misc]  # of a class known only here
        def save_state(self, *args: Any, **kwargs: Any) -> Path:
            return self._attached.save_state(*args, **kwargs)  # type: ignore[no-any-return]

        def load_state(self, *args: Any, **kwargs: Any) -> None:
            self._attached.load_state(*args, **kwargs)

        def end_training(self) -> None:
            self._attached.end_training()

        def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
            state = {name: value for name, value in vars(self).items() if name != "_attached"}
            return _new, (cls,), state

    WithStore.__name__, WithStore.__qualname__ = cls.__name__, cls.__qualname__
    return WithStore


def _new(cls: type[Accelerator]) -> Accelerator:
    made: Accelerator = object.__new__(cls)
    return made


class Attached:
    """A store at an accelerator, whose `save_state`, `load_state` and `end_training` are the
    methods of this object until `detach`."""

    def __init__(
        self,
        accelerator: Accelerator,
        store: Store,
        owned: bool,
        wait: bool,
        ranks: Ranks,
        allow_pickle: bool,
    ) -> None:
        self.store = store
        self._accelerator, self._owned, self._waits = accelerator, owned, wait
        self._ranks, self._allow_pickle = ranks, allow_pickle
        self._saves = BackgroundSaves(store, ranks)
        self._warned: set[int] = set()
        self._class = type(accelerator)
        accelerator._attached, accelerator.__class__ = self, _with_store(self._class)

    def detach(self) -> None:
        """Wait for the last save, and give the accelerator its own methods back."""
        try:
            self.wait()
        finally:
            if vars(self._accelerator).pop("_attached", None):
                self._accelerator.__class__ = self._class

    def close(self) -> None:
        """Detach, and close the store if `attach` opened it."""
        try:
            self.detach()
        finally:
            if self._owned:
                self.store.close()

    def wait(self) -> None:
        """Wait until the last save is durable. Raises what failed, once. All ranks call this."""
        self._saves.settle()

    def end_training(self) -> None:
        """As `Accelerator.end_training`, when the last save is durable."""
        try:
            self.close()
        finally:
            self._accelerator.end_training()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tag: str | Sequence[str] | None = (),
        **save_model_func_kwargs: Any,
    ) -> Path:
        """As `Accelerator.save_state`, as a commit. All ranks call this.

        Args:
            output_dir: The directory that gets the pointer file.
            safe_serialization: Without meaning here: no file is written.
            step: The step of the commit; default: the number at the end of the directory's name.
            metrics: Numbers by name, for `load_state("best:loss")`.
            tag: Names for the commit.
            save_model_func_kwargs: Without meaning here.

        Returns:
            The directory.

        Raises:
            InvalidInput: A value cannot be stored; the message has its path.
            CkptStoreError: An earlier save failed, and this one did not begin.
        """
        accelerator = self._accelerator
        if not self._saves.make_way(step):
            return self._place(output_dir)
        place = self._saves.attempt("save: directory", partial(self._directory, output_dir))
        if place is None:
            return self._place(output_dir)
        directory, before = place
        hooked = together(
            self._ranks, "save: hooks", partial(call_save_hooks, accelerator, directory)
        )
        origins, name = as_first_rank(
            self._ranks, "save: weights", lambda: [hooked and hooked.origins, str(directory)]
        )
        files = together(self._ranks, "save: files", partial(self._written, before, directory))
        self._warn_of_lost_orders()
        pending = self.store.commit_async(
            {**state_to_save(accelerator, name, hooked, origins), **files},
            step=step_of(directory) if step is None else step,
            metrics=metrics,
            tag=tag,
            allow_pickle=self._allow_pickle,
            ranks=self._ranks,
        )
        self._saves.follow(pending, partial(self._publish, directory))
        accelerator.project_configuration.iteration += 1
        if self._waits:
            self._saves.finish()
        return directory

    def _directory(self, asked: str | os.PathLike[str] | None) -> tuple[Path, Listing]:
        """The directory, and what lies in it if hooks may write there."""
        directory = self._place(asked)
        directory.mkdir(parents=True, exist_ok=True)
        hooks = self._accelerator._save_model_state_pre_hook
        return directory, files_in(directory) if hooks else {}

    def _written(self, before: Listing, directory: Path) -> dict[str, Any]:
        """What the hooks of all processes have written, from one process of each node."""
        accelerator = self._accelerator
        if not accelerator._save_model_state_pre_hook or not accelerator.is_local_main_process:
            return {}
        found = written_since(before, directory)
        return {KEY: found} if found else {}

    def _warn_of_lost_orders(self) -> None:
        """Say once of each loader that a resumed epoch would have another order of its samples."""
        for number in loaders_with_lost_order(self._accelerator):
            if number not in self._warned:
                self._warned.add(number)
                logger.warning(
                    "data loader %d is saved within an epoch whose shuffled order cannot be drawn "
                    "again: resumed there, some samples come twice and others never. Use "
                    "DataLoaderConfiguration(use_seedable_sampler=True), also with "
                    "use_stateful_dataloader=True",
                    number,
                )

    def _place(self, asked: str | os.PathLike[str] | None) -> Path:
        accelerator = self._accelerator
        if folder := numbered_folder(accelerator):
            directory = folder / f"checkpoint_{accelerator.save_iteration}"
            if is_checkpoint(directory):
                raise InvalidInput(
                    f"{directory} has a checkpoint already: load_state() goes on behind the "
                    "newest; or set accelerator.project_configuration.iteration"
                )
            return directory
        if asked is None:
            raise InvalidInput(
                "save_state() needs a directory, or "
                "ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        return Path(asked).expanduser().absolute()

    def _publish(self, directory: Path, snapshot: Snapshot) -> None:
        """The commit is durable: name it by its directory, and remove directories that are too
        many."""
        accelerator = self._accelerator
        on_each_node = accelerator.project_configuration.save_on_each_node
        if accelerator.is_main_process or (on_each_node and accelerator.is_local_main_process):
            write_pointer(directory / POINTER, self.store, snapshot.id)
            self._rotate(directory)

    def _rotate(self, newest: Path) -> None:
        folder = numbered_folder(self._accelerator)
        limit = self._accelerator.project_configuration.total_limit
        if folder is None or limit is None:
            return
        older = [each for each in numbered(folder) if each != newest]
        whole = [each for each in older if is_checkpoint(each)]
        kept = whole[max(0, len(whole) - (limit - 1)) :]
        removed = [each for each in older if each not in kept]
        if not self._accelerator.is_main_process:
            for each in removed:
                shutil.rmtree(each)
            return
        places = [each / POINTER for each in removed if is_pointer(each / POINTER)]
        file = leaving_file(folder)
        leaving = [*read_leaving(file), *(read_pointer(place).id for place in places)]
        write_leaving(file, leaving)
        for each in removed:
            shutil.rmtree(each)
        write_leaving(file, self._forget(leaving))

    def _forget(self, leaving: Sequence[CommitId]) -> list[CommitId]:
        """Forget the commits of removed directories, and collect what nothing needs any more.
        Returns the protected ones (a tag, the two newest of the run), which are asked for again
        after the next save, also by a later process."""
        forgotten, protected = 0, []
        newest = {info.id for info in self.store.log(PROTECTED, run=self.store.run)}
        for commit in leaving:
            if commit in newest:
                protected.append(commit)
                continue
            try:
                self.store.forget(commit)
                forgotten += 1
            except Conflict as error:
                logger.debug("commit %s stays for now: %s", commit[:12], error)
                protected.append(commit)
            except NotFound:
                pass  # somebody else has forgotten and collected it
        if forgotten:
            try:
                self.store.gc()
            except CkptStoreError as error:
                logger.warning("removed checkpoints keep their room for now: %s", error)
        return protected

    def load_state(
        self,
        input_dir: str | int | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """As `Accelerator.load_state`, from a commit. All ranks call this.

        Args:
            input_dir: A directory that `save_state` was given; a ref such as a step, a tag or
                `"best:loss"`; or None for the newest checkpoint that verifies: damaged ones are
                passed over with a warning. A directory with files of Accelerate is loaded by it.
            load_kwargs: For a directory with files of Accelerate.
            load_model_func_kwargs: `strict=False` as in `Snapshot.restore`. `map_location` is only
                for files: a restore fills tensors where they are.

        Raises:
            NotFound: There is no such checkpoint.
            Corrupt: It is damaged; without `input_dir`, all are.
            InvalidInput: It does not fit what was prepared and registered; nothing was changed.
        """
        self.wait()
        kwargs = {"load_kwargs": load_kwargs, **load_model_func_kwargs}
        location = load_model_func_kwargs.get("map_location")
        if location not in (None, "cpu", "on_device"):
            raise InvalidInput(f"map_location is {location!r}; wanted None, 'cpu' or 'on_device'")
        if input_dir is not None:
            is_directory = as_first_rank(
                self._ranks, "load: look", lambda: isinstance(existing(input_dir), Path)
            )
            asked = cast(str, input_dir)  # of a directory, the one on this process's node
            self._load(Path(asked).expanduser().absolute() if is_directory else asked, kwargs)
            self._number_behind()
        elif not self._load_newest(kwargs):
            raise NotFound(
                f"{self.store.url} has no commit of run {self.store.run}, so that there is nothing "
                "to load; save_state makes one, and resume() loads one if there is one"
            )

    def resume(self) -> bool:
        """Load the newest checkpoint that verifies, as `load_state()` does; False if there is none
        yet. All ranks call this."""
        self.wait()
        return self._load_newest({})

    def _load_newest(self, kwargs: dict[str, Any]) -> bool:
        damaged = []
        for name, is_directory in as_first_rank(self._ranks, "load: look", self._candidates):
            try:
                self._load(Path(name) if is_directory else name, kwargs)
            except (Corrupt, NotFound) as error:
                logger.warning("skipped checkpoint %s: %s", name, error)
                damaged.append(f"{name}: {error}")
                continue
            self._number_behind()
            return True
        if damaged:
            raise Corrupt(
                f"none of the {len(damaged)} checkpoints can be loaded; the newest: {damaged[0]}"
            )
        return False

    def _number_behind(self) -> None:
        """Let automatic naming go on behind the newest number."""
        if folder := numbered_folder(self._accelerator):
            configuration = self._accelerator.project_configuration
            numbers = [number_of(each) + 1 for each in numbered(folder) if is_checkpoint(each)]
            configuration.iteration = max([configuration.iteration, *numbers])

    def _candidates(self) -> list[tuple[str, bool]]:
        """Directories of numbered checkpoints, newest first; where there are none, the commits of
        the run."""
        folder = numbered_folder(self._accelerator)
        found = reversed(numbered(folder)) if folder else ()
        directories = []
        for each in found:
            if is_checkpoint(each):
                directories.append((str(each), True))
            else:
                logger.warning("skipped checkpoint %s: its save did not end", each)
        return directories or [(each.id, False) for each in self.store.log(run=self.store.run)]

    def _load(self, ref: str | int | Path, kwargs: dict[str, Any]) -> None:
        """Load a ref, or what a directory has. The first rank looks: a pointer need not be on the
        disks of other nodes."""
        found = as_first_rank(self._ranks, "load: find", partial(self._found, ref))
        if found is None:
            self._class.load_state(self._accelerator, str(ref), **kwargs)
            return
        commit, made, has_files = found
        snapshot = together(self._ranks, "load: open", partial(self.store.checkout, commit))
        wanted = ref if isinstance(ref, Path) else Path(made["directory"])
        reads_files = has_files and bool(self._accelerator._load_model_state_pre_hook)
        with self._directory_of(snapshot, wanted, ref, reads_files) as directory:
            prepare = partial(self._prepare, snapshot, made, directory)
            state = together(self._ranks, "load: hooks", prepare)
        strict = kwargs.get("strict", True)
        snapshot.restore(state, strict=strict, allow_pickle=self._allow_pickle, ranks=self._ranks)
        logger.info("loaded commit %s (step %s)", snapshot.id[:12], snapshot.step)

    def _found(self, ref: str | int | Path) -> list[Any] | None:
        """The commit, what `save_state` noted there, and whether hooks had written files; None for
        a directory without a pointer."""
        if isinstance(ref, Path) and not os.path.lexists(ref / POINTER):
            return None
        snapshot = self.store.checkout(commit_at(ref) if isinstance(ref, Path) else ref)
        if "accelerate" not in (keys := snapshot.keys()):
            raise InvalidInput(
                f"commit {snapshot.id[:12]} was not made by save_state: it has "
                f"{', '.join(keys)}; store.checkout(…).restore takes parts of it"
            )
        return [snapshot.id, snapshot.of_rank(0).state_dict("accelerate"), KEY in keys]

    @contextmanager
    def _directory_of(
        self, snapshot: Snapshot, wanted: Path, ref: str | int | Path, reads_files: bool
    ) -> Iterator[Path]:
        """The directory for load hooks, with the files of the commit if they read some. A ref whose
        directory is gone, or has another commit by now, gets one for the time of the block."""
        if not reads_files:
            yield wanted
            return

        def choose() -> str | None:
            is_its_own = isinstance(ref, Path) or (
                is_pointer(wanted / POINTER) and read_pointer(wanted / POINTER).id == snapshot.id
            )
            return None if is_its_own else tempfile.mkdtemp(prefix="ckptstore-hooks-")

        passing = as_first_rank(self._ranks, "load: place", choose)
        directory = wanted if passing is None else Path(passing)
        fills = self._accelerator.is_local_main_process
        try:
            if_first = partial(fill, directory, snapshot, self._accelerator.process_index)
            together(self._ranks, "load: files", if_first if fills else lambda: None)
            yield directory
        finally:
            if passing is not None and fills:
                shutil.rmtree(directory, ignore_errors=True)

    def _prepare(self, snapshot: Snapshot, made: dict[str, Any], directory: Path) -> dict[str, Any]:
        """Call the hooks, load the weights that a hook had changed, and return the live objects
        that the rest of the commit is restored to."""
        accelerator = self._accelerator
        saved, present = made["custom_objects"], len(accelerator._custom_objects)
        if saved != present:
            raise InvalidInput(
                f"commit {snapshot.id[:12]} has {saved} registered objects, and {present} are "
                "registered now: call register_for_checkpointing for the same ones, in the same "
                "order"
            )
        models = list(accelerator._models)
        shown = [] if is_sharded(accelerator) else models
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(shown, str(directory))
        edited = [place for place in made["edited"] if place < len(models)]
        state = live_state(accelerator, models)
        for place in edited:
            saved_weights = snapshot.of_rank(0).state_dict(key_of("model", place))
            state.pop(key_of("model", place)).load_state_dict(saved_weights)
        return state
