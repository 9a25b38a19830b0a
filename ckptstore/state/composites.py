"""Which tensors are more than one block of memory, and how are they split?

`split_tensor` divides parameters, sparse, quantized, nested and jagged tensors and subclasses into
strided tensors that share their memory. It refuses tensors without memory of their own.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ckptstore.core.model import Box
from ckptstore.errors import InvalidInput
from ckptstore.state import tensors, values
from ckptstore.state.containers import (
    Joint,
    SplitObject,
    add_filled,
    add_node_type,
    attribute,
    attributes_of,
)
from ckptstore.state.shards import (
    check_finished,
    held_of,
    is_distributed,
    is_dtensor,
    is_sharded_tensor,
    without_attributes,
)
from ckptstore.state.stateful import class_name, class_named

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def split_tensor(tensor: torch.Tensor) -> SplitObject | torch.Tensor:
    """What `tensor` is made of; a strided tensor that stands for it as it is; or `InvalidInput`
    saying why it cannot be stored."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):  # in which some tensors cannot be detached
            return split_tensor(tensor)
    if not is_sharded_tensor(tensor):  # which cannot be asked
        _refuse_without_memory(tensor)
    if is_distributed(tensor):
        return split_distributed(tensor, _whole_local) or _whole_local(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        return _split_parameter(tensor)
    attributes = _attributes_of(tensor)
    if tensor.requires_grad or (attributes and type(tensor) is torch.Tensor):
        is_marked = tensor.requires_grad and tensor.is_leaf
        marks = (("requires_grad", is_marked), *attributes)
        plain = tensor.detach()
        return (
            SplitObject("torch.Tensor", [plain], attrs=marks) if is_marked or attributes else plain
        )
    if tensor.is_nested:
        return _split_jagged(tensor) if tensor.layout == torch.jagged else _split_nested(tensor)
    if type(tensor) is not torch.Tensor:
        return _split_subclass(tensor)
    if tensor.layout == torch.sparse_coo:
        return _split_coo(tensor)
    if tensor.layout in _COMPRESSED:
        return _split_compressed(tensor)
    if tensor.is_quantized:
        return _split_quantized(tensor)
    return tensor.detach() if vars(tensor) else tensor  # without torch's own marks


MARK = re.compile("_is_param|.*_dynamo_.*|_specialize_on|_(sym_)?(sizes|strides)_capsule(_len)?")
"""Attributes that torch itself writes on tensors, for the code that runs now."""


def split_distributed(tensor: Any, bare: Callable[[Any], torch.Tensor]) -> SplitObject | None:
    """A distributed tensor with attributes: these, around what `bare` makes of it, which has none.
    None if it has no attributes."""
    attributes = _attributes_of(tensor)
    if not attributes:
        return None
    is_marked = not is_sharded_tensor(tensor) and tensor.requires_grad and tensor.is_leaf
    marks = (("requires_grad", is_marked), *attributes)
    return SplitObject("torch.Tensor", [bare(tensor)], attrs=marks)


def _attributes_of(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """What a tensor holds beside its data, and beside what its class gives a tensor that is made of
    the same data again."""
    held = vars(tensor)
    if all(MARK.fullmatch(str(name)) for name in held) or _is_refused(tensor):
        return ()
    again = _made_again(tensor)
    notes = set(filter(MARK.fullmatch, map(str, held)))  # to make it again has added some
    given = () if again is None else (n for n in vars(again) if _is_given(n, held, vars(again)))
    return attributes_of(tensor, notes.union(given))


def _is_refused(tensor: torch.Tensor) -> bool:
    """Whether the tensor wraps others, and does not say which."""
    wraps = not is_distributed(tensor) and tensors.wraps_others(tensor)
    return wraps and not hasattr(tensor, "__tensor_flatten__")


def _made_again(tensor: Any) -> torch.Tensor | None:
    """A tensor of the same class over the same memory, as a restore makes it; None of a class that
    gives a tensor no attributes."""
    if is_dtensor(tensor):
        return None
    if is_distributed(tensor):
        bare: torch.Tensor = without_attributes(tensor)
        return bare
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    made: torch.Tensor = type(tensor).__tensor_unflatten__(
        inner, context, tensor.size(), tensor.stride()
    )
    return made


def _is_given(name: str, held: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether the class of a tensor gave it the attribute that it holds. What is no plain value
    cannot be compared, and counts as given."""
    if name not in held:
        return False
    encoded = values.encode_attribute(held[name])
    return encoded is values.NOT_A_VALUE or encoded == values.encode_attribute(given[name])


def _refuse_without_memory(tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise InvalidInput(
            "an uninitialized parameter has no values yet; run the module once on an input, then "
            "commit"
        )
    if tensor.is_meta:
        raise InvalidInput(
            "a meta tensor has no memory for values; materialize it first "
            "(module.to_empty(device=…))"
        )
    if tensor.is_mkldnn:
        raise InvalidInput("an mkldnn tensor's memory is opaque; store tensor.to_dense()")
    if tensor.is_quantized:
        tensors.checked_address(
            tensor
        )  # before its integers are looked at: torch would give them new memory
    if type(tensor).__name__ == "MaskedTensor":
        raise InvalidInput("a masked tensor cannot be stored; store get_data() and get_mask()")


def _whole_local(tensor: Any) -> torch.Tensor:
    """The local part of a distributed tensor where that is all of it."""
    if not is_dtensor(tensor):
        return _whole_shard(tensor)
    check_finished(tensor.placements)
    local: torch.Tensor = tensor.to_local().detach()
    if local.shape != tensor.shape:
        raise InvalidInput(
            f"this rank holds {list(local.shape)} of a DTensor of shape {list(tensor.shape)}; "
            "commit tensor.full_tensor()"
        )
    return local


def _whole_shard(tensor: Any) -> torch.Tensor:
    """The one shard of a ShardedTensor or a CheckpointableTensor where that is all of it."""
    held = held_of(tensor)
    if 0 in held.shape:
        return tensors.new(held.shape, held.dtype)
    if held.holding.boxes != (Box.whole(held.shape),):
        kind = "ShardedTensor" if is_sharded_tensor(tensor) else "CheckpointableTensor"
        raise InvalidInput(
            f"this rank holds {len(held.parts)} shards of a {kind} of shape {list(held.shape)}; "
            "commit it with all ranks, or its shards under keys of their own"
        )
    return held.parts[0][1]


def _record(type_: str, children: Mapping[str, Any], attrs: Mapping[str, Any]) -> SplitObject:
    encoded = tuple((name, attribute(value, name)) for name, value in attrs.items())
    return SplitObject(type_, list(children.values()), list(children), encoded)


def _split_parameter(parameter: torch.nn.Parameter) -> SplitObject:
    attrs: tuple[tuple[str, Any], ...] = (("requires_grad", parameter.requires_grad),)
    if type(parameter) is not torch.nn.Parameter and torch.nn.Parameter in type(parameter).__mro__:
        attrs = (("class", class_name(type(parameter))), *attrs)
    attrs += _attributes_of(parameter)
    return SplitObject("torch.Parameter", [parameter.detach()], attrs=attrs)


def _join_parameter(joint: Joint) -> torch.nn.Parameter:
    data, requires_grad = joint.children[0], joint.attrs["requires_grad"]
    if "class" not in joint.attrs:
        return torch.nn.Parameter(data, requires_grad)
    cls: Any = class_named(joint.attrs["class"], joint.classes)
    made: torch.nn.Parameter = torch.Tensor._make_subclass(
        cls, data, requires_grad
    )  # runs none of the class's own code
    return made


def _split_coo(tensor: torch.Tensor) -> SplitObject:
    return _record(
        "torch.sparse_coo",
        {"indices": tensor._indices(), "values": tensor._values()},
        {"coalesced": tensor.is_coalesced(), "shape": list(tensor.shape)},
    )


def _join_coo(joint: Joint) -> torch.Tensor:
    indices, values = joint.children
    with _quiet():
        return torch.sparse_coo_tensor(
            indices,
            values,
            joint.attrs["shape"],
            dtype=values.dtype,
            device=values.device,
            is_coalesced=joint.attrs["coalesced"],
            check_invariants=True,
        )


def _split_compressed(tensor: torch.Tensor) -> SplitObject:
    indices = {name: getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]}
    children = {**indices, "values": tensor.values()}
    return _record(str(tensor.layout), children, {"shape": list(tensor.shape)})


def _join_compressed(joint: Joint, layout: torch.layout) -> torch.Tensor:
    with _quiet():
        compressed, plain, values = joint.children
        return torch.sparse_compressed_tensor(
            compressed,
            plain,
            values,
            joint.attrs["shape"],
            dtype=values.dtype,
            layout=layout,
            device=values.device,
            check_invariants=True,
        )


def _split_quantized(tensor: torch.Tensor) -> SplitObject:
    children = {"integers": tensors.quantized_integers(tensor)}
    attrs = {"dtype": tensor.dtype, "shape": list(tensor.shape)}
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        attrs |= {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    else:
        children["scales"] = tensor.q_per_channel_scales()
        children["zero_points"] = tensor.q_per_channel_zero_points()
        attrs["axis"] = tensor.q_per_channel_axis()
    return _record("torch.quantized", children, attrs)


def _join_quantized(joint: Joint) -> torch.Tensor:
    integers, *channels = joint.children
    dtype, shape = joint.attrs["dtype"], joint.attrs["shape"]
    if integers.nbytes != tensors.quantized_nbytes(dtype, shape):
        raise ValueError(f"{integers.nbytes} bytes of integers for a shape of {shape}")
    made: torch.Tensor
    with _quiet():
        if channels:
            scales, zero_points = channels
            made = torch._empty_per_channel_affine_quantized(
                shape,
                scales=scales,
                zero_points=zero_points,
                axis=joint.attrs["axis"],
                dtype=dtype,
                device=scales.device,
            )
        else:
            made = torch._empty_affine_quantized(
                shape,
                scale=joint.attrs["scale"],
                zero_point=joint.attrs["zero_point"],
                dtype=dtype,
                device=integers.device,
            )
    # Copied: torch makes no quantized tensor over memory that is there.
    tensors.quantized_integers(made).copy_(integers)
    return made


def _split_nested(tensor: Any) -> SplitObject:
    children = {
        "buffer": tensor.values(),
        "sizes": tensor._nested_tensor_size(),
        "strides": tensor._nested_tensor_strides(),
        "offsets": tensor._nested_tensor_storage_offsets(),
    }
    if not children["offsets"].numel():  # of no tensors: there is nothing that could be tied
        children = {name: part.clone() for name, part in children.items()}
    return _record("torch.nested", children, {})


def nested_of(
    buffer: torch.Tensor, sizes: torch.Tensor, strides: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The nested tensor of these parts. Raises `ValueError` for what is none."""
    if not offsets.numel() and not sizes.dim():  # torch makes no view of that
        with _quiet():
            return torch.nested.nested_tensor([], dtype=buffer.dtype, device=buffer.device)
    # torch does not look whether what it is told lies within the buffer.
    last = offsets + ((sizes - 1) * strides).sum(-1) if sizes.numel() else offsets
    if (
        buffer.dim() != 1
        or sizes.shape != strides.shape
        or any((each < 0).any() for each in (sizes, strides, offsets))
    ):
        raise ValueError("sizes, strides or offsets that are none")
    if ((last >= buffer.numel()) & (sizes > 0).all(-1)).any():
        raise ValueError(f"parts beyond the {buffer.numel()} elements that there are")
    with _quiet():
        return torch._nested_view_from_buffer(buffer, sizes, strides, offsets)


def _split_jagged(tensor: Any) -> SplitObject:
    children = {"values": tensor.values(), "offsets": tensor.offsets()}
    if tensor.lengths() is not None:
        children["lengths"] = tensor.lengths()
    attrs = {
        "jagged_dim": tensor._ragged_idx,
        "max_seqlen": tensor._maybe_max_seqlen,
        "min_seqlen": tensor._maybe_min_seqlen,
    }
    parts = _record("torch.jagged", children, attrs)
    return parts._replace(attrs=(*parts.attrs, *_attributes_of(tensor)))


def _join_jagged(joint: Joint) -> torch.Tensor:
    parts = dict(joint.items())
    return jagged_of(parts["values"], parts["offsets"], parts.get("lengths"), **joint.attrs)


def jagged_of(
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor | None,
    *,
    jagged_dim: int,
    **cached: int | None,
) -> torch.Tensor:
    """The jagged tensor of these parts. Raises `ValueError` for what is none."""
    if (offsets.diff() < 0).any() or offsets[0] < 0 or offsets[-1] > values.shape[jagged_dim - 1]:
        raise ValueError("offsets that are not within the values")
    with _quiet():
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, lengths, jagged_dim=jagged_dim, **cached
        )


def _split_subclass(tensor: Any) -> SplitObject:
    cls = type(tensor)
    if not hasattr(tensor, "__tensor_flatten__"):
        return _split_thin_subclass(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = _record(
        "torch.subclass",
        {name: getattr(tensor, name) for name in names},
        {"class": class_name(cls), "shape": list(tensor.shape), "stride": list(tensor.stride())},
    )
    encoded = attribute(context, f"the context of {class_name(cls)}.__tensor_flatten__")
    return parts._replace(attrs=(*parts.attrs, ("context", encoded), *_attributes_of(tensor)))


def _join_subclass(joint: Joint) -> Any:
    cls: Any = class_named(joint.attrs["class"], joint.classes)
    shape, stride = torch.Size(joint.attrs["shape"]), tuple(joint.attrs["stride"])
    return cls.__tensor_unflatten__(dict(joint.items()), joint.attrs["context"], shape, stride)


def _split_thin_subclass(tensor: Any) -> SplitObject:
    """A subclass that adds methods to a tensor and no data."""
    cls = type(tensor)
    if _is_refused(tensor):
        raise InvalidInput(
            f"{class_name(cls)} wraps other tensors and has no __tensor_flatten__; call "
            f"ckptstore.register_value(…, {cls.__name__}, encode, decode), or store its inner "
            "tensors"
        )
    plain = tensor.as_subclass(torch.Tensor)
    attrs = (("class", class_name(cls)), *_attributes_of(tensor))
    return SplitObject("torch.thin_subclass", [plain], attrs=attrs)


def _join_thin_subclass(joint: Joint) -> Any:
    return joint.children[0].as_subclass(class_named(joint.attrs["class"], joint.classes))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks that quantized, compressed and nested tensors are in beta or
    deprecated, and outside of inference mode, in which tensors from outside cannot be joined."""
    with warnings.catch_warnings(), torch.inference_mode(mode=False):
        warnings.simplefilter("ignore", UserWarning)
        yield


def _split_generator(generator: torch.Generator) -> SplitObject:
    device = attribute(generator.device, "device")
    return SplitObject("torch.Generator", [generator.get_state()], attrs=(("device", device),))


def _add_tensors() -> None:
    add_node_type("torch.Parameter", "wrapper", _join_parameter)
    add_node_type(
        "torch.Tensor",
        "wrapper",
        lambda joint: joint.children[0].detach().requires_grad_(joint.attrs["requires_grad"]),
    )
    add_node_type("torch.sparse_coo", "record", _join_coo)
    for layout in _COMPRESSED:
        add_node_type(str(layout), "record", partial(_join_compressed, layout=layout))
    add_node_type("torch.quantized", "record", _join_quantized, copies=True)
    add_node_type("torch.nested", "record", lambda joint: nested_of(*joint.children))
    add_node_type("torch.jagged", "record", _join_jagged)
    add_node_type("torch.subclass", "record", _join_subclass)
    add_node_type("torch.thin_subclass", "wrapper", _join_thin_subclass)
    add_filled(
        torch.Generator,
        _split_generator,
        "torch.Generator",
        "wrapper",
        lambda joint: torch.Generator(joint.attrs["device"]),
        lambda target, joint: target.set_state(joint.children[0]),
        lambda target, joint: target.device == joint.attrs["device"],
    )


_add_tensors()
