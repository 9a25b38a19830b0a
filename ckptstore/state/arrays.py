"""How are numpy's arrays, scalars, dtypes and generators split and joined?"""

from typing import Any

import numpy as np
import torch

from ckptstore.errors import Corrupt, InvalidInput
from ckptstore.state.containers import (
    Joint,
    SplitObject,
    add_container,
    add_filled,
    add_node_type,
)
from ckptstore.state.values import add_codec, decode_value, encode_value

_BIT_GENERATORS: dict[str, type[np.random.BitGenerator]] = {
    name: getattr(np.random, name) for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
}
_SEEDS = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
_SEEDLESS = np.random.bit_generator.SeedlessSequence  # type: ignore[attr-defined]  # of old seeds
_LARGEST_POOL = 1024
"""Words of a seed sequence's pool; numpy's default is 4."""
_TENSOR_KINDS = "biufc"


def _encode_dtype(dtype: np.dtype[Any]) -> Any:
    if dtype.hasobject:
        raise InvalidInput(
            f"numpy dtype {dtype} holds Python objects; convert it to a plain dtype, or pass "
            "allow_pickle=True"
        )
    try:
        description = np.lib.format.dtype_to_descr(dtype)
        is_whole = np.lib.format.descr_to_dtype(description) == dtype
    except ValueError:
        is_whole = False
    if not is_whole:
        raise InvalidInput(
            f"numpy dtype {dtype} has no description that numpy reads as the same; store the bytes "
            "(array.view(np.uint8)), or pass allow_pickle=True"
        )
    return encode_value(description)


def _dtype(description: Any) -> np.dtype[Any]:
    dtype = np.dtype(np.lib.format.descr_to_dtype(description))
    if dtype.hasobject:
        raise Corrupt(
            f"numpy dtype {dtype} holds Python objects, which are never stored; run `ckptstore "
            "fsck`"
        )
    return dtype


def _decode_scalar(description: Any, digits: str) -> Any:
    memory = bytearray.fromhex(digits) or bytearray(1)
    return np.ndarray((), _dtype(decode_value(description)), memory)[()]


def _split_array(array: np.ndarray[Any, Any]) -> SplitObject:
    attrs = (("dtype", _encode_dtype(array.dtype)),)
    if (
        array.dtype.kind in _TENSOR_KINDS
        and array.dtype.isnative
        and array.dtype != np.longdouble
        and array.dtype != np.clongdouble
    ):
        # torch shares an array's memory only if it may be written, runs forward, and steps by whole
        # elements, as a field of records may not; any other is copied.
        shareable = array.flags.writeable and all(
            stride >= 0 and stride % array.itemsize == 0 for stride in array.strides
        )
        return SplitObject(
            "numpy.ndarray", [torch.from_numpy(array if shareable else array.copy())], attrs=attrs
        )
    shape = (("shape", encode_value(array.shape)),)
    return SplitObject("numpy.ndarray", [array.tobytes()], attrs=attrs + shape)


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


def _split_numpy_generator(generator: np.random.Generator) -> SplitObject:
    name = type(generator.bit_generator).__name__
    if name not in _BIT_GENERATORS:
        raise InvalidInput(
            f"a numpy Generator on {name} cannot be stored; use one of {', '.join(_BIT_GENERATORS)}"
        )
    state = {**generator.bit_generator.state, "seed_sequence": _split_seeds(generator)}
    return SplitObject("numpy.Generator", [state], attrs=(("bit_generator", name),))


def _split_seeds(generator: np.random.Generator) -> dict[str, Any] | None:
    """The sequence from which children are spawned, by the arguments that make it again."""
    seeds = generator.bit_generator.seed_seq
    if type(seeds) is np.random.SeedSequence and seeds.pool_size <= _LARGEST_POOL:
        return {name: getattr(seeds, name) for name in _SEEDS}
    if seeds is None or type(seeds) is _SEEDLESS:
        return None  # it can spawn none
    raise InvalidInput(
        f"a numpy Generator with the seeds {seeds!r:.80} cannot be stored; use a "
        f"numpy.random.SeedSequence with a pool of at most {_LARGEST_POOL} words"
    )


def _make_generator(joint: Joint) -> np.random.Generator:
    return np.random.Generator(_BIT_GENERATORS[joint.attrs["bit_generator"]]())


def _fill_generator(target: np.random.Generator, joint: Joint) -> None:
    state = dict(joint.children[0])
    # Without it in commits of earlier versions; the target's sequence stays.
    seeds = state.pop("seed_sequence", target.bit_generator.seed_seq)
    if seeds is None:
        seeds = _SEEDLESS()
    elif isinstance(seeds, dict):
        if seeds["pool_size"] > _LARGEST_POOL:  # before that memory is asked for
            raise ValueError(f"a pool of {seeds['pool_size']} words")
        seeds = np.random.SeedSequence(**seeds)
    # The one way to give a generator that is there a sequence of seeds.
    target.bit_generator.__setstate__((state, seeds))  # type: ignore[attr-defined]  # it has one


def _add_numpy() -> None:
    for cls in {*np.sctypeDict.values()} - {np.object_}:
        add_codec(
            cls,
            "numpy.scalar",
            lambda x: [_encode_dtype(x.dtype), x.tobytes().hex()],
            _decode_scalar,
        )
    for dtype_class in {type(np.dtype(cls)) for cls in np.sctypeDict.values()}:
        add_codec(
            dtype_class,
            "numpy.dtype",
            lambda x: [_encode_dtype(x)],
            lambda description: _dtype(decode_value(description)),
        )
    add_container(np.ndarray, _split_array)
    add_node_type("numpy.ndarray", "wrapper", _join_array)
    add_filled(
        np.random.Generator,
        _split_numpy_generator,
        "numpy.Generator",
        "wrapper",
        _make_generator,
        _fill_generator,
        lambda target, joint: type(target.bit_generator).__name__ == joint.attrs["bit_generator"],
    )
    add_filled(
        np.random.RandomState,
        lambda x: SplitObject("numpy.RandomState", [x.get_state(legacy=False)]),
        "numpy.RandomState",
        "wrapper",
        lambda joint: np.random.RandomState(),
        lambda target, joint: target.set_state(joint.children[0]),
    )


_add_numpy()
