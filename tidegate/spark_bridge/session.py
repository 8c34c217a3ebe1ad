"""`RayDPSession`: a Spark session on Ray (with RayDP). Executors and task slots share one reservation.

Rules:

* There is one placement group, with one bundle for each executor. A bundle has space for the executor *and* its task
  slots. RayDP puts executor i into bundle i. The task actor of slot s runs in bundle `bundle_of_slot(s)`.
* The session starts Ray on this machine, connects to Ray at `ray_address`, or uses the Ray that the caller has
  initialised. It shuts down only what it has started or connected.
* Start and stop have a time limit. If a start fails, its earlier steps are undone.
* A process has one session, because Spark allows one context for each process.
* In a cluster that was started elsewhere, Ray starts Java workers in the environment of its own daemon, which cannot be
  changed from here. With a wrong Java the app master would end minutes later, so each node is checked first, and the
  error names the node.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ray
import raydp
from pyspark import SparkContext
from pyspark.sql import SparkSession
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from raydp.spark.ray_cluster_master import RAYDP_SPARK_MASTER_SUFFIX

from tidegate.actors.graph.slot_plan import Placement, slot_order, strategy_of
from tidegate.actors.ray.actor_calls import NAMESPACE
from tidegate.actors.ray.authentication import close_token_file, make_token_file, refuse_ray_client
from tidegate.actors.ray.connection import (
    check_same_cluster,
    clean_end_at_sigterm,
    cluster_of_this_user,
    filter_worker_output,
    prepare_connection,
)
from tidegate.actors.ray.reservation import SlotRequest, ask_for, await_room, check_fits
from tidegate.spark_bridge.errors import SparkBridgeError, SparkTimeoutError
from tidegate.spark_bridge.java import add_opens_options, ensure_java, is_supported, parse_java_major
from tidegate.spark_bridge.spark_calls import call_bounded, registered_executors
from tidegate.storage.errors import ConfigurationError

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 30.0
_GATEWAY_KILL_TIMEOUT_S = 5.0
_EXECUTOR_POLL_S = 0.1
_RAY_STARTS_MAX = 3

# RayDP registers an unbounded stop, which would hang the exit of this process if the cluster has died. A session
# registers its own bounded one.
atexit.unregister(raydp.stop_spark)


class RayDPSession:
    """Ray and Spark together. `start` starts them; `stop`, or the end of a `with` block, stops them."""

    _active: RayDPSession | None = None
    _active_lock = threading.Lock()

    def __init__(self, app_name: str, resources: SessionResources) -> None:
        """Called by `start`, which users call instead."""
        self._app_name = app_name
        self._resources = resources
        self._owns_ray = False
        self._started_cluster = False
        self._dashboard_url: str | None = None
        self._spark: SparkSession | None = None
        self._placement_group: PlacementGroup | None = None
        self._stopped = False

    @classmethod
    def start(
        cls,
        app_name: str,
        *,
        executors: int,
        executor_cores: int,
        executor_memory: str | int,
        slots_per_executor: int,
        placement: Placement = "spread",
        ray_address: str | None = None,
        spark_configs: Mapping[str, str] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        include_dashboard: bool = True,
        show_log: bool = False,
        start_timeout_s: float = 180.0,
    ) -> RayDPSession:
        """Starts Ray if needed, reserves the bundles, starts Spark in them, and waits for the executors.

        `executor_memory`, in Spark's notation ("1g") or in bytes, is the heap of an executor, which its bundle
        reserves. `placement` decides how bundles are placed on nodes. `spark_configs` override tidegate's Spark
        settings, and `ray_options` the arguments of `ray.init`. `show_log` shows the log of tidegate's processes here,
        at every level. Each of the three steps after Ray (reservation, Spark, executors) may take `start_timeout_s`
        seconds.

        Raises ConfigurationError for wrong arguments, for a second session in the process, and for more resources than
        a local Ray has. Raises SparkTimeoutError if the cluster has no free resources in time or does not answer.
        """
        resources = SessionResources.of(executors, executor_cores, executor_memory, slots_per_executor, placement)
        session = cls(app_name, resources)
        with cls._active_lock:
            _refuse_second_session(cls._active)
            cls._active = session
        atexit.register(session.stop)
        try:
            with clean_end_at_sigterm():
                session._start_ray(ray_address, dict(ray_options or {}), include_dashboard)
            filter_worker_output(show_log)
            session._reserve(start_timeout_s)
            session._start_spark(dict(spark_configs or {}), start_timeout_s)
            session._await_executors(start_timeout_s)
        except BaseException:
            session.stop()
            raise
        return session

    @property
    def spark(self) -> SparkSession:
        """Returns the Spark session. Raises SparkBridgeError after `stop`."""
        if self._spark is None:
            raise SparkBridgeError(f"session {self._app_name!r} is stopped; start a new one")
        return self._spark

    @property
    def placement_group(self) -> PlacementGroup:
        """Returns the placement group that executors and task actors share. Raises SparkBridgeError after `stop`."""
        if self._placement_group is None:
            raise SparkBridgeError(f"session {self._app_name!r} is stopped; start a new one")
        return self._placement_group

    @property
    def dashboard_url(self) -> str | None:
        """Returns the URL of Ray's dashboard, or None if there is none or the caller has initialised Ray."""
        return self._dashboard_url

    @property
    def slots(self) -> int:
        """Returns the number of task slots of all executors together. Each slot is one CPU of its bundle."""
        return self._resources.slots

    def bundle_of_slot(self, slot: int) -> int:
        """Returns the index of the bundle of a slot (from 0)."""
        return self._resources.bundle_of_slot(slot)

    def __enter__(self) -> RayDPSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops Spark, releases the reservation, and shuts down or disconnects the Ray that was started or connected
        here.

        It has a time limit, and a second call has no effect. In a dead cluster Spark may not stop by itself. Then its
        JVM is killed, with a warning.
        """
        if self._stopped:
            return
        self._stopped = True
        atexit.unregister(self.stop)
        try:
            self._stop_spark()
            group = self._placement_group
            self._placement_group = None
            # A cluster that this session started ends with its reservations. Releasing them on a dead one takes long.
            if group is not None and ray.is_initialized() and not self._started_cluster:
                self._attempt("releasing the placement group", lambda: ray.util.remove_placement_group(group))
            if self._owns_ray:
                self._attempt("shutting Ray down", ray.shutdown)
        finally:
            with RayDPSession._active_lock:
                if RayDPSession._active is self:
                    RayDPSession._active = None

    def _start_ray(self, address: str | None, options: dict[str, Any], include_dashboard: bool) -> None:
        home = ensure_java()
        logger.info("Spark and RayDP run on the Java at %s", home)
        # Executors must run the Python that has tidegate, not the first python3 on PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        refuse_ray_client(address)
        if ray.is_initialized():
            if options:
                raise ConfigurationError(
                    "ray_options have no effect: this process has initialised Ray already. "
                    "Remove them, or do not call ray.init before the session starts."
                )
            close_token_file(os.environ)
            check_same_cluster(address)
            check_cluster_java()
            return
        if address is None:
            settings: dict[str, Any] = {
                "num_cpus": self._resources.cluster_cpus,
                "include_dashboard": include_dashboard,
                # All that Ray logs at INFO here is the address of its dashboard, which `dashboard_url` has.
                "logging_level": logging.WARNING,
            }
            make_token_file(os.environ)
        else:
            settings = {}
            if address == "auto":
                address = cluster_of_this_user()
            prepare_connection(address)
        self._owns_ray = True
        self._started_cluster = address is None
        settings |= {"namespace": NAMESPACE, **options}
        with _without_notice_of_tokens():
            context = _start_local_ray(settings) if address is None else ray.init(address=address, **settings)
        self._dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else None
        if address is not None:
            check_cluster_java()

    def _reserve(self, timeout_s: float) -> None:
        wanted = self._resources.wanted(self._app_name)
        check_fits(wanted)
        self._placement_group = ask_for(wanted)
        missing = await_room(self._placement_group, wanted, timeout_s)
        if missing is not None:
            raise SparkTimeoutError(
                f"{wanted.name}: {missing}. Request fewer executors, cores, slots or less memory, or add nodes."
            )

    def _start_spark(self, configs: dict[str, str], timeout_s: float) -> None:
        group = self.placement_group
        settings = {**self._spark_defaults(), **configs}
        resources = self._resources

        def start() -> SparkSession:
            session = raydp.init_spark(
                self._app_name,
                resources.executors,
                resources.executor_cores,
                resources.executor_memory_mib,
                placement_group=group,
                placement_group_bundle_indexes=list(range(resources.executors)),
                configs=settings,
            )
            assert isinstance(session, SparkSession)
            return session

        self._spark = call_bounded(
            start,
            timeout_s=timeout_s,
            what="starting Spark on Ray",
            advice="See the logs of RayDPSparkMaster in Ray's session directory; every node needs its Java.",
        )

    def _spark_defaults(self) -> dict[str, str]:
        defaults = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.execution.arrow.pyspark.enabled": "true",
        }
        if self._started_cluster:
            # Everything is on this machine, so Spark's driver need not be reachable from outside.
            defaults |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
        return defaults

    def _await_executors(self, timeout_s: float) -> None:
        context = self.spark.sparkContext
        deadline = time.monotonic() + timeout_s
        while (registered := registered_executors(context)) < self._resources.executors:
            if time.monotonic() > deadline:
                raise SparkTimeoutError(
                    f"{registered} of {self._resources.executors} Spark executors registered within "
                    f"{timeout_s:g} s. Look for the logs of the raydp-executor actors in Ray's session "
                    "directory; the usual causes are too little memory and a Java that does not start."
                )
            time.sleep(_EXECUTOR_POLL_S)

    def _stop_spark(self) -> None:
        self._spark = None
        if not self._attempt("stopping Spark", raydp.stop_spark):
            _kill_gateway()
            # If Ray continues, it keeps RayDP's master and its executors, whose name the next session needs.
            if ray.is_initialized() and not self._owns_ray:
                self._attempt("ending RayDP's master", self._kill_master)

    def _kill_master(self) -> None:
        name = self._app_name + RAYDP_SPARK_MASTER_SUFFIX
        if name in ray.util.list_named_actors():
            ray.kill(ray.get_actor(name))

    def _attempt(self, what: str, call: Callable[[], object]) -> bool:
        """Runs one step of `stop`. If it fails or exceeds its time limit, logs that and returns False."""
        try:
            call_bounded(call, timeout_s=_STOP_TIMEOUT_S, what=what, advice="Its cluster seems to be dead.")
        except Exception as error:  # noqa: BLE001 - the remaining steps of the stop must still run
            logger.warning("session %r: %s failed: %s", self._app_name, what, error)
            return False
        return True


def _start_local_ray(settings: dict[str, Any]) -> Any:
    """Starts our own Ray cluster. Without an address Ray would connect to the newest one on this machine."""
    for _ in range(_RAY_STARTS_MAX - 1):
        try:
            return ray.init(address="local", **settings)
        except Exception as error:
            # Ray allows its processes a fixed 30 s, which can be too little on a busy machine.
            if "timed out during startup" not in str(error):
                raise
            logger.warning("Ray has not started yet, and is started again: %s", error)
            ray.shutdown()
    return ray.init(address="local", **settings)


def _refuse_second_session(active: RayDPSession | None) -> None:
    if active is not None:
        raise ConfigurationError(
            f"session {active._app_name!r} is running in this process, and Spark allows one a process. Stop "
            "it first (session.stop()), or use that session for this program, too."
        )
    if SparkContext._active_spark_context is not None:
        raise ConfigurationError(
            "this process has a Spark context already, and Spark allows one a process. Stop it first, or run "
            "tidegate on that Spark cluster."
        )


@contextmanager
def _without_notice_of_tokens() -> Iterator[None]:
    """Suppresses Ray's warning that it protects its own cluster with a token, which is intended."""
    notices = logging.getLogger("ray._private.authentication.authentication_token_setup")
    level = notices.level
    notices.setLevel(logging.ERROR)
    try:
        yield
    finally:
        notices.setLevel(level)


