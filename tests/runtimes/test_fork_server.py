"""Workers that are forked have what Ray gave them, and nothing of each other; without a server they start as ever."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import until

from tidegate.actors.runtimes.ray.fork_server import imported, launch, server
from tidegate.actors.runtimes.ray.fork_server.imported import Imported, import_all
from tidegate.actors.runtimes.ray.fork_server.server import ForkServer, receive

WORKER = """\
import json, os, sys
import numpy
more = {}
if "with Ray" in sys.argv:
    import ray
    from tidegate.actors.runtimes.ray.fork_server.imported import ray_id, threads
    more = {"path": sys.path, "original": sys.orig_argv[1:], "ray": ray_id().hex(), "threads": threads()}
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "argv": sys.argv, "folder": os.getcwd(),
    "job": os.environ.get("RAY_JOB_ID"), "extra": os.environ.get("OMP_NUM_THREADS"), "name": __name__,
    "why_not": os.environ.get("_TIDEGATE_NOT_FORKED"), "settings": [n for n in os.environ if n.startswith("TIDEGATE_")],
    "random": numpy.random.random(), "modules": "tidegate.actors.runtimes.ray.task.worker_actor" in sys.modules,
} | more), flush=True)
sys.exit(3)
"""
SOCKET = "--raylet-name="
PATIENT = """
import importlib.util, sys
del sys.argv[0]
spec = importlib.util.spec_from_file_location("launch", sys.argv[0])
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
launch.PATIENCE_S = 240.0
launch.main()
"""
"""Runs the file as Python does, and waits as long as a busy machine may need to start the server."""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: that of a socket has about a hundred bytes at most."""
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        yield Path(folder).resolve()


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of Ray's on this node."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait()


def run(folder: Path, raylet: int | None, name: str, *more: str) -> dict[str, object]:
    """Start a worker as Ray does, and return what it prints; where the output goes tells when it has ended."""
    (folder / "worker.py").write_text(WORKER)
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_RAYLET_PID", "OMP_NUM_THREADS")}
    environment |= {"RAY_JOB_ID": "01"} | ({} if raylet is None else {"RAY_RAYLET_PID": str(raylet)})
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        PATIENT,
        launch.__file__,
        str(folder / "worker.py"),
        f"{SOCKET}{folder}/raylet",
        name,
        *more,
    ]
    # No pipe: the server would keep one open.
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as errors:
        started = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=errors)
        started.wait()
    until("what the worker prints", lambda: (folder / f"{name}.out").read_text().endswith("\n"))
    found: dict[str, object] = json.loads((folder / f"{name}.out").read_text())
    return found | {"launched": started.pid, "code": started.returncode}


@pytest.mark.slow
def test_workers_are_forked_with_what_is_theirs(tmp_path: Path, raylet: subprocess.Popen[bytes]) -> None:
    """Two workers have one parent and its imports, their own environment, arguments, output and random numbers.

    They find modules where others do, have as many threads, and draw ids of their own in Ray. No variable of theirs is
    taken for a setting. They are gone when they have ended, and the server is when its Ray is.
    """
    alone = run(tmp_path, None, "alone", "with Ray")
    first, second = (run(tmp_path, raylet.pid, name, "with Ray") for name in ("one", "two"))

    assert first["parent"] == second["parent"] != os.getpid()
    assert first["pid"] != first["launched"]
    for name, found in (("one", first), ("two", second)):
        assert found["code"] == 0
        assert (found["job"], found["extra"], found["name"]) == ("01", None, "__main__")
        assert found["argv"] == [str(tmp_path / "worker.py"), f"{SOCKET}{tmp_path}/raylet", name, "with Ray"]
        assert found["folder"] == str(tmp_path)
        assert found["modules"]
        assert found["settings"] == alone["settings"]
        assert found["original"] == found["argv"]
        assert (found["path"], found["threads"]) == (alone["path"], alone["threads"])
    assert first["random"] != second["random"]
    assert first["ray"] != second["ray"]
    until("the ends of workers", lambda: not any(os.path.exists(f"/proc/{w['pid']}") for w in (first, second)))
    parent = first["parent"]
    raylet.kill()
    until("the end of the server", lambda: not _runs(parent))


