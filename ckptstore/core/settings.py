"""Which choices of a process apply to a store: arguments of `open` and environment variables?

`$CKPTSTORE_RUN`, `$CKPTSTORE_THREADS`, `$CKPTSTORE_STAGING_BYTES` and
`$CKPTSTORE_READ_CACHE_BYTES` are the defaults of arguments. Imports pydantic: for training code,
not for queries.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ckptstore.core.config import (
    CHUNK_BYTES,
    DEFAULT_RUN,
    MIN_STAGING_BYTES,
    THREADS_MAX,
    check_chunk_bytes,
    default_threads,
)
from ckptstore.core.environment import setting
from ckptstore.core.ids import check_run
from ckptstore.core.options import Executor, OnFull
from ckptstore.errors import InvalidInput

_SET_OUTSIDE = ("run", "threads", "staging_bytes", "read_cache_bytes", "patch_memory_bytes")


class Settings(BaseModel):
    """The arguments of `ckptstore.open`. `chunk_bytes`, `codec` and `private` apply only if this
    call creates the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Annotated[str, AfterValidator(check_run)] = DEFAULT_RUN
    create: bool = True
    read_only: bool = False
    chunk_bytes: Annotated[int, AfterValidator(check_chunk_bytes)] = CHUNK_BYTES
    codec: Literal["raw", "zstd"] = "raw"
    private: bool = False
    on_full: OnFull = "raise"
    threads: Annotated[int, Field(ge=1, le=THREADS_MAX, default_factory=default_threads)]
    staging_bytes: Annotated[int | None, Field(ge=MIN_STAGING_BYTES)] = None
    max_in_flight: Annotated[int, Field(ge=1)] = 1
    index: str | None = None
    executor: Executor = "thread"
    storage_options: dict[str, Any] = Field(default_factory=dict)
    direct_io: bool | None = None
    read_cache_bytes: Annotated[int, Field(ge=0)] = 0
    patch_memory_bytes: Annotated[int | None, Field(ge=0)] = None

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Settings from arguments that are not None, then the environment, then defaults. Raises
        `InvalidInput`."""
        set_outside = {name: setting(name) for name in _SET_OUTSIDE}
        named = {**set_outside, **_without_none(given)}
        try:
            return cls(**_without_none(named))
        except ValidationError as error:
            # pydantic's own traceback would say all of it again.
            problems = "; ".join(map(_problem, error.errors(include_url=False)))
            raise InvalidInput(
                f"a store cannot be opened with these settings: {problems}"
            ) from None


def _problem(found: Mapping[str, Any]) -> str:
    """The error text for one invalid setting."""
    given = _given(found["loc"], found["input"])
    own = found.get("ctx", {}).get("error")
    if own is not None and given:  # a check of ours, which names the value
        return str(own)
    return f"{'.'.join(map(str, found['loc']))}{given}: {found['msg']}"


def _given(where: tuple[int | str, ...], value: object) -> str:
    """The given value for the error text, unless it may hold a secret."""
    return "" if where and where[0] in ("storage_options", "index") else f" is {value!r}"


def _without_none(items: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in items.items() if value is not None}
