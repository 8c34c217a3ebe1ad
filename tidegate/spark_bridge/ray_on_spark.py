"""`RayOnSparkSession`: Ray inside the executors of an existing Spark cluster. Task slots use cores of the executors.

It starts Ray with `ray.util.spark`: the head next to Spark's driver, and one node in each executor, as a child process
of a Spark task that never ends. Rules:

* The Spark session belongs to the caller, and continues when this session stops. Ray is started here, and ends here.
* A cluster in which Ray cannot run is refused before anything starts (`executors.py`).
* If an executor is lost, its Ray node is lost, too. Ray requests another node from Spark, wherever there are free
  cores.
* Start and stop have a time limit. If a start fails, its earlier steps are undone. `stop` returns when the processes on
  this machine have ended.
* Without Spark's driver, or without any executor for longer than `spark.tidegate.executorTimeout`, no slot is left, and
  none will follow. `SparkGuard` then fails the job with this reason. If a single executor is lost, the job only
  restarts.

The token, which driver, head and nodes share:

* The token of this user is used (`RAY_AUTH_TOKEN`, the file `RAY_AUTH_TOKEN_PATH`, or `~/.ray/auth_token`). Without
  one, a token is generated for this cluster alone, and never written to a file. If `RAY_AUTH_MODE` switches tokens
  off, there is none.
* It is in the environment of this process while the cluster runs, because Ray reads it there. `StartHook` passes it to
  the nodes, together with a `PATH` that contains `ray`: Ray on Spark starts the head from this process, but the nodes
  from Python workers of Spark, which do not inherit the environment of this process. A hook that was set before, or
  Ray's own hook for Databricks, is called first.

The head: names in Ray's module are replaced while a cluster starts, because Ray has no settings for this. The Spark
tasks of the nodes do not use any of them, because Spark pickles these tasks. A version of Ray without such
a name is not changed.

* Ray always waits 20 s for the head, and then the head must answer. Here the session waits until the head answers, has
  ended, or the time limit of the caller has passed: less on an idle machine, long enough on a busy one. Nodes may take
  as long.
* The output of the head is written to a file in its folder. If the head ends, the error contains its last lines.
* The dashboard listens on the address of the driver, not on all addresses.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import HTTPServer
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import ray.util.spark
from pyspark import SparkContext
from pyspark.sql import SparkSession
from ray._private import ray_constants
from ray.util.placement_group import PlacementGroup
from ray.util.spark import cluster_init, utils

from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.authentication import is_on_spark, token_of_this_user
from tidegate.actors.ray.connection import clean_end_at_sigterm, filter_worker_output
from tidegate.actors.ray.reservation import SlotRequest, ask_for, await_room
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.protocol.failures import bounded_text
from tidegate.spark_bridge.errors import SparkBridgeError, SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.executors import (
    IN_EXECUTOR,
    NodePlan,
    await_executors,
    here,
    look_at_hosts,
    refuse_master,
    refuse_scarce,
    refuse_unfit,
)
from tidegate.spark_bridge.spark_calls import LOOK_S, SparkWatch, call_bounded, driver_gone
from tidegate.spark_bridge.worker_python import refuse_unfit_workers
from tidegate.storage.errors import ConfigurationError

logger = logging.getLogger(__name__)

HEAD_STORE_BYTES = 256 * 2**20
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_ADDRESS = "RAY_ADDRESS"
_CONTACT = "AUTOSCALER_HEARTBEAT_TIMEOUT_S"
"""Seconds after which Ray's head removes a node that does not answer.

