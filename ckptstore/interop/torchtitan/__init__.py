"""How does torchtitan keep its checkpoints in a store? By one line of its configuration
(docs/torchtitan.md).

    checkpoint=StoreCheckpointManager.Config(enable=True, interval=100)
"""

from dataclasses import dataclass
from typing import Any

from ckptstore.interop.torchtitan.contract import METHODS
from ckptstore.interop.torchtitan.manager import NoCheckpoint, StoreManager, is_model_only
from ckptstore.plugin.pointers import is_pointer, read_pointer

__all__ = ["NoCheckpoint", "StoreCheckpointManager"]

if "_load_checkpoint" in METHODS:

    class StoreCheckpointManager(StoreManager):
        """torchtitan's checkpoints as commits, for torchtitan after 0.3.0 (docs/torchtitan.md)."""

        @dataclass(kw_only=True, slots=True)
        class Config(StoreManager.Config):
            """As torchtitan's own, with `store`, `run` and `keep_best`; `keep_latest_k=1` is
            allowed."""

        def load(self, step: int = -1) -> bool:
            """Restore `step`, or the newest commit that is intact, when -1."""
            return self._load(step)

        def _load_checkpoint(
            self,
            states: dict[str, Any],
            checkpoint_id: str,
            *,
            from_hf: bool,
            from_quantized: bool,
        ) -> None:
            raise NotImplementedError("load restores commits, and calls none of this")

        def _is_valid_checkpoint(self, checkpoint_dir: str) -> bool:
            return is_pointer(checkpoint_dir)

        def _is_resumable_checkpoint(self, checkpoint_dir: str) -> bool:
            if not is_pointer(checkpoint_dir):
                return False
            return not is_model_only(self.store.checkout(read_pointer(checkpoint_dir).id))

else:

    class StoreCheckpointManager(StoreManager):  # type: ignore[no-redef]
        """torchtitan's checkpoints as commits, for torchtitan 0.3.0 (docs/torchtitan.md)."""

        @dataclass(kw_only=True, slots=True)
        class Config(StoreManager.Config):
            """As torchtitan's own, with `store`, `run` and `keep_best`; `keep_latest_k=1` is
            allowed."""
