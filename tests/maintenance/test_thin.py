"""Thinning: what a thinned commit keeps, what it says it lacks, whose place it has."""

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import ckptstore
from ckptstore.analysis import bad_number, norm
from ckptstore.errors import Conflict, InvalidInput, Thinned
from ckptstore.maintenance import forget
from ckptstore.maintenance.check.fsck import fsck
from ckptstore.maintenance.check.offline_store import open_offline_store
from ckptstore.maintenance.forget import forget_by_policy
from ckptstore.maintenance.retention import KeepBest, KeepEverySteps, KeepLast
from ckptstore.restore.reader import Reader
from ckptstore.store import Store, internals_of
from tests.cli.running import call
from tests.golden.reader import reader

GLOB = "optimizer/**"


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(300, 100, generator=generator)
    return {
        "model": {"weight": weight, "tied": weight},
        "optimizer": {
            "state": {"exp_avg": weight * 2, "step": step, "shape": torch.ones(3)},
            "master": weight,
        },
    }


def make(place: Path, steps: int = 6) -> list[str]:
    with ckptstore.open(place) as store:
        return [
            store.commit(state(step), step=step, metrics={"loss": 1 / (step + 1)}).id
            for step in range(steps)
        ]


def stored_bytes(store: Store) -> int:
    return store.usage().stored_bytes


def test_old_commits_lose_leaves_keep_the_others_and_stay_where_they_were(tmp_path: Path) -> None:
    commits = make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        before = {info.step: info for info in store.log()}
        plan = store.forget(KeepLast(2).thin(GLOB))
        assert [each.row.step for each in plan.thinned] == [3, 2, 1, 0]
        assert not plan.forgotten
        after = {info.step: info for info in store.log()}
        assert list(after) == list(before)
        for step, info in after.items():
            old = before[step]
            assert (info.run, info.metrics, info.time_ns) == (old.run, old.metrics, old.time_ns)
            assert info.thinned == (() if step > 3 else (GLOB,))
            snap = store.checkout(step)
            weight = snap.read("model/weight")
            assert torch.equal(weight, state(step)["model"]["weight"])
            gone = [leaf.path for leaf in snap.leaves() if leaf.gone]
            assert bool(gone) == (step < 4)
        assert store.checkout("latest").id == commits[-1]
        assert store.checkout("latest~5").step == 0
        assert store.checkout("best:loss").step == 5
        assert not store.fsck(read_data="100%").findings


