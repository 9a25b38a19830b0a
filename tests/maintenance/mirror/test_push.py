"""Mirroring commits: the same ids, complete or not at all, and only missing chunks are sent."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from shutil import copytree
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.errors import Conflict, InvalidInput, NoSpace, NotFound, ReadOnly
from ckptstore.log.entries import Register
from ckptstore.maintenance.mirror import Mirrored, MirrorOptions, mirror
from ckptstore.maintenance.mirror_plan import choose
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.repository.store_handle import StoreHandle
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.storage.local import LocalStorage
from ckptstore.store import Store
from tests.maintenance.stores import (
    CHUNK_BYTES,
    assert_restores,
    check,
    copy_of,
    files,
    flip,
    heal,
    large_state,
    make_store,
    state,
)
from tests.support.fixtures import scratch

__all__ = ["scratch"]

BATCH_BYTES = 200_000


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("mirrored") / "store", states=large_state)


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    return copy_of(template, tmp_path / "store")


@pytest.fixture(params=["local", "memory"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "target") if request.param == "local" else f"memory://{request.node.name}"


@contextmanager
def counted(
    storage: type[LocalStorage] | type[BucketStorage], patch: pytest.MonkeyPatch
) -> Iterator[list[int]]:
    """The sizes of all objects that are written meanwhile, packs included."""
    sizes: list[int] = []
    put, put_new = storage.put, storage.put_new

    def counting(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, key: str, data: Any, **kwargs: Any) -> Any:
            sizes.append(len(data))
            return write(self, key, data, **kwargs)

        return call

    with patch.context() as within:
        within.setattr(storage, "put", counting(put))
        within.setattr(storage, "put_new", counting(put_new))
        yield sizes


def in_batches(source: Path, target: Path | str, batch_bytes: int = BATCH_BYTES) -> Mirrored:
    with (
        closing(StoreHandle(source, read_only=True)) as ours,
        closing(StoreHandle(target)) as theirs,
    ):
        return mirror(
            ours,
            theirs,
            choose(ours, (), run=None),
            MirrorOptions(batch_bytes=batch_bytes),
            ThreadPool(2),
        )


def commits_of(store: Store) -> dict[str, tuple[Any, ...]]:
    """All that a commit tells of itself, but what is different in every store: its number, its
    session, its cost."""
    return {
        info.id: (
            info.content,
            info.run,
            info.step,
            info.message,
            info.parents,
            info.metrics,
            info.tags,
            info.logical_bytes,
            info.leaves,
        )
        for info in store.log()
    }


def test_everything_arrives_under_the_same_ids_with_lineage_tags_runs_and_metrics(
    place: Path, target: str
) -> None:
    with ckptstore.open(place) as store:
        done = store.push(target, create=True)
        with ckptstore.open(target, create=False) as there:
            assert commits_of(there) == commits_of(store)
            assert there.tags() == store.tags()
            for info in store.log():
                assert abs(there.checkout(info.id).time.timestamp() - info.time_ns / 1e9) < 10
            for step in range(3):
                assert_restores(there, f"main@{step}", step, large_state)
            assert not there.fsck(read_data="100%").findings
            assert [info.step for info in there.log(run="main")] == [2, 1, 0]
    assert len(done.sent) == 4 and not done.damaged


def test_chunks_in_the_target_are_not_sent_again(place: Path, target: str) -> None:
    with ckptstore.open(place) as store:
        store.push(target, create=True)
        again = store.push(target)
        assert (again.sent, again.chunks, again.stored_bytes, again.plan.present) == ((), 0, 0, 4)
        store.commit(large_state(2) | {"more": torch.full((1000,), 5.0)}, step=3)
        more = store.push(target)
    assert len(more.sent) == 1 and more.raw_bytes == 4000


def test_chunks_are_found_in_packs_of_any_layout(place: Path, tmp_path: Path) -> None:
    """The target committed one of the states itself, in another order, under other names."""
    with ckptstore.open(
        tmp_path / "target", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec="zstd")
    ) as other:
        mine = large_state(1)["model"]
        other.commit({"x": {"small": mine["small"]}, "y": [mine["big"]]}, step=0)
    with ckptstore.open(place) as store:
        done = store.push(tmp_path / "target", "main@1")
    assert (len(done.sent), done.raw_bytes) == (1, 0)
    assert not check(tmp_path / "target").findings


def test_a_dry_run_says_what_a_real_run_moves(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store:
        planned = store.push(tmp_path / "target", create=True, dry_run=True)
        done = store.push(tmp_path / "target")
    assert planned.load and not planned.sent
    assert planned.plan == done.plan
    assert planned.load.raw_bytes == done.raw_bytes
    assert planned.load.chunks >= done.chunks > 0


@pytest.mark.parametrize("codecs", [("raw", "zstd"), ("zstd", "raw")])
def test_each_store_encodes_as_it_is_set_to(codecs: tuple[str, str], tmp_path: Path) -> None:
    source = make_store(tmp_path / "source", codec=codecs[0], steps=1)
    with ckptstore.open(
        tmp_path / "target", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES, codec=codecs[1])
    ) as target:
        target.pull(source, verify=True)
        assert_restores(target, "main@0", 0)
        assert not target.fsck(read_data="100%").findings


def test_only_named_commits_are_sent_with_ancestors_on_request(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store:
        one = store.push(tmp_path / "one", "latest", create=True)
        line = store.push(tmp_path / "line", "latest", create=True, ancestors=True)
        other = store.push(tmp_path / "run", run="other", create=True)
        with pytest.raises(NotFound, match="nosuch"):
            store.push(tmp_path / "one", "nosuch")
    assert [t.step for t in one.plan.commits] == [2]
    assert [t.step for t in line.plan.commits] == [0, 1, 2]
    assert [t.run for t in other.plan.commits] == ["other"]
    with ckptstore.open(tmp_path / "one") as store:
        assert store.checkout().parents == (line.plan.commits[1].commit,), (
            "lineage is kept where a parent is not there"
        )


def test_a_tag_moves_only_by_force_and_nothing_is_sent_before_that_is_known(
    place: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    with ckptstore.open(place) as store:
        store.push(target, 0, create=True)
        store.tag("first", 2)
        with pytest.raises(Conflict, match="first is"):
            store.push(target)
        with ckptstore.open(target) as there:
            assert len(there.log()) == 1
        assert store.push(target, dry_run=True).plan.rejected
        store.push(target, tags=False)
        store.push(target, force=True)
        with ckptstore.open(target) as there:
            assert there.tags() == store.tags()
        store.untag("first")
        store.tag("first", 1)
        store.mirror(target)
        with ckptstore.open(target) as there:
            assert there.tags() == store.tags()


def test_what_the_target_has_forgotten_stays_forgotten(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store:
        store.push(tmp_path / "target", create=True)
        with ckptstore.open(tmp_path / "target") as there:
            there.untag("first")
            there.forget(0)
            done = store.push(tmp_path / "target")
            assert len(done.plan.forgotten) == 1
            assert [info.step for info in there.log(run="main")] == [2, 1]


def test_stores_that_cut_chunks_differently_are_told_so(place: Path, tmp_path: Path) -> None:
    ckptstore.open(
        tmp_path / "target", storage=ckptstore.Storage(chunk_bytes=2 * CHUNK_BYTES)
    ).close()
    with ckptstore.open(place) as store:
        with pytest.raises(InvalidInput, match="chunk-size 65536"):
            store.push(tmp_path / "target")
        with pytest.raises(InvalidInput, match="both source and target"):
            store.push(place)
        with pytest.raises(NotFound, match="no store"):
            store.push(tmp_path / "absent")
    with ckptstore.open(tmp_path / "target", read_only=True) as store, pytest.raises(ReadOnly):
        store.pull(place)


def test_another_way_to_a_store_is_no_other_store(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place)
    copytree(place, tmp_path / "copy")
    with ckptstore.open(place) as store:
        for send in (store.push, store.pull, store.mirror):
            with pytest.raises(InvalidInput, match="lead to the same store"):
                send(tmp_path / "link")
            assert not send(tmp_path / "copy").sent
        assert not store.sessions()


def test_a_clone_has_everything_and_a_second_one_completes_it(place: Path, target: str) -> None:
    with ckptstore.clone(place, target) as there, ckptstore.open(place) as store:
        assert commits_of(there) == commits_of(store)
        store.commit(large_state(3), step=3)
    with ckptstore.clone(place, target) as there:
        assert there.checkout().step == 3


def test_a_mirror_of_a_mirror_can_be_pulled_back(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store, ckptstore.clone(place, "memory://chain") as there:
        first = store.checkout(1).id
        with ckptstore.open(
            tmp_path / "back", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)
        ) as back:
            back.pull("memory://chain", "main@1")
            assert back.checkout(1).id == first
            back.checkout(1).verify()
        there.commit(large_state(9), step=9)
        store.pull("memory://chain")
        assert_restores(store, 9, 9, large_state)
        assert not store.fsck().findings


# -- killed, damaged, away --


def test_batches_that_arrived_are_not_sent_again(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever object could not be put: what was registered before is found there, and the commit
    is completed."""
    whole = in_batches(place, _empty(tmp_path / "whole"))
    assert any(isinstance(entry.body, Register) for entry in _log(tmp_path / "whole"))
    repeated = []
    for n in (2, 12, 22, 32):
        target = _empty(tmp_path / f"target-{n}")
        with monkeypatch.context() as patch:
            _fail_at(n, patch)
            with pytest.raises(NoSpace):
                in_batches(place, target)
        repeated.append(in_batches(place, target).chunks)
        with ckptstore.open(target) as there, ckptstore.open(place) as store:
            assert commits_of(there) == commits_of(store)
            assert not there.fsck(read_data="100%").damaged
    assert repeated == sorted(repeated, reverse=True)
    assert repeated[-1] < whole.chunks / 2


