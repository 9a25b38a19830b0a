"""A bucket to measure against: moto in a process of its own, Ceph's gateway, or the server that
`$CKPTSTORE_TEST_S3` names."""

import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ckptstore.plugins.buckets.bucket import BucketStorage
from tests.support.servers.ports import free_port
from tests.support.servers.rgw import missing_programs, rgw_server

BUCKET = "benchmarks"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where it is, and as whom to come."""

    endpoint: str
    key: str
    secret: str
    server: str
    """What serves it, in words."""
    name: str = BUCKET

    @property
    def storage_options(self) -> dict[str, Any]:
        who = {"key": self.key, "secret": self.secret}
        return {"endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"}, **who}

    def new_url(self) -> str:
        return f"s3://{self.name}/{secrets.token_hex(8)}"

    def client(self, connections: int = 10) -> Any:
        """The raw client, boto3's."""
        import boto3
        from botocore.config import Config

        who = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        config = Config(max_pool_connections=connections)
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1", config=config, **who
        )

    def delete(self, prefix: str) -> None:
        """Delete every object whose key begins with `prefix`, fewer than a thousand."""
        client = self.client()
        for found in client.list_objects_v2(Bucket=self.name, Prefix=prefix).get("Contents", ()):
            client.delete_object(Bucket=self.name, Key=found["Key"])
        client.close()


@contextmanager
def bucket() -> Iterator[Bucket]:
    """The bucket, made if need be."""
    if endpoint := os.environ.get("CKPTSTORE_TEST_S3"):
        found = Bucket(
            endpoint,
            os.environ["CKPTSTORE_TEST_S3_KEY"],
            os.environ["CKPTSTORE_TEST_S3_SECRET"],
            "a server that was named",
        )
        _make(found)
        yield found
        return
    port = free_port()
    arguments = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        found = Bucket(f"http://127.0.0.1:{port}", "testing", "testing", "moto, on the same host")
        _make(found)
        yield found
    finally:
        server.kill()
        server.wait()


@contextmanager
def real_bucket() -> Iterator[Bucket]:
    """The bucket of Ceph's gateway where that is installed and no other server is named, else
    `bucket`."""
    if "CKPTSTORE_TEST_S3" in os.environ or missing_programs():
        with bucket() as found:
            yield found
        return
    with rgw_server() as rgw:
        found = Bucket(
            rgw.server.endpoint,
            rgw.server.key,
            rgw.server.secret,
            "Ceph RGW, in memory, on the same host",
        )
        _make(found)
        yield found


class Requested:
    """How many requests this process has begun."""

    count = 0


@contextmanager
def requests_counted() -> Iterator[Requested]:
    """Count the requests that ckptstore begins meanwhile, in all threads."""
    requested, lock, ask = Requested(), threading.Lock(), BucketStorage.ask

    def counting(self: BucketStorage, *request: Any, **more: Any) -> Any:
        with lock:
            requested.count += 1
        return ask(self, *request, **more)

    BucketStorage.ask = counting  # type: ignore[method-assign]  # put back below
    try:
        yield requested
    finally:
        BucketStorage.ask = ask  # type: ignore[method-assign]


def _make(found: Bucket) -> None:
    client = found.client()
    if BUCKET not in [known["Name"] for known in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=BUCKET)
    client.close()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
