"""Which `rename=` makes the names of a commit and those of a target meet? For an error's next step.

Wrappers and libraries put prefixes before names, and some releases renamed their layers. A prefix
is found from the names alone, on either side; renamed parts come from a table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ckptstore.errors import InvalidInput
from ckptstore.state.renaming import Renamer

PARTS: tuple[Mapping[str, str], ...] = (
    # wrappers within a name: torch.compile, FSDP1, activation checkpoints, DistributedDataParallel
    {"_orig_mod.": ""},
    {"_fsdp_wrapped_module.": ""},
    {"_checkpoint_wrapped_module.": ""},
    {"module.": ""},
    # torch.nn.utils.weight_norm, and torch.nn.utils.parametrizations.weight_norm, which follows it
    {
        ".weight_g": ".parametrizations.weight.original0",
        ".weight_v": ".parametrizations.weight.original1",
    },
    {
        "/weight_g": "/parametrizations.weight.original0",
        "/weight_v": "/parametrizations.weight.original1",
    },
    # DenseNet of torchvision before 0.3
    {f".{name}.{n}.": f".{name}{n}." for name in ("norm", "conv") for n in (1, 2)},
    # Vision Transformer of torchvision before 0.13
    {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."},
    # layer norms of TensorFlow, and of what was converted from it
    {".gamma": ".weight", ".beta": ".bias"},
    # adapters of PEFT within a model, and saved alone
    {".lora_A.default.": ".lora_A.", ".lora_B.default.": ".lora_B."},
)
"""Parts of names that differ between what was saved and what is wanted, in either direction."""

TRIES = 20
"""At most so many prefixes are compared with all names."""


class _Way(NamedTuple):
    """A rename as the caller writes it, what it makes of a path, and where the names were."""

    text: str
    apply: Callable[[str], str]
    place: str


def renaming_hint(missing: Sequence[str], paths: Sequence[str]) -> str:
    """A line that says how to call `restore`, if a rename of the `paths` of a commit gives all that
    are `missing` in it; empty if none is known to."""
    if not missing:
        return ""
    wanted = set(missing)
    for way in _ways(missing[0], paths):
        if wanted <= set(map(way.apply, paths)):
            them, are = (f"all {len(missing)} names", "are") if missing[1:] else ("the name", "is")
            return f"\n{them} that the commit lacks {are} there {way.place}: pass {way.text}"
    return ""


def _ways(wanted: str, paths: Sequence[str]) -> Iterator[_Way]:
    found = filter(None, (_prefixes(wanted, path) for path in paths))
    for _, old, new in sorted(set(found), reverse=True)[:TRIES]:
        place = f"behind {old!r}" if len(old) > len(new) else f"without {new!r}"
        yield _Way(f"rename={{{old!r}: {new!r}}}", partial(_renamed, Renamer({old: new})), place)
    for parts in PARTS:
        back = {new: old for old, new in parts.items()}
        for table in (parts, back) if all(back) else (parts,):
            calls = "".join(f".replace({old!r}, {new!r})" for old, new in table.items())
            text = f"rename=lambda path: path{calls}"
            yield _Way(text, partial(_replaced, table), "under other names")


def _prefixes(wanted: str, there: str) -> tuple[int, str, str] | None:
    """What to replace in front of `there` so that it becomes `wanted`, of the same key, after the
    number of parts in which both end alike."""
    key, _, name = wanted.partition("/")
    other_key, _, other = there.partition("/")
    if key != other_key or not name or not other:
        return None
    ours, theirs = name.split("."), other.split(".")
    n = 0
    while n < min(len(ours), len(theirs)) and ours[-1 - n] == theirs[-1 - n]:
        n += 1
    if not n:
        return None
    end = ".".join(ours[len(ours) - n :])
    old, new = other.removesuffix(end), name.removesuffix(end)
    return (n, old, new) if old else (n, f"{key}/", f"{key}/{new}")


def _renamed(renamer: Renamer, path: str) -> str:
    """The new path; of one that cannot be renamed so, the old one."""
    try:
        return renamer(path)
    except InvalidInput:
        return path


def _replaced(parts: Mapping[str, str], path: str) -> str:
    for old, new in parts.items():
        path = path.replace(old, new)
    return path
