"""What the fork server has imported, and whether a process with that may be forked: `server.py` asks before each fork.

Rules:

- It imports libraries and tidegate, and runs no code of any job: nothing can get from one job to another.
- A process is forked only while it has one thread: what another thread holds at that moment nobody would ever give
  back.
- Children must draw random numbers of their own. Ray's are drawn in C++, which does not notice a fork and cannot be
  seeded anew: so nothing may have drawn any before. Two children are tried.
- A file that has changed since it was imported ends it: workers have the code that is there when they start.
- The server's libraries start no threads while it imports them. A child gives those of linear algebra, and numexpr,
  back as many threads as they would have had.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from tidegate.actors.runtimes.ray.fork_server.launch import package_folder

IMPORTED = (
    "ray._private.workers.default_worker",
    "tidegate.actors.runtimes.ray.task.worker_actor",
    "tidegate.actors.runtimes.ray.coordinator.coordinator_actor",
)
ID_BYTES_MAX = 64
BLAS = "openblas"
BLAS_SETTERS = tuple(
    f"{name}_set_num_threads{suffix}" for name in ("openblas", "scipy_openblas") for suffix in ("", "64_")
)
BLAS_VARIABLES = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
"""With them users say how many threads linear algebra has."""
NUMEXPR_VARIABLES = ("NUMEXPR_NUM_THREADS", "OMP_NUM_THREADS")
NUMEXPR_THREADS_MAX = 16
"""As many as it takes by itself."""

log = logging.getLogger(__name__)


class Imported:
    """What is loaded now. `why_not`: why no worker may be forked from it, if that is so."""

    def __init__(self, why_not: str | None = None) -> None:
        self.why_not = why_not
        found = files() if why_not is None else []
        self._files = {path: version for path in found if (version := version_of(path)) is not None}

    @property
    def is_stale(self) -> bool:
        """Whether a file that has been imported is another one now."""
        for path, version in self._files.items():
            if version_of(path) != version:
                log.info("%s has changed since tidegate's fork server has imported it: the server ends", path)
                return True
        return False


def import_all(folder: str) -> Imported:
    """Load what processes of jobs need. `folder`: where tidegate must lie."""
    try:
        if (found := package_folder()) != folder:
            raise ImportError(f"tidegate is in {found}, not in {folder}")
        for name in IMPORTED:
            importlib.import_module(name)
        if find_spec("pandas") is not None:
            importlib.import_module("pandas")
        arrow: Any = importlib.import_module("pyarrow")
        arrow.array([])  # It looks for pandas now, once.
    except Exception as error:
        log.exception("tidegate's fork server cannot import what tasks need")
        return Imported(f"the server cannot import what tasks need: {type(error).__name__}: {error}")
    if (count := threads()) > 1:
        return Imported(f"the server has {count} threads, because something that it imports has started them")
    if (drawn := in_child(ray_id)) in (b"", in_child(ray_id)):
        return Imported("processes that are forked would draw the same ids" if drawn else "the server draws no ids")
    gc.collect()
    gc.freeze()
    return Imported()


def threads() -> int:
    """How many this process has, also those that Python knows nothing of."""
    return len(os.listdir("/proc/self/task"))


def ray_id() -> bytes:
    """An id of Ray's that is drawn in C++."""
    raylet: Any = importlib.import_module("ray._raylet")
    drawn: bytes = raylet.PlacementGroupID.of(raylet.JobID.from_int(1)).binary()
    return drawn


def in_child(action: Callable[[], bytes]) -> bytes:
    """What a child of this process gets; nothing, if it gets nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, action())
        finally:
            os._exit(0)
    os.close(write)
    try:
        return os.read(read, ID_BYTES_MAX)
    finally:
        os.close(read)
        os.waitpid(child, 0)


def files() -> list[str]:
    """Those of all modules, and Python's own."""
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return [sys.executable, *(path for path in named if isinstance(path, str))]


def version_of(path: str) -> tuple[int, int, int] | None:
    """What changes with a file; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def give_threads_back(environment: Mapping[str, str]) -> None:
    """In a child: libraries have as many threads as this environment says; if it says nothing, one a processor."""
    numexpr = sys.modules.get("numexpr")  # pandas imports it, where it is installed.
    if numexpr is not None and not any(environment.get(name) for name in NUMEXPR_VARIABLES):
        numexpr.set_num_threads(min(numexpr.detect_number_of_cores(), numexpr.MAX_THREADS, NUMEXPR_THREADS_MAX))
    if any(environment.get(name) for name in BLAS_VARIABLES):
        return
    for setter in _blas_setters():
        setter(len(os.sched_getaffinity(0)))


def _blas_setters() -> list[Callable[[int], object]]:
    with open("/proc/self/maps") as maps:
        loaded = {line.split(maxsplit=5)[-1].strip() for line in maps if BLAS in line}
    libraries = [ctypes.CDLL(path) for path in sorted(loaded)]
    return [getattr(library, name) for library in libraries for name in BLAS_SETTERS if hasattr(library, name)]
