"""An S3 server for tests: moto in this process, or the real one that `make test-real` has started.

`$CKPTSTORE_TEST_S3` is the real one's endpoint, `$CKPTSTORE_TEST_S3_KEY` and
`$CKPTSTORE_TEST_S3_SECRET` say who we are there.
"""

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

BUCKET = "checkpoints"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a server listens, and as whom to come."""

    endpoint: str
    key: str
    secret: str

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition("/")[2].rpartition(":")
        return host, int(port)

    def options(self, **more: Any) -> dict[str, Any]:
        """`storage_options` for it."""
        who = {"key": self.key, "secret": self.secret}
        return {
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
            **who,
            **more,
        }

    def behind(self, endpoint: str) -> "S3Server":
        """The same server, reached by another way."""
        return S3Server(endpoint, self.key, self.secret)


def environment_of(server: S3Server) -> dict[str, str]:
    """Variables by which a command finds the server."""
    return {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def clients() -> list[Any]:
    """Parameters: `make test` has a time limit and goes through obstore, `make soak` through
    fsspec; `make test-real` through both."""
    return [
        "obstore",
        "fsspec"
        if "CKPTSTORE_TEST_S3" in os.environ
        else pytest.param("fsspec", marks=pytest.mark.soak),
    ]


def new_url(bucket: str = BUCKET) -> str:
    """A place that no other test uses."""
    return f"s3://{bucket}/{secrets.token_hex(8)}/store"


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """The server, with a bucket."""
    _parse_descriptions_once()
    if endpoint := os.environ.get("CKPTSTORE_TEST_S3"):
        server = S3Server(
            endpoint, os.environ["CKPTSTORE_TEST_S3_KEY"], os.environ["CKPTSTORE_TEST_S3_SECRET"]
        )
        make_bucket(server)
        yield server
        return
    with moto_server() as server:
        yield server


def _parse_descriptions_once() -> None:
    """Each session of botocore parses Amazon's description of S3 anew, which takes longer than most
    tests. The sessions of this process share what the first one parsed."""
    from botocore.loaders import JSONFileLoader

    load = cache(JSONFileLoader().load_file)
    JSONFileLoader.load_file = lambda _, path: load(path)


@contextmanager
def moto_server(address: str = "127.0.0.1") -> Iterator[S3Server]:
    """moto, with a bucket. It takes any signature, so a proxy may change requests on their way.

    It looks whether there is an object and then puts one, and of two requests at once both may find
    none: here that is one step.
    """
    from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
    from moto.s3.responses import S3Response
    from werkzeug.serving import make_server

    put, turn = S3Response.put_object, threading.Lock()

    def put_in_turn(response: S3Response) -> Any:
        with turn:
            return put(response)

    class Quiet(MotoRequestHandler):
        def log_request(self, *_: Any) -> None:
            pass

    # Only S3: moto's own server looks through the files of all services for each request.
    moto = make_server(address, 0, create_backend_app("s3"), threaded=True, request_handler=Quiet)
    S3Response.put_object = put_in_turn
    thread = threading.Thread(target=moto.serve_forever, daemon=True)
    thread.start()
    try:
        server = S3Server(f"http://127.0.0.1:{moto.port}", "testing-key", "testing-secret")
        make_bucket(server)
        yield server
    finally:
        moto.shutdown()
        thread.join()
        moto.server_close()
        S3Response.put_object = put


@contextmanager
def ends_halfway() -> Iterator[None]:
    """moto, in this process, ends uploads as a gateway of Ceph that is killed meanwhile: the object
    has its name, its upload is still listed, and to abort that deletes the object."""
    from moto.s3.exceptions import S3ClientError
    from moto.s3.models import S3Backend

    complete, abort = S3Backend.complete_multipart_upload, S3Backend.abort_multipart_upload

    def complete_halfway(backend: Any, bucket: str, upload: str, body: Any) -> Any:
        uploads = backend.get_bucket(bucket).multiparts
        half = uploads[upload]
        complete(backend, bucket, upload, body)
        uploads[upload] = half
        raise S3ClientError("InternalError", "the gateway is gone")

    def abort_all(backend: Any, bucket: str, upload: str) -> None:
        found = backend.get_bucket(bucket)
        if (name := found.multiparts[upload].key_name) in found.keys:
            found.keys.pop(name)
        abort(backend, bucket, upload)

    S3Backend.complete_multipart_upload = complete_halfway
    S3Backend.abort_multipart_upload = abort_all
    try:
        yield
    finally:
        S3Backend.complete_multipart_upload = complete
        S3Backend.abort_multipart_upload = abort


def make_bucket(server: S3Server) -> None:
    """Make the bucket unless it is there."""
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
    )
    if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    client.close()
