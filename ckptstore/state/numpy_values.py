"""How are numpy values stored? Arrays are tensor leaves if torch has the dtype, else bytes."""

from typing import Any

import numpy as np
import torch

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state.containers import Joint, Parts, add_container, add_node_type
from ckptstore.state.values import add_codec, decode_value, encode_value

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    cls.__name__: cls
    for cls in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}
_TENSOR_KINDS = "biufc"


def _encode_dtype(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise InvalidInput(
            f"numpy dtype {dtype} holds Python objects; convert it to a plain dtype, or pass "
            "allow_pickle=True"
        )
    return encode_value(np.lib.format.dtype_to_descr(dtype))


def _dtype(description: Any) -> np.dtype[Any]:
    dtype = np.dtype(np.lib.format.descr_to_dtype(description))
    if dtype.hasobject:
        raise Corrupt(
            f"numpy dtype {dtype} holds Python objects, which are never stored; run `ckptstore "
            "fsck`"
        )
    return dtype


def _decode_scalar(payload: list[Any]) -> Any:
    encoded, digits = payload
    return np.ndarray((), _dtype(decode_value(encoded)), bytearray.fromhex(digits) or bytearray(1))[
        ()
    ]


def _split_array(array: np.ndarray[Any, Any]) -> Parts:
    attrs = (("dtype", _encode_dtype(array.dtype)),)
    if (
        array.dtype.kind in _TENSOR_KINDS
        and array.dtype.isnative
        and array.dtype != np.longdouble
        and array.dtype != np.clongdouble
    ):
        # torch shares an array's memory only if it may be written and runs forward; any other is
        # copied.
        shareable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
        return Parts(
            "numpy.ndarray", [torch.from_numpy(array if shareable else array.copy())], attrs=attrs
        )
    shape = (("shape", encode_value(array.shape)),)
    return Parts("numpy.ndarray", [array.tobytes()], attrs=attrs + shape)


def _join_array(joint: Joint) -> np.ndarray[Any, Any]:
    (child,) = joint.children
    dtype = _dtype(joint.attrs["dtype"])
    if isinstance(child, torch.Tensor):
        array: np.ndarray[Any, Any] = child.numpy()
        if array.dtype != dtype:
            raise Corrupt(
                f"an array of {dtype} is stored as a tensor of {array.dtype}; run `ckptstore fsck`"
            )
        return array
    # Copied, since an array over bytes could not be written to.
    return np.ndarray(joint.attrs["shape"], dtype, bytearray(child) or bytearray(1))


def _split_generator(generator: np.random.Generator) -> Parts:
    name = type(generator.bit_generator).__name__
    if name not in _BIT_GENERATORS:
        raise InvalidInput(
            f"a numpy Generator on {name} cannot be stored; use one of {', '.join(_BIT_GENERATORS)}"
        )
    return Parts(
        "numpy.Generator", [generator.bit_generator.state], attrs=(("bit_generator", name),)
    )


def _join_generator(joint: Joint) -> np.random.Generator:
    bits = _BIT_GENERATORS[joint.attrs["bit_generator"]]()
    bits.state = joint.children[0]
    return np.random.Generator(bits)


def _refill_generator(target: Any, joint: Joint) -> bool:
    if (
        type(target) is not np.random.Generator
        or type(target.bit_generator).__name__ != joint.attrs["bit_generator"]
    ):
        return False
    target.bit_generator.state = joint.children[0]
    return True


def _refill_random_state(target: Any, joint: Joint) -> bool:
    if type(target) is not np.random.RandomState:
        return False
    target.set_state(joint.children[0])
    return True


def _join_random_state(joint: Joint) -> np.random.RandomState:
    made = np.random.RandomState()
    made.set_state(joint.children[0])
    return made


def _add_all() -> None:
    for cls in {*np.sctypeDict.values()} - {np.object_}:
        add_codec(
            cls,
            "numpy.scalar",
            lambda x: [_encode_dtype(x.dtype), x.tobytes().hex()],
            lambda p, _: _decode_scalar(p),
        )
    for dtype_class in {type(np.dtype(cls)) for cls in np.sctypeDict.values()}:
        add_codec(
            dtype_class,
            "numpy.dtype",
            lambda x: [_encode_dtype(x)],
            lambda p, _: _dtype(decode_value(p[0])),
        )
    add_container(np.ndarray, _split_array)
    add_node_type("numpy.ndarray", "wrapper", _join_array)
    add_container(np.random.Generator, _split_generator)
    add_node_type("numpy.Generator", "wrapper", _join_generator, _refill_generator)
    add_container(
        np.random.RandomState, lambda x: Parts("numpy.RandomState", [x.get_state(legacy=False)])
    )
    add_node_type("numpy.RandomState", "wrapper", _join_random_state, _refill_random_state)


_add_all()
