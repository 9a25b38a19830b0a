"""The store as training code uses it: what went in comes back, nothing is half-done."""

import logging
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckptstore
from ckptstore import Corrupt, InvalidInput, NotFound, Unavailable


def net(width: int = 64) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 4)
    )


def training() -> dict[str, Any]:
    torch.manual_seed(1)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "epoch": 3,
        "history": {"losses": [1.0, 0.5], "best": torch.arange(5)},
    }


def files(root: Path, folder: str) -> list[Path]:
    return sorted(p for p in (root / folder).rglob("*") if p.is_file())


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- there and back --


def test_a_state_comes_back_in_place(place: Path) -> None:
    state = training()
    weights = [p.clone() for p in state["model"].parameters()]
    moments = state["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
    with ckptstore.open(place) as store:
        store.commit(state, step=1)
        addresses = [p.data_ptr() for p in state["model"].parameters()]
        with torch.no_grad():
            for p in state["model"].parameters():
                p.zero_()
        state["epoch"], state["history"]["losses"] = 0, []
        state["optimizer"].state_dict()["state"][0]["exp_avg"].zero_()
        report = store.checkout(1).restore(state)
    assert not report.missing and not report.unexpected
    assert all(torch.equal(a, b) for a, b in zip(weights, state["model"].parameters(), strict=True))
    assert addresses == [p.data_ptr() for p in state["model"].parameters()]
    assert torch.equal(moments, state["optimizer"].state_dict()["state"][0]["exp_avg"])
    assert state["epoch"] == 3 and state["history"]["losses"] == [1.0, 0.5]


def test_a_fresh_process_resumes_where_the_last_one_stopped(place: Path) -> None:
    state = training()
    with ckptstore.open(place) as store:
        store.commit(state, step=1)
    code = (
        "import ckptstore, torch, sys\n"
        "model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, "
        "4))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "history = {'losses': [], 'best': torch.zeros(5, dtype=torch.int64)}\n"
        "state = {'model': model, 'optimizer': optimizer, 'epoch': 0, 'history': history}\n"
        "snapshot = ckptstore.open(sys.argv[1]).resume(state)\n"
        "print(snapshot.step, state['epoch'], sum(p.double().sum().item() for p in "
        "model.parameters()).hex())\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(place)], capture_output=True, text=True, check=True
    ).stdout.split()
    assert out == [
        "1",
        "3",
        sum(p.double().sum().item() for p in state["model"].parameters()).hex(),
    ]


def test_resume_on_a_fresh_store_returns_none(place: Path) -> None:
    with ckptstore.open(place) as store:
        assert store.resume(training()) is None


def test_state_dict_gives_fresh_containers_of_the_same_types(place: Path) -> None:
    state = training()
    with ckptstore.open(place) as store:
        state_dict = store.commit(state).state_dict()
    assert list(state_dict) == ["model", "optimizer", "epoch", "history"]
    assert state_dict["history"]["losses"] == [1.0, 0.5] and state_dict["epoch"] == 3
    assert all(
        torch.equal(v, state_dict["model"][k]) for k, v in state["model"].state_dict().items()
    )


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_each_codec_gives_back_the_same_bytes(place: Path, codec: str) -> None:
    state = {
        "smooth": torch.linspace(0, 1, 300_000),
        "random": torch.randn(100_000, dtype=torch.float64),
        "zeros": torch.zeros(500_000),
    }
    with ckptstore.open(place, storage=ckptstore.Storage(codec=codec)) as store:
        snapshot = store.commit(state)
        for name, tensor in state.items():
            assert torch.equal(snapshot.read(name), tensor)
            assert torch.equal(snapshot.read(name, slice(100, 70_000)), tensor[100:70_000])
        snapshot.verify()


def test_verify_reads_metadata_that_this_process_has_read_before(place: Path) -> None:
    with ckptstore.open(place) as store:
        snapshot = store.commit({"x": torch.arange(100_000)})
        assert snapshot.read("x")[7] == 7
        for pack in store._handle.log.replay().packs.values():
            for path in (place / "packs").rglob(f"{pack.id}*") if pack.metadata else ():
                path.write_bytes(bytes(60) + path.read_bytes()[60:])
        with pytest.raises(Corrupt):
            snapshot.verify()


def test_one_leaf_or_a_part_of_it_can_be_read(place: Path) -> None:
    weight = torch.randn(3000, 300)
    with ckptstore.open(place) as store:
        snapshot = store.commit({"model": {"w": weight, "n": 7}})
        assert torch.equal(snapshot.read("model/w"), weight)
        assert torch.equal(
            snapshot.read("model/w", (slice(5, 2000), slice(10, 20))), weight[5:2000, 10:20]
        )
        assert torch.equal(snapshot.read("model/w", -1), weight[-1])
        assert snapshot.read("model/n") == 7
        with pytest.raises(InvalidInput, match="step 2"):
            snapshot.read("model/w", slice(0, 10, 2))
        with pytest.raises(InvalidInput, match="no regions"):
            snapshot.read("model/n", 0)
        with pytest.raises(NotFound, match="did you mean 'model/w'"):
            snapshot.read("model/ww")


# -- what is stored once --


def test_an_unchanged_commit_writes_no_pack(place: Path) -> None:
    state = training()
    with ckptstore.open(place) as store:
        first = store.commit(state, step=1)
        packs = files(place, "packs")
        again = store.commit(state, step=2)
        assert files(place, "packs") == packs
        assert (
            again.new_bytes == 0 and again.content_id == first.content_id and again.id != first.id
        )


def test_equal_chunks_are_stored_once_across_leaves_and_runs(place: Path) -> None:
    tensor = torch.randn(400_000)
    with ckptstore.open(place) as store:
        first = store.commit({"a": tensor, "b": tensor.clone()})
        assert tensor.nbytes < first.new_bytes < 1.1 * tensor.nbytes
    with ckptstore.open(place, run="other") as store:
        assert store.commit({"c": tensor.clone()}).new_bytes < 20_000


def test_a_change_costs_the_chunks_it_touches(place: Path) -> None:
    tensor = torch.randn(4 << 20)
    with ckptstore.open(place) as store:
        store.commit({"w": tensor})
        tensor[12345] += 1
        changed = store.commit({"w": tensor})
        difference = store.diff("latest~1", "latest")
    assert changed.stats.new_chunks == 1 and changed.new_bytes < 1_100_000
    assert [c.path for c in difference.changes] == ["w"] and difference.changed_bytes == 1 << 20


# -- finding commits --


def test_refs_name_steps_tags_ids_runs_ancestors_and_bests(place: Path) -> None:
    with ckptstore.open(place) as store:
        ids = [
            store.commit({"n": i}, step=10 * i, metrics={"loss": abs(i - 2), "acc": i}).id
            for i in range(4)
        ]
        store.tag("good", 10)
        with ckptstore.open(place, run="other") as other:
            foreign = other.commit({"n": 9}, step=10).id
        wanted = {
            10: 1,
            "good": 1,
            ids[2][:10]: 2,
            "latest": 3,
            "latest~2": 1,
            "best:loss": 2,
            "best:acc:max": 3,
            "good~1": 0,
        }
        assert {ref: store.checkout(ref).id for ref in wanted} == {
            ref: ids[i] for ref, i in wanted.items()
        }
        assert store.checkout("other@10").id == foreign
        own = store.log(run=store.run)
        assert [info.id for info in own] == ids[::-1]
        assert [info.parents for info in own] == [(ids[2],), (ids[1],), (ids[0],), ()]
        assert foreign in {info.id for info in store.log()}


def test_tags_move_and_go(place: Path) -> None:
    with ckptstore.open(place) as store:
        a, b = store.commit({"n": 1}, tag=["x", "y"]), store.commit({"n": 2}, tag="x")
        assert store.tags() == {"x": b.id, "y": a.id}
        store.untag("y")
        assert store.tags() == {"x": b.id}
        with pytest.raises(NotFound, match="'y'"):
            store.untag("y")


def test_lineage_follows_what_was_restored(place: Path) -> None:
    with ckptstore.open(place) as store:
        first, _ = store.commit({"n": 1}, step=1), store.commit({"n": 2}, step=2)
    with ckptstore.open(place, run="branch") as store:
        state = {"n": 0}
        store.checkout("main@1").restore(state)
        assert store.commit(state, step=2).parents == (first.id,)


def test_a_plain_dict_takes_what_the_commit_has_beyond_it(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"history": {"loss": 0.5, "curve": torch.ones(3)}})
        target: dict[str, Any] = {"history": {}}
        store.checkout().restore(target)
    assert target["history"]["loss"] == 0.5 and torch.equal(
        target["history"]["curve"], torch.ones(3)
    )


