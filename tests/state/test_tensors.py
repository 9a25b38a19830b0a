"""Every dtype of this torch, in every memory layout, byte for byte."""

import mmap
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckptstore.errors import InvalidInput
from ckptstore.state import tensors
from ckptstore.state.tensors import TensorSource
from tests.state.carrying import assert_same, carry, staged_bytes, tensor_bytes

STORED = sorted(name for name, dtype in tensors.DTYPES.items() if dtype not in tensors.QUANTIZED)
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
SHAPE = (5, 6, 7)

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "sliced": lambda t: t[1:4, ::2, 3:],
    "expanded": lambda t: t[:1].expand(3, 6, 7),
    "zero-dim": lambda t: t[2, 3, 4],
    "empty": lambda t: t[2:2],
    "offset": lambda t: t[3],
    "one element": lambda t: t[:1, :1, :1],
}


def filled(name: str, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    tensor = tensors.empty(name, shape)
    tensors.memory_of(tensor)[:] = random.randbytes(tensor.nbytes)
    return tensor


def reference(tensor: torch.Tensor, base: torch.Tensor) -> bytes:
    """The bytes of a view of the contiguous `base`, by way of an integer dtype that torch copies
    itself."""
    integers = tensors.as_dtype(base, INTEGERS[base.itemsize], tuple(base.shape))
    view = integers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).contiguous()
    return bytes(tensors.memory_of(view))


def test_every_dtype_of_this_torch_is_known_by_its_name() -> None:
    there = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert set(tensors.DTYPES.values()) == there
    assert {str(dtype) for dtype in there} == {f"torch.{name}" for name in tensors.DTYPES}


def test_every_dtype_is_either_stored_as_it_is_or_quantized() -> None:
    for name, dtype in tensors.DTYPES.items():
        quantized = "qint" in name or "quint" in name
        assert (dtype in tensors.QUANTIZED) == quantized
        assert (name in STORED) != quantized


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_view_of_any_dtype_comes_back(layout: str) -> None:
    for name in STORED:
        base = filled(name)
        view = LAYOUTS[layout](base)
        wanted = reference(view, base)
        carried = carry({"t": view})
        assert carried.content == [wanted], name
        assert (carried.schema.dtypes, carried.schema.shapes) == ((name,), (tuple(view.shape),))
        assert_same(carried.inflate()["t"], view)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_byte_range_can_be_staged(layout: str) -> None:
    for name in STORED:
        base = filled(name)
        view = LAYOUTS[layout](base)
        wanted = reference(view, base)
        source = TensorSource(view)
        for _ in range(8):
            start, stop = sorted(random.randint(0, len(wanted)) for _ in range(2))
            out = bytearray(stop - start)
            source.stage(start, stop, memoryview(out))
            assert out == wanted[start:stop], name


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced", "zero-dim", "empty"])
def test_a_tensor_is_restored_where_it_stands(layout: str) -> None:
    for name in STORED:
        source, target = LAYOUTS[layout](filled(name)), LAYOUTS[layout](filled(name))
        state = {"t": target}
        address = target.data_ptr()
        assert carry({"t": source}).restore(state) is state
        assert state["t"] is target, name
        assert target.data_ptr() == address, name
        assert tensor_bytes(target) == tensor_bytes(source), name


@pytest.mark.parametrize("name", STORED)
def test_memory_is_shared_where_a_tensor_is_contiguous(name: str) -> None:
    tensor = filled(name)
    source = TensorSource(tensor)
    memory = source.memory()
    assert memory is not None
    assert (memory.format, memory.ndim, memory.nbytes, source.width) == (
        "B",
        1,
        tensor.nbytes,
        tensor.itemsize,
    )
    memory[0] ^= 0xFF
    assert bytes(memory) == staged_bytes(source)


def test_a_memory_view_keeps_its_tensor_alive() -> None:
    memory = tensors.memory_of(torch.full((1 << 16,), 7, dtype=torch.uint8))
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]
    assert bytes(memory) == b"\7" * (1 << 16)
    del others


CONJUGATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda t: t.conj(),
    "transposed conjugate": lambda t: t.mH,
    "negative imaginary part": lambda t: t.conj().imag,
    "negative": lambda t: torch._neg_view(t),
    "negative conjugate": lambda t: torch._neg_view(t.conj()),
}


@pytest.mark.parametrize("view", CONJUGATES)
@pytest.mark.parametrize("name", ["complex64", "complex128"])
def test_conjugate_and_negative_views_are_stored_by_value(name: str, view: str) -> None:
    # The sign of a NaN or a zero that torch negates differs between its vectorised and its scalar
    # loops: other numbers only.
    numbers = torch.view_as_complex(
        torch.nan_to_num(torch.view_as_real(filled(name, (4, 6))), nan=1.0)
    )
    lazy = CONJUGATES[view](numbers)
    resolved = lazy.resolve_conj().resolve_neg().contiguous()
    assert tensor_bytes(lazy) == bytes(tensors.memory_of(resolved))
    assert_same(carry([lazy]).inflate()[0], resolved)


def test_a_conjugate_view_takes_a_restored_value() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    state = {"t": base.conj()}
    view = state["t"]
    carry({"t": torch.tensor([1 + 2j, 3 - 4j, 5j])}).restore(state)
    assert state["t"] is view
    assert base.tolist() == [1 - 2j, 3 + 4j, -5j]


def test_a_conjugate_view_is_no_alias_of_its_base() -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    real = torch.view_as_real(base)
    carried = carry([base, base.conj(), real[:, 1], base.conj().imag])
    assert carried.schema.aliases == (-1, -1, -1, -1)
    got = carried.inflate()
    assert got[1].tolist() == [1 - 2j, 3 + 4j]
    assert got[3].tolist() == [-2.0, 4.0]


def test_a_tensor_over_a_map_reads_it_and_keeps_it_open(tmp_path: Any) -> None:
    wanted = torch.arange(4096, dtype=torch.int32)
    (tmp_path / "f").write_bytes(bytes(tensors.memory_of(wanted)))
    with (tmp_path / "f").open("rb") as file:
        tensor = tensors.tensor_from(
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), "int32", (64, 64)
        )
    tensor += 1
    assert torch.equal(tensor, wanted.reshape(64, 64) + 1)


def test_a_tensor_over_read_only_bytes_is_a_copy() -> None:
    data = bytes(8)
    tensor = tensors.tensor_from(data, "uint8", (8,))
    tensor += 1
    assert data == bytes(8)


def test_a_buffer_of_another_size_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"7 bytes for a tensor int32\[2\]; wanted 8"):
        tensors.tensor_from(bytes(7), "int32", (2,))


def test_a_dtype_that_this_torch_lacks_is_named() -> None:
    with pytest.raises(InvalidInput, match="float3_e1m1"):
        tensors.empty("float3_e1m1", (1,))


def test_no_dtype_makes_torch_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in STORED:
            carry({"t": filled(name)}).inflate()


def test_a_conversion_leaves_the_filters_of_warnings_to_other_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are the whole process's: of two threads that change them, one puts back the other's."""
    monkeypatch.setattr(warnings, "catch_warnings", None)
    monkeypatch.setattr(warnings, "filterwarnings", None)
    values = torch.tensor([1.0, -2.5, 0.0, 3e38])
    read_only = memoryview(values.numpy().tobytes())
    found = torch.empty(4, dtype=torch.bfloat16)
    to = tensors.Destination(found, torch.float32)
    to.write(0, read_only[:8])
    to.write(8, read_only[8:])
    assert torch.equal(found, values.bfloat16())
    assert to.losses and not to.losses.said(whole=True)
