"""A store that is made as a mirror is at least as private as the store that it mirrors."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import ckptstore
from tests.cli.running import call


@pytest.fixture(params=[0o022, 0o000, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def pushed(source: Path, target: Path) -> None:
    assert call("-s", str(source), "push", str(target), "--create").code == 0


def cloned(source: Path, target: Path) -> None:
    assert call("clone", str(source), str(target)).code == 0


def mirrored(source: Path, target: Path) -> None:
    with ckptstore.open(source, mirror=target) as store:
        store.commit({"w": torch.ones(3)})
        assert store.flush_mirror()


def backed_up(source: Path, target: Path) -> None:
    with ckptstore.open(source) as store:
        store.push(target, create=True)


WAYS = [pushed, cloned, mirrored, backed_up]


def modes(store: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in (store, *store.rglob("*"))}


@pytest.mark.parametrize("way", WAYS)
def test_a_private_stores_mirror_is_private(
    way: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    with ckptstore.open(tmp_path / "source", storage=ckptstore.Storage(private=True)) as store:
        store.commit({"w": torch.zeros(3)})
    way(tmp_path / "source", tmp_path / "deep" / "target")
    assert all(mode & 0o077 == 0 for mode in modes(tmp_path / "deep" / "target"))
    with ckptstore.open(tmp_path / "deep" / "target") as store:
        store.commit({"w": torch.ones(5)})
    assert all(mode & 0o077 == 0 for mode in modes(tmp_path / "deep" / "target"))


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_mirror_has_no_right_that_its_source_lacks(mode: int, umask: int, tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "source") as store:
        store.commit({"w": torch.zeros(3)})
    (tmp_path / "source").chmod(mode)
    pushed(tmp_path / "source", tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == mode & ~umask | 0o700
    assert all(found & 0o777 & ~mode == 0 for found in modes(tmp_path / "target"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a directory to another group")
def test_rights_of_one_group_are_no_rights_of_another(tmp_path: Path) -> None:
    with ckptstore.open(tmp_path / "source") as store:
        store.commit({"w": torch.zeros(3)})
    os.chown(tmp_path / "source", -1, 54_321)
    (tmp_path / "source").chmod(0o750)
    pushed(tmp_path / "source", tmp_path / "target")
    assert stat.S_IMODE((tmp_path / "target").stat().st_mode) == 0o700
