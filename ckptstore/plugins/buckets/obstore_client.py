"""How are the requests of a bucket of S3, Google Cloud Storage or Azure sent through obstore?

obstore is written in Rust and takes about half of the processor time that fsspec's libraries
take (docs/decisions/047-…). For S3, s3fs finds the endpoint, the region and the credentials, so
one set of options serves both clients, and it lists and aborts uploads, which obstore cannot.

obstore repeats requests that it knows to be repeatable. `BucketStorage` repeats the others. Both
stop at the same deadline. obstore's threads do not survive a fork: a forked child takes the other
client.

Large objects go to S3 by `S3Upload`, because obstore aborts an upload whose end was not answered.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckptstore.errors import InvalidInput
from ckptstore.plugin.storages import PART_BYTES, check_size
from ckptstore.plugins.buckets.fsspec_client import CONNECT_TIMEOUT_S, FsspecClient, signer
from ckptstore.plugins.buckets.s3_upload import MARK, PARTS_IN_FLIGHT, Repeat, S3Upload

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, WritableFile
    from obstore.store import AzureStore, GCSStore, S3Store

STORES = {
    "s3": "S3Store",
    "s3a": "S3Store",
    "gs": "GCSStore",
    "gcs": "GCSStore",
    "az": "AzureStore",
    "abfs": "AzureStore",
    "abfss": "AzureStore",
}
S3_OPTIONS = frozenset(
    {
        "anon",
        "client_kwargs",
        "config_kwargs",
        "endpoint_url",
        "key",
        "profile",
        "secret",
        "session",
        "token",
        "use_ssl",
    }
)
"""The options of s3fs that say where the bucket is and who asks; obstore follows no others."""

_MANY = 1000
"""More attempts than are made before a deadline."""

_LONGEST_PAUSE = timedelta(seconds=5)

_REFUSED = re.compile(r"status code: 4(?!08|29)|redirect|non-partial|Wanted range")
"""How obstore's errors tell an answer that would be the same again; the last two are some servers'
for a range behind the object's end."""

_runtime_pid = 0
"""The process that used obstore first: its threads live there alone."""


def usable() -> bool:
    """Whether this process owns obstore's threads."""
    global _runtime_pid
    _runtime_pid = _runtime_pid or os.getpid()
    return _runtime_pid == os.getpid()