def test_keys_with_slashes_dots_percents_spaces_and_unicode_never_collide(place: Path) -> None:
    state = {
        "m": {
            "a.b": torch.tensor(1),
            "a": {"b": torch.tensor(2)},
            "a/b": torch.tensor(3),
            "a%2Fb": torch.tensor(4),
            "": torch.tensor(5),
        },
        "m/a": {"b": torch.tensor(6)},
        "ü n": {
            0: torch.tensor(7),
            "0": torch.tensor(8),
            True: torch.tensor(9),
            (1, "x"): torch.tensor(10),
        },
    }
    with ckptstore.open(place) as store:
        snapshot = store.commit(state)
        paths = [leaf.path for leaf in snapshot.leaves()]
        assert len(set(paths)) == 10
        assert [int(snapshot.read(path)) for path in paths] == list(range(1, 11))
        back = snapshot.state_dict()
    assert back == state


def test_steps_and_metrics_may_be_whatever_counts_as_a_number(place: Path) -> None:
    loss = torch.tensor(0.5, requires_grad=True) * 2
    with warnings.catch_warnings(), ckptstore.open(place) as store:
        warnings.simplefilter("error")
        store.commit(
            {"n": 1}, step=torch.tensor(7), metrics={"loss": loss, "acc": np.float32(0.25)}
        )  # type: ignore[arg-type, dict-item]
        store.commit({"n": 2}, step=np.int64(8))  # type: ignore[arg-type]
        assert [(info.step, dict(info.metrics)) for info in store.log()] == [
            (8, {}),
            (7, {"loss": 1.0, "acc": 0.25}),
        ]


