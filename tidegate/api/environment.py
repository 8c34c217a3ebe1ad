"""`StreamEnvironment`: where a driver script makes its streams and runs them as jobs.

It holds one `Program` at a time. `execute` checks it, prepares it (`submission/`) and hands it to the runtime of this
environment: Ray, or this process.
"""

from __future__ import annotations

import copy
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from tidegate.actors.drivers.threads import lacks_threads
from tidegate.actors.graph.event_time import with_event_time
from tidegate.actors.graph.filtered_sources import with_needed_rows
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.needed_columns import with_needed_columns
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.runtimes.running_job import RunningJob, Submission
from tidegate.api.accompanied_job import AccompaniedJob
from tidegate.api.checkpoint_calls import CheckpointCalls, call_with_arrow, calling_with_spark, check_functions
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.given_names import check_given, combining_mode, pointer, script_name
from tidegate.api.progress.display import ProgressKind, progress_kind, show_progress, stop_progress
from tidegate.api.streams.stream import Stream
from tidegate.api.submission.captured_objects import check_captures
from tidegate.api.submission.changes_once import check_changes_come_once
from tidegate.api.submission.doubts import doubts, endless_source
from tidegate.api.submission.job import Job
from tidegate.api.submission.job_names import name_taken
from tidegate.api.submission.restore_report import RestoreReport
from tidegate.api.submission.submission import JobRequest, check_meaning, make_job_id, prepare, report_on
from tidegate.api.submission.temporary_jobs import TemporaryJob, delete_unneeded, temporary_root
from tidegate.api.topologies import Topologies
from tidegate.connectors.master_hooks import MasterHook
from tidegate.operators.local_aggregation.combining_rule import CombiningMode
from tidegate.recovery.restart_strategy import RestartStrategy, default_strategy
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.clock import monotonic_ms
from tidegate.storage.errors import ConfigurationError, JobFailedError, JobTimeoutError
from tidegate.storage.extras import need
from tidegate.storage.files.create_check import check_conditional_create
from tidegate.storage.files.file_system_store import check_outlives_ray, check_savepoint_target
from tidegate.storage.files.store import OpenStore
from tidegate.storage.units import duration_text
from tidegate.web.options import WebOptions

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from tidegate.api.submission.plan_picture import Plan
    from tidegate.api.tables.lookup_tables import LookedUp


log = logging.getLogger(__name__)

PREVIEW_INTERVAL = "100ms"
"""Between checkpoints of a job that only shows rows: as soon as one covers enough rows, the job ends."""
PREVIEW_LOOK_MS = 50


