"""What would a policy free? Answered from documents, pages and footers; no tensor is read."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ckptstore.plugin.checks import metadata_of, read_document
from ckptstore.plugin.encoding import decode_page, decode_schema
from ckptstore.plugin.handles import StoreHandle
from ckptstore.plugin.model import ChunkId, CommitDocument
from ckptstore.plugin.policies import Policy
from ckptstore.plugin.reading import Reader
from ckptstore.plugin.text import Column, Table, bytes_text, selector
from ckptstore.plugin.upkeep import plan_retention, short_keys
from ckptstore.plugins.reports.usage import Footers, beside_gc

if TYPE_CHECKING:
    from ckptstore.plugins.reports.usage import Keys


@dataclass(frozen=True, slots=True)
class RunForecast:
    """What a policy would do to one run. `freed_bytes` is what the chunks take that no commit would
    need any more, if the policy looked at this run alone."""

    run: str
    kept: int
    thinned: int
    forgotten: int
    needed_bytes: int
    freed_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Forecast:
    """What a policy would free, by run, and in all runs together: a chunk that several runs share
    is freed only if none needs it. A gc without slack (`max_unused=0`) frees this; of a thinning
    the new pages, a few hundred bytes, are not counted."""

    reason: str
    runs: tuple[RunForecast, ...]
    needed_bytes: int
    freed_bytes: int

    def __repr__(self) -> str:
        return f"<forecast: {self.summary}>"

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary}"

    def table(self) -> Table:
        """One row per run."""
        count = ("keep", "thin", "forget")
        columns = (
            Column("run", fit="wrap", least=16),
            *(Column(name, "count") for name in count),
            Column("needs", "bytes"),
            Column("would free", "bytes"),
        )
        rows = [
            (r.run, r.kept, r.thinned, r.forgotten, r.needed_bytes, r.freed_bytes)
            for r in self.runs
        ]
        return Table(columns, rows, f"What if: {self.reason}")

    @property
    def summary(self) -> str:
        """The total."""
        share = self.freed_bytes / self.needed_bytes if self.needed_bytes else 0.0
        needed = bytes_text(self.needed_bytes)
        return f"would free {bytes_text(self.freed_bytes)} of {needed} ({share:.0%})"


def forecast(
    handle: StoreHandle, reader: Reader, policies: Sequence[Policy], run: str | None = None
) -> Forecast:
    """What `policies` would free in `run`, or in all runs. Changes nothing, and a gc may run
    meanwhile. Raises as `plan_policies`."""
    return beside_gc(handle, lambda: _forecast(handle, reader, policies, run))


def _forecast(
    handle: StoreHandle, reader: Reader, policies: Sequence[Policy], run: str | None
) -> Forecast:
    state = handle.log.replay()
    handle.objects.sync(state)
    plan = plan_retention(handle, state, policies, reader, run)
    needs = _Needs(handle)
    words: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    before: dict[str, list[Keys]] = defaultdict(list)
    after: dict[str, list[Keys]] = defaultdict(list)
    decided = {each.commit: each for each in plan.decisions}
    for commit, row in state.commits.items():
        if row.soft:
            continue
        document = read_document(handle.storage, row.session, commit)
        before[row.run].append(needs.whole(document))
        decision = decided.get(commit)
        if decision is not None:
            words[row.run][decision.word] += 1
        if decision is None or decision.word == "keep":
            after[row.run].append(before[row.run][-1])
        elif decision.thin:
            globs = document.thinned.globs if document.thinned else ()
            after[row.run].append(needs.thinned(document, (*globs, *decision.thin)))
    footers = Footers(handle)
    had = {name: _union([footers.with_bases(_union(keys))]) for name, keys in before.items()}
    has = {name: _union([footers.with_bases(_union(after[name]))]) for name in had}
    keys, runs_with = np.unique(np.concatenate([*had.values(), _NONE]), return_counts=True)
    sizes = footers.sizes_of(keys)
    alone = sizes * (runs_with == 1)

    def total(of: "Keys", bytes_of: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> int:
        return int(bytes_of[np.searchsorted(keys, of)].sum())

    return Forecast(
        plan.reason,
        tuple(
            RunForecast(
                name,
                words[name]["keep"],
                words[name]["thin"],
                words[name]["forget"],
                total(had[name], sizes),
                total(np.setdiff1d(had[name], has[name], assume_unique=True), alone),
            )
            for name in sorted(words)
        ),
        int(sizes.sum()),
        int(sizes.sum()) - total(_union(list(has.values())), sizes),
    )


_NONE = np.empty(0, np.uint64)


def _union(parts: "Sequence[Keys]") -> "Keys":
    return np.unique(np.concatenate([*parts, _NONE]))


class _Needs:
    """The keys of the chunks that commits need. Each page and schema is read once."""

    def __init__(self, handle: StoreHandle) -> None:
        read = cache(handle.objects.read_metadata)
        self._page = cache(lambda page: list(_leaves(read(page))))
        self._keys = cache(lambda page: short_keys(b"".join(ids for _, ids in self._page(page))))
        self._schema = cache(lambda schema: decode_schema(read(schema)))
        self._gone = cache(self._matching)

    def whole(self, document: CommitDocument) -> "Keys":
        """Those of a commit as it is."""
        pages = (self._keys(page) for _, ref in document.trees for page in ref.pages)
        return _union([short_keys(b"".join(metadata_of(document))), *pages])

    def thinned(self, document: CommitDocument, globs: tuple[str, ...]) -> "Keys":
        """Those of a commit without the leaves that match `globs`, but for pages that change."""
        parts = [short_keys(document.layout)] if document.layout else []
        for _, ref in document.trees:
            gone = self._gone(ref.schema, globs)
            parts.append(short_keys(ref.schema))
            for page in ref.pages:
                if not gone:
                    parts += [short_keys(page), self._keys(page)]
                    continue
                left = (ids for leaf, ids in self._page(page) if leaf not in gone)
                parts.append(short_keys(b"".join(left)))
        return _union(parts)

    def _matching(self, schema: ChunkId, globs: tuple[str, ...]) -> frozenset[int]:
        return self._schema(schema).matching(selector(globs))


def _leaves(page: bytes) -> Iterator[tuple[int, bytes]]:
    decoded = decode_page(page)
    return ((leaf, each.ids) for leaf, each in enumerate(decoded.leaves, decoded.first_leaf))