def _kill_gateway() -> None:
    """Kills the JVM of a Spark driver that does not stop. Afterwards this process can start another one."""
    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    if process.poll() is None:
        logger.warning("killing the Spark driver JVM (process %d), which did not stop", process.pid)
        process.kill()
    process.wait(_GATEWAY_KILL_TIMEOUT_S)
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


APP_MASTER_CPUS = 1
"""The number of CPUs of RayDP's app master, which is an actor."""

EXECUTOR_MEMORY_MIN_BYTES = 450 * 2**20
"""Smallest executor memory that Spark accepts, in bytes: 1.5 times the 300 MiB that it reserves for itself."""

_MEMORY = re.compile(r"(\d+)\s*([kmgt])i?b?", re.IGNORECASE)
_UNIT_BYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_executor_memory_bytes(memory: str | int) -> int:
    """Returns the size in bytes of a text in Spark's notation ("512m", "1g", "1GB": powers of 1024), or of a number
    of bytes.
    """
    if isinstance(memory, str):
        match = _MEMORY.fullmatch(memory.strip())
        if match is None:
            raise ConfigurationError(f"executor_memory {memory!r} is not a size such as '512m' or '1g'; give one")
        size_bytes = int(match[1]) * _UNIT_BYTES[match[2].lower()]
    else:
        size_bytes = memory
    if size_bytes < EXECUTOR_MEMORY_MIN_BYTES:
        raise ConfigurationError(
            f"executor_memory {memory!r} is too small: Spark starts no executor with less than "
            f"{EXECUTOR_MEMORY_MIN_BYTES // 2**20}m"
            "; give that much or more"
        )
    return size_bytes


