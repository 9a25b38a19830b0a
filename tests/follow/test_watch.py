"""`watch` tells of each new commit, and ends when it is told to."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import ckptstore
from ckptstore.plugins.follow.watch import Seen
from tests.cli.running import call, environment, run_on_terminal


@pytest.fixture
def store(tmp_path: Path) -> ckptstore.Store:
    store = ckptstore.open(tmp_path / "store")
    store.commit({"x": 0}, step=0)
    return store


def watching(store: ckptstore.Store, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "ckptstore", "watch", "--every", "1s", "-s", store.url, *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )


def commit_until_told(store: ckptstore.Store, process: "subprocess.Popen[str]") -> str:
    """The first line that it prints. It may miss what was committed before it looked first."""
    import select

    assert process.stdout
    for step in range(1, 200):
        store.commit({"x": step}, step=step, metrics={"loss": 1 / step})
        if select.select([process.stdout], [], [], 0.3)[0]:
            return process.stdout.readline()
    raise AssertionError(process.communicate())


def rest_of(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """What it prints until it ends, behind the lines that were read. `communicate` would pass over
    what was read ahead."""
    assert process.stdout and process.stderr
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(timeout=60)
    return out, err


def test_a_pipe_has_a_line_for_each_commit_until_control_c(store: ckptstore.Store) -> None:
    with watching(store) as process:
        line = commit_until_told(store, process)
        assert " of run main: " in line and ", loss " in line
        process.send_signal(signal.SIGINT)
        out, err = rest_of(process)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1].endswith(("new commits", "1 new commit"))


def test_json_has_a_document_for_each_commit_and_ends_after_so_many(
    store: ckptstore.Store,
) -> None:
    with watching(store, "--json", "-n", "1") as process:
        first = json.loads(commit_until_told(store, process))
        out, err = rest_of(process)
    assert (process.returncode, err) == (0, "")
    assert first["run"] == "main"
    assert json.loads(out.splitlines()[-1])["commits"] == len(out.splitlines())


def test_a_terminal_shows_commits_writers_the_disk_and_the_mirror(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    pytest.importorskip("rich", reason="the extra `watch` is not installed")
    ckptstore.open(tmp_path / "mirror").close()
    words = ("watch", "-n", "0", "-s", store.url, "--mirror", str(tmp_path / "mirror"))
    shown = run_on_terminal(*words)
    assert shown.code == 0
    for text in ("lacks 1 commit", "writing  nobody", " free", store.checkout().id[:8]):
        assert text in shown.out


def test_a_mirror_that_has_the_whole_of_a_thinned_commit_lacks_nothing(
    store: ckptstore.Store, tmp_path: Path
) -> None:
    pytest.importorskip("rich", reason="the extra `watch` is not installed")
    for step in (1, 2):
        store.commit({"x": step, "y": step}, step=step)
    store.push(tmp_path / "mirror", create=True)
    store.forget(ckptstore.KeepLast(2).thin("x"))
    words = ("watch", "-n", "0", "-s", store.url, "--mirror", str(tmp_path / "mirror"))
    assert "lacks 0 commits" in run_on_terminal(*words).out


def test_a_mirror_that_is_none_is_refused(store: ckptstore.Store, tmp_path: Path) -> None:
    result = call("watch", "-n", "0", "-s", store.url, "--mirror", str(tmp_path / "absent"))
    assert result.code == 1
    assert "absent" in result.err


def test_a_rate_is_of_what_was_added_since_the_oldest(store: ckptstore.Store) -> None:
    for step in (1, 2):
        store.commit({"x": step}, step=step)
    infos = store.log()
    took_s = (infos[0].time_ns - infos[-1].time_ns) / 1e9
    added = sum(info.new_bytes for info in infos[:2])
    assert Seen(infos, (), None, None).rate == pytest.approx(added / took_s)
    assert Seen(infos[:1], (), None, None).rate is None
