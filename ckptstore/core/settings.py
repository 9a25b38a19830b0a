"""One process's choices about a store, validated where they come in: arguments of `open` and environment variables.

`$CKPTSTORE_RUN` and `$CKPTSTORE_THREADS` set what the caller leaves open. Imports pydantic: for training code, not for queries.
"""

import os
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ckptstore.core.config import CHUNK_BYTES, check_chunk_bytes, default_threads
from ckptstore.core.ids import check_run
from ckptstore.errors import InvalidInput

DEFAULT_RUN = "main"


class Settings(BaseModel):
    """What `ckptstore.open` takes. `chunk_bytes` and `codec` apply only to a store that is made by this call."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, AfterValidator(check_run)] = DEFAULT_RUN
    create: bool = True
    read_only: bool = False
    chunk_bytes: Annotated[int, AfterValidator(check_chunk_bytes)] = CHUNK_BYTES
    codec: Literal["raw", "zstd"] = "raw"
    threads: Annotated[int, Field(ge=1, le=64, default_factory=default_threads)]
    storage_options: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Settings from arguments, those that are None left out, then the environment, then defaults. Raises `InvalidInput`."""
        named = {"run": os.environ.get("CKPTSTORE_RUN"), "threads": os.environ.get("CKPTSTORE_THREADS"), **_without_none(given)}
        try:
            return cls(**_without_none(named))
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, e['loc']))} is {e['input']!r}: {e['msg']}" for e in error.errors())
            raise InvalidInput(f"a store cannot be opened with these settings: {problems}") from error


def _without_none(items: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in items.items() if value is not None}
