"""A whole state from a commit: bind targets, refuse what does not fit, read, hand over."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptstore.core.ids import CommitId
from ckptstore.engine.checkout import Reader, Tree, Wanted
from ckptstore.errors import InvalidInput
from ckptstore.state.restore import bind

if TYPE_CHECKING:
    from ckptstore.state.restore import Binding

SHOWN = 8


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore left out: paths the target wants and the commit lacks, and paths that only the commit has."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def restore(
    reader: Reader, commit: CommitId, trees: Mapping[str, Tree], app_state: MutableMapping[str, Any], *, strict: bool, allow_pickle: bool
) -> RestoreReport:
    """Bring `app_state` to the commit's state in place. Raises `InvalidInput` before anything is touched."""
    bindings = {
        key: bind(app_state[key], key, tree.schema, strict=strict, allow_pickle=allow_pickle)
        for key, tree in trees.items()
        if key in app_state
    }
    missing = [key for key in app_state if key not in trees] + [p for b in bindings.values() for p in b.missing]
    unexpected = [key for key in trees if key not in app_state] + [p for b in bindings.values() for p in b.unexpected]
    _refuse(commit, bindings, missing if strict else [], unexpected if strict else [])
    reader.read(_wanted(trees, bindings), commit)
    for key in sorted(bindings, key=lambda k: bindings[k].late):
        binding, tree = bindings[key], trees[key]
        restored = binding.finish({i: reader.leaf_bytes(tree, i, commit) for i in binding.wanted_bytes})
        if restored is not app_state[key]:
            app_state[key] = restored
    return RestoreReport(tuple(missing), tuple(unexpected))


def _wanted(trees: Mapping[str, Tree], bindings: Mapping[str, "Binding"]) -> list[Wanted]:
    """Every destination once: tied targets are one piece of memory."""
    wanted: list[Wanted] = []
    seen: set[tuple[int, int]] = set()
    for key, binding in bindings.items():
        for i, destination in enumerate(binding.destinations):
            if destination is None:
                continue
            place = (destination.address, destination.nbytes)
            if destination.address:
                if place in seen:
                    continue
                seen.add(place)
            wanted.append(Wanted(trees[key], i, destination))
    return wanted


def _refuse(commit: CommitId, bindings: Mapping[str, "Binding"], missing: Sequence[str], unexpected: Sequence[str]) -> None:
    problems = [f"{m.path}: the commit has {m.committed}, the target has {m.target}" for b in bindings.values() for m in b.mismatched]
    problems += [f"{path}: wanted by the target, not in the commit" for path in missing]
    problems += [f"{path}: in the commit, not wanted by the target" for path in unexpected]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidInput(
            f"commit {commit[:12]} does not fit the state that it was to be restored into; nothing was changed:\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
            + "\npass strict=False to leave out what only one side has; shapes and dtypes must agree"
        )