def _runs(process: object) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_without_a_server_the_worker_starts_as_ever(tmp_path: Path) -> None:
    """Where Ray does not say which of its processes is meant, the process that Ray has started becomes the worker."""
    found = run(tmp_path, None, "alone")
    assert (found["pid"], found["code"]) == (found["launched"], 3)
    assert "Ray does not say" in str(found["why_not"])


def test_in_an_executor_of_spark_the_worker_starts_as_ever(
    tmp_path: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark ends what descends from its executor, and YARN counts its memory: a forked process descends from nobody."""
    monkeypatch.setenv(launch.ON_SPARK, "1")
    found = run(tmp_path, raylet.pid, "alone")
    assert (found["pid"], found["code"]) == (found["launched"], 3)
    assert "executor of Spark" in str(found["why_not"])


def test_a_server_that_is_not_ready_has_workers_start_as_ever(
    tmp_path: Path, raylet: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at once why it does not fork: nobody waits for it, and no second server is started."""
    monkeypatch.chdir(tmp_path)
    folder = Path(launch.__file__).parents[5]
    kept = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment = kept | {"RAY_RAYLET_PID": str(raylet.pid), "RAY_JOB_ID": "01"}
    path = launch.socket_path([f"{SOCKET}{tmp_path}/raylet"], environment, str(folder))
    assert path is not None
    with _listening(path) as listening, _serving(listening, path, Imported("nothing is to be forked")):
        found = run(tmp_path, raylet.pid, "refused")
    assert (found["pid"], found["code"]) == (found["launched"], 3)
    assert found["why_not"] == "nothing is to be forked"
    assert "fork server: nothing is to be forked" in (tmp_path / "refused.err").read_text()


def test_nothing_is_forked_beside_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread holds would be held for ever in a child."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it has forked"))
    monkeypatch.setattr(server, "threads", lambda: 2)
    path = str(tmp_path / "socket")
    with _listening(path) as listening, _serving(listening, path, Imported()):
        client = launch.connected(path)
        assert client is not None
        with client:
            assert launch.not_forked(client, ["worker.py"]) == "the server has more than one thread"


def test_a_server_that_cannot_fork_says_so_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no more processes may be: its children would have nobody to reap them."""
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(errno.EAGAIN, "no more processes")))
    monkeypatch.setattr(server, "threads", lambda: 1)
    path = str(tmp_path / "socket")
    with _listening(path) as listening, _serving(listening, path, Imported()):
        for _ in range(2):
            client = launch.connected(path)
            assert client is not None
            with client:
                said = launch.not_forked(client, ["worker.py"])
            assert said == "the server cannot fork: [Errno 11] no more processes"


def test_a_server_ends_when_its_files_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has the code that is there when it starts: nothing is forked any more, and others start a new server."""
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it has forked"))
    module = tmp_path / "module.py"
    module.write_text("old = 1")
    monkeypatch.setattr(imported, "files", lambda: [str(module)])
    loaded, path = Imported(), str(tmp_path / "socket")
    assert not loaded.is_stale
    module.write_text("new = 11")
    with _listening(path) as listening, _serving(listening, path, loaded):
        client = launch.connected(path)
        assert client is not None
        until("the end of the server", lambda: not os.path.exists(path))
        with client:
            assert launch.not_forked(client, ["worker.py"]) == "the server has ended"


