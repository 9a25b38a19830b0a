"""The search for an enclosing store: what it finds, where it stops, and which stores it refuses,
each in words."""

import grp
import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import ckptstore
from ckptstore import InvalidInput
from ckptstore.cli.call import Exit
from ckptstore.interop.torchsnapshot import Snapshot, StateDict
from tests.cli.running import call, run

SOMEBODY, OTHER = 54_321, 54_322
"""User ids that no account has."""

as_root = pytest.mark.skipif(
    os.geteuid() != 0,
    reason="needs root, to give files to another user, to mount, and to become another user",
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPTSTORE", "CKPTSTORE_SAFE_DIRECTORIES"):
        monkeypatch.delenv(name, raising=False)


def make_store(place: Path) -> Path:
    with ckptstore.open(place) as store:
        store.commit({"w": torch.ones(3)}, tag="planted")
    return place


def give_away(place: Path, uid: int, gid: int) -> None:
    for path in (place, *place.rglob("*")):
        os.lchown(path, uid, gid)


def other_owner(base: Path) -> Path:
    """Another user's store, in a directory of that user."""
    above = make_store(base / "above")
    give_away(above, SOMEBODY, SOMEBODY)
    return above / "mine"


def world_writable(base: Path) -> Path:
    """A store in a directory where everybody may put one, as in `/tmp`."""
    above = base / "above"
    make_store(above / ".ckptstore")
    above.chmod(0o1777)
    return above / "mine"


def group_writable(base: Path) -> Path:
    """A store in a project's directory, where the whole group may put one."""
    above = make_store(base / "above")
    os.chown(above, -1, SOMEBODY)
    above.chmod(0o2775)
    return above / "mine"


def symbolic_link(base: Path) -> Path:
    """A link from a directory of this user to a store elsewhere."""
    (base / "above").mkdir()
    (base / "above" / ".ckptstore").symlink_to(make_store(base / "elsewhere"))
    return base / "above" / "mine"


def linked_configuration(base: Path) -> Path:
    """A directory of this user in which the store's configuration is a link into another store."""
    (base / "above").mkdir()
    (base / "above" / "ckptstore.json").symlink_to(
        make_store(base / "elsewhere") / "ckptstore.json"
    )
    return base / "above" / "mine"


@contextmanager
def mounted(place: Path) -> Iterator[Path]:
    place.mkdir(parents=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=755", "none", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


PLANTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "other owner": (other_owner, "belongs to another user"),
    "world-writable parent": (world_writable, "others may write to"),
    "group-writable parent": (group_writable, "others may write to"),
    "symbolic link": (symbolic_link, "is a symbolic link"),
    "linked configuration": (linked_configuration, "is a symbolic link"),
}


@pytest.fixture(params=PLANTS)
def planted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A directory of this user below a planted store, and the words by which that store is
    refused."""
    plant, reason = PLANTS[request.param]
    if plant in (other_owner, group_writable) and os.geteuid() != 0:
        pytest.skip("needs root, to give files to another user or group")
    below = plant(tmp_path)
    below.mkdir()
    return below, reason


def contents(place: Path) -> dict[str, int]:
    return {
        str(path): path.lstat().st_mtime_ns
        for path in place.parent.rglob("*")
        if "mine" not in path.parts
    }


def test_a_command_refuses_a_store_that_others_could_have_put_above_it(
    planted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below, reason = planted
    monkeypatch.chdir(below)
    for command in (["log"], ["tag", "x"], ["gc"], ["fsck"], ["migrate"]):
        result = call(*command)
        assert result.code == Exit.NO_STORE, command
        assert reason in result.err
        assert str(below.parent) in result.err
        assert "-s" in result.err
        assert "CKPTSTORE_SAFE_DIRECTORIES" in result.err


def test_a_snapshot_goes_into_no_store_that_others_could_have_put_above_it(
    planted: tuple[Path, str],
) -> None:
    below, reason = planted
    before = contents(below)
    for use in (
        lambda: Snapshot.take(str(below / "1"), {"s": StateDict(a=1)}),
        lambda: Snapshot(str(below / "planted")).get_manifest(),
    ):
        with pytest.raises(InvalidInput, match=reason) as refused:
            use()
        assert "CKPTSTORE_SAFE_DIRECTORIES" in str(refused.value)
        assert "CKPTSTORE_CEILING" in str(refused.value)
    assert contents(below) == before


def test_a_store_that_is_named_is_used_whatever_its_place(
    planted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below, _ = planted
    (place,) = [
        path for path in (below.parent / ".ckptstore", below.parent) if (path / "log").is_dir()
    ] or [below.parents[1] / "elsewhere"]
    monkeypatch.chdir(below)
    assert call("-s", str(place), "log").code == Exit.OK
    with ckptstore.open(place) as store:
        assert store.checkout("planted").read("w").sum() == 3


def test_safe_directories_are_searched_as_ones_own(
    planted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below, _ = planted
    if not (below.parent / "log").is_dir() and not (below.parent / ".ckptstore").is_dir():
        return  # a linked configuration leads to no whole store
    monkeypatch.setenv("CKPTSTORE_SAFE_DIRECTORIES", f"/nowhere:{below.parents[1]}")
    monkeypatch.chdir(below)
    assert "planted" in call("tag").out
    Snapshot.take(str(below / "1"), {"s": StateDict(a=1)})
    assert "mine/1" in call("tag").out


def test_a_ceiling_leaves_out_a_planted_store(
    planted: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    below, _ = planted
    before = contents(below)
    monkeypatch.setenv("CKPTSTORE_CEILING", f"/nowhere:{below.parent}")
    monkeypatch.chdir(below)
    assert call("log").code == Exit.NO_STORE
    assert "CKPTSTORE_CEILING" in call("log").err
    Snapshot.take(str(below / "1"), {"s": StateDict(a=1)})
    assert Snapshot(str(below / "1")).read_object("0/s/a") == 1
    assert contents(below) == before


@as_root
def test_a_store_beyond_a_mount_point_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "above")
    with mounted(store / "größe 2") as point:
        (point / "mine").mkdir()
        monkeypatch.chdir(point / "mine")
        result = call("log")
        monkeypatch.chdir("/")
        assert (result.code, "mount point" in result.err, "größe 2" in result.err) == (
            Exit.NO_STORE,
            True,
            True,
        ), result.err
        with pytest.raises(InvalidInput, match="mount point"):
            Snapshot.take(str(point / "mine" / "1"), {"s": StateDict(a=1)})
        monkeypatch.setenv("CKPTSTORE_SAFE_DIRECTORIES", str(store))
        Snapshot.take(str(point / "mine" / "1"), {"s": StateDict(a=1)})
        with ckptstore.open(store) as opened:
            assert len(opened.log()) == 2


@as_root
def test_a_pointer_file_of_another_user_is_followed_only_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`latest` or `best` is a ref; a file that somebody puts into the working directory under that
    name must not say the store."""
    with ckptstore.open(make_store(tmp_path / "elsewhere")) as store:
        (tmp_path / "work").mkdir()
        ckptstore.write_pointer(tmp_path / "work" / "best", store, "planted")
    monkeypatch.chdir(tmp_path / "work")
    assert call("show", "best").code == Exit.OK
    for spoil in (
        lambda: os.chown(tmp_path / "work" / "best", SOMEBODY, SOMEBODY),
        lambda: (
            os.chown(tmp_path / "work" / "best", 0, 0),
            (tmp_path / "work" / "best").chmod(0o666),
        ),
        lambda: ((tmp_path / "work" / "best").chmod(0o644), (tmp_path / "work").chmod(0o1777)),
    ):
        spoil()
        result = call("show", "best")
        assert (result.code, "best" in result.err, "./best" in result.err) == (
            Exit.NO_STORE,
            True,
            True,
        ), result.err
        assert call("show", "./best").code == Exit.OK


def test_the_search_finds_what_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories that only this user's private group may write to, as under the umask 002, are
    this user's alone."""
    store = make_store(tmp_path / "runs")
    (store / "a" / "b").mkdir(parents=True)
    group = grp.getgrgid(pwd.getpwuid(os.geteuid()).pw_gid)
    if group.gr_name == pwd.getpwuid(os.geteuid()).pw_name:
        os.chown(store / "a", -1, group.gr_gid)
        (store / "a").chmod(0o775)
    monkeypatch.chdir(store / "a" / "b")
    assert "planted" in call("tag").out
    (tmp_path / "link").symlink_to(store / "a")
    Snapshot.take(str(tmp_path / "link" / "c" / "1"), {"s": StateDict(a=1)})
    assert "a/c/1" in call("tag").out


def test_the_search_ends_at_a_directory_of_others_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "runs")
    (store / "open" / "b").mkdir(parents=True)
    (store / "open").chmod(0o1777)
    monkeypatch.chdir(store / "open" / "b")
    result = call("log")
    assert result.code == Exit.NO_STORE
    assert f"{store}/open" in result.err
    assert "others may write to" in result.err


