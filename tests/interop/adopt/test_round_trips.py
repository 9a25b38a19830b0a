"""Any directory is adopted, and comes back with every byte, mode, time and link; tensors in its
files are leaves.
"""

import errno
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import ckptstore
from ckptstore.contents import CommitContents
from ckptstore.core.options import Storage
from ckptstore.errors import Conflict, Corrupt, InvalidInput, NotFound, Unavailable
from ckptstore.plugins.adopt import materializing
from ckptstore.restore.reader import ReadRequest
from ckptstore.snapshot import Snapshot
from ckptstore.store import Store
from tests.interop.adopt.trees import ForeignArguments, gguf, hugging_face, raw, tree_of
from tests.interop.dcp_states import NO_DIST
from tests.interop.test_shards import W, rows, write_shard

pytestmark = [  # the tests write pickles, and reach none from ckptstore
    pytest.mark.pickles,
    pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:TypedStorage"),
]


def huggingface(root: Path) -> None:
    hugging_face(root, root.parent / "ran")


def peft(root: Path) -> None:
    root.mkdir()
    (root / "adapter_config.json").write_text('{"r": 8}')
    for where in (root, root / "second"):
        where.mkdir(exist_ok=True)
        weights = {f"layers.{i}.lora_A.weight": torch.randn(8, 60) for i in range(4)}
        save_file(weights, where / "adapter_model.safetensors")


def index_and_shards(root: Path) -> None:
    root.mkdir()
    for i in range(2):
        save_file({f"w{i}": torch.randn(300, 80)}, root / f"model-0000{i + 1}-of-00002.safetensors")
    names = {f"w{i}": f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)}
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lightning(root: Path) -> None:
    root.mkdir()
    model = torch.nn.Linear(200, 30)
    state = {
        "epoch": 1,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "optimizer_states": [torch.optim.Adam(model.parameters()).state_dict()],
        "hparams_type": ForeignArguments,
        "hyper_parameters": {"lr": 0.1},
    }
    torch.save(state, root / "epoch=1.ckpt")
    (root / "last.ckpt").symlink_to("epoch=1.ckpt")


def distributed(root: Path) -> None:
    root.mkdir()
    state = {"model": {"w": torch.randn(300, 80), "b": torch.randn(9)}, "step": 7, "text": "x"}
    dcp.save(state, checkpoint_id=root / "pytorch_model_fsdp_0", **NO_DIST)


def sharded_safetensors(root: Path) -> None:
    for rank in range(2):
        write_shard(root, rank + 1, {"w": rows(W, 5 * rank, 5 * rank + 5)})


def torn_shards(root: Path) -> None:
    write_shard(root, 1, {"w": rows(W, 0, 4)})
    write_shard(root, 3, {"w": rows(W, 8, 10)})