def _fail_at(n: int, patch: pytest.MonkeyPatch) -> None:
    """There is no room for the n-th object and those after it."""
    done = 0

    def failing(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done >= n:
                raise NoSpace("the disk is full")
            return write(*args, **kwargs)

        return call

    for name in ("put", "put_new", "create"):
        patch.setattr(LocalStorage, name, failing(getattr(LocalStorage, name)))


def _empty(place: Path) -> Path:
    ckptstore.open(place, storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)).close()
    return place


def _log(place: Path) -> list[Any]:
    with closing(StoreHandle(place)) as handle:
        return list(handle.log.read_entries())


def test_a_gc_between_two_attempts_takes_batches_and_the_second_sends_them_again(
    place: Path, tmp_path: Path
) -> None:
    target = _empty(tmp_path / "target")
    with pytest.MonkeyPatch.context() as patch:
        _fail_at(30, patch)
        with pytest.raises(NoSpace):
            in_batches(place, target)
    with ckptstore.open(target) as there:
        there.gc(force=True, max_unused=0.0, grace_s=0)
        assert not there.fsck().findings
    in_batches(place, target)
    assert not check(target).findings


def test_a_gc_in_the_middle_of_a_push_costs_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = _empty(tmp_path / "target")
    from ckptstore.maintenance import mirror as module

    listed = module.list_packs

    def list_and_collect(*args: Any) -> Any:
        records = listed(*args)
        with ckptstore.open(target) as there:
            there.gc(max_unused=0.0, grace_s=0)
        return records

    monkeypatch.setattr(module, "list_packs", list_and_collect)
    done = in_batches(place, target)
    assert len(done.sent) == 4
    assert not check(target).findings


