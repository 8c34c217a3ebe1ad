"""Connects a driver to a running Ray cluster, filters the output of Ray in the driver, and ends the driver at SIGTERM.

This module imports Ray only when it connects, because the environment decides before the import whether Ray sends a
token. Rules:

- The address is the argument, else `RAY_ADDRESS`, else the only cluster on this machine whose processes belong to this
  user. If there are several, `connect` raises an error instead of guessing.
- A process has one connection, and keeps it. `connect` then accepts the address of the same cluster and refuses the
  address of another cluster.
- Ray would retry a dead address for minutes. So the head is probed first (`authentication.py`).
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tidegate.actors.ray.authentication import (
    PATH_VARIABLE,
    TOKEN_VARIABLE,
    close_token_file,
    default_token_path,
    probe,
    refuse_ray_client,
    switch_on_token,
    token_that_is_sent,
)
from tidegate.storage.errors import ConfigurationError

_ADDRESS = "RAY_ADDRESS"
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"
_FLAG = "--gcs-address="
_FIND, _START_ONE = "auto", "local"


@dataclass(frozen=True, slots=True)
class Connection:
    """The connection of this process to Ray. `owned`: this module opened it, so `close` ends it."""

    address: str | None
    owned: bool

    def close(self) -> None:
        """Disconnects from Ray if this module connected. The cluster keeps running."""
        if self.owned:
            import ray

            ray.shutdown()


def connect(
    address: str | None = None, show_log: bool = False, runtime_env: Mapping[str, Any] | None = None
) -> Connection:
    """Connects this process to a Ray cluster, unless it is connected already.

    `show_log`: print tidegate's log lines of every level that Ray shows in the driver. `runtime_env`: the runtime
    environment of all processes that Ray starts for this driver, as in `ray.init`. Raises ConfigurationError if no
    cluster answers, if another cluster or a cluster with another token answers, if Ray rejects `runtime_env`, or if
    `runtime_env` is given to a process that is connected already.
    """
    if runtime_env is not None and not isinstance(runtime_env, Mapping):
        raise ConfigurationError(
            f"runtime_env={runtime_env!r} is not a mapping; give one such as {{'env_vars': {{'A': 'b'}}}}"
        )
    with clean_end_at_sigterm():
        return _connect(address, show_log, dict(runtime_env or {}))


def _connect(address: str | None, show_log: bool, runtime_env: dict[str, Any]) -> Connection:
    if "ray" in sys.modules:
        import ray

        refuse_ray_client(address)
        if ray.is_initialized():
            close_token_file(os.environ)
            check_same_cluster(address)
            if runtime_env:
                raise ConfigurationError(
                    "runtime_env has no effect: this process is connected to Ray already. Give it to ray.init, or do "
                    "not call ray.init, and close the environment that has connected this process"
                )
            filter_worker_output(show_log)
            return Connection(None, False)
    where = address or os.environ.get(_ADDRESS) or _FIND
    if where == _FIND:
        where = cluster_of_this_user()
    prepare_connection(where)
    import ray
    from ray.exceptions import RayError

    from tidegate.actors.ray.actor_calls import NAMESPACE

    check_runtime_env(runtime_env)
    filter_worker_output(show_log)
    try:
        ray.init(
            address=where,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env=runtime_env or None,
        )
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"cannot connect to Ray at {where}: {' '.join(str(error).split())[:500]}. Check that it runs, and that "
            f"this user has its token ({TOKEN_VARIABLE}, {PATH_VARIABLE} or {default_token_path()})"
        ) from error
    return Connection(where, True)


def check_runtime_env(runtime_env: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for a runtime environment that Ray rejects, or that has a field unknown to Ray.

    Ray itself only warns about unknown fields, because plugins may define them.
    """
    from ray.runtime_env import RuntimeEnv

    unknown = sorted(map(str, set(runtime_env) - set(RuntimeEnv.known_fields)))
    if unknown and _PLUGINS not in os.environ:
        known = ", ".join(sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_")))
        raise ConfigurationError(f"runtime_env: Ray has no field {', '.join(unknown)}; give one of {known}")
    try:
        RuntimeEnv(**runtime_env)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"runtime_env: {error}; correct that field") from error


