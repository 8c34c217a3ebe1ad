"""`StreamEnvironment` creates the streams of a driver script and runs them as jobs.

The class methods `local`, `ray`, `raydp` and `on_spark` create an environment. They differ in where jobs run, and in
whether there is Spark (`docs/topologies.md`). An argument that is None is taken from the configuration
(`config_file.py`). The methods that create streams from sources are in `streams/sources.py`.

An environment holds one `Program` at a time. `execute` checks the program, prepares it (`submission/`) and submits it
to the runtime of this environment: Ray, or this process.
"""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import pyarrow as pa

from tidegate.actors.drivers.job_context import DataPlaneOptions, Standbys
from tidegate.actors.drivers.threads import lacks_threads
from tidegate.actors.graph.graph_analysis import with_event_time, with_needed_columns, with_needed_rows
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.local.local_runtime import ENDED_MAX, LocalRuntime
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.running_job import RunningJob, Runtime, Submission
from tidegate.api.checkpoint_calls import CheckpointCalls, call_with_arrow, calling_with_spark, check_functions
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.config_file import Config, load_config
from tidegate.api.config.sections import LogConfig
from tidegate.api.config.setting_kinds import check_runtime_env_is_mapping, spare_processes
from tidegate.api.job_progress import ProgressKind, progress_kind, show_progress, stop_progress
from tidegate.api.job_with_services import JobWithServices
from tidegate.api.name_checks import check_given, combining_mode, pointer, script_name
from tidegate.api.program import Program, UserFunctions
from tidegate.api.streams.output_steps import collected_rows
from tidegate.api.streams.sources import StreamSources
from tidegate.api.streams.stream import Stream
from tidegate.api.submission.job import Job
from tidegate.api.submission.job_names import name_taken
from tidegate.api.submission.planner import JobRequest, check_meaning, make_job_id, prepare, report_on
from tidegate.api.submission.program_checks import check_captures, check_changes_come_once, doubts, endless_source
from tidegate.api.submission.restoring import RestoreReport
from tidegate.api.submission.temporary_jobs import TemporaryJob, delete_unneeded, temporary_root
from tidegate.api.web_access import WebAccess
from tidegate.connectors.source import MasterHook
from tidegate.operators.local_aggregation import CombiningMode
from tidegate.recovery.restart_strategy import RestartStrategy, default_strategy
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError
from tidegate.storage.extras import need
from tidegate.storage.files.file_system_store import (
    check_conditional_create,
    check_outlives_ray,
    check_savepoint_target,
)
from tidegate.storage.files.store import OpenStore
from tidegate.storage.state.key_groups import MAX_PARALLELISM_LIMIT
from tidegate.storage.units import duration_text, parse_size_bytes
from tidegate.web.options import WebOptions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tidegate.actors.graph.slot_plan import Placement
    from tidegate.actors.ray.connection import Connection
    from tidegate.actors.ray.ray_runtime import RayRuntime
    from tidegate.api.submission.plan_picture import Plan
    from tidegate.api.tables.lookup_tables import LookedUp
    from tidegate.spark_bridge import RayDPSession, RayOnSparkSession

_Given = TypeVar("_Given")
_Otherwise = TypeVar("_Otherwise")

log = logging.getLogger(__name__)

PREVIEW_INTERVAL = "100ms"
"""Interval between checkpoints of the job that `show` runs.

The job ends as soon as a checkpoint contains enough rows.
"""
PREVIEW_LOOK_MS = 50


