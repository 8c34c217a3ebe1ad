"""The fork server of a node: a process that has imported what tasks need, and forks itself for workers of Ray.

`launch.py` starts it, and asks it for each worker. What is forked shares the pages of all that is imported here, and
pays nothing for it.

Rules:

- It forks only what may be forked (`imported.py`). Else it says why not, and workers start without it.
- It stays while one of its children lives, to reap them, and a while longer. It ends with its Ray.
- When what it has imported has changed on the disk, it forks no more: the next worker starts another server.
- Where Ray ends each process below it that it has not started itself, it refuses: that would be its children.
- A child has the environment, folder, arguments and standard streams that Ray gave to the worker, its own random
  numbers, and no way back into this module.
"""

from __future__ import annotations

import array
import fcntl
import json
import logging
import os
import runpy
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from tidegate.actors.runtimes.ray.fork_server.imported import Imported, give_threads_back, import_all, threads
from tidegate.actors.runtimes.ray.fork_server.launch import (
    LENGTH,
    LISTENING,
    LOCK,
    PEER,
    REASON_BYTES_MAX,
    STARTED,
    USED_BEFORE,
)

IDLE_S = 30.0
ORDER_S = 10.0
ORDER_BYTES_MAX = 16 * 1024 * 1024
STREAMS = 3

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to be started. `streams`: descriptors of its standard input, output and errors."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    used_s: float
    streams: tuple[int, ...]

    def close(self) -> None:
        """Let go of its streams."""
        for descriptor in self.streams:
            os.close(descriptor)