def prepare_connection(address: str) -> None:
    """Decides whether Ray sends a token to the head at `address`, and checks that the head accepts it.

    Raises ConfigurationError if no head answers within seconds, or if the head requires another token.
    """
    refuse_ray_client(address)
    if address == _START_ONE:
        return
    probe(address)
    switch_on_token(os.environ, address)
    token = token_that_is_sent(os.environ)
    if probe(address, token).answer == "asks for a token":
        which = "a token, and this user has none" if token is None else "another token than this user's"
        raise ConfigurationError(
            f"cannot connect to Ray at {address}: it requires {which} ({TOKEN_VARIABLE}, {PATH_VARIABLE} or "
            f"{default_token_path()})"
            "; set one of them"
        )


def check_same_cluster(address: str | None) -> None:
    """Raises ConfigurationError if `address` belongs to another cluster than the connected one. An `address` of None is
    accepted.
    """
    import ray

    own = ray.get_runtime_context().gcs_address
    if address is None or address in (own, _FIND):
        return
    token = token_that_is_sent(os.environ)
    given, connected = probe(address, token), probe(own, token)
    if not given.cluster or given.cluster != connected.cluster:
        raise ConfigurationError(
            f"address {address!r} is not an address of the Ray cluster at {own}, to which this process is connected: "
            "remove the address, or call ray.shutdown first"
        )


def cluster_of_this_user(processes: Path = Path("/proc")) -> str:
    """Returns the address of this user's Ray cluster on this machine. Raises ConfigurationError if there is none, or
    several.
    """
    found = set()
    for folder in processes.glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            own = folder.stat().st_uid == os.geteuid()
        except OSError:
            continue  # The process has ended meanwhile, or this user may not read it.
        if own and words[0].endswith("raylet"):
            found |= {word.removeprefix(_FLAG) for word in words if word.startswith(_FLAG)}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ConfigurationError(
            f"several Ray clusters of this user run on this machine ({', '.join(sorted(found))}): choose one by "
            f"--address or {_ADDRESS}"
        )
    raise ConfigurationError(
        f"no Ray cluster of this user runs on this machine: name one by --address host:port or {_ADDRESS}"
    )


# --- the end at SIGTERM -----------------------------------------------------------------------------------------------
#
# While a process connects, Ray replaces the handler of SIGTERM by its own, which prints a stack of addresses and aborts
# the process if it has not ended 3 s later. Jobs may take longer to be cancelled. So a handler that the program had set
# before is restored. Without one, SIGTERM raises SystemExit in the main thread, as `sys.exit(143)` does: environments
# close and cancel their jobs. Python sets handlers only on the main thread.

EXIT_CODE = 128 + signal.SIGTERM
_OF_RAY = "ray._private.worker"


@contextmanager
def clean_end_at_sigterm() -> Iterator[None]:
    """Context in which connecting to Ray does not disable the handler that ends this process cleanly at SIGTERM.

    Ray replaces the handler when it connects, so it is set again after the block.
    """
    before: Any = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before if _is_of_the_program(before) else _end)


def _is_of_the_program(handler: Any) -> bool:
    if handler is signal.SIG_IGN:
        return True
    return callable(handler) and getattr(handler, "__module__", None) != _OF_RAY


class _LastExitFunction:
    """An exit function that runs the other exit functions, and then ends the process with `EXIT_CODE`.

    Ray turns a SystemExit that reaches it in a call into a SystemExit with exit code 1, so this function sets the code.
    It ends the process before Ray's native code is unloaded, which may crash. Exit functions run in the reverse order
    of their registration, so this one runs first.
    """

    def __init__(self) -> None:
        self._runs = False

    def __call__(self) -> None:
        if self._runs:
            return  # Called again, as one of the other exit functions.
        self._runs = True
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # It may be closed.
                stream.flush()
        os._exit(EXIT_CODE)


_leave = _LastExitFunction()


