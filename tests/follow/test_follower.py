"""What a follower applies, what it reads for that, and what a target is after anything fails."""

import secrets
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import ckptstore
from ckptstore.core.forks import new_future
from ckptstore.core.geometry import grid
from ckptstore.plugins.buckets.bucket import BucketStorage
from ckptstore.plugins.buckets.fsspec_client import FsspecClient
from ckptstore.plugins.follow import follower as following
from ckptstore.plugins.follow.follower import Follower
from ckptstore.repository.thread_pool import ThreadPool
from ckptstore.restore.reader import Reader
from ckptstore.storage.local import LocalStorage
from ckptstore.store import Store
from tests.shared.sites import Site

CHUNK_BYTES = 1 << 16
BLOCK = CHUNK_BYTES // 2
"""Elements of a bfloat16 tensor in a chunk."""


@pytest.fixture
def whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed is stored whole: no chunk is kept as the base of another, or made of one."""
    monkeypatch.setenv("CKPTSTORE_PATCH_MEMORY_BYTES", "0")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def writer(place: Path) -> Iterator[Store]:
    with ckptstore.open(place, run="rl", storage=ckptstore.Storage(chunk_bytes=CHUNK_BYTES)) as it:
        yield it


@pytest.fixture
def reader(writer: Store, place: Path) -> Iterator[Store]:
    with ckptstore.open(place, read_only=True) as store:
        yield store


def state(step: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.rand(8 * BLOCK, generator=generator).bfloat16()
    return {"model": {"w": weight, "b": torch.zeros(3)}, "step": step}


def blank() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(8 * BLOCK).bfloat16(), "b": torch.ones(3)}, "step": -1}


def assert_same(target: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert torch.equal(target["model"]["w"], wanted["model"]["w"])
    assert torch.equal(target["model"]["b"], wanted["model"]["b"])
    assert target["step"] == wanted["step"]


def stepped(source: dict[str, Any], *blocks: int) -> dict[str, Any]:
    """The next step: one element of each of `blocks` chunks changes."""
    source["step"] += 1
    source["model"]["b"] += 1
    for block in blocks:
        source["model"]["w"][block * BLOCK] += 1
    return source


def applied(follower: Follower) -> int:
    """Bytes that the last commit was read with."""
    assert follower.applied is not None
    return follower.applied.report.read_bytes


def test_only_chunks_that_changed_are_read(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    weight = target["model"]["w"]
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        first = follower.wait(0)
        assert first is not None
        assert applied(follower) == 8 * CHUNK_BYTES
        assert_same(target, source)
        assert follower.wait(0) is None
        second = writer.commit(stepped(source, 2, 5), step=1)
        found = follower.wait(0)
        assert found is not None
        assert found.id == second.id
        assert applied(follower) == 2 * CHUNK_BYTES
        assert_same(target, source)
        assert target["model"]["w"] is weight
        with follower.frozen() as commit:
            assert commit.step == 1


def test_who_was_away_goes_straight_to_the_newest(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    seen: list[int | None] = []
    with reader.follow("rl", target, on_commit=lambda commit: seen.append(commit.step)) as follower:
        follower.wait(0)
        for step in range(1, 6):
            writer.commit(stepped(source, step), step=step)
        follower.wait(0)
        assert seen == [0, 5]
        assert applied(follower) == 5 * CHUNK_BYTES
        assert_same(target, source)


def test_a_trainer_that_is_faster_keeps_nobody_waiting(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)

    def commit(_: object) -> None:
        writer.commit(stepped(source, 1), step=source["step"])

    with reader.follow("rl", target, on_commit=commit) as follower:
        for step in range(3):
            found = follower.wait(0)
            assert found is not None
            assert found.step == step


def test_a_run_may_begin_later(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    with reader.follow("rl", target) as follower:
        assert follower.wait(0) is None
        with (
            pytest.raises(ckptstore.NotFound, match="holds no commit of run rl"),
            follower.frozen(),
        ):
            pass
        writer.commit(source, step=0)
        assert follower.wait(0) is not None
        assert_same(target, source)


def test_a_tag_is_followed_wherever_it_moves(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0, tag="prod")
    first = {"model": {k: v.clone() for k, v in source["model"].items()}, "step": 0}
    with reader.follow("rl", target, ref="prod") as follower:
        follower.wait(0)
        writer.commit(stepped(source, 1), step=1)
        assert follower.wait(0) is None, "the tag stayed"
        assert_same(target, first)
        writer.tag("prod", 1)
        assert follower.wait(0) is not None
        assert_same(target, source)
        writer.tag("prod", 0)
        assert follower.wait(0) is not None
        assert_same(target, first)
        writer.untag("prod")
        assert follower.wait(0) is None
        assert_same(target, first)


def test_a_run_that_was_forgotten_leaves_the_target_as_it_is(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.forget(run="rl", all_commits=True)
        writer.gc(grace_s=0)
        assert follower.wait(0) is None
        with follower.frozen() as commit:
            assert commit.step == 0
        assert_same(target, source)


@pytest.mark.usefixtures("whole_chunks")
def test_a_commit_that_a_gc_deletes_while_it_is_read_gives_way_to_the_newest(
    writer: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 1, 3), step=1)
        begin = following.begin_restore

        def slowly(*args: Any) -> Any:
            monkeypatch.undo()
            begun = begin(*args)
            writer.commit(stepped(source, 1, 3), step=2)
            writer.forget([1])
            writer.gc(max_unused=0.0, grace_s=0)
            return begun

        monkeypatch.setattr(following, "begin_restore", slowly)
        found = follower.wait(0)
        assert found is not None
        assert found.step == 2
        assert_same(target, source)


@pytest.mark.parametrize(
    "other", [torch.zeros(8 * BLOCK), torch.zeros(3 * BLOCK).bfloat16()], ids=["dtype", "shape"]
)
def test_another_dtype_or_shape_is_refused_and_changes_nothing(
    other: torch.Tensor, writer: Store, reader: Store
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit({**source, "model": {"w": other, "b": torch.zeros(3)}}, step=1)
        for _ in range(2):
            with pytest.raises(ckptstore.InvalidInput, match="model/w"):
                follower.wait(0)
        with follower.frozen() as commit:
            assert commit.step == 0
            assert_same(target, source)
        writer.commit(stepped(source, 1), step=2)
        assert follower.wait(0) is not None
        assert_same(target, source)
        assert applied(follower) == CHUNK_BYTES


@pytest.mark.usefixtures("whole_chunks")
def test_damage_is_found_before_anything_is_written(
    writer: Store, reader: Store, place: Path
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        before = {pack: pack.stat().st_ino for pack in place.rglob("*") if pack.is_file()}
        wanted = {"model": {k: v.clone() for k, v in source["model"].items()}, "step": 0}
        writer.commit(stepped(source, 2, 5), step=1)
        chunk = source["model"]["w"][5 * BLOCK : 6 * BLOCK].view(torch.uint8).numpy().tobytes()
        (pack,) = [
            each
            for each in place.rglob("*")
            if each.is_file() and each not in before and chunk in each.read_bytes()
        ]
        data = bytearray(pack.read_bytes())
        data[data.index(chunk) + 7] ^= 1
        pack.chmod(0o600)
        pack.write_bytes(data)
        with pytest.raises(ckptstore.Corrupt):
            follower.wait(0)
        with follower.frozen() as commit:
            assert commit.step == 0
            assert_same(target, wanted)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_write_that_was_interrupted_is_made_whole_before_anybody_looks(
    error: type[BaseException], writer: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 2, 5), step=1)
        _interrupt_after_writing(monkeypatch, error)
        with pytest.raises(error):
            follower.wait(0)
        assert follower.applied is None
        target["model"]["w"].view(torch.uint8).numpy()[:] = 7
        with follower.frozen() as commit:
            assert commit.step == 1
            assert_same(target, source)
        assert applied(follower) == 8 * CHUNK_BYTES


def _interrupt_after_writing(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def interrupted(self: Any) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(following.RestoreOperation, "finish", interrupted)


def test_a_target_that_cannot_be_made_whole_lets_nobody_in(
    writer: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 2, 5), step=1)
        _interrupt_after_writing(monkeypatch, MemoryError)
        with pytest.raises(MemoryError):
            follower.wait(0)
        _interrupt_after_writing(monkeypatch, MemoryError)
        with pytest.raises(MemoryError), follower.frozen():
            pytest.fail("somebody got in")


@pytest.mark.parametrize("inference", [False, True])
def test_what_others_wrote_to_the_target_is_read_again(
    inference: bool, writer: Store, reader: Store
) -> None:
    source = state()
    with torch.inference_mode(inference):
        target = blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        with torch.inference_mode(inference):
            target["model"]["w"] *= 2
        writer.commit(stepped(source, 2), step=1)
        follower.wait(0)
        assert_same(target, source)
        target["model"]["w"] = torch.zeros(8 * BLOCK).bfloat16()
        writer.commit(stepped(source, 2), step=2)
        follower.wait(0)
        assert_same(target, source)


@pytest.mark.parametrize("how", ["written", "replaced", "another key"])
def test_what_a_reader_wrote_while_a_commit_was_read_is_read_again(
    how: str, writer: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    fetch = Reader.fetch

    def meanwhile(self: Any, *args: Any) -> Any:
        monkeypatch.undo()
        with follower.frozen():
            if how == "written":
                target["model"]["w"] *= 2
            elif how == "replaced":
                target["model"]["w"] = torch.zeros(8 * BLOCK).bfloat16()
            else:
                target["model"] = dict(target["model"])
        return fetch(self, *args)

    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 2), step=1)
        monkeypatch.setattr(Reader, "fetch", meanwhile)
        follower.wait(0)
        assert_same(target, source)
        with follower.frozen():
            pass
        writer.commit(stepped(source, 3, 4), step=2)
        follower.wait(0)
        assert_same(target, source)
        assert applied(follower) == 2 * CHUNK_BYTES


def test_a_module_in_another_dtype_follows(writer: Store, reader: Store) -> None:
    source = torch.nn.Linear(512, 512)
    target = torch.nn.Linear(512, 512).half()
    writer.commit({"model": source}, step=0)
    with reader.follow("rl", {"model": target}, dtype=torch.float16) as follower:
        follower.wait(0)
        for step in range(1, 4):
            with torch.no_grad():
                source.weight[step] += 1
            writer.commit({"model": source}, step=step)
            follower.wait(0)
            assert torch.equal(target.weight, source.weight.half())
            shape = tuple(source.weight.shape)
            assert len(grid(shape, 4, CHUNK_BYTES)) > 1
            assert applied(follower) == CHUNK_BYTES
        before = target.weight.clone()
        with torch.no_grad():
            source.weight[0, 0] = 1e30
            source.weight[500, 0] += 1
        writer.commit({"model": source}, step=9)
        with pytest.raises(ckptstore.InvalidInput, match="beyond the range"):
            follower.wait(0)
        with follower.frozen():
            assert torch.equal(target.weight, before)


def test_an_optimizer_follows_its_model(writer: Store, reader: Store) -> None:
    def made() -> tuple[dict[str, Any], Any, Any]:
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.AdamW(model.parameters())
        return {"model": model, "optimizer": optimizer}, model, optimizer

    source, model, optimizer = made()
    target, its_model, its_optimizer = made()
    with reader.follow("rl", target) as follower:
        for step in range(3):
            model(torch.rand(4, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            writer.commit(source, step=step)
            follower.wait(0)
            assert torch.equal(model.weight, its_model.weight)
            for mine, its in zip(
                optimizer.state.values(), its_optimizer.state.values(), strict=True
            ):
                assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_more_than_the_budget_is_refused_with_its_size(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target, memory_budget_bytes=3 * CHUNK_BYTES) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 1, 2, 3), step=1)
        follower.wait(0)
        writer.commit(stepped(source, 1, 2, 3, 4), step=2)
        with pytest.raises(ckptstore.InvalidInput, match=r"256 KiB.*192 KiB are allowed"):
            follower.wait(0)
        with follower.frozen() as commit:
            assert commit.step == 1


def test_nothing_is_applied_while_somebody_reads(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target, turn_timeout_s=0.05) as follower:
        follower.wait(0)
        wanted = target["model"]["w"].clone()
        inside, leave = threading.Event(), threading.Event()

        def read() -> None:
            with follower.frozen():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=read)
        thread.start()
        inside.wait()
        writer.commit(stepped(source, 1), step=1)
        with pytest.raises(ckptstore.Unavailable, match="readers are within frozen"):
            follower.wait(0)
        assert torch.equal(target["model"]["w"], wanted)
        leave.set()
        thread.join()
        follower.wait(0)
        assert_same(target, source)


def test_a_wait_within_frozen_is_refused(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        writer.commit(stepped(source, 1), step=1)
        with follower.frozen(), pytest.raises(ckptstore.InvalidInput, match="wait for itself"):
            follower.wait(0)


def test_a_thread_applies_commits_and_wait_returns_them(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    with reader.follow("rl", target, poll_s=0.001) as follower:
        follower.start()
        for step in range(5):
            commit = writer.commit(stepped(source, step), step=step)
            found = follower.wait(60)
            assert found is not None
            assert found.id == commit.id
            with follower.frozen():
                assert_same(target, source)
        follower.stop()
        follower.stop()
        writer.commit(stepped(source, 1), step=9)
        assert follower.wait(0) is not None


def test_what_ends_the_thread_is_raised_by_the_next_call(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target, poll_s=0.001) as follower:
        follower.start()
        assert follower.wait(60) is not None
        writer.commit({"model": torch.zeros(3)}, step=1)
        with pytest.raises(ckptstore.InvalidInput, match="does not fit"):
            follower.wait(60)
        with follower.frozen() as commit:
            assert commit.step == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"poll_s": 0}, "poll_s is 0"),
        ({"verify": "twice"}, "verify is 'twice'"),
        ({"ref": "a b"}, "no ref"),
        ({"run": "a b"}, "run"),
    ],
)
def test_arguments_are_checked(how: dict[str, Any], message: str, reader: Store) -> None:
    run = how.pop("run", "rl")
    with pytest.raises(ckptstore.InvalidInput, match=message):
        reader.follow(run, blank(), **how)


def test_ids_are_verified_on_request(writer: Store, reader: Store) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target, verify="id") as follower:
        follower.wait(0)
        writer.commit(stepped(source, 1), step=1)
        follower.wait(0)
        assert_same(target, source)


def test_a_base_that_was_written_to_behind_the_followers_back_is_read(
    writer: Store, reader: Store
) -> None:
    """A patch is applied to what lies in the target. numpy's writes are not seen, and what is made
    of them does not match its checksum."""
    source, target = state(), blank()
    writer.commit(source, step=0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        for step in range(1, 4):
            writer.commit(stepped(source, 2, 5), step=step)
            if step == 2:
                target["model"]["w"].view(torch.int16).numpy()[2 * BLOCK + 9] += 1
            follower.wait(0)
            assert_same(target, source)


def test_only_the_newest_patch_is_read(
    writer: Store, reader: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = state(), blank()
    writer.commit(source, step=0)
    reads: list[str] = []
    read_into = LocalStorage.read_into

    def noted(self: LocalStorage, key: str, *where: Any) -> None:
        reads.append(key)
        read_into(self, key, *where)

    with reader.follow("rl", target) as follower:
        follower.wait(0)
        for step in range(1, 9):
            info = writer.commit(stepped(source, 2, 5), step=step)
            assert info.new_bytes < CHUNK_BYTES, "it is stored as patches"
            monkeypatch.setattr(LocalStorage, "read_into", noted)
            reads.clear()
            follower.wait(0)
            assert len(reads) <= 3, "metadata and the newest patches, however long the chain is"
            monkeypatch.undo()
            assert_same(target, source)


@pytest.fixture
def in_a_bucket(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """A writer and a reader, of two hosts."""
    site = Site(f"memory://{secrets.token_hex(8)}")
    with (
        site.open(tmp_path / "writer", run="rl") as writer,
        site.open(tmp_path / "reader", read_only=True) as reader,
    ):
        yield writer, reader


@pytest.mark.parametrize("busy", [False, True])
def test_in_a_bucket_what_a_commit_adds_is_asked_for_at_once(
    busy: bool, in_a_bucket: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no other thread comes to it."""
    writer, reader = in_a_bucket
    source, target, ask = state(), blank(), BucketStorage.ask
    writer.commit(source, step=0)
    asked: list[tuple[str, bool]] = []

    def noted(self: BucketStorage, what: str, *request: Any, **more: Any) -> Any:
        asked.append((what, bool(more.get("once"))))
        return ask(self, what, *request, **more)

    with reader.follow("rl", target) as follower:
        follower.wait(0)
        for step in range(1, 5):
            writer.commit(stepped(source, 2, 5), step=step)
            with monkeypatch.context() as patch:
                patch.setattr(BucketStorage, "ask", noted)
                if busy:
                    patch.setattr(ThreadPool, "submit", lambda self, work: new_future())
                asked.clear()
                follower.wait(0)
            assert_same(target, source)
            adds = [(what, ahead) for what, ahead in asked if "log/" not in what]
            assert len(adds) >= 3, "the document, and packs"
            assert all(ahead for _, ahead in adds)
            assert len(set(adds)) == len(adds)


def test_what_was_damaged_while_it_was_read_ahead_is_read_again(
    in_a_bucket: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = in_a_bucket
    source, target, get = state(), blank(), FsspecClient.get
    writer.commit(source, step=0)
    damaged: set[str] = set()

    def flipping(self: FsspecClient, key: str, start: int, stop: int | None) -> bytes:
        data = bytearray(get(self, key, start, stop))
        if key.startswith("packs/") and key not in damaged:
            damaged.add(key)
            data[random.randrange(len(data))] ^= 1
        return bytes(data)

    random = Random(0)
    with reader.follow("rl", target) as follower:
        follower.wait(0)
        for step in range(1, 9):
            writer.commit(stepped(source, 2, 5), step=step)
            with monkeypatch.context() as patch:
                patch.setattr(FsspecClient, "get", flipping)
                follower.wait(0)
            assert_same(target, source)
    assert len(damaged) >= 8
