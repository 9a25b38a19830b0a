"""How is a state restored into targets? Match them, refuse mismatches, read, load."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptstore.core.ids import CommitId
from ckptstore.errors import InvalidInput
from ckptstore.restore.inflate_commit import Select, View, renamed, selected, whole
from ckptstore.restore.reader import ChunkRead, Reader, Reading, ReadRequest, Tree
from ckptstore.state.leaves import checked_dtype
from ckptstore.state.match_target import Matching
from ckptstore.state.optimizers import ParameterNames
from ckptstore.state.restore import bind

if TYPE_CHECKING:
    import torch

    from ckptstore.state.renaming import Rename
    from ckptstore.state.restore import Binding

SHOWN = 8


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Paths that a restore skipped: those that the commit lacks, and those that the target lacks.

    `needed_bytes` are those of the tensors that this process restored, `read_bytes` the raw bytes
    of the chunks that it read for them: chunks are read whole. `received_bytes` are those of chunks
    that another rank read and sent.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    needed_bytes: int = 0
    read_bytes: int = 0
    received_bytes: int = 0


class Brought(NamedTuple):
    """The result of a shared read by ranks: the pieces left for this rank, and the raw bytes of
    chunks it read and received."""

    left: Sequence[ChunkRead]
    read_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class RestoreOptions:
    """The options of a restore; `Snapshot.restore` documents them."""

    strict: bool = True
    allow_pickle: bool = False
    select: Select | None = None
    rename: "Rename | None" = None
    dtype: "torch.dtype | None" = None
    memory_budget_bytes: int | None = None


class RestoreOperation:
    """A restore: bind targets, then `read`, then `finish`. Raises `InvalidInput` before it changes
    anything."""

    def __init__(
        self,
        reader: Reader,
        commit: CommitId,
        trees: Mapping[str, Tree],
        app_state: MutableMapping[str, Any],
        options: RestoreOptions,
    ) -> None:
        self._reader, self._commit, self._app_state, self._options = (
            reader,
            commit,
            app_state,
            options,
        )
        partial, views = options.select is not None, _views(commit, trees, app_state, options)
        self._trees = {key: view.tree for key, view in views.items()}
        matching = Matching(
            ParameterNames(app_state),
            strict=options.strict,
            allow_pickle=options.allow_pickle,
            partial=partial,
            in_order=options.rename is not None,
            dtype=None if options.dtype is None else checked_dtype(options.dtype),
        )
        self._bindings = bindings = {
            key: bind(
                app_state[key],
                key,
                view.schema,
                matching,
                content_of=view.tree.content_key,
                check=view.tree.check,
            )
            for key, view in views.items()
            if key in app_state
        }
        missing = [key for key in app_state if key not in views and not partial] + [
            p for b in bindings.values() for p in b.missing
        ]
        unexpected = [key for key in views if key not in app_state] + [
            p for b in bindings.values() for p in b.unexpected
        ]
        _refuse(
            commit,
            bindings,
            missing if options.strict else [],
            unexpected if options.strict else [],
        )
        self.report = RestoreReport(tuple(missing), tuple(unexpected))

    @cached_property
    def reading(self) -> Reading:
        """The plan of `read`. Raises `Corrupt` for pages that contradict the shapes,
        `InvalidInput` for too small a budget."""
        wanted = [
            ReadRequest(self._trees[key], i, part, box)
            for key, binding in self._bindings.items()
            for i, destination in enumerate(binding.destinations)
            if destination is not None
            for box, part in destination.parts
        ]
        self.report = replace(self.report, needed_bytes=sum(want.nbytes for want in wanted))
        return self._reader.reading(
            wanted, self._commit, memory_budget_bytes=self._options.memory_budget_bytes
        )

    def read(self, brought: Brought | None = None) -> None:
        """Read all tensors into place, except those `brought` already. After an error, tensors mix
        both states."""
        read_bytes = self._reader.carry_out(self.reading, brought and brought.left)
        if brought:
            read_bytes += brought.read_bytes
        self.report = replace(
            self.report,
            read_bytes=read_bytes,
            received_bytes=brought.received_bytes if brought else 0,
        )

    def finish(self) -> None:
        """Set values that are not tensors, and load states into stateful objects."""
        for key in sorted(self._bindings, key=lambda k: self._bindings[k].late):
            binding, tree = self._bindings[key], self._trees[key]
            restored = binding.finish({i: self._bytes_of(tree, i) for i in binding.wanted_bytes})
            if restored is not self._app_state[key]:
                self._app_state[key] = restored

    def _bytes_of(self, tree: Tree, leaf: int) -> bytes:
        return self._reader.leaf_bytes(
            tree, leaf, self._commit, memory_budget_bytes=self._options.memory_budget_bytes
        )


def _views(
    commit: CommitId,
    trees: Mapping[str, Tree],
    app_state: Mapping[str, Any],
    options: RestoreOptions,
) -> dict[str, View]:
    """A view of each tree to restore, by key of the target state."""
    views = whole(trees) if options.select is None else selected(trees, options.select, commit)
    if options.rename is not None:
        views = renamed(views, options.rename)
    if options.select is None:
        return views
    if not views.keys() & app_state.keys():
        raise InvalidInput(
            f"what was selected belongs to {', '.join(views)}; the state that is to be restored "
            f"has {', '.join(app_state)}"
        )
    return {key: view for key, view in views.items() if key in app_state}


def _refuse(
    commit: CommitId,
    bindings: Mapping[str, "Binding"],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> None:
    problems = [
        f"{m.path}: the commit has {m.committed}, the target has {m.target}"
        for b in bindings.values()
        for m in b.mismatched
    ]
    problems += [f"{path}: wanted by the target, not in the commit" for path in missing]
    problems += [f"{path}: in the commit, not wanted by the target" for path in unexpected]
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise InvalidInput(
            f"commit {commit[:12]} does not fit the state that it was to be restored into; nothing "
            "was changed:\n  "
            + "\n  ".join(problems[:SHOWN])
            + more
            + "\npass strict=False to leave out what only one side has, select= to restore a part, "
            "rename= where names differ, "
            "dtype= to convert floats; shapes must agree, what is tied must be one content"
        )
