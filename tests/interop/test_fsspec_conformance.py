"""fsspec's own tests of `get` for filesystems, on a commit of what they expect there.

Those of `copy`, `put`, `pipe`, `mv` and `open` (of an exclusive write) write through the filesystem
under test, which is read-only.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests

import ckptstore
from ckptstore.errors import ReadOnly
from ckptstore.interop.fsspec import CheckpointFileSystem, url_of


class TestGet(AbstractGetTests, AbstractFixtures):  # type: ignore[misc]  # fsspec has no types
    @pytest.fixture
    def fs(self) -> CheckpointFileSystem:
        return CheckpointFileSystem()

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def fs_path(self) -> str:
        return ""

    @pytest.fixture
    def committed(self, tmp_path: Path) -> Iterator[Callable[..., str]]:
        """Commits what one of fsspec's functions makes in a local directory, and gives its path."""
        with ckptstore.open(tmp_path / "store") as store:

            def commit(make: Callable[..., str]) -> str:
                (tmp_path / "made").mkdir()
                local = LocalFileSystem(auto_mkdir=True)
                source = make(local, lambda *parts: "/".join(map(str, parts)), tmp_path / "made")
                url = url_of(store.adopt(tmp_path / "made"), Path(source).name)
                return str(CheckpointFileSystem._strip_protocol(url))

            yield commit

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, committed: Callable[..., str]) -> str:
        return committed(self._bulk_operations_scenario_0)

    @pytest.fixture
    def fs_glob_edge_cases_files(self, committed: Callable[..., str]) -> str:
        return committed(self._glob_edge_cases_files)

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, committed: Callable[..., str]) -> str:
        return committed(self._dir_and_file_with_same_name_prefix)

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, committed: Callable[..., str]) -> str:
        return committed(self._10_files_with_hashed_names)

    def test_get_directory_recursive(
        self,
        fs: CheckpointFileSystem,
        fs_join: Callable[..., str],
        fs_path: str,
        local_fs: LocalFileSystem,
        local_join: Callable[..., str],
        local_target: str,
        committed: Callable[..., str],
    ) -> None:
        """The only one that makes its directory through the filesystem."""

        def make(local: LocalFileSystem, join: Callable[..., str], root: Path) -> str:
            local.makedirs(join(root, "source", "src"))
            local.touch(join(root, "source", "src", "file"))
            return join(root, "source")

        path = committed(make)
        with pytest.raises(ReadOnly):
            fs.mkdir(f"{path}/src")
        super().test_get_directory_recursive(
            _Made(), fs_join, path, local_fs, local_join, local_target
        )


class _Made(CheckpointFileSystem):
    """What is to be made is there already."""

    def mkdir(self, path: str) -> None:
        assert self.isdir(path)

    def touch(self, path: str) -> None:
        assert self.size(path) == 0