def test_a_server_whose_files_have_changed_reaps_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays until they are gone: who adopts orphans may reap none. Nobody can ask it for anything any more."""
    monkeypatch.setattr(server, "IDLE_S", 0.01)
    module = tmp_path / "module.py"
    module.write_text("old = 1")
    monkeypatch.setattr(imported, "files", lambda: [str(module)])
    path = str(tmp_path / "socket")
    with _listening(path) as listening, _serving(listening, path, Imported(), child=4711) as serving:
        module.write_text("new = 11")
        until("a server that nobody reaches", lambda: not os.path.exists(path))
        assert serving.is_alive
        serving.reaped(4711)
        until("the end of the server", lambda: not serving.is_alive)


def test_nothing_is_forked_whose_children_draw_the_same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks would make one placement group of Ray's in place of two."""
    ids = [b"1", b"2"]
    monkeypatch.setattr(imported, "threads", lambda: 1)
    monkeypatch.setattr(imported, "IMPORTED", ())
    monkeypatch.setattr(imported, "in_child", lambda action: ids.pop())
    folder = launch.package_folder()
    assert import_all(folder).why_not is None
    ids[:] = [b"1", b"1"]
    assert "the same ids" in str(import_all(folder).why_not)
    ids[:] = [b"", b""]
    assert "draws no ids" in str(import_all(folder).why_not)


def test_children_are_not_left_to_a_ray_that_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where processes without a parent go to Ray, it ends all that it has not started itself."""
    asked: list[str | None] = []

    class Server:
        def __init__(self, listening: socket.socket, path: str, imported: Imported, raylet: int) -> None:
            asked.append(imported.why_not)
            os.close(raylet)

        def serve(self) -> None:
            return None

    monkeypatch.setattr(server, "ForkServer", Server)
    monkeypatch.setattr(server, "import_all", lambda folder: Imported())
    monkeypatch.setattr(socket, "socket", lambda fileno: fileno)
    monkeypatch.setattr(sys, "argv", ["", "/socket", "/folder", "/scripts"])
    monkeypatch.setenv("RAY_RAYLET_PID", str(os.getpid()))
    for parent in (1, os.getpid()):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        monkeypatch.setattr(sys, "path", [*sys.path, "/folder"])
        server.main()
    assert asked[0] is None
    assert "belongs to Ray" in str(asked[1])


def _listening(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()
    return listening


class _serving:
    """A server in a thread, until its Ray is gone."""

    def __init__(self, listening: socket.socket, path: str, imported: Imported, child: int | None = None) -> None:
        self._here, there = os.pipe()
        self._there = there
        self._server = ForkServer(listening, path, imported, self._here)
        self._server._children.update([] if child is None else [child])
        self._thread = threading.Thread(target=self._server.serve)

    def __enter__(self) -> _serving:
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def reaped(self, child: int) -> None:
        """Its child has ended, as the signal says."""
        self._server._ended.append(child)

    def __exit__(self, *error: object) -> None:
        os.close(self._there)
        self._thread.join()
        os.close(self._here)


@pytest.fixture(autouse=True)
def _signals_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set handlers; a server is one."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (launch.LENGTH.pack(2**40), "bytes and 3 streams"),
        (launch.LENGTH.pack(10) + b"[]", "ends in the middle"),
        (launch.LENGTH.pack(2) + b"[]", "not enough values"),
        (b"\0", "no order"),
    ],
)
def test_what_is_no_order_is_refused(said: bytes, why: str) -> None:
    """Too long, cut off, of another shape: an error, and no descriptor is left open."""
    before = len(os.listdir("/proc/self/fd"))
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with here, there:
        streams = struct.pack("3i", 0, 1, 2)
        there.sendmsg([said[:8]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        there.sendall(said[8:])
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(ValueError, match=why):
            receive(here)
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_only_looks_keeps_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As others do that look for room, and ask it for nothing: it ends all the same."""
    monkeypatch.setattr(server, "IDLE_S", 0.05)
    path = str(tmp_path / "socket")
    with _listening(path) as listening, _serving(listening, path, Imported("it only waits")):
        for _ in range(20_000):
            if (client := launch.connected(path)) is None:
                return
            with client:
                client.shutdown(socket.SHUT_WR)
                client.recv(1)
    pytest.fail("it stays")
