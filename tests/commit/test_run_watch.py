"""Two trainings that commit to one run are told, once; nothing else looks like that."""

from pathlib import Path

import pytest

import ckptstore


def others_commit(place: Path, run: str) -> None:
    with ckptstore.open(place, run=run) as store:
        store.commit({"x": 0}, step=0)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "somebody else" in record.message]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_somebody_elses_commit_between_two_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    with ckptstore.open(tmp_path, run="a") as store:

        def commit(step: int) -> None:
            if asynchronous:
                store.commit_async({"x": step}, step=step).wait()
            else:
                store.commit({"x": step}, step=step)

        commit(1)
        others_commit(tmp_path, "b")
        commit(2)
        assert not told(caplog)
        for step in (3, 4):
            others_commit(tmp_path, "a")
            foreign = store.checkout("latest").id
            commit(step)
            commit(10 + step)
            assert len(told(caplog)) == 1
            if step == 3:
                assert f"run a: somebody else made commit {foreign[:12]}" in told(caplog)[0]


def test_a_training_that_goes_back_is_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"x": 0}
    others_commit(tmp_path, "main")
    with ckptstore.open(tmp_path) as store:
        store.commit(state, step=1)
        store.commit(state, step=2)
        store.checkout(1).restore(state)
        store.commit(state, step=3)
        store.commit(state, step=4)
        store.resume(state)
        store.commit(state, step=5)
    with ckptstore.open(tmp_path) as store:
        store.commit(state, step=6)
        store.commit(state, step=7)
    assert not told(caplog)
