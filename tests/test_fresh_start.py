"""A run that starts from the beginning says what it looked at, and warns where that may be a
mistake."""

import logging
from pathlib import Path

import pytest

import ckptstore
from tests.cli.running import call


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with one store, `checkpoints`, whose run `pretrain` has two commits."""
    with ckptstore.open(tmp_path / "checkpoints", run="pretrain") as store:
        for step in (100, 200):
            store.commit({"progress": {"step": step}}, step=step)
    return tmp_path


def said(place: Path, caplog: pytest.LogCaptureFixture, run: str | None = None) -> tuple[str, str]:
    """The level and the text of what a fresh start says."""
    with caplog.at_level(logging.INFO, "ckptstore"), ckptstore.open(place, run=run) as store:
        caplog.clear()
        assert store.resume({"progress": {"step": 0}}) is None
    (record,) = (r for r in caplog.records if "nothing to resume" in r.getMessage())
    return record.levelname, record.getMessage()


def test_a_first_start_is_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    level, text = said(tmp_path / "new", caplog)
    assert level == "INFO"
    assert text == f"nothing to resume in run main of {tmp_path}/new: the store has no commits"


@pytest.mark.parametrize(
    "wrong", ["checkpoint", "chekpoints", "Checkpoints", "scripts/checkpoints"]
)
def test_a_mistyped_path_is_told_from_a_first_start(
    runs: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    level, text = said(runs / wrong, caplog)
    assert level == "WARNING"
    assert f"nothing to resume in run main of {runs / wrong}: the store has no commits" in text
    assert text.endswith(f"; did you mean {runs}/checkpoints?")


def test_a_mistyped_folder_above_is_one_too(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    (runs / "team").mkdir()
    (runs / "checkpoints").rename(runs / "team" / "checkpoints")
    level, text = said(runs / "taem" / "checkpoints", caplog)
    assert (level, text.endswith("team/checkpoints?")) == ("WARNING", True)


def test_a_store_within_a_store_is_one_too(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    level, text = said(runs / "checkpoints" / "pretrain", caplog)
    assert (level, text.endswith("/checkpoints?")) == ("WARNING", True)


def test_neighbours_that_are_empty_or_numbered_are_none(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckptstore.open(runs / "chckpoint").close()
    for name in ("run-1", "run-2"):
        assert said(runs / name, caplog)[0] == "INFO"
        with ckptstore.open(runs / name) as store:
            store.commit({"n": 1}, step=1)


@pytest.mark.parametrize(
    ("run", "level"), [(None, "WARNING"), ("pretrian", "WARNING"), ("tune", "INFO")]
)
def test_commits_in_other_runs_are_named(
    runs: Path, run: str | None, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A new name for a run is a decision; the default, or nearly an old one, may be a mistake."""
    found, text = said(runs / "checkpoints", caplog, run)
    assert found == level
    assert text.endswith("runs with commits: pretrain; open(…, run='pretrain') continues one")


def test_what_was_resumed_is_logged(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, "ckptstore"),
        ckptstore.open(runs / "checkpoints", run="pretrain") as store,
    ):
        snapshot = store.resume({"progress": {"step": 0}})
        assert snapshot
    assert (
        f"resumed commit {snapshot.id[:12]} (step 200) of run pretrain of {runs}/checkpoints"
        in caplog.messages
    )


def test_no_store_at_a_path_names_those_near_it(runs: Path) -> None:
    near = f"did you mean {runs}/checkpoints?"
    with pytest.raises(ckptstore.NotFound, match=near.replace("?", r"\?")):
        ckptstore.open(runs / "checkpoint", create=False)
    result = call("log", "-s", str(runs / "checkpoint"))
    assert (result.code, near in result.err) == (10, True)
    assert near in call("log", "-s", str(runs)).err


def test_a_ref_in_an_empty_store_names_the_store_and_those_near_it(runs: Path) -> None:
    with ckptstore.open(runs / "checkpoint") as store:
        with pytest.raises(ckptstore.NotFound, match="the store has no commits") as caught:
            store.checkout()
        (note,) = caught.value.__notes__
        assert note == (f"{runs}/checkpoint has no commits; did you mean {runs}/checkpoints?")


def test_the_log_lists_all_runs_in_python_as_on_the_command_line(runs: Path) -> None:
    with ckptstore.open(runs / "checkpoints", run="tune") as store:
        store.commit({"progress": {"step": 1}}, step=1)
        assert [(info.run, info.step) for info in store.log()] == [
            ("tune", 1),
            ("pretrain", 200),
            ("pretrain", 100),
        ]
        assert [info.step for info in store.log(run="pretrain")] == [200, 100]
        first = store.log()[0]
        assert repr(first) == f"<CommitInfo {first.id[:12]} run=tune, step=1>"
        listed = call("log", "--json", "-s", store.url).document["commits"]
        assert [commit["id"] for commit in listed] == [info.id for info in store.log()]