class StreamEnvironment(Topologies):
    """Makes streams and runs them.

    Make one with `local`, `ray`, `raydp` or `on_spark`, and use it as a context manager. Each method that begins a
    stream takes `slot_sharing_group`: the name of the slots that the source, and the steps after it, share with others
    (see `docs/placement.md`).
    """

    @property
    def open_store(self) -> OpenStore:
        """Opens the storage at a URL, as the runtime of this environment does."""
        return self._program.open_store

    @property
    def spark(self) -> SparkSession:
        """The SparkSession. ConfigurationError if this environment has none."""
        if self._session is None:
            raise ConfigurationError(
                "this environment has no Spark; make one with StreamEnvironment.raydp(...) or on_spark(...)"
            )
        return self._session.spark

    @property
    def dashboard_url(self) -> str | None:
        """Where Ray's dashboard is. None without one, and where this environment has not initialised Ray."""
        return None if self._session is None else self._session.dashboard_url

    @property
    def web_url(self) -> str | None:
        """Where the jobs are shown; None before `serve_web`."""
        return self._web.url

    def serve_web(self, port: int | None = None, address: str | None = None) -> str:
        """Show the jobs of this runtime on a page, and answer scripts under Flink's REST paths (`docs/rest.md`).

        On Ray one small actor does so for all jobs of the cluster; else a thread of this process, until the environment
        is closed. Returns the address; `job.web_url` is that of a job's page. What is not given is as the configuration
        says: `port` is 8081, or the next that is free (0: any), and `address`, that to listen at, is loopback, where
        everybody on this machine may read. Elsewhere reading needs the token, as all that changes a job always does.
        With `rest.enabled` the first `execute` does this. Needs the extra `tidegate[web]`.
        Raises ConfigurationError.
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
        """Give a stream a name, by which queries of this program read it: `create_temporary_view("bids", bids)`.

        It may also be a table that streams are joined with, as `lookup_join` takes it, and `refresh` and `max_stale` as
        it does. Like streams, views are gone when the program is executed. Names are any case. ConfigurationError for
        one that is taken, unless `replace` says so.
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
        """Give a Python function a name, by which queries call it: `create_temporary_function("domain", domain)`.

        It is called with the values of each row, None for null, and returns one value, of the type that its annotation
        says or `returns`: a Python type such as `list[str]`, a dataclass, or a pyarrow type. With `vectorized` it is
        called with a polars Series for each argument, and returns a Series, an Arrow array or a list of as many values.
        It must give the same for the same values, however rows are cut into batches. Several threads may call it at the
        same time. One that raises fails the job, and the error shows the row. Unlike views, functions stay for the
        queries of later programs. Names are any case.
        ConfigurationError for a name that is taken, unless `replace` says so. Needs the extra `tidegate[sql]`.
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
        """The stream of a SELECT over views: `sql("SELECT auction, price * 0.9 AS euros FROM bids WHERE price > 100")`.

        It becomes steps as other methods add them, and nothing else: `docs/sql.md` says which, and where it ends. Words
        and types are Spark's, windows are written as in Flink or as in Spark.

        `emit` is how running aggregates and rankings come out: rows that come and are taken back, in the column
        `row_kind`; of the outermost one rows that replace others ("update"); or, of aggregates, once at the end of the
        input ("final"). `ttl` bounds the state of joins without a window, aggregates, rankings and DISTINCT. State is
        found again by the text of the query, or by `uid`. ConfigurationError says what is not covered, and where it
        stands. Needs the extra `tidegate[sql]`.
        """
        need("StreamEnvironment.sql", "sql")
        from tidegate.sql.queries import translate as translated

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
        """Run the streams made so far as one job, and start anew with an empty environment.

        What is not given here is as the configuration of the environment says, setting by setting. Without a `name`
        the job is called as the script is (`orders` for `orders.py`), or "job". `restore` says where the job starts:

        - None: at the beginning.
        - "latest": at the newest whole checkpoint of a job of this name; afresh if no run of the name ever completed
          one.
        - "latest_or_fresh": the same, and afresh as well if all of them are damaged or gone.
        - A path, `<storage>/<job>/chk-N` or that of a savepoint: there. State whose operator is not in the program, or
          that its function does not declare any more, is refused, or left behind with `allow_non_restored_state`.

        `restart` defaults to the `config=` of the environment. Without that, a job with periodic checkpoints restarts
        without end (`tg.RestartStrategy.exponential_delay()`), and one without them never. `hooks` are told of every
        checkpoint (see `tg.MasterHook`). A `detached` job lives on when this script ends or is killed, if its Ray
        cluster does; any driver finds it with `attach`. `progress` of a job that ends by itself is shown on stderr as a
        "bar", as "lines" now and then, or not ("off"); "auto", the default, is a bar in a terminal. `local_aggregation`
        says whether rows are combined before they are sent to aggregates: "auto" (where that pays), "on" or "off".
        With `slot_sharing=False` each subtask runs in a process of its own (`docs/placement.md`).

        Raises ConfigurationError, TableError or StorageError for what cannot work; nothing has started then. The
        streams can still be executed in another way, until a new source begins another program.
        """
        self._check_open("execute")
        self._program.given_up, shown = True, progress_kind(progress, self._config.job.progress)  # until it has worked
        for before in self._accompanied:
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
                running = self._accompany(self._runtime.submit(submission), submission)
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
        root = submission.spec.root
        job = Job(running, submission.spec.job_id, name, root, self.open_store, savepoints, self._web, temporary)
        for rows in collected:
            rows.follow(job.status, job.wait, endless, temporary)
        if self._submitted is not None:
            self._submitted(job, detached)
        return job

    def _preview(self, stream: Stream, n: int, timeout_ms: int) -> tuple[pa.Table, str]:
        """The first rows of a stream, of a job of its own that is gone afterwards, and a note on what is not shown.

        The job runs where others of this environment run, from the beginning of the sources, until a checkpoint covers
        enough rows, or the input has ended. Raises JobFailedError, and as `execute`.
        """
        self._check_open("show")
        other = copy.copy(self)
        other._program = self._program.up_to([node for node, _ in stream._inputs])
        other._submitted = None
        # Where the configuration lets jobs start is for the program that is executed.
        other._config = replace(self._config, job=self._config.job.model_copy(update={"restore": None}))
        name = f"show-{uuid.uuid4().hex[:8]}"
        shown = Stream(other._program, stream._inputs, stream._keyed_by, stream.timestamp, stream._updating)
        rows = shown._collected("show", name, handed_on=False)
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
            # The job's own message leads to its checkpoints, which go.
            raise JobFailedError(f"show: {job._failure_reason()}") from error.__cause__
        finally:
            job.cancel()
            job._wait_over()
            self.open_store(job.root).delete_tree(CheckpointLayout(job.job_id).job_dir())
        if enough:
            return found, f"only the first {n:,} rows"
        return found, f"what came within {duration_text(timeout_ms)} of {endless}, which never ends" if late else ""

    def _temporary_job(self, request: JobRequest) -> TemporaryJob | None:
        """The temporary folder of a job without storage, which the environment needs as long as it shows the job."""
        if not request.temporary:
            return None
        keeps = "retention" in request.checkpoints.model_fields_set
        temporary = TemporaryJob(request.root, request.job_id, keeps=keeps)
        self._temporary.append(temporary)
        return temporary

    def _accompany(self, running: RunningJob, submission: Submission) -> RunningJob:
        """The job together with its companions in this driver, if it has any."""
        job_id, functions = submission.spec.job_id, self._program.functions
        guards = () if self._guard is None else (self._guard(),)
        if not functions and not submission.companions and not guards:
            return running
        make_call = call_with_arrow if self._session is None else calling_with_spark(self._session.spark)
        calls = [CheckpointCalls(each, job_id, make_call, self.open_store) for each in functions]
        job, before = AccompaniedJob(running, (*guards, *submission.companions, *calls)), self._accompanied
        self._accompanied = [*(each for each in before if not each.over), job]
        job.start(before)
        return job

    def attach(self, name: str) -> Job:
        """The running job with this name or id, whoever started it.

        On Ray the jobs of all drivers are found, on the local runtime those of this process. Closing this environment
        leaves the job alone. Raises ConfigurationError, which lists the running jobs, if there is no such job.
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
        """What `execute(restore=path)` would do with the streams made so far: `print(env.check_restore(path))`.

        `path` is as `restore` of `execute`; for "latest" give the `name` of the job. The report names what would be
        restored, start empty, be dropped or be converted, and holds the error of a refusal. Nothing is started and
        nothing is written, and the streams can still be executed. Raises ConfigurationError if there is no such
        checkpoint, CorruptionError and StorageError.
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
        """What `execute` submits, after every check; sources are staged and tables claimed.

        In a notebook it is a picture of the graph: vertices with their operators and parallelism, and how rows are
        dealt out between them. Printed, it is the same in words. The streams can be executed afterwards.

        `suffix` of the job's id and `seed` are random unless they are given. Unlike `execute` this does not ask
        whether a job of this name runs.
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
        # Imported late: only a plan needs what draws the graph of the job page.
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
        """The request for a job, after the checks that need only the program and the stores.

        `starts`: whether the job is going to be started. Otherwise nothing is prepared for it, and nothing is probed.
        """
        check_given("checkpoints", checkpoints, CheckpointConfig, 'tg.CheckpointConfig(interval="10s", storage=...)')
        check_given("restart", restart, RestartStrategy, 'tg.RestartStrategy.fixed_delay(attempts=3, delay="1s")')
        check_given("slot_sharing", slot_sharing, bool, "True or False")
        settings, config = self._config.job, self._config.checkpoints_of(checkpoints, self._standbys)
        name = settings.name if name is None else name
        restore = pointer(settings.restore if restore is None else restore)
        if name is None:
            if restore in ("latest", "latest_or_fresh"):
                raise ConfigurationError(
                    f"execute(restore={restore!r}): a job is found again by its name; give it, or as pipeline.name"
                )
            name = script_name()
        check_functions(self._program.functions, config, detached=detached)
        named = starts or config.storage is not None
        store = self.open_store(self._storage_of(config) if named else self._runtime.memory_url)
        nodes = self._program.nodes
        check_changes_come_once(nodes, config)
        combining = combining_mode(local_aggregation, settings.local_aggregation)
        graph = self._graph(nodes, combining, settings.slot_sharing if slot_sharing is None else slot_sharing)
        check_outlives_ray(store.url, "the checkpoints of the job")
        for table in self._program.tables:
            check_outlives_ray(table.url, "a table of the job")
        urls = [store.url, *(table.url for table in self._program.tables)]
        if config.savepoints is not None:
            urls.append(self.open_store(config.savepoints).url)
            check_savepoint_target(urls[-1], "savepoints of the job")
        check_captures(nodes, refuse=self._runtime.sends_functions)
        if starts:
            self._runtime.check(graph, urls)
        if detached:
            self._runtime.check_detached(name, urls)
        if starts:
            for url in dict.fromkeys(urls):
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
            log=self._config.log.settings,
            temporary=config.storage is None and config.checkpoint_storage != "jobmanager",
        )

    def _graph(self, nodes: Sequence[StreamNode], combining: CombiningMode, slot_sharing: bool) -> JobGraph:
        graph = translate(nodes, self._program.max_parallelism, combining, slot_sharing=slot_sharing)
        return with_event_time(with_needed_rows(with_needed_columns(graph, nodes), nodes))

    def _storage_of(self, config: CheckpointConfig) -> str:
        """Where checkpoints go: the folder that was named, the coordinator's memory, or a temporary folder."""
        if config.storage is not None:
            return config.storage
        return (
            self._runtime.memory_url if config.checkpoint_storage == "jobmanager" else temporary_root(self.open_store)
        )

    def add_master_hook(self, hook: MasterHook) -> None:
        """Add a hook that the next job tells of its checkpoints (see `tg.MasterHook`)."""
        self._program.hooks.append(hook)

    def _check_open(self, call: str) -> None:
        """Raise ConfigurationError if this environment is closed: a job would run where nothing ends it."""
        if self._closed:
            raise ConfigurationError(
                f"{call}: this environment is closed, so no job can run in it; call {call} before close() or inside "
                "the with block, or make another environment and its streams anew"
            )

    def close(self) -> None:
        """Cancel what runs, and stop Ray and Spark if this environment started them.

        Nothing can be executed or shown afterwards. Tables and collected rows can still be read.
        """
        self._closed = True
        stop_progress(self._runtime)
        self._web.close()
        self._runtime.stop()
        for job in self._accompanied:
            job.close()
        self._accompanied.clear()
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