def deepspeed(root: Path) -> None:
    (root / "global_step5").mkdir(parents=True)
    flat = torch.randn(5000)
    state = {"optimizer_state_dict": {"fp32_flat_groups": [flat[:3000], flat[3000:]]}, "ds": 1}
    torch.save(state, root / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (root / "latest").write_text("global_step5")
    (root / "zero_to_fp32.py").write_text("#!/usr/bin/env python\n")
    (root / "zero_to_fp32.py").chmod(0o755)


def snapshot(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchsnapshot uses what torch has deprecated
        from torchsnapshot import Snapshot, StateDict

        Snapshot.take(str(root), {"model": StateDict(w=torch.randn(300, 80), n=3)})


def arrays(root: Path) -> None:
    root.mkdir()
    np.save(root / "a.npy", np.random.default_rng(0).normal(size=(50, 30)))
    np.save(root / "fortran.npy", np.asfortranarray(np.ones((5, 3))))
    np.save(root / "big_endian.npy", np.arange(9, dtype=">i4"))
    np.save(root / "records.npy", np.zeros(3, dtype=[("a", "<i4")]))
    np.savez(root / "b.npz", x=np.ones((40, 5), np.float16), y=np.arange(9))
    np.savez_compressed(root / "c.npz", x=np.ones((40, 5)))


def gguf_file(root: Path) -> None:
    root.mkdir()
    tensors = {"a": torch.randn(40, 64), "b": torch.randn(30).half(), "c": torch.ones(3).bfloat16()}
    (root / "model.gguf").write_bytes(gguf(tensors, quantized=os.urandom(18)))


def torch_oddities(root: Path) -> None:
    root.mkdir()
    base = torch.randn(30, 40)
    views = {"rows": base[3:9], "turned": base.t(), "broad": base[0].expand(5, 40)}
    torch.save(views, root / "views.pt")
    torch.save(
        {"a": base, "tied": base, "complex": torch.ones(3, dtype=torch.complex64)}, root / "t.pt"
    )
    torch.save({"sparse": base.to_sparse(), "none": torch.empty(0, 3)}, root / "sparse.pt")
    torch.save(
        {"w": base, "v": base.bfloat16()}, root / "old", _use_new_zipfile_serialization=False
    )
    torch.save(torch.nn.Linear(20, 30), root / "module.pt")
    torch.save({1: {"deep": [base.double(), (base.half(),)]}}, root / "files")
    torch.save({"w": base}, root / "model.pt")


def plain(root: Path) -> None:
    (root / "empty" / "inner").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "config").write_text("[core]")
    (root / "back\\slash %41 \u00e9.txt").write_text("x")
    (root / "nothing").touch()
    (root / "large.bin").write_bytes(os.urandom(300_000))
    (root / "out").symlink_to("/etc/passwd")
    (root / "broken").symlink_to("../absent/\u00e9")
    (root / "folder").symlink_to("empty")
    (root / "secret").write_text("x")
    (root / "secret").chmod(0o400)
    os.utime(root / "out", ns=(1, 1_234_567_890_123_456_789), follow_symlinks=False)
    os.utime(root / "empty", ns=(5, -5_000_000_001))
    (root / "empty").chmod(0o2750)
    (root / "sealed").mkdir()
    (root / "sealed" / "file").write_text("y")
    (root / "sealed").chmod(0o555)


MADE: dict[Callable[[Path], None], set[str]] = {
    huggingface: {
        "model/0.weight",
        "optimizer.pt/state.0.exp_avg",
        "rng_state.pth/cpu",
        "training_args.bin/0.weight",
    },
    peft: {"adapter_model/layers.0.lora_A.weight", "second%2Fadapter_model/layers.0.lora_A.weight"},
    index_and_shards: {"model/w0", "model/w1"},
    lightning: {"model/state_dict.weight"},
    distributed: {"model/model.w", "model/model.b"},
    sharded_safetensors: {"model/w"},
    torn_shards: set(),
    deepspeed: {
        "model/optimizer_state_dict.fp32_flat_groups.0",
        "model/optimizer_state_dict.fp32_flat_groups.1",
    },
    snapshot: set(),
    arrays: {"a.npy/array", "b.npz/x", "b.npz/y"},
    gguf_file: {"model/a", "model/b", "model/c", "model/q"},
    torch_oddities: {
        "t.pt/a",
        "old/w",
        "old/v",
        "module.pt/_parameters.weight",
        "model.pt/w",
        "sparse.pt/sparse.1",
    },
    plain: set(),
}


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_directory_comes_back_as_it_was(
    make: Callable[[Path], None], store: Store, tmp_path: Path
) -> None:
    make(tmp_path / "source")
    before = tree_of(tmp_path / "source")
    made = store.adopt(tmp_path / "source", step=5, tag="t", metrics={"loss": 0.5})
    assert (made.step, made.tags, made.metrics) == (5, ("t",), {"loss": 0.5})
    assert made.message == "adopted from source"
    assert tree_of(tmp_path / "source") == before, "the source was not touched"
    done = made.materialize(tmp_path / "back")
    assert tree_of(tmp_path / "back") == before
    assert done.files == sum(type(content) is bytes for _, _, content in before.values())
    found = {leaf.path for leaf in made.leaves() if leaf.kind == "tensor"}
    assert found >= MADE[make] and (found or not MADE[make])
    assert store.adopt(tmp_path / "source").stats.new_bytes == 0  # type: ignore[union-attr]


def test_tensors_have_their_values_and_no_class_of_a_pickle_is_imported(
    store: Store, tmp_path: Path
) -> None:
    marker = tmp_path / "ran"
    weights = hugging_face(tmp_path / "hf", marker)
    made = store.adopt(tmp_path / "hf")
    assert ForeignArguments.loaded == 0 and not marker.exists()
    there = made.state_dict("model")
    assert there.keys() == weights.keys()
    assert all(torch.equal(there[name], weights[name]) for name in weights)
    assert torch.equal(made.read("training_args.bin/0.weight"), torch.full((40,), 3.0))
    moments = torch.load(tmp_path / "hf" / "optimizer.pt")["state"][0]["exp_avg"]
    assert torch.equal(made.read("optimizer.pt/state.0.exp_avg"), moments)


def test_pieces_of_dcp_are_one_tensor_on_the_grid_of_the_whole(
    store: Store, tmp_path: Path
) -> None:
    sharded_safetensors(tmp_path / "sharded")
    assert torch.equal(store.adopt(tmp_path / "sharded").read("model/w"), W)


def test_the_same_weights_in_four_formats_are_stored_once(store: Store, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = {f"layers.{i}.weight": torch.randn(500, 300) for i in range(6)}
    size = sum(len(raw(tensor)) for tensor in weights.values())
    for name in ("safetensors", "pt", "legacy", "npz", "gguf"):
        (tmp_path / name).mkdir()
    save_file(weights, tmp_path / "safetensors" / "model.safetensors")
    torch.save({"model": weights, "step": 1}, tmp_path / "pt" / "model.pt")
    torch.save(weights, tmp_path / "legacy" / "m", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "npz" / "m.npz", **{k: v.numpy() for k, v in weights.items()})  # type: ignore[arg-type]
    (tmp_path / "gguf" / "m.gguf").write_bytes(gguf(weights))
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", **NO_DIST)
    stored = store.commit({"model": weights}).new_bytes
    for name in ("safetensors", "pt", "legacy", "npz", "gguf", "dcp"):
        stored += store.adopt(tmp_path / name).new_bytes
    print(f"{stored / size:.4f} of the weights")
    assert stored <= 1.02 * size


def test_a_glob_selects_files_and_the_directories_around_them(store: Store, tmp_path: Path) -> None:
    peft(tmp_path / "peft")
    (tmp_path / "peft" / "unused").mkdir()
    made = store.adopt(tmp_path / "peft")
    made.materialize(tmp_path / "some", select="*adapter_model*")
    wanted = tree_of(tmp_path / "peft")
    chosen = {".", "adapter_model.safetensors", "second", "second/adapter_model.safetensors"}
    assert tree_of(tmp_path / "some") == {name: wanted[name] for name in chosen}
    with pytest.raises(NotFound, match=r"no files that 'x\*' matches"):
        made.materialize(tmp_path / "none", select="x*")
    assert not (tmp_path / "none").exists()


def test_what_has_content_is_not_overwritten(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peft(tmp_path / "peft")
    made = store.adopt(tmp_path / "peft")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for place in (tmp_path / "full", tmp_path / "full" / "file"):
        with pytest.raises(Conflict, match="is not an empty directory"):
            made.materialize(place)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(Conflict, match="is the working directory"):
        made.materialize(".")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("empty")
    made.materialize(tmp_path / "link")
    assert tree_of(tmp_path / "empty") == tree_of(tmp_path / "peft")
    with pytest.raises(InvalidInput, match="was not adopted"):
        store.commit({"model": 1}).materialize(tmp_path / "other")


def test_what_a_commit_cannot_hold_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no directory"):
        store.adopt(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="is not a directory"):
        store.adopt(tmp_path / "file")
    with pytest.raises(InvalidInput, match=r"the store .* lies in"):
        store.adopt(tmp_path)
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "pipe")
    with pytest.raises(InvalidInput, match="pipe is not a regular file but a socket"):
        store.adopt(tmp_path / "odd")
    (tmp_path / "odd" / "pipe").unlink()
    (tmp_path / "odd" / os.fsdecode(b"\xff")).touch()
    with pytest.raises(InvalidInput, match="is not Unicode"):
        store.adopt(tmp_path / "odd")
    assert store.log() == []


def test_a_finetune_costs_what_it_changed(store: Store, tmp_path: Path) -> None:
    weights = hugging_face(tmp_path / "one", tmp_path / "ran")
    store.adopt(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    weights["1.bias"] += 1
    save_file(weights, tmp_path / "two" / "model.safetensors", metadata={"format": "pt"})
    assert store.adopt(tmp_path / "two").new_bytes < 30_000


def test_many_small_tensors_are_read_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    tensors = {f"w{i}": torch.full((200,), float(i)) for i in range(2000)}
    torch.save(tensors, tmp_path / "d" / "many.pt")
    made = store.adopt(tmp_path / "d")
    taken: list[int] = []
    read = CommitContents.read

    def counted(self: CommitContents, requests: Sequence[ReadRequest], **options: Any) -> None:
        for each in requests:
            taken.extend(p.raw_bytes for p in each.tree.pieces(each.number, each.box))
        read(self, requests, **options)

    monkeypatch.setattr(CommitContents, "read", counted)
    made.materialize(tmp_path / "out")
    size = (tmp_path / "d" / "many.pt").stat().st_size
    assert (tmp_path / "out" / "many.pt").stat().st_size == size <= sum(taken) < 1.2 * size


def large(root: Path) -> None:
    """Two files, each of many windows of the least chunks."""
    root.mkdir()
    draws = torch.Generator().manual_seed(1)
    for name in ("a", "b"):
        weights = {f"w{i}": torch.randn(300, 161, generator=draws) for i in range(6)}
        save_file(weights, root / f"{name}.safetensors")


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Snapshot]:
    monkeypatch.setattr(materializing, "WINDOW_BYTES", 64 << 10)
    large(tmp_path / "source")
    with ckptstore.open(tmp_path / "small", storage=Storage(chunk_bytes=64 << 10)) as store:
        yield store.adopt(tmp_path / "source")


def test_a_window_is_written_while_the_next_is_read(
    windows: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = materializing.write_cached, CommitContents.read
    writes, reads, ahead = list[int](), threading.Semaphore(0), list[bool]()

    def written(fd: int, offset: int, buffers: Sequence[memoryview]) -> None:
        (data,) = buffers
        if offset == 0:
            ahead.append(reads.acquire(timeout=10))
        writes.append(len(data))
        if offset + len(data) < (tmp_path / "source" / "a.safetensors").stat().st_size:
            ahead.append(reads.acquire(timeout=10))
        write(fd, offset, buffers)

    def noted(self: CommitContents, requests: Sequence[ReadRequest], **options: Any) -> None:
        read(self, requests, **options)
        reads.release()

    monkeypatch.setattr(materializing, "WRITERS", 1)
    monkeypatch.setattr(materializing, "write_cached", written)
    monkeypatch.setattr(CommitContents, "read", noted)
    windows.materialize(tmp_path / "out")
    assert tree_of(tmp_path / "out") == tree_of(tmp_path / "source")
    assert len(writes) > 20 and all(ahead), "each window was read before its forerunner was written"


@pytest.mark.parametrize("failing", ["read", "write"])
def test_a_window_that_fails_leaves_nothing(
    windows: Snapshot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    calls = count()

    def third(error: Exception, act: Callable[..., None]) -> Callable[..., None]:
        def acted(*args: Any, **options: Any) -> None:
            if next(calls) == 3:
                raise error
            act(*args, **options)

        return acted

    full = third(OSError(errno.ENOSPC, "No space left on device"), materializing.write_cached)
    damaged = third(Corrupt("a chunk is damaged"), CommitContents.read)
    if failing == "write":
        monkeypatch.setattr(materializing, "write_cached", full)
    else:
        monkeypatch.setattr(CommitContents, "read", damaged)
    wanted = {"write": (Unavailable, "No space left"), "read": (Corrupt, "damaged")}[failing]
    with pytest.raises(wanted[0], match=wanted[1]):
        windows.materialize(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "source"]
