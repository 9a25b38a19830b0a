"""Where do the weights of an ONNX model lie: in its file, or in others beside it?

A model is a message of protocol buffers: of its fields only the heads are read, and no weight.
"""

from collections.abc import Iterator, Mapping

from ckptstore.plugins.foreign.sources import Entry, Window
from ckptstore.plugins.parsers.pickle_ops import TooLarge

_FIELDS_MAX = 1 << 21
_TEXT_MAX = 1 << 16
_VARINT, _BYTES = 0, 2
_WIDTHS = {_VARINT: 0, 1: 8, 5: 4}
"""The bytes of a field behind its head, by its kind."""
_GRAPH, _INITIALIZER, _STRING_KEY, _STRING_VALUE = 7, 5, 1, 2
_DIMS, _DTYPE, _NAME, _RAW, _EXTERNAL = 1, 2, 8, 9, 13
_DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    24: "float8_e8m0fnu",
}


class _Message:
    """The fields of the messages in a file, of which a bounded number is read."""

    def __init__(self, file: Window) -> None:
        self._reader, self._left = file.reader(), _FIELDS_MAX

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int | None, int, int]]:
        """The fields of the message at `start:stop`: number, value if it is one, and where its
        bytes begin and end. Raises `ValueError` unless they fill the message."""
        while start < stop:
            self._left -= 1
            if self._left < 0:
                raise TooLarge(f"it has more than {_FIELDS_MAX:,} fields")
            self._reader.seek(start)
            key = self._varint()
            value = self._varint() if key & 7 == _VARINT else None
            nbytes = self._varint() if key & 7 == _BYTES else _WIDTHS[key & 7]
            begin = self._reader.tell()
            start = begin + nbytes
            if start > stop:
                raise ValueError("a field ends behind its message")
            yield key >> 3, value, begin, start

    def text(self, start: int, stop: int) -> str:
        if stop - start > _TEXT_MAX:
            raise ValueError("a text is too long")
        self._reader.seek(start)
        return self._reader.read(stop - start).decode()

    def varints(self, start: int, stop: int) -> list[int]:
        """Packed numbers."""
        found = []
        self._reader.seek(start)
        while self._reader.tell() < stop:
            found.append(self._varint())
        return found

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._reader.read(1)
            if not byte:
                break
            value |= (byte[0] & 127) << shift
            if byte[0] < 128:
                return value
        raise ValueError("a number does not end")


def onnx_entries(file: Window, name: str = "") -> dict[str, list[Entry]]:
    """The weights of a model, by the name of the file that has them, relative to the model; those
    in the model itself are by `name`. Raises anything for a file of another format."""
    message, found = _Message(file), dict[str, list[Entry]]()
    for number, _, start, stop in message.fields(0, file.size):
        if number != _GRAPH:
            continue
        for inner, _, begin, end in message.fields(start, stop):
            if inner == _INITIALIZER and (weight := _weight(message, begin, end)):
                place, entry = weight
                found.setdefault(name if place is None else place, []).append(entry)
    return found


def onnx_external(model: Window, files: Mapping[str, Window]) -> dict[str, list[Entry]]:
    """The weights in files beside a model, by file; each place once."""
    found = {}
    for name, entries in onnx_entries(model).items():
        if name in files:
            found[name] = list({entry.start: entry for entry in entries}.values())
    return found


def _weight(message: _Message, start: int, stop: int) -> tuple[str | None, Entry] | None:
    """A weight, and the file that has it, if that is another one."""
    shape, raw, dtype, name = list[int](), None, 0, ""
    place: dict[str, str] = {}
    for number, value, begin, end in message.fields(start, stop):
        if number == _DIMS and value is not None:
            shape.append(value)
        elif number == _DIMS:
            shape += message.varints(begin, min(end, begin + _TEXT_MAX))
        elif number == _DTYPE:
            dtype = value or 0
        elif number == _NAME:
            name = message.text(begin, end)
        elif number == _RAW:
            raw = begin, end
        elif number == _EXTERNAL:
            pair = {n: message.text(b, e) for n, _, b, e in message.fields(begin, end)}
            place[pair[_STRING_KEY]] = pair[_STRING_VALUE]
    if dtype not in _DTYPES:
        return None
    if "location" in place and "length" in place:
        first = int(place.get("offset", "0"))
        raw = first, first + int(place["length"])
    if raw is None or raw[0] == raw[1]:
        return None
    return place.get("location"), Entry(name, _DTYPES[dtype], tuple(shape), *raw)
