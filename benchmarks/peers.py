"""How each peer writes a state into an empty folder, restores it in place, and reads one tensor.

A peer leaves durability to the caller: the harness syncs every file and folder within the timed
part (`disk.settle`). That holds for DCP too: torch 2.13, asked to sync its files, calls `fsync` on
`.metadata` while the bytes are still in the stream's buffer (strace shows the write after it), and
never syncs a folder.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.states import State


@dataclass(frozen=True, slots=True)
class Peer:
    """`read` is None where a peer cannot read one tensor without the rest."""

    name: str
    write: Callable[[State, Path], None]
    load: Callable[[Path, State], None]
    read: Callable[[Path, str], torch.Tensor] | None


def _torch_write(state: State, folder: Path) -> None:
    torch.save(state.app, folder / "state.pt")


def _torch_load(folder: Path, into: State) -> None:
    _copy(torch.load(folder / "state.pt", mmap=True, weights_only=True), into.app)


def _torch_read(folder: Path, path: str) -> torch.Tensor:
    found: Any = torch.load(folder / "state.pt", mmap=True, weights_only=True)
    for key in path.split("/"):
        found = found[key]
    return torch.clone(found)


def _copy(source: dict[str, Any], target: dict[str, Any]) -> None:
    for key, value in target.items():
        if isinstance(value, dict):
            _copy(source[key], value)
        else:
            value.copy_(source[key])


def _safetensors_write(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state.tensors, folder / "state.safetensors")


def _safetensors_load(folder: Path, into: State) -> None:
    from safetensors import safe_open

    with safe_open(folder / "state.safetensors", "pt") as file:
        for path, tensor in into.tensors.items():
            tensor.copy_(file.get_tensor(path))


def _safetensors_read(folder: Path, path: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(folder / "state.safetensors", "pt") as file:
        return torch.clone(file.get_tensor(path))


def _dcp_write(state: State, folder: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    save(
        state.app,
        storage_writer=FileSystemWriter(folder, thread_count=2, sync_files=True),
        no_dist=True,
    )


def _dcp_load(folder: Path, into: State) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(into.app, storage_reader=FileSystemReader(folder), no_dist=True)


def _dcp_read(folder: Path, path: str) -> torch.Tensor:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader, name = FileSystemReader(folder), path.replace("/", ".")
    properties = reader.read_metadata().state_dict_metadata[name]
    assert isinstance(properties, TensorStorageMetadata)
    tensor = torch.empty(properties.size)
    load({name: tensor}, storage_reader=reader, no_dist=True)
    return tensor


def _snapshot_state(state: State) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {key: StateDict(**tree) for key, tree in state.app.items()}


def _snapshot_write(state: State, folder: Path) -> None:
    from torchsnapshot import Snapshot

    Snapshot.take(str(folder), _snapshot_state(state))


def _snapshot_load(folder: Path, into: State) -> None:
    from torchsnapshot import Snapshot

    Snapshot(str(folder)).restore(_snapshot_state(into))


def _snapshot_read(folder: Path, path: str) -> torch.Tensor:
    from torchsnapshot import Snapshot

    found: object = Snapshot(str(folder)).read_object(f"0/{path}")
    assert isinstance(found, torch.Tensor)
    return found


def _checkpointing_manager() -> Any:
    """Synchronous, one file per key of the state in parallel. Its default of direct I/O fails with
    EINVAL on ext4 (unaligned writes)."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    saver = SyncCheckpointSaverConfig(
        writer_config=CheckpointWriterConfig(file_write_max_threads=2)
    )
    return CheckpointManager(
        CheckpointManager.Config(
            save=saver, storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
        )
    )


def _checkpointing_write(state: State, folder: Path) -> None:
    with closing(_checkpointing_manager()) as manager:
        manager.save(str(folder / "state"), state.app)


def _checkpointing_load(folder: Path, into: State) -> None:
    with closing(_checkpointing_manager()) as manager:
        manager.load(str(folder / "state"), into=into.app)


PEERS = (
    Peer("torch.save", _torch_write, _torch_load, _torch_read),
    Peer("safetensors", _safetensors_write, _safetensors_load, _safetensors_read),
    Peer("DCP", _dcp_write, _dcp_load, _dcp_read),
    Peer("TorchSnapshot", _snapshot_write, _snapshot_load, _snapshot_read),
    Peer("torch_checkpointing", _checkpointing_write, _checkpointing_load, None),
)
