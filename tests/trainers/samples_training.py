"""One epoch of a shuffled data set, interrupted after a batch and resumed in a new process, by each
trainer that hands out batches (`trainings`).

The folder has a file `how` that says by which, and after which batch the first process saves. It
tells each sample as it comes, then `saved`, and waits to be killed. The second one tells the rest
of the epoch.
"""

import json
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from transformers import Trainer, TrainerCallback, TrainingArguments

import ckptstore
from ckptstore.interop.accelerate import attach as attach_to_accelerator
from ckptstore.interop.lightning import StoreCheckpointIO
from ckptstore.interop.torchtitan import StoreCheckpointManager
from ckptstore.interop.transformers import attach as attach_to_trainer
from tests.trainers.torchtitan_parts import Progress
from tests.trainers.trainings import Tell

if find_spec("deepspeed"):
    import tests.trainers.deepspeed_parts  # noqa: F401  # readies DeepSpeed, before ranks begin

SAMPLES, BATCH = 48, 4
BATCHES = SAMPLES // BATCH


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([float(at)])


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        if at >= SAMPLES:
            raise IndexError(at)
        return {"input_ids": torch.tensor([float(at)]), "labels": torch.tensor([float(at)])}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Rows()[at] for at in range(SAMPLES))


class Shuffled(IterableDataset[torch.Tensor]):
    """A data set that shuffles, and knows its place."""

    def __init__(self) -> None:
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3)).tolist()
        while self._at < SAMPLES:
            self._at += 1
            yield torch.tensor([float(order[self._at - 1])])

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, Any]:
        found = self.layer(input_ids / SAMPLES)
        wanted = input_ids if labels is None else labels
        return {"loss": (found - wanted).square().mean() / SAMPLES, "logits": found}


class Epoch:
    """What becomes of the samples of one process: they are told, and after batch `at` of the first
    process `save` is called, and no other batch comes."""

    def __init__(self, folder: Path, tell: Tell, at: int, warned: "Warned") -> None:
        self.folder, self.at, self.resumes = folder, at, (folder / "resumes").exists()
        self._tell, self._taken, self._warned = tell, 0, warned

    def took(self, samples: torch.Tensor, save: Callable[[], object] = lambda: None) -> None:
        for each in samples.flatten().tolist():
            self._tell("sample", int(each))
        self._taken += 1
        if not self.resumes and self._taken == self.at:
            save()
            self.saved()

    def saved(self) -> None:
        self._tell("warned", int(self._warned.has_warned))
        self._tell("saved", self.at)
        signal.pause()


class Warned(logging.Handler):
    """Whether ckptstore has warned that samples come twice."""

    has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_warned |= "come twice" in record.getMessage()


def torchdata(epoch: Epoch, workers: int = 0, shuffle: bool = False) -> None:
    order = {"shuffle": True} if shuffle else {"sampler": RandomSampler(Numbers())}
    loader: Any = StatefulDataLoader(
        Numbers(),
        BATCH,
        num_workers=workers,
        generator=torch.Generator(),
        **order,
        **_forked(workers),
    )
    with ckptstore.open(epoch.folder / "store") as store:
        if epoch.resumes:
            store.resume({"loader": loader})
        for batch in loader:
            epoch.took(batch, partial(store.commit, {"loader": loader}, step=epoch.at))


def accelerate(epoch: Epoch, stateful: bool, seedable: bool = True) -> None:
    accelerator = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            project_dir=str(epoch.folder), automatic_checkpoint_naming=True
        ),
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=stateful, use_seedable_sampler=seedable
        ),
    )
    loader = accelerator.prepare(
        DataLoader(Numbers(), BATCH, shuffle=True, generator=torch.Generator())
    )
    with closing(attach_to_accelerator(accelerator, epoch.folder / "store")) as attached:
        if epoch.resumes:
            assert attached.resume()
            if not stateful:
                loader = accelerator.skip_first_batches(loader, epoch.at)

        def save() -> None:
            accelerator.save_state()
            attached.wait()

        for batch in loader:
            epoch.took(batch, save)


