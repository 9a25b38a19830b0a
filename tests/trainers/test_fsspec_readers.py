"""pandas, pyarrow and Ray read commits through fsspec."""

from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ckptstore.interop.fsspec import CheckpointFileSystem, url_of
from ckptstore.store import Store
from tests.interop.adopt.trees import tree_of

fsspec.register_implementation("ckptstore", CheckpointFileSystem, clobber=True)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    import pandas as pd

    root = tmp_path / "out"
    (root / "inner").mkdir(parents=True)
    frame = pd.DataFrame({"step": range(5000), "loss": [1 / (i + 1) for i in range(5000)]})
    frame.to_csv(root / "log.csv", index=False)
    frame.to_parquet(root / "inner" / "log.parquet")
    frame.to_json(root / "log.json")
    save_file({"w": torch.arange(90_000.0)}, root / "model.safetensors")
    return root


def test_pandas_reads_tables_of_commits(store: Store, out: Path) -> None:
    import pandas as pd

    url = url_of(store.adopt(out))
    wanted = pd.read_csv(out / "log.csv")
    assert pd.read_csv(f"{url}/log.csv").equals(wanted)
    assert pd.read_parquet(f"{url}/inner/log.parquet").equals(wanted)
    assert len(pd.read_json(f"{url}/log.json")) == 5000


def test_pyarrow_and_ray_read_directories_of_commits(
    store: Store, out: Path, tmp_path: Path
) -> None:
    import pyarrow.fs as pafs
    from ray.train import Checkpoint

    url = url_of(store.adopt(out))
    filesystem = pafs.PyFileSystem(pafs.FSSpecHandler(CheckpointFileSystem()))
    path = CheckpointFileSystem._strip_protocol(url)
    infos = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
    assert {info.path.removeprefix(f"{path}/"): info.type.name for info in infos} == {
        "inner": "Directory",
        "inner/log.parquet": "File",
        "log.csv": "File",
        "log.json": "File",
        "model.safetensors": "File",
    }
    with filesystem.open_input_file(f"{path}/log.csv") as file:
        assert file.read_at(9, 1) == (out / "log.csv").read_bytes()[1:10]
    copied = Checkpoint(path, filesystem).to_directory(str(tmp_path / "ray"))
    contents = [
        {name: content for name, (_, _, content) in tree_of(root).items() if content is not None}
        for root in (Path(copied), out)
    ]
    assert contents[0] == contents[1]


def test_a_local_copy_is_made_for_what_needs_one(store: Store, out: Path, tmp_path: Path) -> None:
    url = f"simplecache::{url_of(store.adopt(out))}/model.safetensors"
    local = fsspec.open_local(url, simplecache={"cache_storage": str(tmp_path / "cache")})
    with safe_open(local, "pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.arange(90_000.0))