class ObstoreClient:
    """`Client` through obstore."""

    def __init__(self, url: str, options: dict[str, Any], deadline_s: float) -> None:
        """Raises `InvalidInput` if obstore is not installed or does not know an option."""
        try:
            import obstore
        except ImportError as error:
            raise InvalidInput(
                f"cannot use obstore: {error}; install ckptstore[obstore], or choose client=fsspec"
            ) from error
        scheme, _, place = url.partition("://")
        bucket, _, root = place.partition("/")
        self._prefix = f"{root}/" if root else ""
        self._url, self._api = url, obstore
        self._s3: FsspecClient | None = None
        if STORES[scheme] == "S3Store":
            if unknown := sorted(options.keys() - S3_OPTIONS):
                raise InvalidInput(
                    f"obstore does not follow the option {unknown[0]!r}; choose client=fsspec"
                )
            self._s3 = FsspecClient(url, options, deadline_s)
            options = _options_of_s3(self._s3.fs, bucket)
        half = timedelta(seconds=deadline_s / 2)
        limits = {
            "connect_timeout": min(timedelta(seconds=CONNECT_TIMEOUT_S), half),
            "timeout": half,
            **options.pop("client_options", {}),
        }
        self._store: S3Store | GCSStore | AzureStore = getattr(obstore.store, STORES[scheme])(
            bucket,
            client_options=limits,
            retry_config={
                "max_retries": _MANY,
                "retry_timeout": 2 * half,
                "backoff": {"max_backoff": _LONGEST_PAUSE},
            },
            **options,
        )

    def may_pass(self, error: Exception) -> bool:
        """Whether a repeated request may succeed."""
        if self._s3 and not isinstance(error, self._api.exceptions.BaseError):
            return self._s3.may_pass(error)
        return isinstance(error, self._api.exceptions.GenericError | OSError) and not (
            isinstance(error, FileNotFoundError) or _REFUSED.search(str(error))
        )

    def get(self, key: str, start: int, stop: int | None) -> "Bytes":
        if stop is None:
            options: GetOptions | None = {"range": {"offset": start}} if start else None
            found = self._api.get(self._store, self._prefix + key, options=options)
            check_size(key, found.meta["size"], self._url)
            return found.bytes()
        return self._api.get_range(self._store, self._prefix + key, start=start, end=stop)

    def tail(self, key: str, nbytes: int) -> tuple["Bytes", int]:
        found = self._api.get(
            self._store, self._prefix + key, options={"range": {"suffix": nbytes}}
        )
        return found.bytes(), found.meta["size"]

    def size(self, key: str) -> int:
        return self._api.head(self._store, self._prefix + key)["size"]

    def put(self, key: str, data: bytes | memoryview, *, create: bool = False) -> None:
        self._api.put(
            self._store,
            self._prefix + key,
            data,
            mode="create" if create else "overwrite",
            use_multipart=False if self._s3 else None,
            chunk_size=PART_BYTES,
            max_concurrency=PARTS_IN_FLIGHT,
        )

    def upload(self, key: str, repeat: Repeat) -> "S3Upload | ObstoreUpload":
        """An upload in parts, whose requests `repeat` calls."""
        if self._s3:
            return self._s3.upload_in_parts(key, repeat)
        return ObstoreUpload(self._api, self._store, self._prefix + key)

    def delete(self, key: str) -> None:
        self._api.delete(self._store, self._prefix + key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        wanted = self._prefix + prefix
        directory, _, name = wanted.rpartition("/")
        # Listing begins behind `offset`, which is before everything that begins with `prefix`.
        offset = wanted[:-1] if name else None
        for page in self._api.list(self._store, directory or None, offset=offset, chunk_size=1000):
            for found in page:
                if found["path"] > wanted and not found["path"].startswith(wanted):
                    return
                yield found["path"].removeprefix(self._prefix), found["size"]

    def uploads(self) -> Iterator[tuple[str, str]]:
        """See `FsspecClient.uploads`."""
        return self._s3.uploads() if self._s3 else iter(())

    def abort(self, key: str, upload: str) -> None:
        """See `FsspecClient.abort`."""
        assert self._s3 is not None
        self._s3.abort(key, upload)


class ObstoreUpload:
    """An upload in parts to a service other than S3. Parts are sent while more is written. obstore
    repeats what fails."""

    def __init__(self, api: Any, store: Any, path: str) -> None:
        self._api, self._store, self._path = api, store, path
        self._mark = secrets.token_hex(16)
        self._file: WritableFile = api.open_writer(
            store,
            path,
            buffer_size=PART_BYTES,
            max_concurrency=PARTS_IN_FLIGHT,
            attributes={MARK: self._mark},
        )

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def complete(self) -> bool:
        """Give the object its name; False if another object has it.

        obstore cannot make this request conditional, so the name is looked up just before. After
        a failure the mark tells whether the answer was lost.
        """
        owner = self._owner()
        if owner is None:
            try:
                self._file.close()
                return True
            except Exception:
                owner = self._owner()
                if owner is None:
                    raise
        return owner == self._mark

    def abort(self, *, answers: bool) -> None:
        """Delete the parts if the service `answers`. May fail silently: gc finds what is left."""
        if not answers:
            return
        with suppress(Exception), self._file:
            raise InterruptedError("obstore aborts an upload whose block raises")

    def _owner(self) -> str | None:
        """The mark of the object that has the name, None if there is none."""
        try:
            found = self._api.get(self._store, self._path, options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(MARK, ""))


def _options_of_s3(fs: Any, bucket: str) -> dict[str, Any]:
    """Options for obstore, taken from s3fs: endpoint, region and credentials of the bucket."""
    place = urlsplit(fs.url(f"{bucket}/any"))
    region = fs.s3.meta.region_name
    if region in (None, "aws-global"):
        region = fs.call_s3("head_bucket", Bucket=bucket).get("BucketRegion")
    verify = fs.client_kwargs.get("verify", os.environ.get("AWS_CA_BUNDLE"))
    trust: dict[str, Any] = {"allow_http": place.scheme == "http"}
    if verify is False:
        trust["allow_invalid_certificates"] = True
    elif isinstance(verify, str):
        trust["root_certificate"] = Path(verify).read_bytes()
    return {
        "aws_endpoint_url_s3": f"{place.scheme}://{place.netloc}",
        "virtual_hosted_style_request": place.path == "/any",
        "region": region or "us-east-1",
        "client_options": trust,
        **({"skip_signature": True} if fs.anon else {"credential_provider": signer(fs)}),
    }
