"""Runs in place of Python where Ray starts a worker: has the node's fork server start it, else starts it as Ray would.

Ray runs this file with the worker's script and arguments, without site packages: each process pays for what is
imported here, so that is a little of the standard library.

Rules:

- One server for each Python, Ray on this node, folder of tidegate, current folder and environment: a process gets
  nothing that was meant for another environment. Ray's C++ reads its variables when it is imported, that of its job
  included: so each job of Ray, which is one program, has a server of its own. Its socket lies with those of Ray's
  session, for the same user only.
- Whoever finds no server makes the socket, under a lock, and starts the server behind it. Others wait in its queue.
  A node has few servers, and a worker for which there is none starts without.
- Whatever goes wrong, the worker starts as it would without a server: this process becomes it, and is told why.
- A worker starts once: the server's child begins when its word has gone out, and this process ends only when it has
  read that word.
"""

from __future__ import annotations

import array
import fcntl
import hashlib
import json
import os
import socket
import struct
import sys

PATIENCE_S = 30.0
SERVERS_MAX = 8
QUEUED_MAX = 512
LENGTH = struct.Struct("!Q")
PEER = struct.Struct("3i")
STARTED = b"1"
LISTENING = 3
"""The server's descriptor of its socket."""
SOCKET_PATH_MAX = 107
USED_BEFORE = "_TIDEGATE_LAUNCH_CPU_S"
"""In the environment of a forked worker: seconds of a processor that its start has cost before the fork."""
WHY_NOT = "_TIDEGATE_NOT_FORKED"
"""In the environment of a worker that starts without: the reason. Variables with `TIDEGATE_` in front are settings."""
REASON_BYTES_MAX = 1_000
ON_SPARK = "RAY_ON_SPARK_START_RAY_PARENT_PID"
"""In the environment of Ray's nodes that `ray.util.spark` has started."""
IN_AN_EXECUTOR = "Ray runs in an executor of Spark, which ends and counts only what descends from it"
PREFIX = "tgfork-"
LOCK = "tidegate-fork.lock"
OF_ONE_WORKER = ("_", "SHLVL", "PWD", "OLDPWD")
"""Variables that say nothing of what is imported."""
SERVE = (
    "import sys; sys.path[0] = sys.argv[3]; sys.path.append(sys.argv[2]); "
    "from tidegate.actors.runtimes.ray.fork_server.server import main; main()"
)
"""Its modules come from where those of workers come from, and only then from the folder of this file."""
WHILE_IMPORTING = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""For the server alone, where they are not set: libraries that it imports start no threads."""


def socket_path(arguments: list[str], environment: dict[str, str], folder: str) -> str | None:
    """Where the server for a worker listens; None: there can be none."""
    sockets = [a.partition("=")[2] for a in arguments if a.startswith("--raylet-name=")]
    if not sockets or not sockets[0].startswith("/") or "RAY_RAYLET_PID" not in environment:
        return None
    kept = sorted((name, value) for name, value in environment.items() if name not in OF_ONE_WORKER)
    what = json.dumps([sys.executable, folder, sockets[0], os.getcwd(), kept])
    path = os.path.join(os.path.dirname(sockets[0]), PREFIX + hashlib.sha256(what.encode()).hexdigest()[:12])
    return path if len(path) <= SOCKET_PATH_MAX else None


def connected(path: str) -> socket.socket | None:
    """A connection to the server, if one listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(PATIENCE_S)
    try:
        client.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        client.close()
        return None
    return client


def connect_or_serve(path: str, folder: str, scripts: str) -> socket.socket | None:
    """A connection to the server, which is started if there is none; None: there are enough others."""
    client = connected(path)
    if client is not None:
        return client
    lock = os.open(os.path.join(os.path.dirname(path), LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        client = connected(path)
        if client is None and may_serve(path):
            start_server(path, folder, scripts)
            client = connected(path)
    finally:
        os.close(lock)
    return client


def may_serve(path: str) -> bool:
    """Whether there is room for one more server. What servers have left that were killed is cleared away."""
    folder = os.path.dirname(path)
    others = 0
    for name in os.listdir(folder):
        if name.startswith(PREFIX):
            found = os.path.join(folder, name)
            client = connected(found)
            if client is None:
                os.unlink(found)
            else:
                client.close()
                others += 1
    return others < SERVERS_MAX


def start_server(path: str, folder: str, scripts: str) -> None:
    """Make the socket, and start a server behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        before = os.umask(0o077)
        try:
            listening.bind(path)
        finally:
            os.umask(before)
        listening.listen(QUEUED_MAX)
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() != 0:  # The server has no parent here, and sees to whom it goes.
                    os._exit(0)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(listening.fileno(), LISTENING, inheritable=True)
                os.closerange(LISTENING + 1, 1024)
                environment = WHILE_IMPORTING | os.environ
                os.execve(sys.executable, [sys.executable, "-c", SERVE, path, folder, scripts], environment)
            finally:
                os._exit(1)
        os.waitpid(child, 0)


def not_forked(client: socket.socket, arguments: list[str]) -> str | None:
    """Have the server start the worker. None: it has; else why not."""
    _, user, _ = PEER.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    if user != os.getuid():
        return f"the server belongs to the user {user}"
    used_s = sum(os.times()[:4])
    order = json.dumps([arguments, dict(os.environ), os.getcwd(), used_s]).encode()
    standard = array.array("i", [0, 1, 2])
    try:
        client.sendmsg([LENGTH.pack(len(order))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, standard)])
        client.sendall(order)
        answer = client.recv(REASON_BYTES_MAX)
    except ConnectionError:  # It has ended, and has not come to this order.
        answer = b""
    except TimeoutError:
        client.shutdown(socket.SHUT_RD)  # From here on no word can come; one may have.
        client.setblocking(False)
        try:
            answer = client.recv(REASON_BYTES_MAX)
        except BlockingIOError:
            answer = b""
        answer = answer or f"the server has not answered for {PATIENCE_S:g} s".encode()
    return None if answer == STARTED else answer.decode(errors="replace") or "the server has ended"


def package_folder() -> str:
    """The folder in which this tidegate lies."""
    folder = os.path.abspath(__file__)
    for _ in range(6):
        folder = os.path.dirname(folder)
    return folder


def main() -> None:
    """Start the worker, one way or the other."""
    arguments, folder = sys.argv[1:], package_folder()
    why_not: str | None
    try:
        path = socket_path(arguments, dict(os.environ), folder) if arguments[0].endswith(".py") else None
        if ON_SPARK in os.environ:
            why_not = IN_AN_EXECUTOR
        elif path is None:
            why_not = "Ray does not say where its sockets are, or in a folder whose path is too long for one more"
        else:
            client = connect_or_serve(path, folder, os.path.dirname(arguments[0]))
            why_not = "the node has no room for another server" if client is None else not_forked(client, arguments)
    except (OSError, UnicodeError) as error:
        why_not = str(error)
    if why_not is not None:
        print(f"this worker starts without tidegate's fork server: {why_not}", file=sys.stderr, flush=True)
        os.environ[WHY_NOT] = why_not
        os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
