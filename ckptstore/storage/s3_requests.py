"""How is one S3 request repeated until a deadline, and how are its failures translated?

s3fs finds credentials and creates the client. Its retries are unused and botocore's are off,
because layers of retries multiply: three times five attempts keep a caller waiting for minutes.
A request is repeated until its deadline; no attempt gets more than half of the remaining time.
After a missed deadline, the next requests get a short one until an answer arrives, so that
cleaning up after a failure does not wait for each object.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ckptstore.core.process import pauses
from ckptstore.core.text import secrets_of, without
from ckptstore.errors import CkptStoreError, InvalidInput, NotFound, ReadOnly, Unavailable

DEADLINE_S = 60.0
SHORT_DEADLINE_S = 5.0
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
CONNECTIONS = 32

_LEAST_ATTEMPT_S = 1.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_PASSING = frozenset(
    [
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestTimeout",
        "InternalError",
        "ServiceUnavailable",
        "OperationAborted",
    ]
)
"""Codes of answers that may be others next time, beside every status of 500 and above."""

_OBSTORE_STATUS = {
    "FileNotFoundError": 404,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
}
"""What obstore raises instead of telling the status."""

_random = secrets.SystemRandom()
"""Of the system: what a trainer that has seeded `random` draws next does not depend on what the
network did."""

T = TypeVar("T")
Request = Callable[[Any], Awaitable[T]]
"""What to do with the client, an aiobotocore one."""


class Requests:
    """The requests of one storage. Thread-safe; a forked child gets its own client."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        given = dict(options)
        self._url = url
        self._deadline_s = float(given.pop("deadline_s", DEADLINE_S))
        self._options = _with_limits(given, self._deadline_s)
        self._secrets = secrets_of(options)
        self._client: Any = None
        self._file_system: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0
        self._in_vain = False

    def run(
        self, request: Request[T], what: str, *, writing: bool = False, once: bool = False
    ) -> T:
        """The answer to `request`; `what` describes it in errors. A request that repeats itself
        is sent `once`.

        Raises `NotFound`, `ReadOnly`, `InvalidInput` or `Unavailable`.
        """
        return self.result(self.start(request, once=once), what, writing=writing)

    def start(self, request: Request[T], *, once: bool = False) -> "Future[T]":
        """Start `request` without waiting."""
        loop, client = self._connected()
        deadline = time.monotonic() + (
            min(SHORT_DEADLINE_S, self._deadline_s) if self._in_vain else self._deadline_s
        )
        return asyncio.run_coroutine_threadsafe(self._until(deadline, request, client, once), loop)

    def result(self, future: "Future[T]", what: str, *, writing: bool = False) -> T:
        """The answer to a request that was started."""
        try:
            return future.result()
        except CkptStoreError:
            raise
        except Exception as error:
            raise self._failure(error, what, writing) from error

    async def credentials(self) -> Any:
        """What the client signs with, as an object of botocore's that renews itself; None if it
        signs nothing. For use within a request."""
        from aiobotocore.credentials import AioCredentials

        fs = self._file_system
        if fs.anon:
            return None
        names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
        key, secret, token = (
            fs.client_kwargs.get(name) or given
            for name, given in zip(names, (fs.key, fs.secret, fs.token), strict=True)
        )
        return (
            AioCredentials(key, secret, token)
            if key and secret
            else await fs.session.get_credentials()
        )

    async def _until(self, deadline: float, request: Request[T], client: Any, once: bool) -> T:
        for pause_s in pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S):
            try:
                async with asyncio.timeout(
                    max((deadline - time.monotonic()) / (1 if once else 2), _LEAST_ATTEMPT_S)
                ):
                    answer = await request(client)
            except Exception as error:
                if once or not _may_pass(error):
                    self._in_vain = once and not _answer(error)[0]
                    raise
                wait_s = _random.uniform(pause_s / 2, pause_s)
                if time.monotonic() + wait_s > deadline:
                    self._in_vain = True
                    raise
            else:
                self._in_vain = False
                return answer
            await asyncio.sleep(wait_s)
        raise AssertionError("pauses do not end")

    def _connected(self) -> tuple[asyncio.AbstractEventLoop, Any]:
        if self._pid != os.getpid():
            # Imported here because a store on a local disk should not pay for it.
            try:
                import s3fs
            except ImportError as error:
                raise InvalidInput(
                    f"cannot open {self._url}: {error}; install ckptstore[s3]"
                ) from error
            self._connect(
                s3fs.S3FileSystem
            )  # twice if threads meet here, which s3fs makes one client of
        assert self._loop is not None
        return self._loop, self._client

    def _connect(self, file_system: Any) -> None:
        try:
            fs = file_system(use_listings_cache=False, **self._options)
            self._client = fs.connect()
        except Exception as error:
            raise self._failure(error, "connect to", writing=False) from error
        self._file_system, self._loop, self._pid = fs, fs.loop, os.getpid()

    def _failure(self, error: Exception, what: str, writing: bool) -> CkptStoreError:
        """Translate `error` into an error of this package."""
        status, code = _answer(error)
        said = without(str(error).partition("\n")[0] or type(error).__name__, self._secrets)
        told = f"cannot {what} in {self._url}: {said}"
        if code == "NoSuchBucket":
            if writing:
                return InvalidInput(f"{told}; make the bucket first")
            return NotFound(f"there is no bucket for {self._url}")
        if status == 404:
            return NotFound(f"cannot {what}: not in {self._url}")
        if status in (401, 403):
            if writing:
                return ReadOnly(
                    f"{told}; get the right to write there, or open it with read_only=True"
                )
            return Unavailable(
                f"{told}; get the right to read there, and look whether key and secret are the "
                "right ones"
            )
        return Unavailable(
            f"{told} (given up after {self._deadline_s:g} s at most); see to the storage, then "
            "repeat"
        )


def is_status(error: BaseException, *statuses: int) -> bool:
    """Whether the server answered with one of `statuses`."""
    return _answer(error)[0] in statuses


def _answer(error: BaseException) -> tuple[int, str]:
    """Status and code of the server's answer, (0, "") if there was none."""
    if status := _OBSTORE_STATUS.get(type(error).__name__):
        return status, ""
    response = getattr(error, "response", None)
    if not isinstance(response, dict):
        return 0, ""
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)), str(
        response.get("Error", {}).get("Code", "")
    )


def _may_pass(error: Exception) -> bool:
    """Whether a repeated request may succeed."""
    from aiohttp import ClientError as BrokenTransfer
    from botocore.exceptions import ConnectionError as NotConnected
    from botocore.exceptions import FlexibleChecksumError, HTTPClientError, IncompleteReadError

    status, code = _answer(error)
    if status:
        return status >= 500 or status in (408, 429) or code in _PASSING
    return isinstance(
        error,
        HTTPClientError
        | NotConnected
        | IncompleteReadError
        | FlexibleChecksumError
        | BrokenTransfer
        | OSError,
    )


def _with_limits(options: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """`options` for s3fs with our time limits and without botocore's retries; the caller's
    settings stay."""
    config = {
        "connect_timeout": min(CONNECT_TIMEOUT_S, deadline_s),
        "read_timeout": min(READ_TIMEOUT_S, deadline_s),
        "max_pool_connections": CONNECTIONS,
        "request_checksum_calculation": "when_supported",
        # What is read is compared with its BLAKE3, which is stricter.
        "response_checksum_validation": "when_required",
        **options.get("config_kwargs", {}),
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    return {**options, "config_kwargs": config}
