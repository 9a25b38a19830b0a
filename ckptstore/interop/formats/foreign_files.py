"""How is a file of torch.save read without trust in it? Tensors and plain values are read, and
anything else only if allowed.
"""

import io
import pickle
import zipfile
import zlib
from pathlib import Path
from typing import Any

from ckptstore.errors import InvalidInput, Unavailable


def load_torch(file: Path | io.BytesIO, name: str, *, allow_pickle: bool) -> Any:
    """The content of a file of torch.save, called `name` in errors.

    Tensors stay in the file until they are read. Exceptions are files of torch before 1.6 and
    compressed archives: their entries are read and compared with their checksums. Raises
    `InvalidInput` for objects that need their code to run, unless `allow_pickle`, and for a damaged
    or foreign file; `Unavailable` for one that may not be read.
    """
    try:
        return _load(
            file,
            mapped=isinstance(file, Path) and _may_be_mapped(file),
            weights_only=not allow_pickle,
        )
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise InvalidInput(f"{name} is not a file of torch.save: {error}") from error
        raise InvalidInput(
            f"{name} holds more than tensors and plain values, and reading it would run its code "
            f"({_first_line(error)}); "
            f"if you trust it, import it with --allow-pickle (allow_pickle=True)"
        ) from error
    except PermissionError as error:
        raise Unavailable(
            f"cannot read {name}: {error}; see that it may be read, then repeat"
        ) from error
    except (ImportError, AttributeError) as error:  # a pickled class, which is imported by name
        raise InvalidInput(
            f"{name} holds objects of a class that cannot be imported here ({_first_line(error)}); "
            "install its package or put its folder on PYTHONPATH, or save tensors and plain values "
            "where it can be imported: torch.save(model.state_dict(), …)"
        ) from error
    except Exception as error:  # a pickle may raise anything
        raise InvalidInput(
            f"{name} is not a file of torch.save, or is damaged: {_first_line(error)}"
        ) from error


def _load(file: Path | io.BytesIO, *, mapped: bool, weights_only: bool) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=weights_only, mmap=mapped)
    except RuntimeError as error:
        if mapped and "mmap can only be used with files saved with" in str(error):
            return _load(file, mapped=False, weights_only=weights_only)
        raise


def _may_be_mapped(file: Path) -> bool:
    """Whether every entry is stored uncompressed: torch maps entries without checking their
    compression.
    """
    if not zipfile.is_zipfile(file):
        return True  # torch raises its own error
    try:
        with zipfile.ZipFile(file) as archive:
            stored = all(each.compress_type == zipfile.ZIP_STORED for each in archive.infolist())
            damaged = None if stored else archive.testzip()
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"its archive cannot be read: {error}") from error
    if damaged is not None:
        raise ValueError(f"its entry {damaged[:80]!r} does not match its checksum")
    return stored


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]
