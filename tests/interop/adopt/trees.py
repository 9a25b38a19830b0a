"""Directories as values, and files in the formats that trainers write."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tree = dict[str, tuple[int, int, object]]


def tree_of(root: Path) -> Tree:
    """Mode, time in ns and content of everything below a directory, and of itself."""
    found: Tree = {}
    for folder, folders, names in os.walk(root):
        for path in (Path(folder), *(Path(folder, name) for name in (*folders, *names))):
            status = path.lstat()
            content: object = None
            if path.is_symlink():
                content = path.readlink()
            elif path.is_file():
                content = path.read_bytes()
            found[path.relative_to(root).as_posix()] = status.st_mode, status.st_mtime_ns, content
    return found


def gguf(tensors: dict[str, torch.Tensor], quantized: bytes = b"") -> bytes:
    """A file of GGUF, version 3, with a few keys, float tensors, and one quantized one."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    words = b"".join(text(f"token{i}") for i in range(5))
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 5) + words,
        text("llama.rope") + struct.pack("<If", 6, 0.5),
    ]
    infos, data = [], b""
    kinds = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % 64)
        dims = struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *reversed(tensor.shape))
        infos.append(text(name) + dims + struct.pack("<IQ", kinds[tensor.dtype], len(data)))
        data += raw(tensor)
    if quantized:
        data += b"\0" * (-len(data) % 64)
        infos.append(text("q") + struct.pack("<IQIQ", 1, 32, 2, len(data)))
        data += quantized
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs + infos)
    return head + b"\0" * (-len(head) % 64) + data


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


class ForeignArguments:
    """A class of a trainer, which pickles name. A reader that unpickles would run `__reduce__`."""

    loaded = 0

    def __init__(self, output_dir: str = "out") -> None:
        self.output_dir, self.weight = output_dir, torch.full((40,), 3.0)

    def __setstate__(self, state: Any) -> None:
        ForeignArguments.loaded += 1


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def hugging_face(root: Path, marker: Path, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint directory like that of Hugging Face's Trainer, and its weights."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(120, 160), torch.nn.Linear(160, 90))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 120)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    root.mkdir(parents=True)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    save_file(weights, root / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    torch.save(scheduler.state_dict(), root / "scheduler.pt")
    rng = {"python": (3, (1, 2), None), "numpy": np.random.default_rng(1).bytes(9)}
    torch.save({**rng, "cpu": torch.get_rng_state()}, root / "rng_state.pth")
    torch.save([ForeignArguments(), Bomb(marker)], root / "training_args.bin")
    (root / "legacy.pkl").write_bytes(pickle.dumps(Bomb(marker)))
    (root / "config.json").write_text('{"architectures": ["X"],\n  "vocab_size": 7}')
    (root / "trainer_state.json").write_text('{"global_step": 5}')
    return weights