def test_a_thinning_reads_and_writes_no_tensor_and_gc_frees_what_it_left(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        packs = {pack.id for pack in store._handle.log.state.packs.values() if not pack.metadata}
        before = stored_bytes(store)
        store.forget(KeepLast(2).thin(GLOB))
        state_ = store._handle.log.state
        assert {pack.id for pack in state_.packs.values() if not pack.metadata} == packs
        assert stored_bytes(store) - before < 8_000
        store.gc(grace_s=0)
        # One of the two tensors goes; the master copy is the weight itself.
        assert stored_bytes(store) < 0.75 * before
        assert not store.fsck(read_data="100%").findings
        assert store.checkout("latest~5").step == 0
        for step in range(4):
            assert torch.equal(
                store.checkout(step).read("model/tied"), state(step)["model"]["tied"]
            )


def test_what_is_gone_is_refused_with_the_nearest_commit_that_has_it(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin(GLOB))
        snap = store.checkout(1)
        target = state(99)
        with pytest.raises(Thinned, match=r"no longer has optimizer/.*\(step 4\)"):
            snap.restore(target)
        assert torch.equal(target["model"]["weight"], state(99)["model"]["weight"])
        for reads in (
            lambda: snap.read("optimizer/state/exp_avg"),
            lambda: snap.read("optimizer/state/step"),
            lambda: snap.read_into(torch.empty(300, 100), "optimizer/state/exp_avg"),
            lambda: snap.open("optimizer/state/exp_avg"),
            snap.state_dict,
        ):
            with pytest.raises(Thinned, match="step 4"):
                reads()
        weights = {"model": target["model"]}
        snap.restore(weights)
        assert torch.equal(weights["model"]["weight"], state(1)["model"]["weight"])
        snap.restore(target, without="optimizer")
        assert snap.state_dict("model").keys() == {"weight", "tied"}
        assert snap.state_dict(select="model/**").keys() == {"model"}
        snap.verify()


def test_a_plan_made_again_has_nothing_to_thin(tmp_path: Path) -> None:
    make(tmp_path)
    policy = KeepLast(2).thin(GLOB)
    with ckptstore.open(tmp_path) as store:
        planned = store.forget(policy, dry_run=True)
        assert len(planned.thinned) == 4
        assert len(store.forgotten()) == 0
        store.forget(policy)
        entries = store._handle.log.state.n
        again = store.forget(policy)
        assert (again.thinned, again.forgotten) == ((), ())
        assert store.forget(KeepLast(2).thin("optimizer/state/*"), dry_run=True).thinned == ()
        assert store._handle.log.state.n == entries


def test_policies_that_keep_and_policies_that_thin_go_together(tmp_path: Path) -> None:
    make(tmp_path, 9)
    with ckptstore.open(tmp_path) as store:
        plan = store.forget(
            [KeepEverySteps(3), KeepBest("loss").thin(GLOB), KeepLast(4).thin(GLOB)]
        )
        words = {each.row.step: each.word for each in plan.decisions}
        assert [step for step, word in words.items() if word == "keep"] == [8, 7, 6, 5]
        assert [step for step, word in words.items() if word == "thin"] == [3, 0]
        assert [info.step for info in store.log()] == [8, 7, 6, 5, 3, 0]


def test_protected_commits_stay_whole(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.tag("release", 1)
        plan = store.forget(KeepLast(1).thin(GLOB))
        assert [each.row.step for each in plan.thinned] == [3, 2, 0]
        assert store.checkout("release").read("optimizer/state/step") == 1


def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 4)
    with ckptstore.open(tmp_path) as store:
        with pytest.raises(InvalidInput, match="has a leaf that matches"):
            store.forget(KeepLast(1).thin("optimiser/**"))
        with pytest.raises(InvalidInput, match="wanted a glob"):
            KeepLast(1).thin()
        assert len(store.log()) == 4


def test_a_leaf_that_shares_memory_with_one_that_stays_stays(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin("model/weight"))
        snap = store.checkout(0)
        assert torch.equal(snap.read("model/tied"), state(0)["model"]["tied"])
        assert not any(leaf.gone for leaf in snap.leaves())


def test_an_undelete_brings_the_whole_commit_back_until_a_gc(tmp_path: Path) -> None:
    commits = make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin(GLOB))
        thinned = store.checkout(1).id
        assert store.undelete(1) == (commits[1],)
        assert [info.step for info in store.log()] == [5, 4, 3, 2, 1, 0]
        assert store.checkout(1).read("optimizer/state/step") == 1
        assert thinned in {info.id for info in store.forgotten()}
        store.tag("mine", 2)
        with pytest.raises(Conflict, match="has this place and a tag"):
            store.undelete(commits[2])
        store.gc(grace_s=0)
        assert store.forgotten() == []
        assert store.checkout(1).id == commits[1]
        with pytest.raises(ckptstore.NotFound):
            store.undelete(commits[0])


def test_undelete_all_brings_back_the_fullest_of_each_place(tmp_path: Path) -> None:
    commits = make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin("optimizer/state/exp_avg"))
        store.forget(KeepLast(2).thin(GLOB))
        store.forget(store.checkout(0).id)
    done = call("-s", str(tmp_path), "undelete", "--all", "--json")
    assert json.loads(done.out)["undeleted"] == commits[3::-1]
    with ckptstore.open(tmp_path) as store:
        assert [info.id for info in store.log()] == commits[::-1]


def test_a_commit_thinned_twice_says_all_that_it_lacks(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin("optimizer/state/*"))
        store.forget(KeepLast(3).thin("optimizer/master"))
        assert [info.thinned for info in store.log()][2:4] == [
            ("optimizer/state/*",),
            ("optimizer/state/*", "optimizer/master"),
        ]
        with pytest.raises(Thinned, match=r"nearest commit .* \(step 3\)"):
            store.checkout(0).read("optimizer/master")
        with pytest.raises(Thinned, match=r"nearest commit .* \(step 4\)"):
            store.checkout(0).read("optimizer/state/step")


def test_the_commands_say_what_is_thinned(tmp_path: Path) -> None:
    commits = make(tmp_path)
    place = ("-s", str(tmp_path))
    shown = call(*place, "forget", "--keep-last", "2", "--thin", GLOB, "--dry-run").out
    assert shown.count("\nthin ") == 4
    assert "0 commits to forget, 4 to thin, 2 to keep" in shown
    done = call(*place, "forget", "--keep-last", "2", "--thin", GLOB, "--json")
    assert [each["thin"] for each in json.loads(done.out)["commits"]] == [[], [], *[[GLOB]] * 4]
    logged = json.loads(call(*place, "log", "--json").out)["commits"]
    assert [each["thinned"] for each in logged] == [[], [], *[[GLOB]] * 4]
    page = call(*place, "show", "0").out
    assert f"{GLOB}, which {commits[0][:12]} had" in page
    assert GLOB in call(*place, "log").out
    leaves = json.loads(call(*place, "ls", "0", "--json").out)["leaves"]
    assert {leaf["path"]: leaf["gone"] for leaf in leaves}["optimizer/state/exp_avg"]
    assert "(gone)" in call(*place, "ls", "0").out
    found = json.loads(call(*place, "diff", "0", "4", "--json").out)
    assert "optimizer/state/exp_avg" in found["thinned"]
    assert {change["path"] for change in found["changes"]} == {"model/weight", "model/tied"}


