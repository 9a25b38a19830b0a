"""A bucket to measure against: moto in a process of its own, or the server that `$CKPTSTORE_TEST_S3` names."""

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

from ckptstore.objects.s3_requests import Requests

BUCKET = "benchmarks"
START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Where it is, and as whom to come."""

    endpoint: str
    key: str
    secret: str

    @property
    def storage_options(self) -> dict[str, Any]:
        who = {"key": self.key, "secret": self.secret}
        return {"endpoint_url": self.endpoint, "client_kwargs": {"region_name": "us-east-1"}, **who}

    def new_url(self) -> str:
        return f"s3://{BUCKET}/{secrets.token_hex(8)}"

    def client(self) -> Any:
        """The raw client, boto3's."""
        import boto3

        who = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        return boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1", **who)


@contextmanager
def bucket() -> Iterator[Bucket]:
    """The bucket, made if need be."""
    if endpoint := os.environ.get("CKPTSTORE_TEST_S3"):
        found = Bucket(endpoint, os.environ["CKPTSTORE_TEST_S3_KEY"], os.environ["CKPTSTORE_TEST_S3_SECRET"])
        _make(found)
        yield found
        return
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    arguments = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        found = Bucket(f"http://127.0.0.1:{port}", "testing", "testing")
        _make(found)
        yield found
    finally:
        server.kill()
        server.wait()


class Requested:
    """How many requests this process has begun."""

    count = 0


@contextmanager
def requests_counted() -> Iterator[Requested]:
    """Count the requests that ckptstore begins meanwhile, in all threads."""
    requested, lock, start = Requested(), threading.Lock(), Requests.start

    def counting(self: Requests, request: Any) -> Any:
        with lock:
            requested.count += 1
        return start(self, request)

    Requests.start = counting  # type: ignore[method-assign]  # put back below
    try:
        yield requested
    finally:
        Requests.start = start  # type: ignore[method-assign]


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