@pytest.mark.parametrize("thins", [False, True], ids=["forgotten", "thinned"])
def test_a_commit_that_goes_meanwhile_is_not_taken_for_a_damaged_one(
    place: Path, tmp_path: Path, thins: bool
) -> None:
    asked = list[int]()

    def take_the_rest(phase: str, done: int, total: int) -> None:
        if phase == "commits" and not asked:
            asked.append(total)
            with ckptstore.open(place) as other:
                for name in other.tags():
                    other.untag(name)
                last = ckptstore.KeepLast(1)
                other.forget(last.thin("model/*") if thins else last, all_runs=True)
                other.gc(grace_s=0, max_unused=0.0)

    with ckptstore.open(place) as store:
        done = store.push(tmp_path / "target", create=True, progress=take_the_rest)
    assert not done.damaged
    assert 0 < len(done.sent) < asked[0]
    assert check(tmp_path / "target").findings == ()


def test_a_commit_that_is_damaged_here_is_skipped_and_the_others_are_sent(
    place: Path, tmp_path: Path
) -> None:
    pack = max(files(place, "packs"), key=lambda path: path.stat().st_size)
    flip(pack, 100)
    with ckptstore.open(place) as store:
        done = store.push(tmp_path / "target", create=True)
    assert (len(done.sent), len(done.damaged)) == (3, 1)
    assert not check(tmp_path / "target").findings