def _end(number: int, frame: FrameType | None) -> None:
    atexit.unregister(_leave)
    atexit.register(_leave)
    sys.exit(EXIT_CODE)


# --- what Ray prints in the driver ------------------------------------------------------------------------------------
#
# Ray prints there all that its processes print: the output of users' functions and errors, but also notices of Java and
# of Ray itself, and each line of a coordinator's log. This filter drops whole lines only: the notices below, two
# warnings of Ray, and lines of tidegate's own log below WARNING unless `show_log` is set. Ray's log files keep all
# lines.

_STAMP = r"\d\d/\d\d/\d\d \d\d:\d\d:\d\d "
_NATIVE_STAMP = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ I \d+ \d+\] "

_NOTICES = re.compile(
    "|".join(
        (
            # Our own doing: RayDP's JVMs need the options, and the launcher always mentions them.
            r"NOTE: Picked up JDK_JAVA_OPTIONS: .*",
            # On a machine whose name resolves to the loopback address. The session sets Spark's address itself.
            _STAMP + r"WARN Utils: Your hostname, .* resolves to a loopback address: .*",
            _STAMP + r"WARN Utils: Set SPARK_LOCAL_IP if you need to bind to another address",
            # Without its native library Hadoop uses slower Java classes.
            _STAMP + r"WARN NativeCodeLoader: Unable to load native-hadoop library for your platform\.\.\. .*",
            # RayDP names a log4j file that does not exist, so Spark uses its defaults and logs this.
            r"ERROR StatusConsoleListener Reconfiguration failed: No configuration found for .*",
            r'Setting default log level to "WARN"\.',
            r"To adjust logging level use sc\.setLogLevel\(newLevel\)\. .*",
            # Ray's native code logs this at INFO, before its log level is set.
            _NATIVE_STAMP + r"gcs_client\.cc:\d+: GcsClient has no Cluster ID set, and won't fetch from GCS\.",
        )
    )
)
_NAME = "tidegate_filter"
_QUIET = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO) tidegate\..*")
_WARNINGS_OF_RAY = re.compile(
    r"Task (\S*\b)?WorkerProcess\.(frame|credit)\b.* failed\. There are infinite retries remaining, .*"
    r"|WARNING: \d+ \w+ worker processes have been started on node: .*",
    re.DOTALL,
)


def is_notice(line: str) -> bool:
    """Returns whether an output line of Ray (without its line end) is one of the known notices that are not shown."""
    return _NOTICES.fullmatch(line) is not None


def is_dropped(line: str, show_log: bool) -> bool:
    """Returns whether the filter drops a line of a process. `show_log`: keep tidegate's own lines at every level."""
    return (
        is_notice(line)
        or _WARNINGS_OF_RAY.fullmatch(line) is not None
        or (not show_log and _QUIET.fullmatch(line) is not None)
    )


def filter_worker_output(show_log: bool) -> None:
    """Filters the output of Ray's processes that Ray prints in this process from now on. A second call replaces the
    first.

    `show_log`: keep tidegate's own log lines at every level.
    """
    # Ray has no public function for this.
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def drop(batch: dict[str, Any]) -> None:
        batch["lines"] = [line for line in batch["lines"] if not is_dropped(line, show_log)]

    dispatcher.remove_handler(_NAME)
    first: tuple[str, Callable[[dict[str, Any]], None]] = (_NAME, drop)
    with dispatcher._lock:
        dispatcher.handlers = [first, *dispatcher.handlers]
    _filter_errors(drop)


def _filter_errors(drop: Callable[[dict[str, Any]], None]) -> None:
    """Filters the error messages that Ray prints without using its log handlers."""
    from ray._private import worker

    ray: Any = worker
    show = getattr(ray.print_to_stdstream, "unfiltered", ray.print_to_stdstream)

    def show_filtered(batch: dict[str, Any], ignore_prefix: bool) -> None:
        drop(batch)
        if batch["lines"]:
            show(batch, ignore_prefix)

    show_filtered.unfiltered = show  # type: ignore[attr-defined]
    ray.print_to_stdstream = show_filtered
