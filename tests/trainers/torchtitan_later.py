"""The contract that torchtitan's managers have on its main branch after 0.3.0, put in the place of
that of 0.3.0, and a training under it. A process of its own runs this: `python -m
tests.trainers.torchtitan_later FOLDER`."""

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torchtitan.components.checkpointer
from torchtitan.config import Configurable

KEPT = 4


class Manager(Configurable, ABC):  # type: ignore[misc]
    """`load` and `save` are concrete, nothing is disabled, and some steps are exempt from
    purging."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):  # type: ignore[misc]
        folder: str = "checkpoint"
        interval: int = 500
        initial_load_path: str | None = None
        initial_load_model_only: bool = True
        initial_load_in_hf: bool = False
        initial_load_in_hf_quantized: bool = False
        last_save_model_only: bool = True
        last_save_in_hf: bool = False
        export_dtype: str = "float32"
        keep_latest_k: int = 10
        purge_exempt: Any = None
        load_step: int = -1
        exclude_from_loading: list[str] = field(default_factory=list)
        enable_first_step_checkpoint: bool = False
        load_only: bool = False

        def __post_init__(self) -> None:
            if self.keep_latest_k == 1:
                raise ValueError("the last one may be in the process of being saved")

    def load(self, step: int = -1) -> bool:
        raise AssertionError("it would look for directories")

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        return self._save(curr_step, last_step)

    def maybe_wait_for_staging(self) -> None:
        self._maybe_wait_for_staging()

    def maybe_wait_for_saving(self) -> None:
        if getattr(self, "save_future", None) is not None:
            self._wait_for_saving()

    def close(self) -> None:
        try:
            self.maybe_wait_for_staging()
            self.maybe_wait_for_saving()
        finally:
            self._close()

    @abstractmethod
    def _save(self, curr_step: int, last_step: bool = False) -> bool: ...

    @abstractmethod
    def _wait_for_saving(self) -> None: ...

    @abstractmethod
    def _maybe_wait_for_staging(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...

    @abstractmethod
    def _load_checkpoint(
        self, states: Any, checkpoint_id: str, *, from_hf: bool, from_quantized: bool
    ) -> None: ...

    @abstractmethod
    def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool: ...

    @abstractmethod
    def _is_resumable_checkpoint(self, checkpoint_dir: str) -> bool: ...


class Exempt:
    """A function within a configuration."""

    def build(self) -> Any:
        return lambda step: step == KEPT


def main(folder: Path) -> None:
    torchtitan.components.checkpointer.BaseCheckpointManager = Manager
    from tests.trainers.torchtitan_parts import Training

    training = Training(folder, keep_latest_k=1, purge_exempt=Exempt())
    assert not training.manager.load()
    training.train(10)
    training.manager.save(11, last_step=True)
    training.close()
    again = Training(folder)
    assert again.manager.load()
    assert again.progress.step == 10
    directory = folder / "checkpoint"
    for step, resumable in ((10, True), (11, False)):
        assert again.manager._is_valid_checkpoint(str(directory / f"step-{step}"))
        assert again.manager._is_resumable_checkpoint(str(directory / f"step-{step}")) is resumable
    assert not again.manager._is_valid_checkpoint(str(directory))
    again.close()
    print(*sorted(path.name for path in directory.glob("step-*")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
