"""`RayOnSparkSession`: Ray inside the executors of a Spark cluster that exists. Task slots live beside the executors.

It starts Ray by `ray.util.spark`: the head beside Spark's driver, and a node in each executor, as a child of a Spark
task that never ends. Rules:
* The Spark session is the caller's, and goes on when this one stops. Ray is started here, and ends here.
* What cannot work is refused before anything starts (`executors.py`, `executor_probe.py`).
* All processes of Ray have one token (`ray_token.py`).
* An executor that is lost takes its node of Ray along. Ray asks Spark for another one, wherever there are cores.
* Start and stop are bounded in time. A start that fails half-way is undone. `stop` returns when the processes on this
  machine have ended.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http.server import HTTPServer
from types import TracebackType
from typing import Any

import ray
import ray.util.spark
from pyspark.sql import SparkSession
from ray.util.placement_group import PlacementGroup
from ray.util.spark import cluster_init

from tidegate.actors.ray.driver.driver_signals import clean_end_at_sigterm
from tidegate.actors.ray.driver.worker_output import filter_worker_output
from tidegate.actors.ray.process.calls import NAMESPACE
from tidegate.actors.ray.slots.reservation import ask_for, await_room
from tidegate.actors.ray.slots.wanted import Wanted
from tidegate.actors.ray.token_check import is_on_spark
from tidegate.protocol.failure_reasons import bounded_text
from tidegate.spark_bridge.bounded_calls import call_bounded
from tidegate.spark_bridge.errors import SparkBridgeError, SparkLostError, SparkTimeoutError
from tidegate.spark_bridge.ray_in_spark.executor_probe import here, look_at_hosts, refuse_scarce, refuse_unfit
from tidegate.spark_bridge.ray_in_spark.executors import IN_EXECUTOR, NodePlan, await_executors, refuse_master
from tidegate.spark_bridge.ray_in_spark.head_node import head_waited_for
from tidegate.spark_bridge.ray_in_spark.ray_token import environment_of_nodes, token_of_cluster
from tidegate.spark_bridge.ray_in_spark.spark_guard import SparkGuard
from tidegate.spark_bridge.ray_in_spark.start_hook import nodes_get
from tidegate.spark_bridge.spark_watch import driver_gone
from tidegate.spark_bridge.worker_python import refuse_unfit_workers
from tidegate.storage.errors import ConfigurationError

logger = logging.getLogger(__name__)

HEAD_STORE_BYTES = 256 * 2**20
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_ADDRESS = "RAY_ADDRESS"
_CONTACT = "AUTOSCALER_HEARTBEAT_TIMEOUT_S"
"""After that time Ray's head ends a node that it has not heard of. Its own 30 s are too little on a busy machine."""
_OURS = ("max_worker_nodes", "min_worker_nodes", "num_cpus_worker_node", "object_store_memory_worker_node")


