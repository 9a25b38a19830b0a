"""What some release of torch lacks that tests need."""

import pytest
import torch

OLD_TORCH = torch.torch_version.TorchVersion(torch.__version__) < (2, 7)
"""Whether this is the oldest supported torch. Its DCP is more limited, and it divides tensors that
are cut in strides evenly or not at all."""

FSDP2 = pytest.mark.skipif(OLD_TORCH, reason="FSDP2 of torch 2.6 takes no step on the CPU")
FLOAT4 = pytest.mark.skipif(
    not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no floats of four bits"
)