def test_repair_heals_chunks_and_documents_from_a_pushed_mirror(tmp_path: Path) -> None:
    place = make_store(tmp_path / "store", states=state)
    with ckptstore.open(place) as store:
        store.mirror(tmp_path / "mirror")
    for folder in ("packs", "commits"):
        for path in files(place, folder):
            damaged = path.read_bytes()
            path.write_bytes(bytes(a ^ 0x55 for a in damaged[:64]) + damaged[64:])
    heal(place, tmp_path / "mirror")
    assert not check(place).damaged
    with ckptstore.open(place) as store:
        for step in range(3):
            assert_restores(store, step, step)


def test_a_flipped_bit_is_healed_from_a_mirror_in_a_bucket(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.mirror("memory://heals")
        flip(max(files(place, "packs"), key=lambda path: path.stat().st_size), 5000)
        done = store.repair("memory://heals", apply=True, read_data="100%")
        assert not done.after.damaged
        for step in range(3):
            assert_restores(store, step, step, large_state)


@pytest.mark.parametrize(
    ("commits", "layers"),
    [
        (10, 8),
        pytest.param(
            100, 128, marks=[pytest.mark.soak, pytest.mark.timeout(1800)], id="a base of 1 GB"
        ),
    ],
)
def test_the_next_commit_of_a_lora_run_moves_little_more_than_its_adapter(
    commits: int, layers: int, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in bytes put into the bucket: packs, twins, document, log entry, session."""
    base = {f"layers.{i}.weight": torch.randn(2048, layers * 8) for i in range(layers)}
    with ckptstore.open(scratch / "store") as store:

        def commit(step: int) -> None:
            adapter = {
                f"layers.{i}.{ab}": torch.randn(16, 1024) for i in range(layers) for ab in "ab"
            }
            store.commit({"base": base, "adapter": adapter, "step": step}, step=step)

        for step in range(commits):
            commit(step)
        store.push("memory://lora", create=True)
        commit(commits)
        with counted(BucketStorage, monkeypatch) as sizes:
            done = store.push("memory://lora")
    adapter_bytes = layers * 2 * 16 * 1024 * 4
    print(
        f"{sum(sizes)} bytes put for an adapter of {adapter_bytes}: "
        f"{sum(sizes) / adapter_bytes:.4f}"
    )
    assert done.raw_bytes == adapter_bytes
    assert sum(sizes) <= 1.05 * adapter_bytes


def test_verifying_finds_what_the_storage_made_of_the_bytes(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_new = BucketStorage.put_new

    def damaging(self: BucketStorage, key: str, data: Any) -> bool:
        return put_new(
            self, key, bytes([data[0] ^ 1]) + bytes(data[1:]) if key.startswith("packs/") else data
        )

    with ckptstore.open(place) as store:
        ckptstore.open("memory://bad", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)).close()
        monkeypatch.setattr(BucketStorage, "put_new", damaging)
        with pytest.raises(ckptstore.Corrupt):
            store.push("memory://bad", verify=True)
        monkeypatch.undo()
        with ckptstore.open("memory://bad") as there:
            assert there.log() == []


def test_commit_documents_are_copied_byte_for_byte(place: Path, tmp_path: Path) -> None:
    with ckptstore.open(place) as store:
        store.push(tmp_path / "target", create=True)

    def documents(root: Path) -> set[tuple[str, bytes]]:
        return {(path.name.partition("-")[2], path.read_bytes()) for path in files(root, "commits")}

    assert documents(tmp_path / "target") == documents(place)


@pytest.mark.parametrize("seed", range(4))
def test_commits_full_of_patches_are_sent_once(seed: int, tmp_path: Path, target: str) -> None:
    """In one push or in several, of all commits or of some, the same bits arrive."""
    random = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(300_000, generator=generator).to(
        random.choice((torch.bfloat16, torch.float32))
    )
    states: list[torch.Tensor] = []
    with ckptstore.open(tmp_path / "source") as store:
        for step in range(8):
            changed = torch.randperm(len(weight), generator=generator)[: random.randint(1, 3_000)]
            weight = weight.clone()
            weight[changed] += 1
            info = store.commit({"weight": weight}, step=step)
            assert not step or info.new_bytes < weight.nbytes / 4, "it is stored as patches"
            states.append(weight)
            if random.random() < 0.3:
                store.push(target, random.randrange(step + 1), create=True)
        store.push(target, create=True)
        again = store.push(target)
        assert not again.sent and not again.chunks
    with ckptstore.open(target) as there:
        for step, wanted in enumerate(states):
            assert torch.equal(there.checkout(step).read("weight"), wanted)
        assert not there.fsck("data").findings