class StreamEnvironment(StreamSources):
    """Creates streams and runs them as jobs.

    Create an environment with `local`, `ray`, `raydp` or `on_spark`. An environment is a context manager.

    Parameters that many methods have in common:

    - `parallelism`: the number of subtasks of steps that do not set their own, at least 1.
    - `max_parallelism`: the number of key groups, from 1 to 32,768. No step can ever have more subtasks.
    - `config`: a YAML file, or a mapping of settings (`docs/configuration.md`). Arguments of a call take precedence.
    - `options`: a `tg.DataPlaneOptions`, the sizes of buffers.
    - `log_level`: "DEBUG", "INFO", "WARNING", "ERROR" or "CRITICAL", for all of tidegate's loggers.
    - `log_rows`: whether values of rows may be in logs and on the job page (`docs/logging.md`).
    - `placement`: on which nodes slots are placed: "spread" over as many as possible, "pack" onto as few as possible,
      or "strict_pack" all on one (`docs/placement.md`).
    - `standbys`: the number of spare processes of each job, unless its own settings give another number. "auto", the
      default, is one for each free slot: 1 to 4, and at most the number of tasks. "warm" adds one for each keyed task,
      which holds the state of that task (`docs/recovery.md`).
    """

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
        guard: Callable[[], DriverService] | None = None,
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
        """A function that is called with each submitted job, and with True if the job is detached.

        None if there is no listener.
        """
        self._jobs_with_services: list[JobWithServices] = []
        self._temporary: deque[TemporaryJob] = deque(maxlen=ENDED_MAX)
        """Temporary folders of the newest jobs that were started without storage.

        Kept as long as the job page shows these jobs.
        """
        self._closed = False
        self._web = WebAccess(runtime)
        self._functions = UserFunctions()

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, object] | None = None) -> Self:
        """Creates the environment that the configuration names: `execution.target` is local, ray, raydp or on_spark.

        `on_spark` uses the SparkSession of this process, or creates one from the settings that begin with `spark.`,
        like a program that `spark-submit` starts.

        - `config`: see `StreamEnvironment`.

        Raises ConfigurationError for wrong settings.

        Example:

            >>> with tg.StreamEnvironment.from_config({"execution.target": "local", "parallelism.default": 2}) as other:
            ...     other.parallelism
            2
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
        """Creates an environment that runs jobs in this process, without Ray and without a JVM.

        - `parallelism`: 1 by default.
        - All other parameters: see `StreamEnvironment`.

        Raises ConfigurationError for wrong settings.

        Example:

            >>> with tg.StreamEnvironment.local(parallelism=2) as other:
            ...     other.parallelism
            2
        """
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
        """Creates an environment that runs jobs as Ray actors next to Spark executors.

        `env.spark` is the SparkSession.

        Starts Ray on this machine, or joins the cluster at `ray_address`, and starts Spark on it through RayDP. An
        executor and its slots are on one node. A slot holds one subtask of each vertex.

        - `executors`: the number of Spark executors, 2 by default, with `executor_cores` (1) cores and
          `executor_memory` ("1gb") of heap each.
        - `slots_per_executor`: task slots next to each executor, 2 by default.
        - `parallelism`: the number of executors by default, and at most the number of slots.
        - `ray_address`: "host:port" of a running Ray cluster.
        - `ray_options`: arguments of `ray.init`.
        - `app_name`, `spark_configs`: the name of the Spark application, and settings of Spark.
        - `include_dashboard`: whether a Ray that is started has its dashboard.
        - All other parameters: see `StreamEnvironment`.

        Raises ConfigurationError for wrong settings.

        Example:

            >>> env = tg.StreamEnvironment.raydp(executors=2)  # doctest: +SKIP
        """
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.raydp", "raydp")
        from tidegate.actors.ray.authentication import refuse_ray_client

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
        return cls(
            RayRuntime(SlotPlacement.of_session(session), strategy=placement),
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
        """Creates an environment that runs jobs as Ray actors in the executors of an existing Spark cluster.

        `env.spark` is `spark`.

        Starts Ray by `ray.util.spark`, and stops Ray when the environment is closed. The SparkSession continues. Each
        slot takes a core of its executor from Spark.

        - `spark`: a SparkSession.
        - `executors`: the number of executors that run Ray, by default all.
        - `slots_per_executor`: by default all cores but one. If executors have one core each, Ray runs in all executors
          but one.
        - `parallelism`: the number of executors with Ray by default, and at most the number of slots.
        - `object_store_memory`: the size of Ray's object store on each node, such as "256mb".
        - `ray_options`: arguments of `ray.init`.
        - `cluster_options`: arguments of `ray.util.spark.setup_ray_cluster`.
        - `include_dashboard`: whether Ray has its dashboard.
        - All other parameters: see `StreamEnvironment`.

        Raises ConfigurationError if Ray cannot run in this Spark, or would leave no core to Spark. Raises
        SparkTimeoutError, SparkLostError or SparkBridgeError if Ray does not start.

        Example:

            >>> env = tg.StreamEnvironment.on_spark(spark, slots_per_executor=3)  # doctest: +SKIP
        """
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.on_spark", "ray", "spark")
        from tidegate.actors.ray.authentication import refuse_ray_client

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
        return cls(
            RayRuntime(SlotPlacement.of_session(session)),
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
        """Creates an environment that runs jobs on a Ray cluster without Spark, or attaches to jobs there.

        - `address`: "host:port" of the cluster. By default the value of RAY_ADDRESS, or the only cluster of this user.
        - `parallelism`: 1 by default.
        - `slots`: the number of task slots to reserve, a CPU each, until the environment is closed. Without it only
          steps with resources reserve slots, and `standbys="auto"` is 1.
        - `runtime_env`: the argument of `ray.init`. It applies unless this process is already connected to Ray.
        - All other parameters: see `StreamEnvironment`.

        Raises ConfigurationError for wrong settings, and if there is no such cluster.

        Example:

            >>> env = tg.StreamEnvironment.ray("10.0.0.1:6379", slots=4)  # doctest: +SKIP
        """
        settings = _settings(config, log_level, log_rows)
        where, kept = settings.topology, _standbys(standbys)
        need("StreamEnvironment.ray", "ray")
        from tidegate.actors.ray.connection import connect

        slots, placement = _or(slots, where.slots), where.placement if placement is None else placement
        parallelism = _or(parallelism, _or(where.parallelism, 1))
        check_slots(slots, placement, parallelism)
        runtime_env = where.runtime_env if runtime_env is None else runtime_env
        connection = connect(_or(address, where.address), bool(settings.log.given()), runtime_env)
        env = cls(
            _runtime_on(connection, slots, placement, settings.checkpoints),
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
        """Parallelism of steps that do not set their own, at least 1.

        A new value applies to steps that are added afterwards.
        """
        return self._program.parallelism

    @parallelism.setter
    def parallelism(self, parallelism: int) -> None:
        if not isinstance(parallelism, int) or parallelism < 1:
            raise ConfigurationError(f"parallelism={parallelism!r}: give a whole number of at least 1")
        self._program.parallelism = parallelism

    @property
    def max_parallelism(self) -> int | None:
        """Returns the number of key groups, from 1 to 32,768: the most subtasks that an operator may ever have.

        None is the default. A restored job then has the number of its checkpoint. A new job has at least 128 key
        groups, and enough for 1.5 times its parallelism (Flink's `pipeline.max-parallelism`). The number cannot be
        changed for existing state.
        """
        return self._program.max_parallelism

    @max_parallelism.setter
    def max_parallelism(self, max_parallelism: int | None) -> None:
        if max_parallelism is not None and (
            type(max_parallelism) is not int or not 1 <= max_parallelism <= MAX_PARALLELISM_LIMIT
        ):
            raise ConfigurationError(
                f"max_parallelism={max_parallelism!r}: give a whole number from 1 to {MAX_PARALLELISM_LIMIT:,}"
            )
        self._program.max_parallelism = max_parallelism

    @property
    def open_store(self) -> OpenStore:
        """Function that opens the storage at a URL, as the runtime of this environment does.

        A runtime may keep a storage in memory.
        """
        return self._program.open_store

    @property
    def spark(self) -> SparkSession:
        """Returns the SparkSession of this environment. Raises ConfigurationError if the environment has none."""
        if self._session is None:
            raise ConfigurationError(
                "this environment has no Spark; make one with StreamEnvironment.raydp(...) or on_spark(...)"
            )
        return self._session.spark

    @property
    def dashboard_url(self) -> str | None:
        """Address of Ray's dashboard, or None if there is no dashboard, or if this environment did not start Ray."""
        return None if self._session is None else self._session.dashboard_url

    @property
    def web_url(self) -> str | None:
        """Address at which the jobs are shown, or None before `serve_web`."""
        return self._web.url

    def serve_web(self, port: int | None = None, address: str | None = None) -> str:
        """Starts a web server with a page that shows the jobs of this runtime, and with Flink's REST paths
        (`docs/rest.md`).

        On Ray one small actor serves all jobs of the cluster. Otherwise a thread of this process serves them until the
        environment is closed. With the setting `rest.enabled` the first `execute` calls this. Needs the extra
        `tidegate[web]`.

        - `port`: by default 8081, or the next port that is free. 0 is any free port.
        - `address`: the address to listen at, by default loopback. Every user of this machine may then read. At any
          other address reading needs the token. Changes of a job always need the token.

        Returns the address of the server. `job.web_url` is the address of a job's page. Raises ConfigurationError if
        the address or the port cannot be used.

        Example:

            >>> url = env.serve_web(port=0)  # doctest: +SKIP
        """
        self._check_open("serve_web")
        settings = self._config.web
        port = settings.web_port if port is None else port
        return self._web.serve(WebOptions(port, settings.web_address if address is None else address))

    # --- SQL ------------------------------------------------------------------------------------------------------

    def create_temporary_view(
        self,
        name: str,
        view: Stream | LookedUp,
        *,
        refresh: str | timedelta | int | None = None,
        max_stale: str | timedelta | int | None = None,
        replace: bool = False,
    ) -> None:
        """Registers a stream or a table under a name, so that SQL queries of this program can read it.

        Like streams, views exist until the program is executed.

        - `name`: letters, digits and underscores. Upper and lower case are not distinguished.
        - `view`: a stream, or any table that `lookup_join` accepts.
        - `refresh`, `max_stale`: only for a table: how often the table is read, and how old its rows may be, as in
          `lookup_join`.
        - `replace`: whether a view of the same name may be replaced.

        Raises ConfigurationError for a name that is already used.

        Example:

            >>> env.create_temporary_view("orders", orders)
            >>> env.sql("SELECT user, amount FROM orders WHERE amount > 10").columns
            ['user', 'amount']
        """
        self._program.views.add(name, view, isinstance(view, Stream), refresh, max_stale, replace)

    def create_temporary_function(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        returns: Any = None,
        vectorized: bool = False,
        replace: bool = False,
    ) -> None:
        """Registers a Python function under a name, so that SQL queries can call it.

        Needs the extra `tidegate[sql]`.

        Unlike views, functions stay registered for the queries of later programs. A function must return the same for
        the same values, however rows are cut into batches. Several threads may call it at the same time. If it raises,
        the job fails, and the error shows the row.

        - `name`: letters, digits and underscores. Upper and lower case are not distinguished.
        - `function`: takes the values of each row, None for null, and returns one value.
        - `returns`: the type of the value: a Python type such as `list[str]`, a dataclass, or a pyarrow type. By
          default the return annotation of the function.
        - `vectorized`: whether the function takes a polars Series for each argument, and returns a Series, an Arrow
          array or a list of the same length.
        - `replace`: whether a function of the same name may be replaced.

        Raises ConfigurationError for a name that is already used.

        Example:

            >>> env.create_temporary_function("cents", lambda amount: amount * 100, returns=int, replace=True)
            >>> env.create_temporary_view("orders", orders)
            >>> env.sql("SELECT cents(amount) AS c FROM orders").columns
            ['c']
        """
        need("StreamEnvironment.create_temporary_function", "sql")
        from tidegate.sql.expressions import check_function_name

        check_function_name(name)
        self._functions.add(name, function, returns, vectorized, replace)

    def sql(
        self,
        query: str,
        *,
        emit: Literal["changes", "update", "final"] = "changes",
        ttl: str | timedelta | int | None = None,
        uid: str | None = None,
    ) -> Stream:
        """Returns the stream of a SELECT query over views. Needs the extra `tidegate[sql]`.

        A query becomes the same steps that methods of streams add. `docs/sql.md` lists these steps, and what is not
        supported. Syntax and types are Spark's. Windows are written as in Flink or as in Spark.

        - `query`: the text of a SELECT.
        - `emit`: how running aggregates and rankings are emitted. "changes" marks inserted and retracted rows in the
          column `row_kind`. "update" emits rows that replace others, for the outermost aggregate or ranking. "final"
          emits aggregates once, at the end of the input.
        - `ttl`: how long joins without a window, aggregates, rankings and DISTINCT keep state, a duration.
        - `uid`: names the state of the query in checkpoints. By default it is made of the text of the query.

        Raises ConfigurationError, with the line and column, for a part of the query that is not supported.

        Example:

            >>> env.create_temporary_view("orders", orders)
            >>> env.sql("SELECT user, sum(amount) AS total FROM orders GROUP BY user", emit="final").show()
            +------+-------+
            | user | total |
            +------+-------+
            | ann  |    42 |
            | bob  |     5 |
            +------+-------+
        """
        need("StreamEnvironment.sql", "sql")
        from tidegate.sql.queries import translate as translated

        with self._program.all_or_nothing():
            return translated(query, self._program, self._program.views, emit, ttl, uid, self._functions)

    # --- execution ------------------------------------------------------------------------------------------------

    def execute(
        self,
        name: str | None = None,
        *,
        checkpoints: CheckpointConfig | None = None,
        restart: RestartStrategy | None = None,
        restore: str | os.PathLike[str] | None = None,
        allow_non_restored_state: bool | None = None,
        hooks: Sequence[MasterHook] = (),
        detached: bool | None = None,
        progress: ProgressKind | None = None,
        local_aggregation: CombiningMode | None = None,
        slot_sharing: bool | None = None,
    ) -> Job:
        """Runs the streams created so far as one job, and starts a new, empty program.

        - `name`: by default the name of the script (`orders` for `orders.py`), or "job".
        - `checkpoints`: a `tg.CheckpointConfig`. Settings that it does not give are taken from the configuration.
        - `restart`: a `tg.RestartStrategy`. By default a job with periodic checkpoints restarts without limit
          (`tg.RestartStrategy.exponential_delay()`), and a job without them never.
        - `restore`: where the job starts.
            - None: at the beginning.
            - "latest": at the newest complete checkpoint of a job of this name, or at the beginning if there never was
              one.
            - "latest_or_fresh": like "latest", and also at the beginning if all checkpoints are damaged or gone.
            - A path: `<storage>/<job>/chk-N`, or the path of a savepoint.
        - `allow_non_restored_state`: whether state may be dropped if its operator or its declaration is no longer in
          the program. By default such state is an error.
        - `hooks`: `tg.MasterHook` objects, which are called at every checkpoint.
        - `detached`: whether the job continues when this script ends or is killed, as long as its Ray cluster runs. Any
          driver finds the job with `attach`.
        - `progress`: how a job that ends by itself is shown on stderr: as a "bar", as "lines", or not ("off"). "auto",
          the default, is a bar in a terminal.
        - `local_aggregation`: whether rows are combined before they are sent to aggregates: "auto" (only where it is
          faster), "on" or "off".
        - `slot_sharing`: with False each subtask runs in a process of its own (`docs/placement.md`).

        Raises ConfigurationError, TableError or StorageError if the job cannot run. Nothing was started in this case,
        and the streams can be executed again with other arguments, until a new source starts another program.

        Example:

            >>> rows = orders.collect()
            >>> job = env.execute("orders", progress="off")
            >>> job.wait()
            'finished'
        """
        self._check_open("execute")
        self._program.given_up, shown = True, progress_kind(progress, self._config.job.progress)  # until it has worked
        for before in self._jobs_with_services:
            before.await_cancelled()
        detached = self._config.job.detached if detached is None else detached
        request = self._request(
            name,
            checkpoints,
            restart,
            restore,
            allow_non_restored_state,
            hooks,
            detached=detached,
            local_aggregation=local_aggregation,
            slot_sharing=slot_sharing,
        )
        request = check_meaning(request, self.open_store)
        store, savepoints, name = self.open_store(request.root), request.checkpoints.savepoints, request.name
        temporary = self._temporary_job(request)
        if self._config.web.web:
            self.serve_web()
        try:
            with name_taken(store, name, request.job_id, make_job_id(name, ""), request.checkpoints.lease) as lease:
                submission = prepare(request, self.open_store)
                restored = submission.spec.restore
                if temporary is not None and restored is not None and restored.root == temporary.root:
                    temporary.restored_from(restored.job_id)
                lease.abandon()
                running = self._with_services(self._runtime.submit(submission), submission)
        except RuntimeError as error:
            if not lacks_threads(error):
                raise
            raise ConfigurationError(
                f"execute({name!r}): this process may not start another thread. The limit of its user (ulimit -u) or "
                "of its container (pids) is reached: raise it, or end other processes"
            ) from error
        show_progress(running, submission, shown, self._runtime)
        for doubt in doubts(self._program.nodes, request.checkpoints.interval is not None):
            log.warning("execute(%r): %s", name, doubt)
        collected, endless = self._program.collected, endless_source(self._program.nodes)
        self._program.clear()
        self._program.executed = name
        root = submission.spec.root
        job = Job(running, submission.spec.job_id, name, root, self.open_store, savepoints, self._web, temporary)
        for rows in collected:
            rows.follow(job.status, job.wait, endless, temporary)
        if self._submitted is not None:
            self._submitted(job, detached)
        return job

    def _preview(self, stream: Stream, n: int, timeout_ms: int) -> tuple[pa.Table, str]:
        """Runs a separate job to compute the first `n` rows of a stream. Returns the rows, and a note about rows that
        are not shown.

        The job runs in the same place as other jobs of this environment, from the beginning of the sources, until a
        checkpoint contains enough rows or the input has ended. It is deleted afterwards. Raises JobFailedError, and the
        errors of `execute`.
        """
        self._check_open("show")
        other = copy.copy(self)
        other._program = self._program.up_to([node for node, _ in stream._inputs])
        other._submitted = None
        # `restore` of the configuration applies to the program that is executed, not to its previews.
        other._config = replace(self._config, job=self._config.job.model_copy(update={"restore": None}))
        name = f"show-{uuid.uuid4().hex[:8]}"
        shown = Stream(other._program, stream._inputs, stream._keyed_by, stream.timestamp, stream._changelog)
        rows = collected_rows(shown, "show", name, handed_on=False)
        endless = endless_source(other._program.nodes)
        deadline_ms = None if endless is None else monotonic_ms() + timeout_ms
        checkpoints = CheckpointConfig(interval=PREVIEW_INTERVAL, min_pause=PREVIEW_INTERVAL)
        job = other.execute(
            name, checkpoints=checkpoints, restart=RestartStrategy.none(), detached=False, progress="off"
        )
        try:
            ended = late = enough = False
            while not (ended or late or enough):
                try:
                    job.wait(PREVIEW_LOOK_MS)
                    ended = True
                except JobTimeoutError:
                    late = deadline_ms is not None and monotonic_ms() >= deadline_ms
                enough = rows.rows_committed() > n
            found = rows.head(n)
        except JobFailedError as error:
            # The message of the job itself names its checkpoints, which are deleted below.
            raise JobFailedError(f"show: {job._failure_reason()}") from error.__cause__
        finally:
            job.cancel()
            job._wait_over()
            self.open_store(job.root).delete_tree(CheckpointLayout(job.job_id).job_dir())
        if enough:
            return found, f"only the first {n:,} rows"
        return found, f"what came within {duration_text(timeout_ms)} of {endless}, which never ends" if late else ""

    def _temporary_job(self, request: JobRequest) -> TemporaryJob | None:
        """Returns the temporary folder of a job without storage, or None if the job has storage.

        The folder is kept as long as the job page shows the job.
        """
        if not request.temporary:
            return None
        keeps = "retention" in request.checkpoints.model_fields_set
        temporary = TemporaryJob(request.root, request.job_id, keeps=keeps)
        self._temporary.append(temporary)
        return temporary

    def _with_services(self, running: RunningJob, submission: Submission) -> RunningJob:
        """Returns the job together with its services in this driver, such as `CheckpointCalls`, or the job alone if it
        has none.
        """
        job_id, functions = submission.spec.job_id, self._program.functions
        guards = () if self._guard is None else (self._guard(),)
        if not functions and not submission.services and not guards:
            return running
        make_call = call_with_arrow if self._session is None else calling_with_spark(self._session.spark)
        calls = [CheckpointCalls(each, job_id, make_call, self.open_store) for each in functions]
        job, before = JobWithServices(running, (*guards, *submission.services, *calls)), self._jobs_with_services
        self._jobs_with_services = [*(each for each in before if not each.over), job]
        job.start(before)
        return job

    def attach(self, name: str) -> Job:
        """Returns the running job with a name or id, whichever driver started it.

        On Ray the jobs of all drivers are found, on the local runtime the jobs of this process. Closing this
        environment does not affect the job.

        - `name`: the name or the id of the job.

        Raises ConfigurationError, which lists the running jobs, if there is no such job.

        Example:

            >>> job = env.attach("orders")  # doctest: +SKIP
        """
        self._check_open("attach")
        card, running = self._runtime.attach(name)
        return Job(running, card.job_id, card.name, card.root, self.open_store, card.savepoints, self._web)

    def check_restore(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        checkpoints: CheckpointConfig | None = None,
        allow_non_restored_state: bool | None = None,
    ) -> RestoreReport:
        """Returns a report of what `execute(restore=path)` would do with the streams created so far.

        The report names the state that would be restored, start empty, be dropped or be converted. If `execute` would
        refuse to restore, it has the error. Nothing is started or written, and the streams can still be executed.

        - `path`, `checkpoints`, `allow_non_restored_state`: as in `execute`.
        - `name`: the name of the job. It is needed for "latest".

        Raises ConfigurationError if there is no such checkpoint, CorruptionError if the checkpoint is damaged, and
        StorageError if it cannot be read.

        Example:

            >>> print(env.check_restore("checkpoints/orders-1a2b3c4d/chk-17"))  # doctest: +SKIP
        """
        name = "check" if name is None and self._config.job.name is None else name
        request = self._request(name, checkpoints, None, path, allow_non_restored_state, (), starts=False)
        return report_on(request, self.open_store)

    def plan(
        self,
        name: str | None = None,
        *,
        checkpoints: CheckpointConfig | None = None,
        restart: RestartStrategy | None = None,
        restore: str | os.PathLike[str] | None = None,
        allow_non_restored_state: bool | None = None,
        hooks: Sequence[MasterHook] = (),
        suffix: str | None = None,
        seed: int | None = None,
        local_aggregation: CombiningMode | None = None,
        slot_sharing: bool | None = None,
    ) -> Plan:
        """Returns the job that `execute` would submit, after every check.

        Sources are staged and tables claimed. In a notebook the plan is a picture of the graph: vertices with their
        operators and parallelism, and how rows are partitioned between them. `print` writes the same as text. The
        streams can be executed afterwards. Unlike `execute`, `plan` does not check whether a job of this name runs.

        - `suffix`: the end of the job's id, random by default.
        - `seed`: the seed of the job's random choices, random by default.
        - All other parameters: as in `execute`.

        Raises the errors of `execute`.

        Example:

            >>> rows = orders.collect()
            >>> "from_rows" in str(env.plan())
            True
        """
        self._check_open("plan")
        request = self._request(
            name,
            checkpoints,
            restart,
            restore,
            allow_non_restored_state,
            hooks,
            suffix,
            seed,
            local_aggregation=local_aggregation,
            slot_sharing=slot_sharing,
        )
        # Imported late: only a plan needs the modules that draw the graph of the job page.
        from tidegate.api.submission.plan_picture import Plan

        return Plan.of(prepare(request, self.open_store))

    def _request(
        self,
        name: str | None,
        checkpoints: CheckpointConfig | None,
        restart: RestartStrategy | None,
        restore: str | os.PathLike[str] | None,
        allow_non_restored_state: bool | None,
        hooks: Sequence[MasterHook],
        suffix: str | None = None,
        seed: int | None = None,
        detached: bool = False,
        local_aggregation: CombiningMode | None = None,
        slot_sharing: bool | None = None,
        starts: bool = True,
    ) -> JobRequest:
        """Returns the request for a job, after the checks that need only the program and the stores.

        `starts` is True if the job is going to be started. If False, no storage is prepared or tested for it.
        """
        check_given("checkpoints", checkpoints, CheckpointConfig, 'tg.CheckpointConfig(interval="10s", storage=...)')
        check_given("restart", restart, RestartStrategy, 'tg.RestartStrategy.fixed_delay(attempts=3, delay="1s")')
        check_given("slot_sharing", slot_sharing, bool, "True or False")
        check_given("allow_non_restored_state", allow_non_restored_state, bool, "True or False")
        check_given("detached", detached, bool, "True or False")
        settings, config = self._config.job, self._config.checkpoints_of(checkpoints, self._standbys)
        name = settings.name if name is None else name
        restore = pointer(settings.restore if restore is None else restore)
        if name is None:
            if restore in ("latest", "latest_or_fresh"):
                raise ConfigurationError(
                    f"execute(restore={restore!r}): a job is found again by its name; give name=, or set pipeline.name"
                )
            name = script_name()
        check_functions(self._program.functions, config, detached=detached)
        named = starts or config.storage is not None
        store = self.open_store(self._storage_of(config) if named else self._runtime.memory_url)
        nodes, executed = self._program.nodes, self._program.executed
        if not nodes and executed is not None:
            raise ConfigurationError(
                f"the job has no source: execute() has run the program already, as the job {executed!r}, and has begun "
                "a new one; make its streams from their sources again"
            )
        check_changes_come_once(nodes, config)
        combining = combining_mode(local_aggregation, settings.local_aggregation)
        graph = self._graph(nodes, combining, settings.slot_sharing if slot_sharing is None else slot_sharing)
        check_outlives_ray(store.url, "the checkpoints of the job")
        for table in self._program.tables:
            check_outlives_ray(table.url, "a table of the job")
        urls = {store.url: config.title("storage")}
        for table in self._program.tables:
            urls.setdefault(table.url, "the URL of a table")
        if config.savepoints is not None:
            savepoints_url = self.open_store(config.savepoints).url
            urls.setdefault(savepoints_url, config.title("savepoints"))
            check_savepoint_target(savepoints_url, "savepoints of the job")
        check_captures(nodes, refuse=self._runtime.sends_functions)
        if starts:
            self._runtime.check(graph, urls)
        if detached:
            self._runtime.check_detached(name, tuple(urls))
        if starts:
            for url in urls:
                check_conditional_create(self.open_store(url))
        return JobRequest(
            name=name,
            job_id=make_job_id(name, suffix if suffix is not None else uuid.uuid4().hex[:8]),
            graph=graph,
            root=store.url,
            tables=tuple(self._program.tables),
            collected=tuple(self._program.collected),
            checkpoints=config,
            restart=restart
            or self._config.restart
            or default_strategy(periodic_checkpoints=config.interval is not None),
            restore=restore,
            hooks=(*self._program.hooks, *hooks),
            options=self._options,
            seed=seed if seed is not None else uuid.uuid4().int % 2**32,
            max_parallelism=self._program.max_parallelism,
            allow_non_restored_state=(
                settings.allow_non_restored_state if allow_non_restored_state is None else allow_non_restored_state
            ),
            detached=detached,
            log=self._config.log.for_processes,
            temporary=config.storage is None and config.checkpoint_storage != "jobmanager",
        )

    def _graph(self, nodes: Sequence[StreamNode], combining: CombiningMode, slot_sharing: bool) -> JobGraph:
        graph = translate(nodes, self._program.max_parallelism, combining, slot_sharing=slot_sharing)
        return with_event_time(with_needed_rows(with_needed_columns(graph, nodes), nodes))

    def _storage_of(self, config: CheckpointConfig) -> str:
        """Returns the URL of the folder of checkpoints: the configured folder, the memory of the coordinator, or a
        temporary folder.
        """
        if config.storage is not None:
            return config.storage
        return (
            self._runtime.memory_url if config.checkpoint_storage == "jobmanager" else temporary_root(self.open_store)
        )

    def add_master_hook(self, hook: MasterHook) -> None:
        """Adds a hook that is called at every checkpoint of the next job.

        - `hook`: a `tg.MasterHook`.

        Example:

            >>> class Printed(tg.MasterHook):
            ...     pass
            >>> env.add_master_hook(Printed("printed"))  # doctest: +SKIP
        """
        self._program.hooks.append(hook)

    def _check_open(self, call: str) -> None:
        """Raises ConfigurationError, which begins with the name of the `call`, if this environment is closed."""
        if self._closed:
            raise ConfigurationError(
                f"{call}: this environment is closed, so no job can run in it; call {call} before close() or inside "
                "the with block, or make another environment and its streams again"
            )

    def close(self) -> None:
        """Cancels running jobs, and stops Ray and Spark if this environment started them.

        Nothing can be executed or shown afterwards. Tables and collected rows can still be read.

        Example:

            >>> other = tg.StreamEnvironment.local()
            >>> other.close()
        """
        self._closed = True
        stop_progress(self._runtime)
        self._web.close()
        self._runtime.stop()
        for job in self._jobs_with_services:
            job.close()
        self._jobs_with_services.clear()
        if self._session is not None:
            self._session.stop()
            self._session = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._temporary.clear()
        delete_unneeded(self.open_store)

    def __enter__(self) -> Self:
        self._check_open("with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _settings(
    config: str | os.PathLike[str] | Mapping[str, object] | None, log_level: str | None, log_rows: bool | None
) -> Config:
    """Returns the configuration of an environment.

    The log settings that were passed to the call take precedence over `config`.
    """
    settings = load_config(config)
    given = {"log_level": log_level, "log_rows": log_rows}
    called = {name: value for name, value in given.items() if value is not None}
    if not called:
        return settings
    return replace(settings, log=LogConfig.model_validate({**settings.log.given(), **called}))


def _or(given: _Given | None, otherwise: _Otherwise) -> _Given | _Otherwise:
    """Returns the argument `given`, or `otherwise` if it is None."""
    return otherwise if given is None else given


def _ray_options(configured: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the arguments of `ray.init`: the configured arguments, overridden by the given arguments.

    Raises ConfigurationError if `runtime_env` is not a mapping.
    """
    check_runtime_env_is_mapping(given or {}, "ray_options")
    return {**configured, **(given or {})}


def _standbys(given: object) -> Standbys | None:
    """Returns the argument `standbys=` of an environment after checking it. None if it was not given."""
    return None if given is None else spare_processes(given, "standbys")


def check_slots(slots: int | None, placement: Placement, parallelism: int) -> None:
    """Raises ConfigurationError for an unknown placement, or if there are fewer slots than the parallelism needs."""
    from tidegate.actors.graph.slot_plan import strategy_of

    strategy_of(placement)
    if slots is not None and slots < max(1, parallelism):
        raise ConfigurationError(
            f"slots={slots}: a slot holds one subtask of each step, so parallelism={parallelism} needs that many"
            f"; give slots={parallelism} or more, or a lower parallelism"
        )


def _runtime_on(
    connection: Connection, slots: int | None, placement: Placement, checkpoints: CheckpointConfig
) -> RayRuntime:
    """Returns the runtime for a Ray cluster to which this process is connected.

    Closes the connection and raises an error if the slots are not available.
    """
    from tidegate.actors.ray.coordinator_liveness import end_orphans
    from tidegate.actors.ray.ray_runtime import RayRuntime

    end_orphans()
    if slots is None:
        return RayRuntime(strategy=placement)
    try:
        return RayRuntime.with_slots(slots, placement, checkpoints.slot_request_timeout / 1_000)
    except BaseException:
        connection.close()
        raise