The default of 30 s is too short on a busy machine.
"""
_OURS = ("max_worker_nodes", "min_worker_nodes", "num_cpus_worker_node", "object_store_memory_worker_node")


class RayOnSparkSession:
    """Ray in Spark's executors. `start` starts it; `stop`, or the end of a `with` block, stops it."""

    def __init__(self, spark: SparkSession, plan: NodePlan) -> None:
        """Called by `start`, which users call instead."""
        self._spark = spark
        self._plan = plan
        self._placement_group: PlacementGroup | None = None
        self._dashboard_url: str | None = None
        self._settings = ExitStack()
        """Environment variables that are set in this process while the cluster runs."""
        self._stopped = threading.Event()

    @classmethod
    def start(
        cls,
        spark: SparkSession,
        *,
        executors: int | None = None,
        slots_per_executor: int | None = None,
        object_store_bytes: int | None = None,
        ray_options: Mapping[str, Any] | None = None,
        cluster_options: Mapping[str, Any] | None = None,
        include_dashboard: bool = True,
        show_log: bool = False,
        start_timeout_s: float = 180.0,
    ) -> RayOnSparkSession:
        """Starts Ray in `executors` of the executors of `spark`, with `slots_per_executor` task slots in each.

        `object_store_bytes` is the size of each node's object store; None for Ray's default. `ray_options` are passed
        to `ray.init`, and `cluster_options` to `ray.util.spark.setup_ray_cluster`. `show_log` shows the log of
        tidegate's processes here, at every level. Each step (executors, their check, head, each node, reservation) may
        take `start_timeout_s` seconds.

        Raises ConfigurationError for an unsuitable cluster, SparkTimeoutError and SparkLostError if Spark does not
        answer, and SparkBridgeError if Ray does not start.
        """
        taken = [name for name in _OURS if name in (cluster_options or {})]
        if taken:
            raise ConfigurationError(
                f"on_spark: {taken[0]} in cluster_options is set by executors=, slots_per_executor= and "
                "object_store_memory=; remove it"
            )
        _refuse(spark)
        context = spark.sparkContext
        task_cpus = int(context.getConf().get("spark.task.cpus", "1") or 1)
        found = await_executors(context, executors, start_timeout_s)
        plan = NodePlan.of(found, executors, slots_per_executor, task_cpus)
        driver = here()
        hosts = look_at_hosts(spark, found, start_timeout_s)
        refuse_unfit(driver, hosts)
        refuse_scarce(plan, found, hosts, object_store_bytes)
        session = cls(spark, plan)
        atexit.register(session.stop)
        options = {
            "max_worker_nodes": plan.nodes,
            "num_cpus_worker_node": plan.slots_per_node,
            "num_gpus_worker_node": 0,
            "object_store_memory_worker_node": object_store_bytes,
            "object_store_memory_head_node": HEAD_STORE_BYTES,
            **(cluster_options or {}),
        }
        options["head_node_options"] = {
            "include_dashboard": include_dashboard,
            "disable_usage_stats": None,
            **options.get("head_node_options", {}),
        }
        of_nodes = options.get("worker_node_options", {})
        resources = {**of_nodes.get("resources", {}), IN_EXECUTOR: 1}
        options["worker_node_options"] = {**of_nodes, "resources": resources}
        try:
            session._start_nodes(options, hosts[0].path, start_timeout_s)
            with clean_end_at_sigterm():
                session._connect(dict(ray_options or {}))
            filter_worker_output(show_log)
            session._reserve(start_timeout_s)
        except BaseException:
            session.stop()
            raise
        return session

    @property
    def spark(self) -> SparkSession:
        """Returns the Spark session of the caller."""
        return self._spark

    @property
    def placement_group(self) -> PlacementGroup:
        """Returns the placement group that reserves all slots. Raises SparkBridgeError after `stop`."""
        if self._placement_group is None:
            raise SparkBridgeError("Ray in the executors of Spark is stopped; make a new environment")
        return self._placement_group

    @property
    def dashboard_url(self) -> str | None:
        """Returns the URL of Ray's dashboard, or None if there is none."""
        return self._dashboard_url

    @property
    def nodes(self) -> int:
        """Returns the number of executors with a Ray node."""
        return self._plan.nodes

    @property
    def slots(self) -> int:
        """Returns the number of task slots of all nodes. Each is one CPU of its bundle."""
        return self._plan.slots

    def guard(self) -> SparkGuard:
        """Returns the driver service that fails a job when Spark is lost."""
        return SparkGuard(self._spark.sparkContext)

    def bundle_of_slot(self, slot: int) -> int:
        """Returns the index of the bundle of a slot (from 0). Consecutive slots are in different bundles."""
        return self._plan.bundle_of_slot(slot)

    def __enter__(self) -> RayOnSparkSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends Ray in the driver and in the executors, within a time limit.

        Spark continues. A second call has no effect.
        """
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        self._placement_group = None
        # Ray has no public API for its cluster.
        cluster: Any = cluster_init._active_ray_cluster
        # Ray warns about each node that ends, also when it ends the nodes itself.
        notices = logging.getLogger("ray.autoscaler._private.spark.spark_job_server")
        try:
            notices.disabled = True
            _attempt("disconnecting from Ray", ray.shutdown)
            if cluster is not None:
                gone = driver_gone(self._spark.sparkContext) is not None
                if gone or not _attempt("ending Ray's nodes", ray.util.spark.shutdown_ray_cluster):
                    # Ray's shutdown requests the end of jobs from Spark first, and fails there if Spark is gone.
                    cluster_init._active_ray_cluster = None
                    _attempt("ending Ray's requests to Spark", lambda: HTTPServer.shutdown(cluster.spark_job_server))
                    cluster.head_proc.terminate()
                cluster.spark_job_server.server_close()
                _await_end(cluster.head_proc, cluster.temp_dir)
        finally:
            notices.disabled = False
            self._settings.close()

    def _start_nodes(self, options: dict[str, Any], path: str, timeout_s: float) -> None:
        before = os.environ.get(_ADDRESS)
        self._settings.callback(_restore, _ADDRESS, before)
        token = self._settings.enter_context(token_of_cluster(os.environ))
        self._settings.enter_context(
            nodes_get({**environment_of_nodes(token, path, os.environ), _CONTACT: str(round(timeout_s))})
        )
        if SparkSession.getActiveSession() is None:
            # Ray requests the active session of this thread. Making a DataFrame activates the session.
            self._spark.createDataFrame([(1,)], "x int")
        host = socket.gethostbyname(str(self._spark.conf.get("spark.driver.host")))
        try:
            with head_waited_for(host, timeout_s):
                ray.util.spark.setup_ray_cluster(**options)
        except (RuntimeError, ValueError, OSError) as error:
            if gone := driver_gone(self._spark.sparkContext):
                raise SparkLostError(f"Ray did not start in Spark's executors: {gone}") from error
            cause = error.__cause__ or error
            raise SparkBridgeError(
                f"Ray did not start in Spark's executors: {bounded_text(' '.join(str(cause).split()))}. Check that "
                "they have enough free cores and memory, and read their logs"
            ) from error

        # Ray's head requests nodes from Spark all the time. Once Spark is gone, each request would print its failure.
        cluster: Any = cluster_init._active_ray_cluster
        cluster.spark_job_server.handle_error = _request_failed

    def _connect(self, options: dict[str, Any]) -> None:
        settings = {"namespace": NAMESPACE, "logging_level": logging.WARNING, **options}
        context = ray.init(address=os.environ[_ADDRESS], **settings)
        self._dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else None
        alive = [node for node in ray.nodes() if node["Alive"] and IN_EXECUTOR in node["Resources"]]
        if len(alive) < self._plan.nodes:
            raise SparkTimeoutError(
                f"{len(alive)} of {self._plan.nodes} Ray nodes have started in Spark's executors. The remaining nodes "
                f"found fewer than {self._plan.slots_per_node} free core(s). End other Spark jobs, or lower executors="
            )

    def _reserve(self, timeout_s: float) -> None:
        labels = ["the task slots in a Spark executor"] * self._plan.nodes
        wanted = SlotRequest(f"{self._spark.sparkContext.appName} (slots)", self._plan.bundles(), labels, "SPREAD")
        self._placement_group = ask_for(wanted)
        missing = await_room(self._placement_group, wanted, timeout_s)
        if missing is not None:
            raise SparkTimeoutError(f"{wanted.name}: {missing}. Check that all executors of Spark are alive")


def _refuse(spark: SparkSession) -> None:
    """Raises ConfigurationError if Ray cannot be started for this session."""
    # Through Spark Connect there is no context here, nor executors that this process could reach.
    if not isinstance(spark, SparkSession):
        raise ConfigurationError(
            f"on_spark: give the SparkSession of this process, which runs Spark's driver, not {type(spark).__module__}."
            f"{type(spark).__name__}"
        )
    context = spark.sparkContext
    if gone := driver_gone(context):
        raise ConfigurationError(f"on_spark: {gone}; make a new SparkSession")
    dynamic = str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).strip().lower() == "true"
    if is_on_spark():
        raise ConfigurationError(
            "on_spark: Ray runs in the executors of this Spark already, and there is one cluster a process. Close that "
            "environment first (or ray.util.spark.shutdown_ray_cluster())"
        )
    if ray.is_initialized():
        raise ConfigurationError(
            "on_spark: this process is connected to Ray already, and a process has one connection. Call ray.shutdown() "
            "first, or close the environment that has connected it"
        )
    refuse_master(str(context.master), dynamic)
    refuse_unfit_workers(spark, "on_spark")


def _request_failed(request: object, address: object) -> None:
    logger.debug("a request of Ray to Spark from %s failed", address, exc_info=True)


def _await_end(head: subprocess.Popen[Any], folder: str) -> None:
    """Waits until Ray's head process has ended and its folder of temporary files is deleted.

    The last Ray node on this machine deletes the folder.
    """
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    while head.poll() is None or os.path.exists(folder):
        if time.monotonic() > deadline:
            logger.warning("Ray's nodes on this machine (folder %s) have not ended in %g s", folder, _STOP_TIMEOUT_S)
            return
        time.sleep(_POLL_S)
    lock = f"{folder}.lock"
    if os.path.exists(lock):
        os.remove(lock)


def _attempt(what: str, call: Callable[[], object]) -> bool:
    """Runs one step of `stop`. If it fails or exceeds its time limit, logs that and returns False."""
    try:
        call_bounded(call, timeout_s=_STOP_TIMEOUT_S, what=what, advice="Its cluster seems to be dead.")
    except Exception as error:  # noqa: BLE001 - the remaining steps of the stop must still run
        logger.warning("Ray on Spark: %s failed: %s", what, error)
        return False
    return True


def _restore(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


LEAVE_S = 10.0


class SparkGuard(DriverService):
    """Fails one job when Spark is lost."""

    def __init__(self, context: SparkContext) -> None:
        super().__init__("the watch over Spark", LEAVE_S)
        self._context = context

    def start(self, fail: Callable[[str], None]) -> None:
        """Starts the thread that checks Spark."""
        self._begin("tidegate guards a job", lambda: self._look(fail))

    def job_ended(self, status: str) -> None:
        """Stops the thread that checks Spark, because the job has ended."""
        self.stop()

    @property
    def complete(self) -> bool:
        """Always True, because the guard does not delay the end of a job."""
        return True

    def _look(self, fail: Callable[[str], None]) -> None:
        watch = SparkWatch(self._context, needs_executors=True)
        try:
            watch.begin()
            while not self._stopping.wait(LOOK_S):
                if reason := watch.over():
                    raise SparkLostError(reason)
        except SparkLostError as error:
            if not self.stopping:
                fail(
                    f"its tasks run in executors of Spark, and Spark is lost: {error}. Its checkpoints stay. Close the "
                    'environment, and execute the job in a new one with restore="latest"'
                )
        finally:
            watch.close()


_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_TOKEN_BYTES = 32


def token_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables for processes of the cluster: Ray's token, or only the token mode if tokens are
    switched off.
    """
    mode = environ.get(_MODE, "").strip().lower()
    if mode and mode != "token":
        return {_MODE: mode}
    return {_MODE: "token", _TOKEN: token_of_this_user(environ) or secrets.token_hex(_TOKEN_BYTES)}