class RayOnSparkSession:
    """Ray in Spark's executors. `start` starts it; `stop`, or the end of a `with` block, stops it."""

    def __init__(self, spark: SparkSession, plan: NodePlan) -> None:
        """Use `start`."""
        self._spark = spark
        self._plan = plan
        self._placement_group: PlacementGroup | None = None
        self._dashboard_url: str | None = None
        self._settings = ExitStack()
        """What this process has as long as the cluster lives."""
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
        """Start Ray in `executors` of the executors of `spark`, with so many task slots in each.

        `object_store_bytes` is the size of each node's object store; None: what Ray thinks fit. `ray_options` are those
        of `ray.init`, and `cluster_options` those of `ray.util.spark.setup_ray_cluster`. `show_log`: the lines of
        tidegate's processes are shown here, whatever their level. Each of the steps (executors,
        a look at them, head, each node, reservation) may take `start_timeout_s` seconds.

        Raises ConfigurationError for what cannot work, SparkTimeoutError and SparkLostError if Spark does not answer,
        SparkBridgeError if Ray does not start.
        """
        taken = [name for name in _OURS if name in (cluster_options or {})]
        if taken:
            raise ConfigurationError(
                f"on_spark: {taken[0]} in cluster_options is decided by executors=, slots_per_executor= and "
                "object_store_memory=; leave it out"
            )
        _refuse(spark)
        context = spark.sparkContext
        task_cpus = int(context.getConf().get("spark.task.cpus", "1") or 1)
        found = await_executors(context, executors, start_timeout_s)
        plan = NodePlan.of(found, executors, slots_per_executor, task_cpus)
        driver, hosts = here(), look_at_hosts(spark, found, start_timeout_s)
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
        """The Spark session, which is the caller's."""
        return self._spark

    @property
    def placement_group(self) -> PlacementGroup:
        """The reservation of all slots. SparkBridgeError after `stop`."""
        if self._placement_group is None:
            raise SparkBridgeError("Ray in the executors of Spark is stopped; make a new environment")
        return self._placement_group

    @property
    def dashboard_url(self) -> str | None:
        """Url of Ray's dashboard, if there is one."""
        return self._dashboard_url

    @property
    def nodes(self) -> int:
        """How many executors have a node of Ray."""
        return self._plan.nodes

    @property
    def slots(self) -> int:
        """Task slots of all nodes. Each is one CPU of its bundle."""
        return self._plan.slots

    def guard(self) -> SparkGuard:
        """What ends a job when Spark is lost, and its slots with it."""
        return SparkGuard(self._spark.sparkContext)

    def bundle_of_slot(self, slot: int) -> int:
        """Index of the bundle that holds a slot (from 0). Neighbouring slots are in different bundles."""
        return self._plan.bundle_of_slot(slot)

    def __enter__(self) -> RayOnSparkSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End Ray, in the driver and in the executors, and wait for it. Spark goes on. Idempotent and bounded."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        atexit.unregister(self.stop)
        self._placement_group = None
        # Ray has no public word for these.
        cluster: Any = cluster_init._active_ray_cluster
        # It warns of each node that ends, also when it ends them itself.
        notices = logging.getLogger("ray.autoscaler._private.spark.spark_job_server")
        try:
            notices.disabled = True
            _attempt("disconnecting from Ray", ray.shutdown)
            if cluster is not None:
                gone = driver_gone(self._spark.sparkContext) is not None
                if gone or not _attempt("ending Ray's nodes", ray.util.spark.shutdown_ray_cluster):
                    # That asks Spark first, and comes no further where it is gone, and with it the other nodes.
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
            # Ray asks for the active session of this thread. Whoever makes a DataFrame is active.
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
                f"Ray did not start in Spark's executors: {bounded_text(' '.join(str(cause).split()))}. Have they the "
                "cores and the memory free that it needs? Their logs say more"
            ) from error

        # Ray's head asks Spark for nodes all the time; once Spark is gone, each request would print its failure.
        cluster: Any = cluster_init._active_ray_cluster
        cluster.spark_job_server.handle_error = _request_failed

    def _connect(self, options: dict[str, Any]) -> None:
        settings = {"namespace": NAMESPACE, "logging_level": logging.WARNING, **options}
        context = ray.init(address=os.environ[_ADDRESS], **settings)
        self._dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else None
        alive = [node for node in ray.nodes() if node["Alive"] and IN_EXECUTOR in node["Resources"]]
        if len(alive) < self._plan.nodes:
            raise SparkTimeoutError(
                f"{len(alive)} of {self._plan.nodes} Ray nodes have started in Spark's executors: the others found no "
                f"{self._plan.slots_per_node} free core(s). End other Spark jobs, or lower executors="
            )

    def _reserve(self, timeout_s: float) -> None:
        labels = ["the task slots in a Spark executor"] * self._plan.nodes
        wanted = Wanted(f"{self._spark.sparkContext.appName} (slots)", self._plan.bundles(), labels, "SPREAD")
        self._placement_group = ask_for(wanted)
        missing = await_room(self._placement_group, wanted, timeout_s)
        if missing is not None:
            raise SparkTimeoutError(f"{wanted.name}: {missing}. Have executors of Spark been lost?")


def _refuse(spark: SparkSession) -> None:
    """Raise ConfigurationError where Ray cannot be started for this session."""
    # Through Spark Connect there is no context here, nor executors that this process could reach.
    if not isinstance(spark, SparkSession):
        raise ConfigurationError(
            f"on_spark: a SparkSession is needed in whose driver this program runs, not {type(spark).__module__}."
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
    """Wait until the head has ended, and with the last node on this machine their folder is gone."""
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
    """Run one step of `stop`. If it fails or hangs, log that and return False."""
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
