"""The commands that ask questions about a history, make commits of others, sign, compact and thin,
on stores in buckets and databases."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.running import Result, call
from tests.shared.sites import Site, kinds, sites_of
from tests.support.servers.s3 import environment_of

STEPS, PARTS_AT, BAD_AT = range(1, 6), 4, 3
Ask = Callable[..., Result]


def state(step: int, run: str) -> dict[str, Any]:
    """Weights that part from those of run `a` at one step and become NaN in `bad`."""
    weight = torch.linspace(1, 2, 60_000) * (1 + step * 2**-14)
    if run == "parts" and step >= PARTS_AT:
        weight[7] += 1
    if run == "bad" and step >= BAD_AT:
        weight[7] = torch.nan
    return {"model": {"weight": weight}, "optimizer": {"m": torch.full((20_000,), float(step))}}


@pytest.fixture(scope="module", params=kinds())
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Four runs of five commits, which tests only add to, but for the run `old`."""
    folder = tmp_path_factory.mktemp("questions")
    site = sites_of(request, folder).new()
    for run in ("a", "parts", "bad", "old"):
        with site.open(folder / "host", run=run) as store:
            for step in STEPS:
                store.commit(state(step, run), step=step, metrics={"loss": 1 / step})
    return site


@pytest.fixture
def ask(
    site: Site, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Ask:
    """Run a command on the store, from a host that has not seen it yet."""
    monkeypatch.setenv("CKPTSTORE_CACHE", str(tmp_path / "host"))
    if site.options is not None:
        for name, value in environment_of(request.getfixturevalue("s3")).items():
            monkeypatch.setenv(name, value)

    def run(*words: str, code: int = 0) -> Result:
        index = ["--index", str(site.more["index"])] if site.more else []
        found = call("-s", site.place, *index, *words)
        assert found.code == code, found.err
        return found

    return run


QUESTIONS = {
    "parted a parts --select model": {"step": PARTS_AT, "equal_steps": [1, 2, 3]},
    "bisect --good bad@1 --bad bad@5 --nan": {"looked_at": 2},
    "plot metrics loss --run a": {"bars": []},
    "plot tensor model/weight --run a": {},
    "plot diff a@1 a@2": {},
    "plot size": {},
    "stats --what-if --keep-last 1 --thin optimizer": {},
    "history model/weight --run a": {"commits": 5},
}


@pytest.mark.parametrize("words", QUESTIONS)
def test_a_question_is_answered(ask: Ask, words: str) -> None:
    found = ask(*words.split(), "--json").document
    assert QUESTIONS[words].items() <= found.items()


def test_a_chart_is_drawn(ask: Ask, tmp_path: Path) -> None:
    ask("plot", "metrics", "--run", "a", "-o", str(tmp_path / "loss.svg"))
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()


def test_history_reads_no_tensor_a_second_time(ask: Ask) -> None:
    first = ask("history", "weight", "--run", "bad", "--nan", "--json").document
    assert [row["step"] for row in first["rows"]] == [BAD_AT]
    assert ask("history", "weight", "--run", "bad", "--nan", "--json").document == first


def test_watch_tells_what_another_host_commits(ask: Ask, site: Site, tmp_path: Path) -> None:
    def commit_until_told() -> None:
        with site.open(tmp_path / "other", run="watched") as store:
            step = 0
            while not told.wait(0.3):
                store.commit({"step": step}, step=step)
                step += 1

    told = threading.Event()
    writer = threading.Thread(target=commit_until_told)
    writer.start()
    try:
        found = ask("watch", "--every", "1s", "-n", "1")
    finally:
        told.set()
        writer.join()
    assert "of run watched" in found.out


def test_average_and_sign_write_into_the_store(ask: Ask, tmp_path: Path) -> None:
    made = ask("average", "a@1", "a@3", "--tag", "mean", "--run", "made", "--json").document
    shown = ask("ls", "mean", "--json").document
    assert {leaf["path"] for leaf in shown["leaves"]} == {"model/weight", "optimizer/m"}
    key = str(tmp_path / "key")
    ask("sign", "--new-key", key)
    ask("verify", "mean", "--keys", f"{key}.pub", code=1)
    assert ask("sign", "mean", "--key", key, "--json").document["commit"] == made["commit"]
    ask("verify", "mean", "--keys", f"{key}.pub")


def test_compact_and_thin_take_bytes_and_keep_the_rest(
    ask: Ask, site: Site, tmp_path: Path
) -> None:
    words = ("--keep-last", "2", "--thin", "optimizer", "--run", "old")
    assert len(ask("forget", *words, "--json").document["commits"]) == 5
    assert ask("compact", "--newest", "1", "--every", "2", "--json").document["deltas"] > 0
    ask("gc", "--now")
    assert "not compared" in ask("diff", "old@1", "old@5").out
    with site.open(tmp_path / "reader") as store:
        for run in ("a", "old"):
            for step in STEPS:
                weight = store.checkout(f"{run}@{step}").read("model/weight")
                assert torch.equal(weight, state(step, run)["model"]["weight"])
        assert store.fsck(read_data="100%").findings == ()