@dataclass(frozen=True, slots=True)
class SessionResources:
    """The executors and slots of a session. Create it with `of`, which checks the numbers."""

    executors: int
    executor_cores: int
    executor_memory_bytes: int
    slots_per_executor: int
    placement: Placement = "spread"
    """How bundles are placed on nodes, and slots in bundles."""

    @classmethod
    def of(
        cls,
        executors: int,
        executor_cores: int,
        executor_memory: str | int,
        slots_per_executor: int,
        placement: Placement = "spread",
    ) -> SessionResources:
        """Returns resources after a check. Raises ConfigurationError, which names the wrong argument."""
        counts = {
            "executors": executors,
            "executor_cores": executor_cores,
            "slots_per_executor": slots_per_executor,
        }
        for name, count in counts.items():
            if count < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {count}")
        memory_bytes = parse_executor_memory_bytes(executor_memory)
        strategy_of(placement)
        return cls(executors, executor_cores, memory_bytes, slots_per_executor, placement)

    @property
    def slots(self) -> int:
        """Returns the number of task slots of all executors together."""
        return self.executors * self.slots_per_executor

    @property
    def cluster_cpus(self) -> int:
        """Returns how many CPUs a Ray cluster for this session alone needs: for its bundles and RayDP's app master."""
        return self.executors * (self.executor_cores + self.slots_per_executor) + APP_MASTER_CPUS

    @property
    def executor_memory_mib(self) -> str:
        """Returns the heap of an executor in Spark's notation (whole MiB, rounded down)."""
        return f"{self.executor_memory_bytes // 2**20}m"

    def bundles(self) -> list[dict[str, float]]:
        """Returns one bundle for each executor: its cores, its heap, and one CPU for each slot."""
        cpus = float(self.executor_cores + self.slots_per_executor)
        return [{"CPU": cpus, "memory": float(self.executor_memory_bytes)} for _ in range(self.executors)]

    def wanted(self, app_name: str) -> SlotRequest:
        """Returns the request for these resources to Ray. RayDP puts executor i into bundle i."""
        labels = ["a Spark executor and its task slots"] * self.executors
        return SlotRequest(f"{app_name} (executors and slots)", self.bundles(), labels, strategy_of(self.placement))

    def bundle_of_slot(self, slot: int) -> int:
        """Returns the index of the bundle of a slot.

        Depending on `placement`, consecutive slots are spread over executors, or packed into as few as possible.
        """
        if not 0 <= slot < self.slots:
            raise ConfigurationError(f"slot {slot} does not exist; give one of the slots 0 to {self.slots - 1}")
        return slot_order(self.executors, self.slots_per_executor, self.placement)[slot]


