"""`python -m benchmarks.rl FOLDER --steps N` trains a small GPT by GRPO on the CPU, commits every
step, and says what a step costs to keep or to send, beside others.

The weights are bfloat16. The optimizer (AdamW, written out) has fp32 masters and moments. A prompt
is two digits, and the reward is 1 if the answer is their sum modulo ten. Some supervised steps come
first, at a high rate; then GRPO trains at `--rate`. A follower in another process samples from the
weights of the newest commit, and its states are compared with the trainer's, bit by bit.

Beside it, for consecutive steps: what TRL sends (`delta_codec.py` of its delta weight sync:
changed positions as int32, or gaps as uint16, and raw values; by reckoning), zstd with the file of
the step before as its dictionary, as `zstd --patch-from` does, and `xdelta3` if it is installed,
over safetensors files.
"""

import argparse
import hashlib
import json
import multiprocessing
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import zstandard
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import ckptstore

RUN = "grpo"
DIGITS, GROUP, PROMPTS = 10, 16, 32
BETAS, EPS = (0.9, 0.999), 1e-8

Weights = Mapping[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        made: torch.Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return made


class Policy(nn.Module):
    """Logits of the answer to two digits."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(DIGITS, width), nn.Embedding(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, DIGITS)
        self.bfloat16()

    def forward(self, prompts: torch.Tensor) -> torch.Tensor:
        x = self.embed(prompts) + self.place.weight
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x[:, -1]).float()
        return logits


class MasterAdamW:
    """AdamW with fp32 masters of bfloat16 weights."""

    def __init__(self, model: nn.Module) -> None:
        self._named = dict(model.named_parameters())
        self.state = {
            name: {
                "master": weight.detach().float(),
                "m": torch.zeros(weight.shape),
                "v": torch.zeros(weight.shape),
            }
            for name, weight in self._named.items()
        }
        self.steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.steps += 1
        for name, weight in self._named.items():
            assert weight.grad is not None
            its, grad = self.state[name], weight.grad.float()
            its["m"].lerp_(grad, 1 - BETAS[0])
            its["v"].mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
            m = its["m"] / (1 - BETAS[0] ** self.steps)
            v = its["v"] / (1 - BETAS[1] ** self.steps)
            its["master"].addcdiv_(m, v.sqrt_().add_(EPS), value=-rate)
            weight.copy_(its["master"])
            weight.grad = None


def drawn(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, and their right answers."""
    prompts = torch.randint(DIGITS, (count, 2))
    return prompts, prompts.sum(1) % DIGITS


def supervised_step(model: Policy, optimizer: MasterAdamW, rate: float) -> None:
    prompts, answers = drawn(256)
    functional.cross_entropy(model(prompts), answers).backward()
    optimizer.step(rate)


def grpo_step(model: Policy, optimizer: MasterAdamW, rate: float) -> float:
    """One step on a group of answers to each prompt; the mean reward."""
    prompts, right = drawn(PROMPTS)
    logged = functional.log_softmax(model(prompts), -1)
    answers = torch.multinomial(logged.detach().exp(), GROUP, replacement=True)
    rewards = (answers == right[:, None]).float()
    spread = rewards.std(1, keepdim=True) + 1e-4
    advantages = (rewards - rewards.mean(1, keepdim=True)) / spread
    loss = -(advantages * logged.gather(1, answers)).mean()
    loss.backward()
    optimizer.step(rate)
    return float(rewards.mean())


def bits_of(weights: Weights) -> str:
    hashed = hashlib.blake2b()
    for name in sorted(weights):
        hashed.update(name.encode())
        hashed.update(
            weights[name].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        )
    return hashed.hexdigest()


def follow(place: str, width: int, layers: int, to: Connection) -> None:
    """The sampler's process: tells the step, the bits and the mean reward of what it samples from,
    until it is killed."""
    torch.set_num_threads(1)
    model = Policy(width, layers)
    with (
        ckptstore.open(place, read_only=True) as store,
        store.follow(RUN, {"model": model}) as follower,
    ):
        follower.wait()
        follower.start()
        while True:
            with follower.frozen() as commit, torch.no_grad():
                prompts, right = drawn(256)
                reward = float((model(prompts).argmax(-1) == right).float().mean())
                to.send((commit.step, bits_of(model.state_dict()), reward))
            follower.wait(1)


def trl_bytes(old: Weights, new: Weights) -> tuple[int, int, int]:
    """Elements that changed, and the bytes that TRL sends of them: with int32 positions, and with
    uint16 gaps."""
    count = raw = gaps = 0
    for name, tensor in new.items():
        differ = tensor.view(torch.int16) != old[name].view(torch.int16)
        at = differ.flatten().nonzero().flatten()
        count += len(at)
        raw += len(at) * (4 + tensor.itemsize)
        wide = len(at) and int(at.diff(prepend=at.new_tensor([-1])).max()) > 1 << 16
        gaps += len(at) * ((4 if wide else 2) + tensor.itemsize)
    return count, raw, gaps


def zstd_bytes(old: bytes, new: bytes) -> int:
    """What zstd makes of a file beside the one before."""
    window = max(len(new), len(old)).bit_length() + 1
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=window, enable_ldm=True
    )
    base = zstandard.ZstdCompressionDict(old, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    return len(
        zstandard.ZstdCompressor(dict_data=base, compression_params=parameters).compress(new)
    )


def xdelta_bytes(old: Path, new: Path, out: Path) -> int:
    subprocess.run(["xdelta3", "-e", "-f", "-B", "268435456", "-s", old, new, out], check=True)
    return out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--supervised", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    asked = parser.parse_args()
    torch.manual_seed(0)
    shutil.rmtree(asked.folder, ignore_errors=True)
    asked.folder.mkdir(parents=True)
    model = Policy(asked.width, asked.layers)
    optimizer = MasterAdamW(model)
    for _ in range(asked.supervised):
        supervised_step(model, optimizer, 1e-3)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    given = (str(asked.folder / "weights"), asked.width, asked.layers, theirs)
    follower = context.Process(target=follow, args=given, daemon=True)
    measured = run(asked, model, optimizer, ours, follower.start)
    follower.kill()
    follower.join()
    tell(asked, model, measured)


def run(
    asked: argparse.Namespace,
    model: Policy,
    optimizer: MasterAdamW,
    seen: Connection,
    start: Callable[[], None],
) -> dict[str, list[float]]:
    """Train and commit; every state that the sampler saw must be that of its commit."""
    found: dict[str, list[float]] = {}
    bits: dict[int, str] = {}
    looks: list[Any] = []

    def note(**figures: float) -> None:
        for name, figure in figures.items():
            found.setdefault(name, []).append(figure)

    files = [asked.folder / f"{n}.safetensors" for n in range(2)]
    with (
        ckptstore.open(asked.folder / "weights", run=RUN) as weights,
        ckptstore.open(asked.folder / "all", run=RUN) as whole,
    ):
        for step in range(asked.steps + 1):
            old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            reward = grpo_step(model, optimizer, asked.rate) if step else 0.0
            new = model.state_dict()
            bits[step] = bits_of(new)
            save_file(dict(new), files[step % 2])
            policy = weights.commit({"model": model}, step=step)
            state = {"masters": optimizer.state, "steps": optimizer.steps}
            both = whole.commit({"model": model, "optimizer": state}, step=step)
            if not step:
                start()
                looks.append(seen.recv())
                continue
            while seen.poll():
                looks.append(seen.recv())
            count, raw, gaps = trl_bytes(old, new)
            before, after = files[1 - step % 2], files[step % 2]
            note(
                reward=reward,
                changed=count,
                weights=policy.new_bytes,
                all=both.new_bytes,
                all_bytes=both.logical_bytes,
                trl_raw=raw,
                trl_gaps=gaps,
                zstd=zstd_bytes(before.read_bytes(), after.read_bytes()),
            )
            if shutil.which("xdelta3"):
                note(xdelta3=xdelta_bytes(before, after, asked.folder / "delta"))
        while looks[-1][0] < asked.steps:
            looks.append(seen.recv())
    if torn := [step for step, saw, _ in looks if bits[step] != saw]:
        raise RuntimeError(f"the sampler saw states that are no commits, as of steps {torn}")
    found["looks"] = [float(len(looks))]
    found["steps_seen"] = [float(len({step for step, _, _ in looks}))]
    return found


def tell(asked: argparse.Namespace, model: Policy, found: dict[str, list[float]]) -> None:
    nbytes = sum(each.nbytes for each in model.state_dict().values())
    (asked.folder / "figures.json").write_text(json.dumps(found))
    median = {name: statistics.median(figures) for name, figures in found.items()}
    print(
        f"{nbytes / 1e6:.1f} MB of bf16, rate {asked.rate:g}, {asked.steps} steps; "
        f"{median['changed'] * 2 / nbytes:.2%} of the elements change a step; the sampler saw "
        f"{median['steps_seen']:.0f} commits, all bit-equal"
    )
    rows = {
        "ckptstore, weights": median["weights"],
        "TRL, int32 positions (reckoned)": median["trl_raw"],
        "TRL, uint16 gaps (reckoned)": median["trl_gaps"],
        "zstd, patch from the last file": median["zstd"],
    }
    if "xdelta3" in median:
        rows["xdelta3"] = median["xdelta3"]
    for name, stored in rows.items():
        print(f"{name:34} {stored / 1e3:9.1f} kB {stored / nbytes:8.4f} of the weights")
    share = median["all"] / median["all_bytes"]
    print(f"{'ckptstore, with masters and moments':34} {median['all'] / 1e3:9.1f} kB {share:8.4f}")


if __name__ == "__main__":
    main()
