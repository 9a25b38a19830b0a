"""DCP's files pass between releases of torch: what a newer one wrote is imported and adopted, and
what is exported is read by all that are supported."""

import subprocess
import sys
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from ckptstore.interop.dcp import dcp_to_store, store_to_dcp
from ckptstore.interop.formats.exports import export
from ckptstore.plugins.foreign.inert_pickles import load_inert
from ckptstore.store import Store
from tests.golden.dcp_files import BY_TORCH, EXPORTED, wanted
from tests.interop.dcp_states import same, zeros

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:TypedStorage is deprecated"
)


def empty() -> dict[str, Any]:
    return {**zeros(wanted()), "name": ""}


def fields(directory: Path) -> set[int]:
    """How many fields the properties of tensors have in a `.metadata`, of which no code is run."""
    found = load_inert(directory / ".metadata").state_dict_metadata.values()
    return {len(each.properties.columns) for each in found if hasattr(each, "properties")}


def test_the_metadata_of_torch_2_15_is_imported_and_adopted(store: Store, tmp_path: Path) -> None:
    assert same(dcp_to_store(BY_TORCH, store).state_dict(), wanted())
    directory = tmp_path / "adopted"
    copytree(BY_TORCH, directory)
    adopted = store.adopt(directory)
    assert {leaf.shape for leaf in adopted.leaves()} >= {(5, 7), (7, 5)}
    adopted.materialize(tmp_path / "back")
    for file in BY_TORCH.iterdir():
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()


def test_what_was_exported_on_torch_2_15_is_loaded_by_this_ones_dcp() -> None:
    found = empty()
    dcp.load(found, checkpoint_id=EXPORTED)
    assert same(found, wanted())


@pytest.mark.skipif(not hasattr(TensorProperties, "strides"), reason="torch before 2.15 refuses it")
def test_torch_loads_its_own() -> None:
    found = empty()
    dcp.load(found, checkpoint_id=BY_TORCH)
    assert same(found, wanted())


def test_an_export_has_the_properties_that_every_torch_reads(store: Store, tmp_path: Path) -> None:
    snapshot = store.commit(wanted())
    store_to_dcp(snapshot, tmp_path / "whole")
    export(snapshot, tmp_path / "part", format="dcp", select="model")
    assert fields(tmp_path / "whole") == fields(tmp_path / "part") == fields(EXPORTED) == {5}
    assert fields(BY_TORCH) == {6}


def test_nothing_of_torch_that_is_private_and_about_to_go_is_imported() -> None:
    gone = ["_experimental"]
    if hasattr(dcp, "FsspecWriter"):
        gone.append("_fsspec_filesystem")
    code = (
        "import sys, torch.distributed.checkpoint\n"
        f"for name in {gone}: sys.modules['torch.distributed.checkpoint.' + name] = None\n"
        "import ckptstore.interop.dcp"
    )
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", code], check=True)