def lightning(epoch: Epoch, stateful: bool) -> None:
    path = str(epoch.folder / "c.ckpt")

    class Learns(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, number: int) -> Any:
            self.batch = batch
            return self.net(batch)["loss"]

        def on_train_batch_end(self, *_: Any) -> None:
            epoch.took(self.batch, partial(self.trainer.save_checkpoint, path))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[StoreCheckpointIO(epoch.folder / "store")],
    )
    loader = (StatefulDataLoader if stateful else DataLoader)(Numbers(), BATCH, shuffle=True)
    trainer.fit(Learns(), loader, ckpt_path=path if epoch.resumes else None)


def fabric(epoch: Epoch) -> None:
    path = epoch.folder / "c.ckpt"
    fabric = Fabric(accelerator="cpu", plugins=[StoreCheckpointIO(epoch.folder / "store")])
    own: Any = StatefulDataLoader(Numbers(), BATCH, shuffle=True)
    loader: Any = fabric.setup_dataloaders(own)
    if epoch.resumes:
        fabric.load(path, {"loader": own})
    for batch in loader:
        epoch.took(batch, partial(fabric.save, path, {"loader": own}))


def transformers(epoch: Epoch, streams: bool = False, epochs: int = 1, **options: Any) -> None:
    class Sees(Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
            epoch.took(inputs["input_ids"])
            return super().training_step(model, inputs, *args, **more)

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            if not epoch.resumes:
                attached.wait()
                epoch.saved()

    trainer = Sees(
        model=Net(),
        args=TrainingArguments(
            output_dir=str(epoch.folder / "out"),
            max_steps=epochs * BATCHES,
            save_strategy="steps",
            save_steps=epoch.at,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **options,
        ),
        train_dataset=Stream() if streams else Rows(),
        callbacks=[Stops()],
    )
    epoch.at = 0  # its own steps say when it saves
    with attach_to_trainer(trainer, epoch.folder / "store") as attached:
        trainer.train(resume_from_checkpoint=epoch.resumes)


def deepspeed(epoch: Epoch, skips: bool) -> None:
    import deepspeed

    from ckptstore.interop.deepspeed import StoreCheckpointEngine

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    net = Net()
    engine, _, loader, _ = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters()),
        training_data=Numbers(),
        config={"train_micro_batch_size_per_gpu": BATCH, "steps_per_print": 1_000_000},
    )
    loader.num_local_io_workers = 0
    with ckptstore.open(epoch.folder / "store") as store:
        StoreCheckpointEngine.install(engine, store, wait=True)
        out, skipped = str(epoch.folder / "out"), 0
        if epoch.resumes:
            _, client = engine.load_checkpoint(out)
            skipped = client["batches"] if skips else 0
        for number, batch in enumerate(islice(loader, skipped, None), skipped + 1):
            engine.backward(engine(batch)["loss"])
            engine.step()
            state = {"batches": number}
            epoch.took(batch, partial(engine.save_checkpoint, out, client_state=state))


def torchtitan(epoch: Epoch) -> None:
    parts, progress = [Net()], Progress()
    loader = ParallelAwareDataloader(Shuffled(), 0, 1, batch_size=BATCH)
    optimizers = default_adamw(lr=1e-2, fused=False).build(model_parts=parts)
    enabled = "enable" in StoreCheckpointManager.Config.__dataclass_fields__
    config = StoreCheckpointManager.Config(
        folder="checkpoint",
        interval=1,
        last_save_model_only=False,
        **({"enable": True} if enabled else {}),
    )
    manager = config.build(
        dataloader=loader,
        model_parts=parts,
        optimizers=optimizers,
        lr_schedulers=LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=optimizers, training_steps=BATCHES
        ),
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(epoch.folder),
    )

    def save() -> None:
        manager.save(epoch.at, last_step=True)
        manager.close()

    manager.load()
    for batch in loader:
        epoch.took(batch, save)
    manager.close()


def _forked(workers: int) -> dict[str, Any]:
    """Workers that end with a process that was killed: those of a fork server do not."""
    return {"multiprocessing_context": "fork"} if workers else {}


WAYS: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (torchdata, accelerate, lightning, fabric, transformers, deepspeed, torchtitan)
}


def train(folder: Path, tell: Tell) -> Any:
    torch.set_num_threads(1)
    warned = Warned(logging.WARNING)
    logging.getLogger("ckptstore").addHandler(warned)
    how = json.loads((folder / "how").read_text())
    WAYS[how["by"]](Epoch(folder, tell, how["at"], warned), **how["options"])
    return None
