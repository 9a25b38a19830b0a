"""Small stores for tests of forget and gc, and the objects in them. A store may be given by its
directory."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ckptstore.core.ids import CommitId, SessionId, pack_id, pack_key, twin_key
from ckptstore.maintenance.gc import GcOptions, GcReport, collect
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.storage.contract import PART_BYTES
from tests.shared.sites import Site

NOT_COUNTED = ("index/", "log/", "reserve", "ckptstore.json")
ALL = GcOptions(max_unused=0.0, grace_s=0)


def state_of(step: int, *, own: int = 40_000, shared: int = 60_000) -> dict[str, Any]:
    """A state with a tensor of its own and one that all steps share."""
    random = torch.Generator().manual_seed(step)
    return {
        "model": {
            "shared": torch.arange(shared, dtype=torch.float32),
            "own": torch.randn(own, generator=random),
        },
        "step": step,
    }


def at(place: Path | Site) -> Site:
    return place if isinstance(place, Site) else Site(str(place))


def make(
    place: Path | Site, steps: int, *, forget: Sequence[int] = (), codec: str = "raw"
) -> list[CommitId]:
    """A store of `steps` commits, of which those at `forget` are forgotten. In a directory it is a
    copy of one that was made before."""
    site = at(place)
    if site.folder is None or site.more:
        return _commit(site, steps, tuple(forget), codec)
    template, commits = _template(steps, tuple(forget), codec)
    shutil.copytree(template.name, site.folder, dirs_exist_ok=True)
    return list(commits)


@cache
def _template(
    steps: int, forget: tuple[int, ...], codec: str
) -> tuple[TemporaryDirectory[str], list[CommitId]]:
    folder = TemporaryDirectory()
    return folder, _commit(Site(folder.name), steps, forget, codec)


def _commit(site: Site, steps: int, forget: tuple[int, ...], codec: str) -> list[CommitId]:
    with site.open(codec=codec) as store:
        commits = [store.commit(state_of(step), step=step).id for step in range(steps)]
        if forget:
            store.forget([commits[i] for i in forget])
    return commits


def verify(place: Path | Site, steps: Sequence[int]) -> None:
    """Every one of these steps is there, bit for bit."""
    with at(place).open() as store:
        for step in steps:
            restored = store.checkout(step).state_dict()
            for name, tensor in state_of(step)["model"].items():
                assert torch.equal(restored["model"][name], tensor), (step, name)


def size_of(place: Path | Site) -> int:
    """Bytes of everything that gc answers for."""
    return sum(size for _, size in objects(place))


def objects(place: Path | Site) -> list[tuple[str, int]]:
    """What gc answers for: files as the disk has them; in a bucket unfinished uploads as well."""
    site = at(place)
    if folder := site.folder:
        found = {
            path.relative_to(folder).as_posix(): path.stat().st_size
            for path in folder.rglob("*")
            if path.is_file()
        }
    else:
        storage = site.storage()
        found = {**dict(storage.list("")), **dict(storage.list("tmp/"))}
    return sorted(
        (key, size)
        for key, size in found.items()
        if not key.startswith(NOT_COUNTED) or key.startswith("log/scratch-")
    )


def garbage(place: Path | Site) -> set[str]:
    """Packs, documents and temporaries that the log does not list, and condemned packs."""
    with opened(place) as handle:
        state = handle.log.replay()
        live = [pack for pack in state.packs.values() if pack.live]
        listed = {pack_key(pack.id) for pack in live} | {
            twin_key(pack.id) for pack in live if pack.metadata
        }
        listed |= {f"commits/{row.session}-{commit}" for commit, row in state.commits.items()}
    return {key for key, _ in objects(place)} - listed


def leave_half_written(place: Site, session: SessionId) -> str:
    """What a writer leaves that ends in the middle of a pack: a temporary file, in a bucket an
    upload. Its name."""
    storage = place.storage()
    if place.place.startswith("s3:"):
        storage.create(pack_key(pack_id(session, 7, 7)), session=session).append(
            [memoryview(bytes(PART_BYTES + 1))]
        )
    else:
        storage.put(f"tmp/{session}-00", b"left behind")
    (key,) = (key for key, _ in storage.list("tmp/"))
    return key


@contextmanager
def opened(place: Path | Site) -> Iterator[StoreHandle]:
    with at(place).opened() as handle:
        yield handle


def collected(place: Path | Site, options: GcOptions = ALL, **kwargs: Any) -> GcReport:
    """One gc by a process that has just opened the store."""
    with opened(place) as handle:
        return collect(handle, options, **kwargs)