def test_thin_without_a_policy_is_refused(tmp_path: Path) -> None:
    make(tmp_path, 4)
    done = call("-s", str(tmp_path), "forget", "--thin", GLOB)
    assert done.code == 2
    assert "--keep" in done.err


def test_the_reader_of_the_format_page_reads_thinned_commits(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin(GLOB))
        expected = store.checkout(1).id
        store.undelete(0)
    found = reader.Store(tmp_path)
    assert found.find("1") == expected
    assert found.find("latest") == list(found.commits)[-1]
    leaves = found.leaves(expected)
    assert found.read(leaves["model/weight"]) == state(1)["model"]["weight"].numpy().tobytes()
    with pytest.raises(ValueError, match="was thinned away"):
        found.read(leaves["optimizer/state/exp_avg"])
    assert found.read(found.leaves(found.find("0"))["optimizer/state/step"]) == b"0"


def test_damage_to_a_thinned_commit_is_found_as_any_other(tmp_path: Path) -> None:
    make(tmp_path)
    with ckptstore.open(tmp_path) as store:
        store.forget(KeepLast(2).thin(GLOB))
        store.gc(grace_s=0)
        document = next((tmp_path / "commits").glob(f"*-{store.checkout(0).id}"))
    document.chmod(0o644)
    document.write_bytes(document.read_bytes()[:-1])
    with open_offline_store(tmp_path) as offline:
        assert fsck(offline).findings


@pytest.mark.soak
def test_two_hundred_commits_with_five_optimizers_are_little_more_than_their_weights(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 600), torch.nn.Linear(600, 300))
    optimizer = torch.optim.AdamW(model.parameters())
    raw_bytes = 0
    with ckptstore.open(tmp_path) as store:
        for step in range(200):
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            snap = store.commit({"model": model, "optimizer": optimizer}, step=step)
            raw_bytes += snap.logical_bytes
        started = time.perf_counter()
        assert len(store.forget(KeepLast(5).thin(GLOB)).thinned) == 195
        took_s = time.perf_counter() - started
        store.gc(grace_s=0, max_unused=0.0)
        share = stored_bytes(store) / raw_bytes
        assert not store.fsck().findings
    print(f"stored {share:.3f} of {raw_bytes / 1e6:.0f} MB; 195 commits thinned in {took_s:.1f} s")
    # Weights are a third of the state: 1/3 of 195, and all of 5 commits.
    assert share < 0.36


def test_questions_pass_over_what_is_gone(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "s") as store:
        for step in range(4):
            moments = {"m": torch.full((30_000,), math.nan)} if not step else {"m": torch.ones(3)}
            store.commit({"model": {"w": torch.randn(30_000)}, "optimizer": moments}, step=step)
        store.forget(KeepLast(2).thin(GLOB))
        rows = [(row.step, row.leaf) for row in store.history("*")]
        assert (0, "model/w") in rows and (3, "optimizer/m") in rows
        assert (0, "optimizer/m") not in rows
        thinned = store.checkout(0)
        assert bad_number(thinned) is None
        assert norm(thinned, "*") == pytest.approx(float(thinned.read("model/w").norm()))
    files = fsspec.filesystem("ckptstore").ls(f"ckptstore://{tmp_path}/s@0", detail=False)
    assert [Path(file).name for file in files] == ["model.safetensors"]


def test_a_commit_that_is_purged_while_others_are_thinned_is_passed_over(tmp_path: Path) -> None:
    commits = make(tmp_path)
    with ckptstore.open(tmp_path) as store, ckptstore.open(tmp_path) as other:
        internals = internals_of(store)
        reader = Reader(internals.handle.config, internals.handle.objects, internals.threads)
        read, purged = reader.document, list[str]()

        def document(*what: Any) -> Any:
            found = read(*what)
            if not purged:
                purged.append(commits[0])
                other.forget(commits[0])
                other.gc(grace_s=0)
            return found

        reader.document = document  # type: ignore[assignment, method-assign]
        forget_by_policy(internals.handle, [KeepLast(2).thin(GLOB)], reader)
        assert purged
        assert [info.step for info in store.log() if info.thinned] == [3, 2, 1]
        assert not store.fsck(read_data="100%").findings


