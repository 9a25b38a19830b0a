"""How does Megatron-Core save into a store? By a save strategy whose saves are commits
(docs/megatron.md).

Megatron turns its sharded tensors into DCP's terms and hands them to a writer of files. Here DCP's
own `save` takes them, within `redirect`. Megatron reads a checkpoint through DCP's reader, also
before it asks any strategy, so a load needs `redirect` around it and no strategy.
"""

import os
import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ckptstore import Store
from ckptstore.errors import InvalidInput
from ckptstore.interop.dcp import redirect
from ckptstore.interop.oldest import check_version

try:
    import megatron.core
    from megatron.core.dist_checkpointing.strategies.torch import (
        MCoreSavePlanner,
        TorchDistSaveShardedStrategy,
        _replace_state_dict_keys_with_sharded_keys,
        mcore_to_pyt_state_dict,
    )
except ImportError as error:
    raise ImportError(
        'StoreSaveStrategy needs Megatron-Core: pip install "ckptstore[megatron]", on Python 3.12 '
        f"or newer ({error})"
    ) from error

__all__ = ["StoreSaveStrategy"]

_ITERATION = re.compile(r"iter_(\d+)")

OLDEST = (0, 19)
"""The oldest Megatron-Core that this has been tested with; older ones have other strategies."""


# Megatron-Core has no types for mypy
class StoreSaveStrategy(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """A save strategy of `megatron.core.dist_checkpointing` whose saves are commits.

    The directory gets a pointer file, and Megatron's `metadata.json`.

    Args:
        store: An open store, or the place of one. A directory `iter_0000100` gives the step.
        allow_pickle: Pickle objects that have no safe encoding.
        options: Of Megatron's own strategy.

    Raises:
        InvalidInput: The version of Megatron-Core is not supported.

    Example:
        >>> strategy = StoreSaveStrategy(ckptstore.open("checkpoints"))
        >>> dist_checkpointing.save(sharded_state_dict, "out/iter_0000100", strategy)
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        check_version("Megatron-Core", megatron.core.__version__, OLDEST, "megatron-core")
        super().__init__(**options)
        self.store, self._allow_pickle = store, allow_pickle

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Commit, and name the commit by `checkpoint_dir`. All ranks call this."""
        state, *_ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        planner = MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            flatten_sharded_tensors=False,
        )
        iteration = _ITERATION.fullmatch(Path(checkpoint_dir).name)
        step = int(iteration[1]) if iteration else None
        with redirect(self.store, step=step, allow_pickle=self._allow_pickle):
            dcp_save(
                mcore_to_pyt_state_dict(state, False),
                checkpoint_id=checkpoint_dir,
                planner=planner,
            )

    def async_save(self, *_: Any, **__: Any) -> Any:
        """Refused: Megatron would save in a process of its own.

        Raises:
            InvalidInput: Always.
        """
        raise InvalidInput(
            "StoreSaveStrategy saves synchronously: leave out async_sharded_save (--async-save)"
        )