_CHECK_TIMEOUT_S = 120.0
"""Time limit for running `java -version` in a process on each node, in seconds. It takes a minute on a busy machine."""
_JAVA_TIMEOUT_S = 150.0
"""Time limit of `java -version`, in seconds.

It is longer than the limit of the driver, so that the driver reports a timeout.
"""
_STRONG_ENCAPSULATION_MAJOR = 16


@dataclass(frozen=True, slots=True)
class NodeJava:
    """The `java` on the `PATH` of a node, its major version (each None if unknown), and its options."""

    path: str | None
    major: int | None
    options: str


def java_problem(java: NodeJava) -> str | None:
    """Returns why Spark on RayDP cannot use this Java, or None if it can."""
    if java.path is None:
        return "its PATH has no java"
    if not is_supported(java.major):
        return f"its java ({java.path}) is version {java.major or 'unknown'}, and Spark needs 8 to 17"
    assert java.major is not None
    missing = [option for option in add_opens_options() if option not in java.options]
    if java.major >= _STRONG_ENCAPSULATION_MAJOR and missing:
        return f"JDK_JAVA_OPTIONS there lacks {missing[0]}"
    return None


def check_cluster_java() -> None:
    """Raises ConfigurationError for the first live node with a Java that cannot run Spark executors."""
    nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    probe = ray.remote(num_cpus=0, max_retries=0)(_node_java)
    asked = {
        node_id: probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)).remote()
        for node_id in nodes
    }
    try:
        found: list[NodeJava] = ray.get(list(asked.values()), timeout=_CHECK_TIMEOUT_S)
    except GetTimeoutError as error:
        raise SparkTimeoutError(
            f"the nodes of the Ray cluster did not report their Java within {_CHECK_TIMEOUT_S:g} s. Check that the "
            "cluster is alive, and that its machines have time for a small task."
        ) from error
    for node_id, java in zip(asked, found, strict=True):
        problem = java_problem(java)
        if problem is not None:
            raise ConfigurationError(
                f"Ray node {nodes[node_id]} cannot run Spark executors: {problem}. Call "
                "tidegate.spark_bridge.ensure_java() before ray.init, or start the node with JAVA_HOME, PATH "
                "and JDK_JAVA_OPTIONS as it sets them."
            )


def _node_java() -> NodeJava:
    path = shutil.which("java")
    if path is None:
        return NodeJava(None, None, "")
    done = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=_JAVA_TIMEOUT_S, check=False)
    major = parse_java_major(done.stderr + done.stdout)
    return NodeJava(path, major, os.environ.get("JDK_JAVA_OPTIONS", ""))
