"""Every interface reads the commits of every other one, to the last bit."""

from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import ckptstore
from ckptstore.interop.dcp import StoreReader, StoreWriter
from ckptstore.interop.formats import export, import_path
from ckptstore.interop.torchsnapshot import Snapshot, StateDict
from ckptstore.store import Store
from tests.interop.dcp_states import NO_DIST

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is", "ignore:TypedStorage is deprecated"
)

Tensors = dict[str, torch.Tensor]

NAME = "taken"
SOON = timedelta(seconds=60)


def tensors() -> Tensors:
    generator = torch.Generator().manual_seed(5)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return {
        "layers.0.weight": torch.randn(600, 700, generator=generator),
        "layers.0.bias": torch.randn(700, generator=generator).bfloat16(),
        "steps": torch.arange(12).reshape(3, 4),
        "odd": odd,
    }


def write_natively(place: Path, aside: Path) -> None:
    with ckptstore.open(place) as store:
        store.commit({"model": tensors()}, tag=NAME)


def write_by_dcp(place: Path, aside: Path) -> None:
    dcp.save({"model": tensors()}, storage_writer=StoreWriter(place, tag=NAME), **NO_DIST)


def write_by_snapshot(place: Path, aside: Path) -> None:
    ckptstore.open(place).close()
    Snapshot.take(str(place / NAME), {"model": StateDict(**tensors())})


def write_from_safetensors(place: Path, aside: Path) -> None:
    save_file(tensors(), aside / f"{NAME}.safetensors")
    with ckptstore.open(place) as store:
        commit = import_path(store, aside / f"{NAME}.safetensors")
        store.tag(NAME, commit.id)


def write_what_a_peer_sent(place: Path, aside: Path) -> None:
    state = transferred({"model": tensors()})
    with ckptstore.open(place) as store:
        store.commit(state, tag=NAME)


def read_natively(place: Path, aside: Path) -> Tensors:
    with ckptstore.open(place) as store:
        return dict(store.checkout(NAME).state_dict("model"))


def read_by_dcp(place: Path, aside: Path) -> Tensors:
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}}
    dcp.load(state, storage_reader=StoreReader(place, ref=NAME), **NO_DIST)
    return state["model"]


def read_by_snapshot(place: Path, aside: Path) -> Tensors:
    state = StateDict(**{name: torch.zeros_like(tensor) for name, tensor in tensors().items()})
    Snapshot(str(place / NAME)).restore({"model": state})
    return dict(state)


def read_as_safetensors(place: Path, aside: Path) -> Tensors:
    with ckptstore.open(place) as store:
        export(
            store.checkout(NAME), aside / "out.safetensors", format="safetensors", select="model"
        )
    return load_file(aside / "out.safetensors")


def read_by_a_peer(place: Path, aside: Path) -> Tensors:
    with ckptstore.open(place) as store:
        state = transferred({"model": dict(store.checkout(NAME).state_dict("model"))}, store)
    return state["model"]


def transferred(state: dict[str, Tensors], store: Store | None = None) -> dict[str, Tensors]:
    """`state` as a peer has it after a transfer."""
    pytest.importorskip("torchft", reason="torchft is not installed here")
    from ckptstore.interop.torchft import StoreTransport

    sender: StoreTransport[dict[str, Tensors]] = StoreTransport(SOON, store)
    receiver: StoreTransport[dict[str, Tensors]] = StoreTransport(SOON)
    try:
        sender.send_checkpoint([1], 1, state, SOON)
        return receiver.recv_checkpoint(0, sender.metadata(), 1, SOON)
    finally:
        receiver.shutdown()
        sender.shutdown()


WRITERS = (
    write_natively,
    write_by_dcp,
    write_by_snapshot,
    write_from_safetensors,
    write_what_a_peer_sent,
)
READERS = (read_natively, read_by_dcp, read_by_snapshot, read_as_safetensors, read_by_a_peer)


@pytest.mark.parametrize(
    ("write", "read"),
    list(product(WRITERS, READERS)),
    ids=lambda way: way.__name__.replace("_", " "),
)
def test_what_one_has_written_every_other_reads(
    write: Callable[[Path, Path], None], read: Callable[[Path, Path], Tensors], tmp_path: Path
) -> None:
    write(tmp_path / "store", tmp_path)
    got = read(tmp_path / "store", tmp_path)
    wanted = tensors()
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_the_same_tensors_are_one_content_whoever_wrote_them(tmp_path: Path) -> None:
    write_natively(tmp_path / "store", tmp_path)
    with ckptstore.open(tmp_path / "store") as store:
        native = store.checkout()
    for write in (write_by_dcp, write_what_a_peer_sent):
        write(tmp_path / "store", tmp_path)
        with ckptstore.open(tmp_path / "store") as store:
            assert store.checkout().content_id == native.content_id
    write_from_safetensors(tmp_path / "store", tmp_path)
    with ckptstore.open(tmp_path / "store") as store:
        packs = store.log()[0].new_bytes
    assert packs < 20_000  # only its header and its tree: the tensors are already stored