def test_a_snapshot_in_a_directory_of_everybody_is_a_store_of_its_own(tmp_path: Path) -> None:
    """What `Snapshot.take(tempfile.mkdtemp(), …)` does: no store for all of the temporary
    directory."""
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    made = Path(tempfile.mkdtemp(dir=shared))
    for path in (made, shared / "new", shared / "new"):
        snapshot = Snapshot.take(str(path), {"s": StateDict(a=torch.arange(5))})
        assert (path / ".ckptstore" / "ckptstore.json").is_file()
        assert snapshot.commit.tags == (path.name,)
        assert Snapshot(str(path)).read_object("0/s/a").tolist() == [0, 1, 2, 3, 4]
    assert {path.name for path in shared.iterdir()} == {made.name, "new"}
    with ckptstore.open(shared / "new" / ".ckptstore", create=False) as store:
        assert len(store.log()) == 2
    Snapshot.take(str(shared / "run" / "1"), {"s": StateDict(a=1)})
    Snapshot.take(str(shared / "run" / "2"), {"s": StateDict(a=1)})
    assert (
        shared / "run" / "ckptstore.json"
    ).is_file()  # a directory that is made now is this user's alone


def test_a_snapshot_makes_no_store_in_a_path_that_others_may_write_to(tmp_path: Path) -> None:
    made = tmp_path / "shared" / "1"
    made.mkdir(parents=True)
    for directory in (made, made.parent):
        directory.chmod(0o1777)
    with pytest.raises(InvalidInput, match=r"others may write to .*CKPTSTORE_SAFE_DIRECTORIES"):
        Snapshot.take(str(made), {"s": StateDict(a=1)})
    assert list(made.iterdir()) == []