class ForkServer:
    """Serves until nobody needs it. `path`: of the socket that listens."""

    def __init__(self, listening: socket.socket, path: str, imported: Imported, raylet: int) -> None:
        self._listening = listening
        self._path = path
        self._imported = imported
        self._raylet = raylet
        self._children: set[int] = set()
        self._used_s = time.monotonic()
        """When it last had a child or an order. Who only looks whether it is there, and asks for nothing, is no use."""
        self._ended: list[int] = []
        """Children that are gone, as the signal has said. It may come before the child is known by its id."""

    def serve(self) -> Order | None:
        """Answer until the end, which returns None. In a child: what it is to become."""
        self._listening.setblocking(False)
        signal.signal(signal.SIGCHLD, self._reap)
        while True:
            if self._children:
                self._used_s = time.monotonic()
            left_s = max(0.0, self._used_s + IDLE_S - time.monotonic())
            ready, _, _ = select.select([self._listening.fileno(), self._raylet], [], [], left_s)
            self._forget()
            if self._raylet in ready or (not ready and not self._children and self._left()):
                return None
            if self._imported.is_stale:
                self._leave()
                self._outlive_children()
                return None
            if self._listening.fileno() in ready and (order := self._answered()) is not None:
                return order

    def _outlive_children(self) -> None:
        """Stay to reap them: whoever adopts orphans may reap none, and Ray takes their ids to be in use then."""
        while self._children and not select.select([self._raylet], [], [], IDLE_S)[0]:
            self._forget()

    def _answered(self) -> Order | None:
        """Take one connection. Only a child returns an order."""
        try:
            client, _ = self._listening.accept()
        except BlockingIOError:  # Who has asked is gone.
            return None
        with client:
            try:
                order = receive(client)
            except (OSError, ValueError) as error:
                log.warning("tidegate's fork server was asked for what it does not understand: %s", error)
                return None
            if order is None:
                return None
            self._used_s = time.monotonic()
            why_not, child = self._imported.why_not, -1
            if why_not is None and threads() > 1:
                why_not = "the server has more than one thread"
            if why_not is None:
                try:
                    child = os.fork()
                except OSError as error:  # The node, or the user, has as many processes as it may have.
                    why_not = f"the server cannot fork: {error}"
            if why_not is not None:
                order.close()
                with suppress(OSError):  # Who has asked is gone.
                    client.send(why_not.encode(errors="replace")[:REASON_BYTES_MAX])
                return None
            if child == 0:
                return self._begun(client, order)
            self._children.add(child)
            order.close()
        return None

    def _begun(self, client: socket.socket, order: Order) -> Order:
        """In a child: say so. Nobody there to hear it: the worker was started otherwise."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            client.sendall(STARTED)
        except OSError:
            os._exit(0)
        self._listening.close()
        os.close(self._raylet)
        return order

    def _reap(self, number: int, frame: FrameType | None) -> None:
        """Children that have ended are gone at once: Ray looks whether their ids are in use."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                self._ended.append(ended)

    def _forget(self) -> None:
        while self._ended:
            self._children.discard(self._ended.pop())

    def _left(self) -> bool:
        """Take the socket away, unless somebody is at it just now."""
        with self._locked():
            if select.select([self._listening], [], [], 0)[0]:
                return False
            os.unlink(self._path)
        return True

    def _leave(self) -> None:
        """Take the socket away. Who is at it just now hears the end, and starts without."""
        with self._locked(), suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listening.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """While nobody else looks for a server."""
        lock = os.open(os.path.join(os.path.dirname(self._path), LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def receive(client: socket.socket) -> Order | None:
    """What somebody asks for; None: nothing, or it is somebody else's user. Raises OSError, ValueError."""
    client.settimeout(ORDER_S)
    _, user, _ = PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if user != os.getuid():
        return None
    head, rights, _, _ = client.recvmsg(LENGTH.size, socket.CMSG_SPACE(STREAMS * 4))
    streams = array.array("i")
    for _level, _kind, data in rights:
        streams.frombytes(data)
    try:
        if not head:
            return None
        (length,) = LENGTH.unpack(head)
        if length > ORDER_BYTES_MAX or len(streams) != STREAMS:
            raise ValueError(f"{length} bytes and {len(streams)} streams")
        text = bytearray()
        while len(text) < length:
            part = client.recv(length - len(text))
            if not part:
                raise ValueError("it ends in the middle")
            text += part
        arguments, environment, folder, used_s = json.loads(text)
        return Order(arguments, environment, folder, used_s, tuple(streams))
    except BaseException as error:
        for descriptor in streams:
            os.close(descriptor)
        if isinstance(error, (TypeError, struct.error)):
            raise ValueError(f"it is no order: {error}") from error
        raise


def become(order: Order, scripts: str) -> None:
    """Be the worker, to its end. `scripts`: the folder of Ray's scripts, as the server has it among its paths."""
    os.setpgid(0, 0)
    for number, descriptor in enumerate(order.streams):
        os.dup2(descriptor, number)
    order.close()
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environment)
    os.environ[USED_BEFORE] = f"{order.used_s:.3f}"
    sys.argv[:] = order.arguments
    sys.orig_argv[1:] = order.arguments
    sys.path[sys.path.index(scripts)] = os.path.dirname(order.arguments[0])  # Ray has put others before it.
    if (numbers := sys.modules.get("numpy.random")) is not None:
        numbers.seed()
    give_threads_back(order.environment)
    runpy.run_path(order.arguments[0], run_name="__main__")


def main() -> None:
    """Import, and serve. Its children are workers of Ray."""
    path, folder, scripts = sys.argv[1:]
    raylet_id = int(os.environ["RAY_RAYLET_PID"])
    try:
        raylet = os.pidfd_open(raylet_id)
    except OSError as error:
        raylet, _open = os.pipe()  # It never says a word, and what forks nothing soon ends.
        imported = Imported(f"the server cannot watch Ray's process {raylet_id}: {error}")
    else:
        if os.getppid() == raylet_id:
            # Ray takes in whoever has lost its parent, to end what it has not started itself.
            imported = Imported("the server belongs to Ray, which would end its children")
        else:
            imported = import_all(folder)
    if imported.why_not is not None:
        log.warning("tidegate's fork server forks nothing: %s", imported.why_not)
    sys.path.pop()  # The folder, which workers have not.
    order = ForkServer(socket.socket(fileno=LISTENING), path, imported, raylet).serve()
    if order is not None:
        become(order, scripts)
