"""How is a pickle read without trust in it? Its names become records; nothing is imported."""

import pickle
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput
from ckptstore.plugin.model import WIDTHS

METADATA_BYTES_MAX = 1 << 30


def load_inert(path: Path) -> Any:
    """DCP's metadata as records without behavior. Raises `InvalidInput` for a file with names that
    DCP does not write.
    """
    try:
        if path.stat().st_size > METADATA_BYTES_MAX:
            raise InvalidInput(f"{path} has more than {METADATA_BYTES_MAX} bytes")
        with path.open("rb") as file:
            return _Inert(file).load()
    except InvalidInput:
        raise
    except Exception as error:  # a forged pickle may raise anything
        raise InvalidInput(f"{path} cannot be read: {error!r:.200}") from error


class Record:
    """An object of DCP's metadata, as plain attributes. `columns` is the state of an object without
    attribute names.
    """

    columns: tuple[Any, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.columns = tuple(state)


def _ignored(*parts: object) -> str:
    return "/".join(map(str, parts))


_DCP = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    ("torch.serialization", "_get_layout"): _ignored,
    (_DCP, "_MEM_FORMAT_ENCODING"): _ignored,
    **{
        (module, name): type(name, (Record,), {})
        for module, name in (
            (_DCP, "Metadata"),
            (_DCP, "TensorStorageMetadata"),
            (_DCP, "BytesStorageMetadata"),
            (_DCP, "ChunkStorageMetadata"),
            (_DCP, "TensorProperties"),
            (_DCP, "MetadataIndex"),
            (_DCP, "StorageMeta"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        )
    },
}
"""What stands for the names in DCP's metadata."""


class _Inert(pickle.Unpickler):
    """Builds inert records: no name in a pickle reaches the classes of torch."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in WIDTHS:
            return name
        if module in ("pathlib", "pathlib._local"):  # the latter by Python 3.13
            return _ignored
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        raise InvalidInput(
            f"it names {module}.{name}, which DCP's metadata does not; importing it could run code"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise InvalidInput("it refers to objects outside of itself, which DCP's metadata does not")
