"""`StateDict` under the name of TorchSnapshot's module."""

from ckptstore.interop.torchsnapshot.stateful import StateDict

__all__ = ["StateDict"]