def test_in_a_safe_directory_snapshots_share_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    team = tmp_path / "team"
    team.mkdir()
    team.chmod(0o2777)
    monkeypatch.setenv("CKPTSTORE_SAFE_DIRECTORIES", str(team))
    for name in ("1", "2"):
        Snapshot.take(str(team / name), {"s": StateDict(a=1)})
    assert (team / "ckptstore.json").is_file() or (team / ".ckptstore" / "ckptstore.json").is_file()


@as_root
def test_another_user_plants_a_store_and_a_third_is_not_captured(tmp_path: Path) -> None:
    """With real user ids: the planter's directory is the planter's, the victim's process runs as
    the victim."""
    base = Path(tempfile.mkdtemp(prefix="ckptstore-discovery-"))  # where other users can come
    try:
        base.chmod(0o1777)
        script = (
            "import os, sys; sys.path[:0] = eval(sys.argv[1]); os.setgid(int(sys.argv[2])); "
            "os.setuid(int(sys.argv[2]));"
            "from ckptstore.cli.main import main; sys.exit(main(sys.argv[3:]))"
        )

        def as_user(uid: int, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
            # Imported before the user changes: the interpreter's own files may be root's alone.
            code = (
                "import ckptstore.cli.main, ckptstore.cli.setup, ckptstore.plugins.reports.log, "
                f"ckptstore.store, ckptstore.maintenance.check.offline_store; {script}"
            )
            command = [sys.executable, "-c", code, repr(sys.path), str(uid), *words]
            environment = {
                **os.environ,
                "HOME": str(base),
                "CKPTSTORE_CACHE": str(base / f"cache-{uid}"),
                "CKPTSTORE_CEILING": "/",
            }
            return subprocess.run(
                command,
                cwd=directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        (base / "victim").mkdir()
        os.chown(base / "victim", OTHER, OTHER)
        planted = as_user(SOMEBODY, base, "init", str(base / ".ckptstore"))
        assert planted.returncode == 0, planted.stderr
        result = as_user(OTHER, base / "victim", "log")
        assert result.returncode == Exit.NO_STORE, result.stderr
        assert (
            f"{base} belongs to another user" in result.stderr
            or "others may write to" in result.stderr
        )
    finally:
        subprocess.run(["rm", "-rf", str(base)], check=True)


def test_a_command_says_where_its_search_ended(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    result = run("log", cwd=tmp_path / "a", env={"CKPTSTORE_CEILING": str(tmp_path)})
    assert result.code == Exit.NO_STORE
    assert f"{tmp_path} is in $CKPTSTORE_CEILING" in result.err
