"""A state carried as a store carries it: flattened, schema and leaves as bytes, and back, without
storage."""

from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from ckptstore.core.model import Schema
from ckptstore.objects.schema import decode_schema, encode_schema
from ckptstore.state import tensors
from ckptstore.state.flatten import flatten
from ckptstore.state.inflate import inflate
from ckptstore.state.leaf_sources import Source
from ckptstore.state.match_target import Matching
from ckptstore.state.optimizers import ParameterNames
from ckptstore.state.restore import Binding, bind


@dataclass(frozen=True)
class Carried:
    """A committed tree: nothing in it shares memory with what was flattened."""

    schema: Schema
    content: list[bytes]

    def bytes_of(self, leaf: int) -> bytes:
        alias = self.schema.aliases[leaf]
        return self.content[leaf if alias < 0 else alias]

    def inflate(self, **options: Any) -> Any:
        values: list[Any] = []
        for i, kind in enumerate(self.schema.kinds):
            data = self.bytes_of(i)
            values.append(
                tensors.tensor_from(
                    memoryview(bytearray(data)), self.schema.dtypes[i], self.schema.shapes[i]
                )
                if kind == "tensor"
                else data
            )
        return inflate(self.schema, values, **options)

    def bind(self, target: Any, **options: Any) -> Binding:
        return bind(target, "s", self.schema, Matching(ParameterNames({"s": target}), **options))

    def restore(self, target: Any, **options: Any) -> Any:
        binding = self.bind(target, **options)
        assert not binding.mismatched
        assert not binding.missing or options.get("strict") is False
        assert not binding.unexpected or options.get("strict") is False
        return self.finish(binding)

    def finish(self, binding: Binding) -> Any:
        for i, landing in enumerate(binding.destinations):
            for _, destination in landing:
                land(destination, self.bytes_of(i))
        binding.receive({i: self.bytes_of(i) for i in binding.wanted_bytes})
        return binding.finish()


def carry(state: Any, **options: Any) -> Carried:
    """`state` under the key `s`, its schema through its bytes as well."""
    flat = flatten({"s": state}, **options)["s"]
    schema = decode_schema(encode_schema(flat.schema))
    assert schema == flat.schema
    return Carried(schema, [raw_bytes(source) for source in flat.leaves])


def raw_bytes(source: Source) -> bytes:
    """All bytes of a source, from its memory where it has some."""
    memory = source.view(0, source.nbytes)
    return staged_bytes(source) if memory is None else bytes(memory)


def staged_bytes(source: Source) -> bytes:
    buffer = bytearray(source.nbytes)
    source.stage(0, source.nbytes, memoryview(buffer))
    return bytes(buffer)


def land(destination: Any, data: bytes) -> None:
    """In two parts, the second first: destinations take any order."""
    assert len(data) == destination.nbytes
    memory = destination.memory()
    if memory is not None:
        memory[:] = data
        return
    width = destination.tensor.itemsize
    middle = len(data) // width // 2 * width
    destination.write(middle, memoryview(data)[middle:])
    destination.write(0, memoryview(data)[:middle])


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes of any strided tensor: what equality of tensors means here, NaN included."""
    buffer = bytearray(tensor.nbytes)
    tensors.read_range(tensor, 0, tensor.nbytes, memoryview(buffer))
    return bytes(buffer)


def assert_same(got: Any, wanted: Any) -> None:
    """Equal bit for bit and type for type, all the way down, in the same order."""
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape, got.requires_grad) == (
            wanted.dtype,
            wanted.shape,
            wanted.requires_grad,
        )
        assert tensor_bytes(got) == tensor_bytes(wanted)
    elif isinstance(wanted, dict):
        assert len(got) == len(wanted)
        for (key, value), (wanted_key, wanted_value) in zip(
            got.items(), wanted.items(), strict=True
        ):
            assert_same(key, wanted_key)
            assert_same(value, wanted_value)
        assert getattr(got, "default_factory", None) == getattr(wanted, "default_factory", None)
    elif hasattr(wanted, "__iter__") and not isinstance(
        wanted, str | bytes | bytearray | set | frozenset | Enum
    ):
        assert getattr(got, "maxlen", None) == getattr(wanted, "maxlen", None)
        assert len(list(got)) == len(list(wanted))
        for item, wanted_item in zip(got, wanted, strict=True):
            assert_same(item, wanted_item)
    elif is_dataclass(wanted):
        assert_same(
            [getattr(got, each.name) for each in fields(wanted)],
            [getattr(wanted, each.name) for each in fields(wanted)],
        )
    elif isinstance(wanted, set | frozenset):
        assert sorted(map(repr, got)) == sorted(map(repr, wanted))
    else:
        assert repr(got) == repr(wanted)
        assert got == wanted or wanted != wanted
