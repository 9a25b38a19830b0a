"""`RNGState` under the name of TorchSnapshot's module."""

from ckptstore.interop.torchsnapshot.stateful import RNGState

__all__ = ["RNGState"]
