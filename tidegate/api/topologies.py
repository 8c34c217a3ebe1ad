"""`Topologies`: the ways to make an environment, that is, where its jobs run, and whether there is Spark.

What an environment does is the same in all of them (`environment.py`). Which to choose: `docs/topologies.md`. An
argument that is None is what the configuration says (`config_file.py`).
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import pyarrow as pa

from tidegate.actors.drivers.job_context import DataPlaneOptions
from tidegate.actors.drivers.process_settings import Standbys
from tidegate.actors.local.local_runtime import ENDED_MAX, LocalRuntime
from tidegate.actors.runtimes.companions import Companion
from tidegate.actors.runtimes.running_job import Runtime
from tidegate.api.accompanied_job import AccompaniedJob
from tidegate.api.config.config_file import Config, load_config
from tidegate.api.config.sections.log_config import LogConfig
from tidegate.api.config.sections.setting_values import check_runtime_env_is_mapping, spare_processes
from tidegate.api.program import Program
from tidegate.api.ray_slots import check_slots, runtime_on
from tidegate.api.streams.stream_sources import StreamSources
from tidegate.api.submission.temporary_jobs import TemporaryJob
from tidegate.api.user_functions import UserFunctions
from tidegate.api.web_access import WebAccess
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.extras import need
from tidegate.storage.files.store import OpenStore
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT
from tidegate.storage.units import parse_size_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.actors.graph.slot_plan import Placement
    from tidegate.actors.ray.driver.connection import Connection
    from tidegate.api.submission.job import Job
    from tidegate.spark_bridge import RayDPSession, RayOnSparkSession

_Given = TypeVar("_Given")
_Otherwise = TypeVar("_Otherwise")


class Topologies(StreamSources):
    """An environment as it was made. `StreamEnvironment` runs programs in it."""

    def __init__(
        self,
        runtime: Runtime,
        parallelism: int,
        *,
        max_parallelism: int | None = None,
        config: Config | None = None,
        options: DataPlaneOptions | None = None,
        open_store: OpenStore | None = None,
        session: RayDPSession | RayOnSparkSession | None = None,
        guard: Callable[[], Companion] | None = None,
        standbys: Standbys | None = None,
    ) -> None:
        store = open_store if open_store is not None else runtime.open_store
        super().__init__(Program(parallelism, store, self._preview))
        self.parallelism = parallelism
        self.max_parallelism = max_parallelism
        self._runtime = runtime
        self._config = config if config is not None else Config()
        self._config.log.set_up_driver()
        self._options = self._config.buffers.options(options)
        self._session = session
        self._guard = guard
        self._standbys = standbys
        self._connection: Connection | None = None
        self._submitted: Callable[[Job, bool], object] | None = None
        """Whoever wants to know of each job, and whether it is detached."""
        self._accompanied: list[AccompaniedJob] = []
        self._temporary: deque[TemporaryJob] = deque(maxlen=ENDED_MAX)
        """Folders of the newest jobs without storage, which their pages show."""
        self._closed = False
        self._web = WebAccess(runtime)
        self._functions = UserFunctions()

    @abstractmethod
    def _preview(self, stream: Any, n: int, timeout_ms: int) -> tuple[pa.Table, str]:
        """Runs the steps before a stream for its first rows. See `StreamEnvironment`."""

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, object] | None = None) -> Self:
        """Run jobs where the configuration says: `execution.target` is local, ray, raydp or on_spark.

        `on_spark` takes the SparkSession of this process, or makes it of the settings that begin with `spark.`, as a
        program that `spark-submit` starts does. Raises ConfigurationError for wrong settings.
        """
        settings = load_config(config).topology
        if settings.target == "ray":
            return cls.ray(config=config)
        if settings.target == "raydp":
            return cls.raydp(config=config)
        if settings.target == "on_spark":
            from tidegate.spark_bridge import spark_session

            return cls.on_spark(spark_session(settings.app_name, settings.of_spark()), config=config)
        return cls.local(config=config)

    @classmethod
    def local(
        cls,
        parallelism: int | None = None,
        *,
        max_parallelism: int | None = None,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        options: DataPlaneOptions | None = None,
        log_level: str | None = None,
        log_rows: bool | None = None,
    ) -> Self:
        """Run jobs in this process: no Ray, no JVM. `parallelism` is 1 unless it is given."""
        settings = _settings(config, log_level, log_rows)
        where = settings.topology
        return cls(
            LocalRuntime(),
            _or(parallelism, _or(where.parallelism, 1)),
            max_parallelism=_or(max_parallelism, where.max_parallelism),
            config=settings,
            options=options,
        )

    @classmethod
    def raydp(
        cls,
        executors: int | None = None,
        executor_cores: int | None = None,
        executor_memory: str | int | None = None,
        slots_per_executor: int | None = None,
        *,
        placement: Placement | None = None,
        standbys: Standbys | None = None,
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        app_name: str | None = None,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        options: DataPlaneOptions | None = None,
        ray_address: str | None = None,
        spark_configs: Mapping[str, str] | None = None,
        ray_options: Mapping[str, Any] | None = None,
        include_dashboard: bool | None = None,
        log_level: str | None = None,
        log_rows: bool | None = None,
    ) -> Self:
        """Run jobs as Ray actors that live beside Spark executors; `env.spark` is the SparkSession.

        Starts Ray on this machine, or joins the cluster at `ray_address`, and starts Spark on it through RayDP: two
        executors of a core and 1 GiB, with two slots each, unless it is said otherwise. A slot holds one subtask of
        each vertex. `parallelism` defaults to the number of executors, and is at most the slots.
        An executor and its slots are on one node; `placement` says on which: "spread" over as many nodes as can be,
        "pack" onto as few, "strict_pack" all on one (`docs/placement.md`).

        Each job keeps `standbys` spare processes, unless its own settings say another number. "auto", the default, is
        one for each free slot: 1 to 4, and at most as many as tasks. "warm" adds one for each keyed task, which holds
        the state of that task (`docs/recovery.md`). Raises ConfigurationError for wrong settings.
        """
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.raydp", "raydp")
        from tidegate.actors.ray.driver.head_probe import refuse_ray_client

        refuse_ray_client(_or(ray_address, where.address))
        from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
        from tidegate.spark_bridge import RayDPSession

        placement = where.placement if placement is None else placement
        executors = _or(executors, _or(where.executors, 2))
        session = RayDPSession.start(
            _or(app_name, where.app_name),
            executors=executors,
            executor_cores=_or(executor_cores, where.executor_cores),
            executor_memory=where.executor_memory if executor_memory is None else executor_memory,
            slots_per_executor=_or(slots_per_executor, _or(where.slots_per_executor, 2)),
            placement=placement,
            ray_address=_or(ray_address, where.address),
            spark_configs={**where.spark_configs, **(spark_configs or {})},
            ray_options=_ray_options(where.ray_options, ray_options),
            include_dashboard=_or(include_dashboard, where.include_dashboard),
            show_log=bool(settings.log.given()),
        )
        bundles = tuple(session.bundle_of_slot(slot) for slot in range(session.slots))
        return cls(
            RayRuntime(SlotPlacement(session.placement_group, bundles), strategy=placement),
            _or(parallelism, _or(where.parallelism, executors)),
            max_parallelism=_or(max_parallelism, where.max_parallelism),
            config=settings,
            options=options,
            session=session,
            standbys=kept,
        )

    @classmethod
    def on_spark(
        cls,
        spark: SparkSession,
        executors: int | None = None,
        slots_per_executor: int | None = None,
        *,
        standbys: Standbys | None = None,
        parallelism: int | None = None,
        max_parallelism: int | None = None,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        options: DataPlaneOptions | None = None,
        object_store_memory: str | int | None = None,
        ray_options: Mapping[str, Any] | None = None,
        cluster_options: Mapping[str, Any] | None = None,
        include_dashboard: bool | None = None,
        log_level: str | None = None,
        log_rows: bool | None = None,
    ) -> Self:
        """Run jobs as Ray actors in the executors of a Spark cluster that exists; `env.spark` is `spark`.

        Starts Ray by `ray.util.spark`, in `executors` of the executors, and ends it with the environment; the session
        goes on. Each slot takes a core of its executor from Spark. By default Ray is in every executor, and takes all
        its cores but one; of executors with one core it takes all but one of them. `parallelism` defaults to the number
        of executors with Ray, and is at most the slots. `standbys` as with `raydp`.

        `object_store_memory` of each node ("256mb"), `ray_options` of `ray.init`, `cluster_options` of
        `ray.util.spark.setup_ray_cluster`. Raises ConfigurationError for a Spark in which Ray cannot run, or that Ray
        would leave no core, and SparkTimeoutError, SparkLostError or SparkBridgeError if it does not start.
        """
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.on_spark", "ray", "spark")
        from tidegate.actors.ray.driver.head_probe import refuse_ray_client

        refuse_ray_client()
        from tidegate.actors.ray.ray_runtime import RayRuntime, SlotPlacement
        from tidegate.spark_bridge import RayOnSparkSession

        store = None if object_store_memory is None else parse_size_bytes(object_store_memory)
        session = RayOnSparkSession.start(
            spark,
            executors=_or(executors, where.executors),
            slots_per_executor=_or(slots_per_executor, where.slots_per_executor),
            object_store_bytes=_or(store, where.object_store_memory),
            ray_options=_ray_options(where.ray_options, ray_options),
            cluster_options={**where.cluster_options, **(cluster_options or {})},
            include_dashboard=_or(include_dashboard, where.include_dashboard),
            show_log=bool(settings.log.given()),
        )
        bundles = tuple(session.bundle_of_slot(slot) for slot in range(session.slots))
        return cls(
            RayRuntime(SlotPlacement(session.placement_group, bundles)),
            _or(parallelism, _or(where.parallelism, session.nodes)),
            max_parallelism=_or(max_parallelism, where.max_parallelism),
            config=settings,
            options=options,
            session=session,
            guard=session.guard,
            standbys=kept,
        )

    @classmethod
    def ray(
        cls,
        address: str | None = None,
        parallelism: int | None = None,
        *,
        slots: int | None = None,
        placement: Placement | None = None,
        standbys: Standbys | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        config: str | os.PathLike[str] | Mapping[str, object] | None = None,
        options: DataPlaneOptions | None = None,
        log_level: str | None = None,
        log_rows: bool | None = None,
    ) -> Self:
        """Run jobs without Spark, or attach to jobs, on the Ray cluster at "host:port".

        Without `address` it is that of RAY_ADDRESS, or the one cluster of this user. `slots` reserves task slots, a CPU
        each, until the environment is closed; without it only steps with resources reserve any. `placement` and
        `standbys` as with `raydp`; without slots "auto" is 1. `runtime_env` is that of `ray.init`: this call connects
        the program, unless it is connected already. Raises ConfigurationError."""
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.ray", "ray")
        from tidegate.actors.ray.driver.connection import connect

        slots, placement = _or(slots, where.slots), where.placement if placement is None else placement
        parallelism = _or(parallelism, _or(where.parallelism, 1))
        check_slots(slots, placement, parallelism)
        runtime_env = where.runtime_env if runtime_env is None else runtime_env
        connection = connect(_or(address, where.address), bool(settings.log.given()), runtime_env)
        env = cls(
            runtime_on(connection, slots, placement, settings.checkpoints),
            parallelism,
            max_parallelism=where.max_parallelism,
            config=settings,
            options=options,
            standbys=kept,
        )
        env._connection = connection
        return env

    @property
    def parallelism(self) -> int:
        """Parallelism of operators that name none, at least 1. When it is set, operators added from then on have it."""
        return self._program.parallelism

    @parallelism.setter
    def parallelism(self, parallelism: int) -> None:
        if not isinstance(parallelism, int) or parallelism < 1:
            raise ConfigurationError(f"parallelism={parallelism!r}: at least 1 is needed, a whole number")
        self._program.parallelism = parallelism

    @property
    def max_parallelism(self) -> int | None:
        """Number of key groups, from 1 to 32,768: the most subtasks that an operator may ever have.

        None, the default: as in the checkpoint that a job is restored from; for a new job at least 128, with room to
        grow by half (Flink's `pipeline.max-parallelism`). It cannot change as long as a job's state lives.
        """
        return self._program.max_parallelism

    @max_parallelism.setter
    def max_parallelism(self, max_parallelism: int | None) -> None:
        if max_parallelism is not None and (
            type(max_parallelism) is not int or not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT
        ):
            raise ConfigurationError(
                f"max_parallelism={max_parallelism!r}: it is a whole number from 1 to {MAX_PARALLELISM_LIMIT:,}"
            )
        self._program.max_parallelism = max_parallelism


def _settings(
    config: str | os.PathLike[str] | Mapping[str, object] | None, log_level: str | None, log_rows: bool | None
) -> Config:
    """The configuration of an environment, with what its call says of logs."""
    settings = load_config(config)
    given = {"log_level": log_level, "log_rows": log_rows}
    called = {name: value for name, value in given.items() if value is not None}
    if not called:
        return settings
    return replace(settings, log=LogConfig.model_validate({**settings.log.given(), **called}))


def _or(given: _Given | None, otherwise: _Otherwise) -> _Given | _Otherwise:
    """What an argument says; else something else."""
    return otherwise if given is None else given


def _ray_options(configured: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `ray.init`: those that were given, and those of the configuration. Raises ConfigurationError."""
    check_runtime_env_is_mapping(given or {}, "ray_options")
    return {**configured, **(given or {})}


def _standbys(given: object) -> Standbys | None:
    """The `standbys=` that an environment was given, checked; None if it was given none."""
    return None if given is None else spare_processes(given, "standbys")
