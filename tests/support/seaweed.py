"""A real S3 server for tests: SeaweedFS from its wheel, on loopback unless told otherwise, gone when the block ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sysconfig
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from s3fs import S3FileSystem
from waiting import until

BUCKET = "tidegate-tests"
_KEY = "tidegate"
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_START_TRIES_MAX = 5
LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class S3Process:
    """The process of a server, for those who stop it: it keeps its files and its place, and comes back with both."""

    folder: Path
    address: str
    ports: list[int]
    running: subprocess.Popen[bytes]

    def kill(self) -> None:
        """As if its machine was switched off; who asks is refused a connection."""
        self.running.kill()
        self.running.wait()

    def start(self) -> None:
        """After `kill`. Returns before it answers."""
        self.running = _start(self.folder, self.address, self.ports)


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where a running server is and who may use it."""

    endpoint_url: str
    secret: str
    """Its own: who asks another server at this place, which took the port first, is refused."""
    process: S3Process = field(repr=False)

    @property
    def options(self) -> dict[str, object]:
        """Options of `open_store` for this server."""
        return {"endpoint_url": self.endpoint_url, "key": _KEY, "secret": self.secret}


@contextmanager
def run_seaweed(folder: Path, address: str = LOOPBACK) -> Iterator[S3Server]:
    """Start a server on `folder`, wait until it has made the bucket, and stop it at the end.

    It speaks plain HTTP: another `address` than loopback has to be one that nobody outside of this machine reaches.
    """
    secret = uuid.uuid4().hex
    identity = {"accessKey": _KEY, "secretKey": secret}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = {"identities": [{"name": "tests", "credentials": [identity], "actions": actions}]}
    (folder / "s3.json").write_text(json.dumps(config))
    for attempt in range(_START_TRIES_MAX):
        # Another process may take a port between the choice and the start, so a start that dies is tried again, on
        # other ports.
        ports = _free_ports(address, 5)
        process = S3Process(folder, address, ports, _start(folder, address, ports))
        try:
            server = S3Server(f"http://{address}:{ports[0]}", secret, process)
            if _make_bucket(process.running, server):
                yield server
                return
            log = (folder / "weed.log").read_text(errors="replace")[-2000:]
            assert attempt + 1 < _START_TRIES_MAX, f"the S3 server does not start:\n{log}"
        finally:
            process.kill()


def forget_clients() -> None:
    """s3fs gives the same client for the same options, wherever the environment says that the server is by now."""
    for kind in (S3FileSystem, *S3FileSystem.__subclasses__()):
        kind.clear_instance_cache()


def _start(folder: Path, address: str, ports: list[int]) -> subprocess.Popen[bytes]:
    s3, master, filer, volume, admin = ports
    command = [
        str(Path(sysconfig.get_path("scripts")) / "weed"),
        "mini",
        f"-ip={address}",
        f"-ip.bind={address}",
        f"-dir={folder}",
        f"-s3.config={folder / 's3.json'}",
        f"-s3.port={s3}",
        f"-master.port={master}",
        f"-filer.port={filer}",
        f"-volume.port={volume}",
        f"-admin.port={admin}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-admin.ui=false",
        "-webdav=false",
        "-master.telemetry=false",
    ]
    environment = os.environ | {"HOME": str(folder)}
    with (folder / "weed.log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=folder,
            preexec_fn=_die_with_parent,
        )


def _die_with_parent() -> None:
    """However a test run ends, killed for instance, no server outlives it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _make_bucket(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Whether the server made the bucket before it died."""
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=server.endpoint_url,
        aws_access_key_id=_KEY,
        aws_secret_access_key=server.secret,
        region_name="us-east-1",
        config=Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1}),
    )
    made = False

    def over() -> bool:
        nonlocal made
        with suppress(BotoCoreError, ClientError):
            client.create_bucket(Bucket=BUCKET)
            made = True
        return made or process.poll() is not None

    until("the S3 server", over)
    return made


def _free_ports(address: str, count: int) -> list[int]:
    """Ports of an address that are free now, and the ports 10,000 above them, which SeaweedFS takes for gRPC."""
    ports: list[int] = []
    with _Sockets(address) as sockets:
        for candidate in range(20_000 + os.getpid() % 10_000, 45_000):
            if sockets.bind(candidate) and sockets.bind(candidate + 10_000):
                ports.append(candidate)
            if len(ports) == count:
                return ports
    raise AssertionError("no free ports for the S3 server")


class _Sockets:
    def __init__(self, address: str) -> None:
        self._address = address
        self._open: list[socket.socket] = []

    def __enter__(self) -> _Sockets:
        return self

    def __exit__(self, *_: object) -> None:
        for bound in self._open:
            bound.close()

    def bind(self, port: int) -> bool:
        probe = socket.socket()
        self._open.append(probe)
        try:
            probe.bind((self._address, port))
        except OSError:
            return False
        return True