@contextmanager
def token_of_cluster(environ: MutableMapping[str, str]) -> Iterator[dict[str, str]]:
    """Sets the token of the cluster in this process during the block. Yields the variables for other processes."""
    settings = token_settings(environ)
    before = {name: environ.get(name) for name in settings}
    environ.update(settings)
    _read_again()
    try:
        yield settings
    finally:
        for name, value in before.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        _read_again()


def environment_of_nodes(token: Mapping[str, str], path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of every Ray node: the token of the cluster, and `PATH`.

    `path`: the folders in which executors find the command `ray`. They are last in `PATH`, so that the head uses its
    own.
    """
    own = [os.path.dirname(sys.executable), environ.get("PATH", "")]
    return {**token, "PATH": os.pathsep.join(entry for entry in (*own, path) if entry)}


def _read_again() -> None:
    """Makes Ray read the token mode and the token again, with private functions of Ray."""
    if "ray" in sys.modules:
        raylet: Any = import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


VARIABLE = "RAY_ON_SPARK_START_HOOK"


@dataclass(slots=True)
class _Given:
    """The environment variables that the start hook adds for nodes, and the name of the hook that was set before."""

    environment: Mapping[str, str]
    before: str | None


_given: list[_Given] = []


class StartHook:
    """The start hook of Ray on Spark for the session that is starting or running. Ray creates an instance whenever it
    needs one.
    """

    def __init__(self) -> None:
        self._given = _given[-1]
        self._inner = _inner(self._given.before)

    def custom_environment_variables(self) -> dict[str, str]:
        """Returns the variables of the previous hook together with the added ones."""
        return {**self._inner.custom_environment_variables(), **self._given.environment}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def nodes_get(environment: Mapping[str, str]) -> Iterator[None]:
    """Returns a context in which nodes that Ray on Spark starts get these environment variables."""
    before = os.environ.get(VARIABLE)
    _given.append(_Given(dict(environment), before))
    os.environ[VARIABLE] = f"{StartHook.__module__}.{StartHook.__qualname__}"
    try:
        yield
    finally:
        _given.pop()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _inner(before: str | None) -> Any:
    from ray._common.utils import load_class
    from ray.util.spark.databricks_hook import DefaultDatabricksRayOnSparkStartHook
    from ray.util.spark.start_hook_base import RayOnSparkStartHook
    from ray.util.spark.utils import is_in_databricks_runtime

    if before is not None:
        made: Any = load_class(before)
        return made()
    kind: Any = DefaultDatabricksRayOnSparkStartHook if is_in_databricks_runtime() else RayOnSparkStartHook
    return kind(False)


_LINES_MAX = 100
_FOLDER = "--temp-dir="
_LOGGERS = ("ray.util.spark", "ray._private.worker")


@contextmanager
def head_waited_for(dashboard_host: str, timeout_s: float) -> Iterator[None]:
    """Returns a context in which `setup_ray_cluster` waits for the head node in the way that the module's docstring
    describes, and logs only errors.
    """
    start = _HeadStart(timeout_s, utils.is_port_in_use)
    with ExitStack() as stack:
        for owner, name, value in (
            (cluster_init, "_RAY_HEAD_STARTUP_TIMEOUT", 0),
            (cluster_init, "_RAY_CONNECT_CLUSTER_POLL_PROGRESS_TIMEOUT", timeout_s),
            (cluster_init, "_start_ray_head_node", start.begin),
            (cluster_init, "is_port_in_use", start.is_port_in_use),
            (cluster_init, "get_all_interfaces_ip", lambda: dashboard_host),
            (ray_constants, "RAY_LOG_TO_DRIVER", False),
        ):
            stack.enter_context(_replaced(owner, name, value))
        for logger in map(logging.getLogger, _LOGGERS):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


class _HeadStart:
    """One start of Ray's head: its process, and the file with its output."""

    def __init__(self, timeout_s: float, answers: Callable[[str, int], bool]) -> None:
        self._answers = answers
        self._deadline = time.monotonic() + timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def begin(
        self, command: Sequence[str], synchronous: bool, extra_env: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], _Tail]:
        """Starts the head process, with its output in a file.

        Replaces a function of Ray. Ctrl-C does not reach the process.
        """
        assert not synchronous, "Ray does not wait for the end of its head"
        folder = next(word.removeprefix(_FOLDER) for word in command if word.startswith(_FOLDER))
        printed = Path(folder) / "head.out"
        with printed.open("wb") as output:
            self._process = subprocess.Popen(
                command, env={**os.environ, **extra_env}, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
        return self._process, _Tail(printed)

    def is_port_in_use(self, host: str, port: int) -> bool:
        """Returns whether a port is in use. Replaces a function of Ray.

        After the head was started, it first waits until the head uses the port.
        """
        while not self._answers(host, port):
            if self._process is None or self._process.poll() is not None or time.monotonic() > self._deadline:
                return False
            time.sleep(_POLL_S)
        return True


class _Tail:
    """The last lines of a file, for the text of Ray's error."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        if self._path.exists():
            yield from self._path.read_text(errors="replace").splitlines(keepends=True)[-_LINES_MAX:]


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    if not hasattr(owner, name):
        yield
        return
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
