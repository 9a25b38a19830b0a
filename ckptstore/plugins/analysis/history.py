"""How did tensors move over the commits of a run?

What changed from one commit to the next is kept in the catalog by the commits that led there. So a
second look reads nothing of the store, and one at a longer run only what is new.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ckptstore.errors import Corrupt, InvalidInput, NotFound
from ckptstore.plugin.encoding import decode_schema
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import CommitId, CommitInfo, Schema, digest, parse_chunk_id
from ckptstore.plugin.progress import Counter, Progress, silent
from ckptstore.plugin.reading import Reader
from ckptstore.plugin.statistics import is_measured, key_of
from ckptstore.plugin.text import selector
from ckptstore.plugin.work import ThreadPool, uncollected
from ckptstore.plugins.analysis.measurements import Measurements, Tensor

if TYPE_CHECKING:
    import pandas

    from ckptstore.plugin.snapshots import Select

COMMITS_AT_ONCE = 50
"""So many commits are looked up in the catalog, and kept there, together."""

_MOVE = struct.Struct("<IQ5d3Q2d")
_NONE = -1.0
"""A drift that there is not; a distance is never negative."""


class HistoryRow(NamedTuple):
    """One tensor in one commit.

    `nan`, `inf` and `zeros` count elements; `norm`, `mean`, `std`, `min` and `max` are of the
    finite ones, NaN without any. `drift` is the Euclidean norm of the difference to the commit
    before, `drift_first` of that to the first commit with the tensor; None without one of this
    shape and dtype there.
    """

    step: int | None
    run: str
    commit: CommitId
    leaf: str
    elements: int
    norm: float
    mean: float
    std: float
    min: float
    max: float
    zeros: int
    nan: int
    inf: int
    drift: float | None
    drift_first: float | None


Numbers: TypeAlias = tuple[
    int, float, float, float, float, float, int, int, int, float | None, float | None
]
"""The numbers of a row."""

Moves: TypeAlias = Mapping[int, Numbers]
"""The tensors of a commit that are not as in the commit before, by their number in the selection.
"""


class History(Sequence[HistoryRow]):
    """Rows in the order of the commits, and of the leaves in each."""

    def __init__(self, rows: Sequence[HistoryRow]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i):  # type: ignore[no-untyped-def]  # a row or rows, as of a list
        return self._rows[i]

    def __iter__(self) -> Iterator[HistoryRow]:
        return iter(self._rows)

    def __repr__(self) -> str:
        leaves = {row.leaf for row in self._rows}
        commits = {row.commit for row in self._rows}
        return f"<History of {len(leaves)} leaves in {len(commits)} commits>"

    def first_bad(self) -> "History":
        """For each leaf that ever has a NaN or an infinity, the first row that has one."""
        found: dict[str, HistoryRow] = {}
        for row in self._rows:
            if row.nan or row.inf:
                found.setdefault(row.leaf, row)
        return History(list(found.values()))

    def to_pandas(self) -> "pandas.DataFrame":
        """The rows as a data frame of pandas, which must be installed."""
        try:
            import pandas
        except ImportError as error:
            raise InvalidInput(f"to_pandas: {error}; install pandas") from error
        return pandas.DataFrame(self._rows, columns=HistoryRow._fields)


@uncollected()
def history(
    handle: StoreHandle,
    threads: ThreadPool,
    commits: Sequence[CommitInfo],
    select: "Select" = "*",
    progress: Progress = silent,
) -> History:
    """The history of the selected tensors over `commits`, from the first to the last. `progress`
    is called with phase, done and total.

    Raises:
        NotFound: None of the commits has a selected tensor.
    """
    selection, table = _Selection(handle, select), _Table()
    keys = _keys(commits, select)
    kept = handle.queries().statistics(keys) if keys else {}
    number = 0
    for commit in commits[: len(keys)]:
        leaves = selection.of(commit)
        moves = _decoded(kept.get(keys[number]), len(leaves))
        if moves is None:
            break
        table.add(commit, leaves, moves)
        number += 1
    if number < len(commits):
        walk = _Walk(handle, threads, selection, progress)
        walk.begin(commits[:number], table)
        for start in range(number, len(commits), COMMITS_AT_ONCE):
            some = commits[start : start + COMMITS_AT_ONCE]
            found: dict[bytes, bytes] = {}
            for i, moves in enumerate(walk.moves(some), start):
                table.add(commits[i], selection.of(commits[i]), moves)
                if keys:
                    found[keys[i]] = _encoded(moves)
            handle.keep_statistics(found)
    if not table.rows:
        runs = ", ".join(dict.fromkeys(info.run for info in commits))
        where = f" of run {runs}" if runs else ""
        raise NotFound(
            f"none of {len(commits)} commits{where} has a tensor of numbers that matches "
            f"{select!r:.80}; "
            "`ckptstore ls` lists leaves"
        )
    return History(table.rows)


def _keys(commits: Sequence[CommitInfo], select: "Select") -> list[bytes]:
    """The catalog's key for what changed in each commit, which names all before it; none if the
    selection has no name."""
    if callable(select):
        return []
    start = digest(repr(select).encode())
    chain = accumulate(commits, lambda last, info: digest(last + info.id.encode()), initial=start)
    return [key_of("history", key) for key in chain][1:]


def _encoded(moves: Moves) -> bytes:
    ends = ((_NONE if x is None else x for x in numbers[-2:]) for numbers in moves.values())
    return b"".join(
        _MOVE.pack(i, *numbers[:-2], *end)
        for (i, numbers), end in zip(moves.items(), ends, strict=True)
    )


def _decoded(data: bytes | None, leaves: int) -> Moves | None:
    """The inverse of `_encoded`; None if `data` is none of these leaves'."""
    if data is None or len(data) % _MOVE.size:
        return None
    found: dict[int, Numbers] = {}
    for i, *numbers, drift, first in _MOVE.iter_unpack(data):
        ends = (None if x == _NONE else x for x in (drift, first))
        found[i] = (*numbers, *ends)
    return found if max(found, default=0) < max(leaves, 1) else None


