"""Ceph's S3 server with one monitor and one disk in memory, as children of this process. Needs no
root, and no cluster's keys."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.servers.ports import free_port
from tests.support.servers.s3 import S3Server

PROGRAMS = ("radosgw", "ceph-mon", "ceph-osd")
_START_S = 120.0
_KEY, _SECRET = "testing-key", "testing-secret"

_CONFIG = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
public network = 127.0.0.0/8
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
run dir = {home}
log file = {home}/$name.log
admin socket = {home}/$name.asok
pid file = {home}/$name.pid
keyring = {home}/keyring
[mon]
mon data = {home}/mon
mon data avail warn = 0
mon data avail crit = 0
[osd]
osd data = {home}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd class load list = *
osd class default list = *
[client.rgw]
ms mon client mode = crc
ms client mode = crc
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {home}/rgw
rgw enable usage log = false
rgw run sync thread = false
rgw gc obj min wait = 1
rgw gc processor period = 1
rgw gc processor max time = 1
rgw dns name = localhost
"""


class RgwServer:
    """One server; `start` and `kill` are those of the gateway, its disk lives on."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ckptstore-rgw-"))
        self._children: list[subprocess.Popen[bytes]] = []
        self._gateway: subprocess.Popen[bytes] | None = None
        self.port, mon_port = free_port(), free_port()
        for folder in ("mon", "osd", "rgw"):
            (self._home / folder).mkdir()
        config = _CONFIG.format(
            home=self._home, port=self.port, mon_port=mon_port, fsid=uuid.uuid4()
        )
        (self._home / "ceph.conf").write_text(config)
        try:
            self._start_monitor(mon_port)
            self._start_disk()
            user = (
                "user",
                "create",
                "--uid",
                "test",
                "--display-name",
                "test",
                "--access-key",
                _KEY,
                "--secret",
                _SECRET,
            )
            self._run("radosgw-admin", *user)
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def server(self) -> S3Server:
        return S3Server(f"http://127.0.0.1:{self.port}", _KEY, _SECRET)

    def start(self) -> None:
        """Start the gateway, and wait until it listens."""
        self._gateway = self._child("radosgw", "-f", "-n", "client.rgw")
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
                return
            except OSError:
                if time.monotonic() > deadline or self._gateway.poll() is not None:
                    raise RuntimeError(f"radosgw does not listen; see {self._home}") from None
                time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL the gateway."""
        assert self._gateway is not None
        self._gateway.kill()
        self._gateway.wait()

    def stop(self) -> None:
        """For good."""
        for child in reversed(self._children):
            with suppress(ProcessLookupError):
                child.kill()
            child.wait()
        shutil.rmtree(self._home)

    def _start_monitor(self, port: int) -> None:
        keyring, monmap = str(self._home / "keyring"), str(self._home / "monmap")
        for number, name in enumerate(("mon.", "client.admin", "client.rgw")):
            rights = ["--cap", "mon", "allow *", "--cap", "osd", "allow *"]
            self._run(
                "ceph-authtool",
                *(["--create-keyring"] if not number else []),
                keyring,
                "--gen-key",
                "-n",
                name,
                *rights,
            )
        self._run("monmaptool", "--create", "--addv", "a", f"[v2:127.0.0.1:{port}]", monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._child("ceph-mon", "-f", "-i", "a")

    def _start_disk(self) -> None:
        disk = str(uuid.uuid4())
        self._run("ceph", "osd", "new", disk)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        self._child("ceph-osd", "-f", "-i", "0")
        deadline = time.monotonic() + _START_S
        while "1 up" not in self._run("ceph", "osd", "stat"):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the OSD does not come up; see {self._home}")
            time.sleep(0.1)

    def _run(self, program: str, *arguments: str) -> str:
        environment = {**os.environ, "CEPH_CONF": str(self._home / "ceph.conf")}
        command = " ".join([program, *arguments])
        try:
            done = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                timeout=_START_S,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"{command} did not end within {_START_S:.0f} s; {self._last_words()}"
            ) from None
        if done.returncode:
            raise RuntimeError(
                f"{command} ended with {done.returncode}: {done.stderr}; {self._last_words()}"
            )
        return done.stdout

    def _last_words(self) -> str:
        """What became of the servers, and the ends of their logs: `stop` removes these."""
        ends = [f"{child.args[0]} {child.poll()}" for child in self._children]
        logs = [f"{log}: {log.read_text()[-1500:]}" for log in sorted(self._home.glob("*.log"))]
        return "\n".join(["exit codes: " + ", ".join(ends), *logs])

    def _child(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with open(self._home / f"{program}.out", "ab") as out:
            child = subprocess.Popen(
                [program, "-c", str(self._home / "ceph.conf"), *arguments],
                stdout=out,
                stderr=out,
                cwd=self._home,
            )
        self._children.append(child)
        return child


@contextmanager
def rgw_server() -> Iterator[RgwServer]:
    """A server for the time of the block."""
    rgw = RgwServer()
    try:
        yield rgw
    finally:
        rgw.stop()


def missing_programs() -> list[str]:
    """What would have to be installed first."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