@pytest.mark.parametrize("reads", ["document", "trees"])
def test_the_commit_that_is_thinned_next_may_be_purged_before_it_is_read(
    tmp_path: Path, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = make(tmp_path)
    with ckptstore.open(tmp_path) as store, ckptstore.open(tmp_path) as other:
        internals = internals_of(store)
        reader = Reader(internals.handle.config, internals.handle.objects, internals.threads)
        read, purged = getattr(reader, reads), list[str]()

        def purge_and_read(*what: Any) -> Any:
            if not purged:
                purged.extend(commits[:4])
                other.forget(purged)
                other.gc(grace_s=0, max_unused=0)
            return read(*what)

        monkeypatch.setattr(reader, reads, purge_and_read)
        forget_by_policy(internals.handle, [KeepLast(1).thin(GLOB)], reader)
        assert purged
        assert [info.step for info in store.log()] == [5, 4]
        assert not store.fsck(read_data="100%").findings


def test_what_was_done_before_somebody_set_a_tag_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is tagged when others were forgotten and it is to be thinned: it stays whole."""
    ids, thin = make(tmp_path / "store"), forget.thin_commit
    tagged: list[str] = []

    def meanwhile(handle: Any, reader: Any, commit: Any, globs: Any) -> object:
        if not tagged:
            with ckptstore.open(tmp_path / "store") as other:
                other.tag("good", commit)
            tagged.append(commit)
        return thin(handle, reader, commit, globs)

    monkeypatch.setattr(forget, "thin_commit", meanwhile)
    with ckptstore.open(tmp_path / "store") as store:
        plan = store.forget([KeepLast(4), KeepLast(2).thin("optimizer/**")])
        assert plan.done == "forgot 2 commits, thinned 1"
        assert [each.commit for each in plan.forgotten] == ids[1::-1]
        assert [each.commit for each in plan.decisions] == ids[::-1]


@pytest.mark.parametrize("order", sorted(itertools.permutations(range(3))))
def test_tied_leaves_go_once_each_name_was_thinned_in_whichever_order(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    tied = torch.ones(400)
    with ckptstore.open(tmp_path) as store:
        for step in range(4):
            names = {"e": tied * step, "own": torch.ones(5)}
            store.commit({"m": {**names, "tie": names["e"], "third": names["e"]}}, step=step)
        globs = [("m/e", "m/tie", "m/third")[i] for i in order]
        for glob in globs[:2]:
            assert len(store.forget(KeepLast(2).thin(glob)).thinned) == 2
            assert not store.forget(KeepLast(2).thin(glob)).thinned
            assert torch.equal(store.checkout(1).read(f"m/{glob[2:]}"), tied)
        assert not store.forget(KeepLast(2).thin(*globs[:2])).thinned
        assert store.forget(KeepLast(2).thin(globs[2])).thinned
        there = [leaf.path for leaf in store.checkout(1).leaves() if not leaf.gone]
        assert there == ["m/own"]
        assert sorted(store.log()[-1].thinned) == sorted(globs)
        assert not store.fsck(read_data="100%").findings


@pytest.mark.parametrize("first", ["m/own", "m/e"])
def test_tied_leaves_of_a_commit_that_was_thinned_before_go_together(
    tmp_path: Path, first: str
) -> None:
    tied = torch.ones(400)
    with ckptstore.open(tmp_path) as store:
        for step in range(4):
            store.commit({"m": {"e": tied, "tie": tied, "own": torch.ones(5), "x": 1}}, step=step)
        for globs in ((first,), ("m/e", "m/tie"), ("m/own",)):
            store.forget(KeepLast(2).thin(*globs))
        there = [leaf.path for leaf in store.checkout(1).leaves() if not leaf.gone]
        assert there == ["m/x"]


def test_what_is_new_of_a_thinned_commit_is_what_was_new_of_its_place(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with ckptstore.open(tmp_path / "a") as store:
        before = {info.step: info.new_bytes for info in store.log()}
        store.forget(KeepLast(2).thin(GLOB))
        after = {info.step: info.new_bytes for info in store.log()}
        assert all(before[step] <= after[step] < before[step] + 8_000 for step in before)
        assert sum(after.values()) == store.usage().stored_bytes
        assert sum(each.new_bytes for each in store.usage().commits) == sum(after.values())
        ckptstore.clone(tmp_path / "a", tmp_path / "b").close()
        store.undelete([info.id for info in store.forgotten()])
        store.push(tmp_path / "b")
    with ckptstore.open(tmp_path / "b") as mirror:
        assert not any(info.thinned for info in mirror.log())
        assert sum(info.new_bytes for info in mirror.log()) == mirror.usage().stored_bytes