class Leaf(NamedTuple):
    """A selected tensor: number `i` of the tree `key`."""

    key: str
    i: int
    path: str


class _Selection:
    """The selected tensors of numbers in a commit, which its schemas alone decide, and the globs by
    which it was thinned."""

    def __init__(self, handle: StoreHandle, select: "Select") -> None:
        self._handle, self._is_selected = handle, selector(select)
        self._found: dict[tuple[str, ...], list[Leaf]] = {}
        self._is_gone = cache(selector)

    def of(self, commit: CommitInfo) -> list[Leaf]:
        schemas = (*commit.schemas.values(), *commit.thinned)
        if schemas not in self._found:
            self._found[schemas] = [
                Leaf(key, i, path)
                for key, name in commit.schemas.items()
                for i, path in self._tensors(self._schema(name))
                if self._is_selected(path)
                and not (commit.thinned and self._is_gone(commit.thinned)(path))
            ]
        return self._found[schemas]

    def _schema(self, name: str) -> Schema:
        known = self._handle.queries().schema(name)
        return known or decode_schema(self._handle.objects.read_metadata(parse_chunk_id(name)))

    def _tensors(self, schema: Schema) -> Iterator[tuple[int, str]]:
        columns = zip(schema.paths, schema.kinds, schema.dtypes, strict=True)
        for i, (path, kind, dtype) in enumerate(columns):
            if kind == "tensor" and is_measured(dtype):
                yield i, path