# -- damage --


def test_a_flipped_bit_is_found_and_resume_falls_back(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensor = torch.randn(100_000)
    with ckptstore.open(place) as store:
        store.commit({"w": tensor}, step=1)
        old = set(files(place, "packs"))
        store.commit({"w": tensor + 1}, step=2)
        data = max(set(files(place, "packs")) - old, key=lambda p: p.stat().st_size)
    spoil(data, 5000)
    with ckptstore.open(place) as store:
        with pytest.raises(Corrupt, match=r"leaf w, commit .*fsck"):
            store.checkout(2).restore({"w": torch.zeros(100_000)})
        state = {"w": torch.zeros(100_000)}
        with caplog.at_level(logging.WARNING, "ckptstore"):
            assert store.resume(state).step == 1
        assert torch.equal(state["w"], tensor)
        assert [s.step for s in store.skipped] == [2] and "skipped commit" in caplog.text


def test_metadata_is_read_from_its_twin(place: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"w": torch.arange(3)}, step=1)
    (twin,) = (p for p in files(place, "packs") if p.name.endswith(".2"))
    spoil(Path(str(twin)[:-2]), 10)
    with ckptstore.open(place) as store:
        assert torch.equal(store.checkout(1).read("w"), torch.arange(3))


@pytest.mark.parametrize("lost", ["catalog.sqlite", "chunks.lmdb", ""])
def test_losing_the_indexes_loses_nothing(place: Path, lost: str) -> None:
    import shutil

    tensor = torch.randn(50_000)
    with ckptstore.open(place) as store:
        store.commit({"w": tensor}, step=1, tag="x", metrics={"loss": 1.0})
        before = store.log()
    for path in [place / "index" / lost] if lost else [place / "index"]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with ckptstore.open(place) as store:
        assert store.log() == before
        assert torch.equal(store.checkout("x").read("w"), tensor)
        assert store.commit({"w": tensor}, step=2).new_bytes == 0


# -- many at once --


def test_threads_may_share_a_store(place: Path) -> None:
    failed: list[BaseException] = []

    def work(store: ckptstore.Store, i: int) -> None:
        try:
            tensor = torch.full((200_000,), float(i))
            assert torch.equal(store.commit({"w": tensor}, step=i).read("w"), tensor)
            assert torch.equal(store.checkout(i).read("w"), tensor)
        except BaseException as error:
            failed.append(error)

    with ckptstore.open(place) as store:
        threads = [threading.Thread(target=work, args=(store, i)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and len(store.log()) == 6


def test_a_failing_disk_leaves_nothing_visible(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ckptstore.open(place) as store:
        store.commit({"w": torch.arange(5)}, step=1)
        before = files(place, "packs")
        fsync, calls = os.fsync, []

        def failing(fd: int) -> None:
            calls.append(fd)
            if len(calls) == 2:
                raise OSError(5, "Input/output error")
            fsync(fd)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(Unavailable, match="Input/output error"):
            store.commit({"w": torch.randn(300_000)}, step=2)
        monkeypatch.setattr(store._handle.storage, "_fsync", fsync)
        assert files(place, "packs") == before and not files(place, "tmp")
        assert [info.step for info in store.log()] == [1]
        store.commit({"w": torch.randn(300_000)}, step=2)


def test_a_commit_says_what_it_cost_in_one_line(
    place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ckptstore.open(place) as store, caplog.at_level(logging.INFO, "ckptstore"):
        snapshot = store.commit({"w": torch.zeros(1000)}, step=5, tag="x")
    line = caplog.messages[-1]
    assert (
        line.startswith(f"commit {snapshot.id[:12]} step 5 (x): 3.9 KiB -> ")
        and "durable after" in line
    )
    assert (
        snapshot.stats.logical_bytes == 4000
        and snapshot.stats.held_s >= snapshot.stats.durable_s >= snapshot.stats.packed_s
    )
