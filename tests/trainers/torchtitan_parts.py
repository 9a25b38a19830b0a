"""A small training on the CPU, of torchtitan's own optimizers, schedulers and data loader. Its
Trainer needs a GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

import ckptstore
from ckptstore.interop.torchtitan import StoreCheckpointManager
from tests.trainers.trainings import digest

VOCABULARY = 128
SEQUENCE = 16


class Words(IterableDataset):  # type: ignore[type-arg]
    """Sequences without end, other ones for each rank."""

    def __init__(self, rank: int) -> None:
        self._rank, self._at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._at += 1
            generator = torch.Generator().manual_seed(self._at * 1_000 + self._rank)
            yield torch.randint(VOCABULARY, (SEQUENCE + 1,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Progress:
    """What torchtitan's Trainer has of a state."""

    def __init__(self) -> None:
        self.step = self.ntokens_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class Transformer(nn.Module):
    """Small, with dropout: a resumed training must draw the same. (torchtitan's own models need
    triton.)"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found = self.embedding(words)
        for layer in self.layers:
            found = layer(found)
        return self.head(found)  # type: ignore[no-any-return]


class Training:
    """A training under torchtitan's manager of checkpoints, or another `manager`."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module | None = None,
        *,
        manager: Any = StoreCheckpointManager,
        rank: int = 0,
        ranks: int = 1,
        workers: int = 0,
        adapter: Any = None,
        **options: Any,
    ) -> None:
        self.model = model if model is not None else nn.Linear(SEQUENCE, VOCABULARY)
        self.optimizers = default_adamw(lr=1e-2, fused=False).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=40
        )
        self.loader = ParallelAwareDataloader(
            Words(rank),
            rank,
            ranks,
            num_workers=workers,
            generator=torch.Generator(),  # or each start of an iterator moves torch's own on
        )
        self.progress = Progress()
        self.loss = torch.zeros(())
        if "enable" in manager.Config.__dataclass_fields__:  # as long as torchtitan has it
            options["enable"] = True
        config = manager.Config(folder="checkpoint", **{"interval": 2} | options)
        self.manager = config.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.progress},
            sd_adapter=adapter,
            base_folder=str(folder),
        )

    def train(self, steps: int, *, save: bool = True) -> None:
        """Go on to step `steps`, and save where it is due."""
        words = iter(self.loader)
        while self.progress.step < steps:
            self.progress.step += 1
            batch = next(words)
            self.progress.ntokens_seen += batch.numel()
            self.optimizers.zero_grad()
            self.loss = self.forward(batch)
            self.loss.backward()
            self.manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            if save:
                self.manager.save(self.progress.step)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        inputs, wanted = batch[:, :-1], batch[:, 1:]
        if isinstance(self.model, nn.Linear):
            return self.model(inputs / VOCABULARY).square().mean()  # type: ignore[no-any-return]
        logits = self.model(inputs)
        return nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    def digest(self) -> str:
        return digest(
            {name: local(value) for name, value in self.model.state_dict().items()},
            {name: local(value) for name, value in self.optimizers.state_dict().items()},
            self.schedulers.state_dict(),
            self.progress.state_dict(),
            self.loss,
            torch.get_rng_state(),
        )

    def close(self) -> None:
        self.manager.close()


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def packs(folder: Path) -> set[Path]:
    found = (folder / "checkpoint" / "store" / "packs").rglob("*")
    return {path for path in found if path.is_file()}


def damage_newest(folder: Path) -> None:
    """Flip a bit in every pack of the newest commit."""
    with ckptstore.open(folder / "checkpoint" / "store", read_only=True) as store:
        session = store.log(limit=1)[0].session
    for pack in packs(folder):
        if pack.name.startswith(session):
            data = bytearray(pack.read_bytes())
            data[len(data) // 3] ^= 16
            pack.write_bytes(data)


def directories(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("step-*"))