class _Table:
    """The rows of commits that were added in sequence. `first` has the first commit with each
    leaf."""

    def __init__(self) -> None:
        self.rows: list[HistoryRow] = []
        self.first: dict[str, CommitInfo] = {}
        self._last: dict[str, Numbers] = {}

    def add(self, commit: CommitInfo, leaves: Sequence[Leaf], moves: Moves) -> None:
        now: dict[str, Numbers] = {}
        make = partial(tuple.__new__, HistoryRow)  # 200,000 rows are made in a fifth of a second
        for number, (_, _, path) in enumerate(leaves):
            numbers = moves.get(number)
            if numbers is None:
                numbers = self._last.get(path)
                if numbers is None:
                    raise Corrupt(
                        f"the catalog's history of {path} begins behind commit {commit.id[:12]}; "
                        "run `ckptstore reindex`"
                    )
                if numbers[-2] != 0.0:
                    numbers = (*numbers[:-2], 0.0, numbers[-1])
            elif path not in self.first:
                self.first[path] = commit
            now[path] = numbers
            self.rows.append(make((commit.step, commit.run, commit.id, path, *numbers)))
        self._last = now


class _Seen(NamedTuple):
    """A tensor that is not as in the commit before, that one, and the first."""

    tensor: Tensor
    before: Tensor | None
    first: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, before: Tensor | None, first: Tensor | None) -> "_Seen":
        ends = (end if end and end.fits(tensor) else None for end in (before, first))
        return cls(tensor, *ends)

    def numbers(self, known: Measurements) -> Numbers:
        x = known.statistics(self.tensor)
        drift, first = (known.distance(end, self.tensor) if end else None for end in self[1:])
        sizes = (x.norm, x.mean, x.std, x.min, x.max) if x.finite else (math.nan,) * 5
        return x.elements, *sizes, x.zeros, x.nan, x.inf, drift, first


class _Walk:
    """Goes from commit to commit and measures what changed."""

    def __init__(
        self,
        handle: StoreHandle,
        threads: ThreadPool,
        selection: _Selection,
        progress: Progress,
    ) -> None:
        self._known = Measurements(handle, threads, progress=progress)
        self._reader = Reader(handle.config, handle.objects, threads)
        self._selection, self._progress = selection, progress
        self._before: dict[str, Tensor] = {}
        self._first: dict[str, Tensor] = {}

    def begin(self, done: Sequence[CommitInfo], table: _Table) -> None:
        """Go on behind the commits that are `done`, and in the table."""
        for commit in {info.id: info for info in table.first.values()}.values():
            for path, tensor in self._tensors(commit, {}).items():
                if table.first[path] is commit:
                    self._first[path] = tensor
        if done:
            self._before = self._tensors(done[-1], {})

    def moves(self, commits: Sequence[CommitInfo]) -> list[Moves]:
        """What changed in each of the next commits."""
        counter = Counter(self._progress, "read commits", len(commits))
        changed = []
        for commit in commits:
            changed.append(dict(self._changed(commit)))
            counter.add()
        everything = [seen for each in changed for seen in each.values()]
        self._known.look_up(
            (seen.tensor for seen in everything),
            ((end, seen.tensor) for seen in everything for end in seen[1:] if end),
        )
        return [
            {number: seen.numbers(self._known) for number, seen in each.items()} for each in changed
        ]

    def _changed(self, commit: CommitInfo) -> Iterator[tuple[int, _Seen]]:
        before, self._before = self._before, self._tensors(commit, self._before)
        for number, (path, tensor) in enumerate(self._before.items()):
            last = before.get(path)
            if tensor is not last:
                yield number, _Seen.of(tensor, last, self._first.setdefault(path, tensor))

    def _tensors(self, commit: CommitInfo, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The selected tensors of a commit; those that are as `before` are the same objects."""
        document = self._reader.document(commit.session, commit.id)
        trees = self._reader.trees(document.trees)
        found = {}
        for key, i, path in self._selection.of(commit):
            last = before.get(path)
            same = last is not None and last.is_as_in(trees[key], i)
            found[path] = last if last and same else Tensor.of(commit.id, trees[key], i)
        return found
