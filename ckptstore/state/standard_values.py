"""How are small values of the standard library and torch stored: dates, paths, dtypes?"""

import datetime as dt
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import torch

from ckptstore.errors import InvalidInput
from ckptstore.objects.canonical import bits_float, float_bits
from ckptstore.state import tensors
from ckptstore.state.values import (
    add_codec,
    decimal_digits,
    decode_digits,
    decode_value,
    encode_value,
)


def _encode_timezone(zone: dt.tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        # the one way to its name as given
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [_span(offset), *name]
    if type(zone) is ZoneInfo and zone.key:
        return zone.key
    raise InvalidInput(
        f"the time zone {zone!r} cannot be stored; use datetime.timezone, or zoneinfo.ZoneInfo "
        "with a key"
    )


def _decode_timezone(encoded: Any) -> dt.tzinfo | None:
    if encoded is None:
        return None
    if isinstance(encoded, str):
        return ZoneInfo(encoded)
    offset, *name = encoded
    return dt.timezone(_timedelta(offset), *name)


def _span(delta: dt.timedelta) -> list[int]:
    return [delta.days, delta.seconds, delta.microseconds]


def _timedelta(span: list[int]) -> dt.timedelta:
    days, seconds, microseconds = span
    return dt.timedelta(days, seconds, microseconds)


def _complex(real: float, imag: float) -> complex:
    return complex(real, imag)


def _encode_clock(value: dt.datetime | dt.time) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _encode_timezone(value.tzinfo)]


def _decode_clock(
    cls: type[dt.datetime] | type[dt.time], payload: list[Any]
) -> dt.datetime | dt.time:
    text, fold, zone = payload
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=_decode_timezone(zone))


def _encode_slice(value: slice) -> list[Any] | None:
    bounds = [value.start, value.stop, value.step]
    return (
        [encode_value(bound) for bound in bounds]
        if all(bound is None or type(bound) is int for bound in bounds)
        else None
    )


def _add_numbers() -> None:
    add_codec(
        complex,
        "complex",
        lambda x: [float_bits(x.real), float_bits(x.imag)],
        lambda p, _: _complex(*map(bits_float, p)),
    )
    add_codec(Decimal, "Decimal", lambda x: [str(x)], lambda p, _: Decimal(p[0]))
    add_codec(
        Fraction,
        "Fraction",
        lambda x: [*map(decimal_digits, x.as_integer_ratio())],
        lambda p, _: Fraction(*map(decode_digits, p)),
    )
    add_codec(
        range,
        "range",
        lambda x: [*map(decimal_digits, (x.start, x.stop, x.step))],
        lambda p, _: range(*map(decode_digits, p)),
    )
    add_codec(
        slice,
        "slice",
        _encode_slice,
        lambda p, classes: slice(*(decode_value(bound, classes) for bound in p)),
    )
    add_codec(type(...), "Ellipsis", lambda x: [], lambda p, _: ...)
    add_codec(UUID, "UUID", lambda x: [x.hex], lambda p, _: UUID(hex=p[0]))


def _add_times() -> None:
    add_codec(dt.timedelta, "timedelta", _span, lambda p, _: _timedelta(p))
    add_codec(dt.date, "date", lambda x: [x.isoformat()], lambda p, _: dt.date.fromisoformat(p[0]))
    add_codec(
        dt.timezone,
        "timezone",
        lambda x: [_encode_timezone(x)],
        lambda p, _: _decode_timezone(p[0]),
    )
    add_codec(
        ZoneInfo, "ZoneInfo", lambda x: [_encode_timezone(x)], lambda p, _: _decode_timezone(p[0])
    )
    add_codec(dt.time, "time", _encode_clock, lambda p, _: _decode_clock(dt.time, p))
    add_codec(dt.datetime, "datetime", _encode_clock, lambda p, _: _decode_clock(dt.datetime, p))


def _add_paths() -> None:
    for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath):
        add_codec(cls, cls.__name__, _encode_path, lambda p, _, cls=cls: _path(cls, p[0]))  # type: ignore[misc]


def _encode_path(value: PurePath) -> list[Any] | None:
    """None where Python reads the text as another path: before 3.12, that of a Windows server
    without a share."""
    return [encode_value(str(value))] if type(value)(str(value)) == value else None


def _path(cls: type[PurePath], text: str) -> PurePath:
    # A PosixPath of a checkpoint opened on Windows becomes that system's own kind of path, since it
    # could not be made.
    return Path(text) if issubclass(cls, Path) else cls(text)


_add_numbers()
_add_times()
_add_paths()


_LAYOUTS = {
    str(layout): layout for layout in vars(torch).values() if isinstance(layout, torch.layout)
}
_FORMATS = {
    str(form): form for form in vars(torch).values() if isinstance(form, torch.memory_format)
}
_QSCHEMES = {
    str(scheme): scheme for scheme in vars(torch).values() if isinstance(scheme, torch.qscheme)
}


def _named(known: dict[str, Any], name: str) -> Any:
    if name not in known:
        raise InvalidInput(
            f"this torch ({torch.__version__}) has no {name[:60]!r}; read with the torch that "
            "wrote it or a newer one"
        )
    return known[name]


add_codec(
    torch.dtype,
    "torch.dtype",
    lambda x: [tensors.DTYPE_NAMES[x]],
    lambda p, _: tensors.dtype_of(p[0]),
)
add_codec(torch.device, "torch.device", lambda x: [str(x)], lambda p, _: torch.device(p[0]))
add_codec(torch.layout, "torch.layout", lambda x: [str(x)], lambda p, _: _named(_LAYOUTS, p[0]))
add_codec(
    torch.memory_format,
    "torch.memory_format",
    lambda x: [str(x)],
    lambda p, _: _named(_FORMATS, p[0]),
)
add_codec(torch.qscheme, "torch.qscheme", lambda x: [str(x)], lambda p, _: _named(_QSCHEMES, p[0]))
add_codec(torch.Size, "torch.Size", lambda x: list(x), lambda p, _: torch.Size(p))
