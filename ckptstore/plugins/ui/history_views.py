"""Views of a store's history as JSON: the store, a run, the lineage, what was forgotten.

They read the catalog alone, so they are quick. Each is a function of a store and of parts of a URL.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ckptstore.plugin.handles import Point, TagInfo
from ckptstore.plugin.model import CommitId, CommitInfo
from ckptstore.plugins.ui import opened
from ckptstore.plugins.ui.opened import History, OpenStore, by_run
from ckptstore.plugins.ui.values import Json, clip, run_key, thin

POINTS = 400
SPARK_POINTS = 40
RUNS_SHOWN = 500
TAGS_SHOWN = 1_000
METRICS_SHOWN = 100
RECENT = 12
FORGOTTEN_SHOWN = 1_000


def position(store: OpenStore) -> Json:
    """The number of the log's last entry, by which a page sees that something has happened."""
    return {"n": store.position()}


def overview(store: OpenStore) -> Json:
    """Totals, growth, runs with sparklines, tags, and the last commits."""
    with closing(store.handle.queries()) as queries:
        n, totals, packs = queries.position().n, queries.totals(), queries.packs()
        points, tags = queries.points(opened.COMMITS_SHOWN), queries.tags()
        runs = [*by_run(points).values()][:RUNS_SHOWN]
        linked = [*(run[-1].id for run in runs), *(point.id for point in points[:RECENT])]
        brief_of = {info.id: brief(info) for info in queries.commits(linked)}
    config, oldest_first = store.handle.config, points[::-1]
    places = thin(len(points), POINTS)
    logical, new = (
        list(accumulate(getattr(point, name) for point in oldest_first))
        for name in ("logical_bytes", "new_bytes")
    )
    return {
        "n": n,
        "name": clip(store.name),
        "id": config.store,
        "chunk_bytes": config.chunk_bytes,
        "codec": config.codec,
        **totals._asdict(),
        "older": totals.commits - len(points),
        "packs": len(packs),
        "stored_bytes": sum(pack.bytes * (2 if pack.metadata else 1) for pack in packs),
        "logical_bytes": logical[-1] if logical else 0,
        "growth": {
            "time": [oldest_first[place].time_ns // 1_000_000 for place in places],
            "logical": [logical[place] for place in places],
            "new": [new[place] for place in places],
        },
        "runs": [_run(run, brief_of[run[-1].id]) for run in runs],
        "tags": [_tag(tag) for tag in tags[:TAGS_SHOWN]],
        "recent": [brief_of[point.id] for point in points[:RECENT]],
    }


def brief(info: CommitInfo) -> Json:
    """What a link to a commit says."""
    return {
        "id": info.id,
        "run": clip(info.run),
        "run_key": run_key(info.run),
        "step": info.step,
        "time": info.time_ns // 1_000_000,
        "tags": [clip(tag) for tag in info.tags[:20]],
        "logical_bytes": info.logical_bytes,
        "new_bytes": info.new_bytes,
        "message": clip(info.message),
    }


def _tag(tag: TagInfo) -> Json:
    return {"name": clip(tag.name), "id": tag.commit, "run": clip(tag.run), "step": tag.step}


def _run(points: Sequence[Point], latest: Json) -> Json:
    found = [point for point in points if point.metric is not None]
    values = (found[place].value for place in thin(len(found), SPARK_POINTS))
    return {
        "run": latest["run"],
        "key": latest["run_key"],
        "commits": len(points),
        "latest": latest,
        "logical_bytes": sum(point.logical_bytes for point in points),
        "new_bytes": sum(point.new_bytes for point in points),
        "metric": clip(found[0].metric or "") if found else None,
        "spark": [math.nan if value is None else value for value in values],
    }


def metric_names(infos: Iterable[CommitInfo]) -> list[str]:
    """The most frequent metrics; of equals, losses first."""
    counts = Counter(name for info in infos for name in info.metrics)
    return sorted(counts, key=lambda name: (-counts[name], "loss" not in name, name))[
        :METRICS_SHOWN
    ]


def run(store: OpenStore, key: str) -> Json:
    """The commits of a run as columns, oldest first, with a column for each metric."""
    infos = store.history().run(key)
    return {
        "n": store.history().n,
        "run": clip(infos[0].run),
        "key": key,
        **_columns(infos),
        "message": [clip(info.message) for info in infos],
        "metrics": [
            {"name": clip(name), "values": [info.metrics.get(name) for info in infos]}
            for name in metric_names(infos)
        ],
    }


def lineage(store: OpenStore) -> Json:
    """All commits as columns, oldest first; parents are places in them, or ids of commits that are
    not among them. `lane` is the place of a commit's branch among those of its run, and `tracks`
    are lines along lanes, each from a place to a place; the last of the three says if it is known
    that the commits are parents."""
    history = store.history()
    infos = history.commits[::-1]
    runs = {run: number for number, run in enumerate(history.runs)}
    place_of: Mapping[CommitId, int] = {info.id: place for place, info in enumerate(infos)}
    tracks = [each for of_run in branches(infos) for each in lanes(of_run)]
    lane = {place: lane for lane, track in tracks for place in track.places}
    return {
        "n": history.n,
        "older": history.totals.commits - len(infos),
        "runs": [{"run": clip(run), "key": run_key(run)} for run in runs],
        **_columns(infos),
        "run": [runs[info.run] for info in infos],
        "lane": [lane[place] for place in range(len(infos))],
        "tracks": [part for _, track in tracks for part in track.parts],
        "message": [clip(info.message, 80) for info in infos],
        "parents": [
            [place_of.get(parent, parent[:12]) for parent in info.parents] for info in infos
        ],
    }


@dataclass(frozen=True, slots=True)
class Track:
    """Commits of one run, by their places among all: each has the one before as its first parent,
    or, at the places in `gaps`, a parent that is not known. `begin` is where the line to them
    leaves its lane: at their parent if that is of the run, else at the first of them."""

    begin: int
    places: list[int]
    gaps: set[int]

    @property
    def parts(self) -> list[tuple[int, int, bool]]:
        """The first and the last place of each piece of the line, and whether each commit of the
        piece is known to be the parent of the next."""
        first, parts = self.places[0], list[tuple[int, int, bool]]()
        for before, place in pairwise(self.places):
            if place in self.gaps:
                parts += [(first, before, True), (before, place, False)]
                first = place
        return [*parts, (first, self.places[-1], True)]


def branches(infos: Sequence[CommitInfo]) -> list[list[Track]]:
    """The lines of descent in each run, of commits from old to new.

    A commit continues the track of its first parent unless another commit has, and then begins
    one. If its parent is forgotten, or too old to be known, it continues the track of its run that
    was last added to, which has a gap there.
    """
    place_of = {info.id: place for place, info in enumerate(infos)}
    of_run: dict[str, list[Track]] = {}
    newest: dict[str, Track] = {}
    ending: dict[int, Track] = {}
    for place, info in enumerate(infos):
        parent = place_of.get(info.parents[0]) if info.parents else None
        track = ending.get(parent) if parent is not None else None
        if track and infos[track.places[0]].run != info.run:
            track = None
        if info.parents and parent is None and (track := newest.get(info.run)):
            track.gaps.add(place)
        if track is None:
            is_branch = parent is not None and infos[parent].run == info.run
            track = Track(parent if is_branch and parent is not None else place, [], set())
            of_run.setdefault(info.run, []).append(track)
        else:
            del ending[track.places[-1]]
        track.places.append(place)
        ending[place] = newest[info.run] = track
    return list(of_run.values())


def lanes(tracks: Iterable[Track]) -> Iterator[tuple[int, Track]]:
    """The tracks of a run, each with the first lane that no other has meanwhile."""
    ends: list[int] = []
    for track in sorted(tracks, key=lambda track: (track.begin, track.places[0])):
        free = next((lane for lane, end in enumerate(ends) if end < track.begin), len(ends))
        ends[free : free + 1] = [track.places[-1]]
        yield free, track


def _columns(infos: Sequence[CommitInfo]) -> dict[str, Json]:
    return {
        "id": [info.id for info in infos],
        "step": [info.step for info in infos],
        "time": [info.time_ns // 1_000_000 for info in infos],
        "logical_bytes": [info.logical_bytes for info in infos],
        "new_bytes": [info.new_bytes for info in infos],
        "tags": [[clip(tag) for tag in info.tags[:20]] for info in infos],
    }


def forgotten(store: OpenStore) -> Json:
    """The forgotten commits that can be brought back, newest first."""
    rows = [
        (row.n, commit) for commit, row in store.handle.log.replay().commits.items() if row.soft
    ]
    newest_first = [commit for _, commit in sorted(rows, reverse=True)]
    with closing(store.handle.queries()) as queries:
        infos = queries.commits(newest_first[:FORGOTTEN_SHOWN])
    return {"commits": [brief(info) for info in infos], "total": len(rows)}


def children_of(history: History, commit: CommitId) -> list[CommitInfo]:
    """The commits that have `commit` as a parent."""
    return [info for info in history.commits if commit in info.parents]
