"""A stateful dictionary, for tensors and values outside of modules and optimizers."""

from collections import UserDict
from typing import Any


class StateDict(UserDict[str, Any]):
    """A stateful dictionary.

    A restore sets the keys that the snapshot has and leaves others alone, as in TorchSnapshot. (A
    restored `ckptstore.StateDict` equals what was committed.)
    """

    def state_dict(self) -> dict[str, Any]:
        return self.data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data.update(state_dict)
