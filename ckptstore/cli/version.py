"""`ckptstore --version`: what a bug report must say about this installation."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ckptstore
from ckptstore.plugin.model import FORMAT_VERSION

LIBRARIES = (
    *("torch", "numpy", "blake3", "xxhash", "zstandard"),
    *("lmdb", "rpds-py", "sqlalchemy", "alembic", "pydantic", "shtab"),
    *("fsspec", "s3fs", "aiobotocore", "obstore", "psycopg", "torchft"),
)
"""What ckptstore relies on. Nothing of it is imported for its version."""


def versions() -> dict[str, Any]:
    """Versions of ckptstore, the store format, Python, the platform and the libraries; null for a
    library that is not installed."""
    return {
        "ckptstore": ckptstore.__version__,
        "format": FORMAT_VERSION,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
