"""Turns a driver's streams into a job that a runtime can run.

`StreamEnvironment` makes a `JobRequest`, and `prepare` makes a `Submission` of it. Whatever can be known to be wrong is
refused before anything starts. Checks come first; at the end sources are staged, and then tables are claimed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, runtime_checkable

from tidegate.actors.coordinator.job_spec import (
    AlignedSource,
    AssignedSource,
    CheckpointSettings,
    FailoverStrategy,
    JobEdgeInfo,
    JobSpec,
    RestorePoint,
    Retention,
)
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext, ProcessSettings
from tidegate.actors.drivers.log_lines import LogSettings
from tidegate.actors.drivers.user_sinks import SinkCommitters
from tidegate.actors.drivers.write_pace import paused_ms_max
from tidegate.actors.graph.graph_analysis import with_filtered_sources, with_projected_sources
from tidegate.actors.graph.job_graph import JobGraph, JobVertex, OperatorSpec, SourceSpec
from tidegate.actors.graph.source_checks import splits_of
from tidegate.actors.restore.meaning_checks import Comparison
from tidegate.actors.restore.restore_checks import (
    check_restorable,
    check_unread,
    rehearse,
    with_key_groups_of,
)
from tidegate.actors.runtimes.driver_services import DriverService
from tidegate.actors.runtimes.running_job import FedJob, Submission
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.settings_table import shown_settings
from tidegate.api.name_checks import check_name
from tidegate.api.submission.restoring import RestoreReport, checkpoints_up_to, restore_point, restore_report
from tidegate.api.submission.table_claims import check_tables, claim_tables
from tidegate.api.submission.temporary_jobs import own_folder
from tidegate.api.tables.output_tables import CollectedRows, OutputTable
from tidegate.connectors.source import ExternallyInducedSource, MasterHook, Source, is_assignable
from tidegate.operators.sinks.table_sink import table_sink
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.edges import PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.recovery.restore_chain import COLLECT, SOURCE, lineage, taskowned_url
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.layout import CheckpointPointer, parse_savepoint_name
from tidegate.storage.checkpoints.metadata import (
    CheckpointMetadata,
    Committable,
    StoredSplit,
    SubtaskState,
    is_own_sink,
)
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError, NotFoundError, TableError, TidegateError
from tidegate.storage.extras import need
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, SubtaskIndex
from tidegate.storage.rocksdb.tuning import DatabaseTuning
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.table_copy import copy_table
from tidegate.storage.tables.table_info import schema_difference
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

# Flink's words for users on the left, those of its coordinator on the right.
_RETENTION = {
    "retain_on_cancellation": Retention.RETAIN_ON_CANCELLATION,
    "delete_on_cancellation": Retention.RETAIN_ON_FAILURE,
    "no_externalized_checkpoints": Retention.NEVER_RETAIN,
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What operators reported when they were opened on the columns of a checkpoint."""

    restore: RestorePoint
    found: tuple[Comparison, ...]

    @property
    def dropped_states(self) -> tuple[tuple[OperatorUid, str], ...]:
        """States of functions that are dropped, as the user has agreed (see `RestorePoint`)."""
        return tuple((each.uid, state) for each in self.found for state in each.dropped_states)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What `StreamEnvironment.execute` was asked for."""

    name: str
    job_id: JobId
    graph: JobGraph
    root: str
    tables: Sequence[OutputTable]
    collected: Sequence[CollectedRows]
    checkpoints: CheckpointConfig
    restart: RestartStrategy
    restore: str | None
    options: DataPlaneOptions
    seed: int
    hooks: tuple[MasterHook, ...] = ()
    max_parallelism: int | None = None
    """Number of key groups, if the user has said it; else a restored job has that of its checkpoint."""
    allow_non_restored_state: bool = False
    rehearsal: Rehearsal | None = None
    """None until the operators have been opened on the checkpoint that the job starts from."""
    detached: bool = False
    log: LogSettings = field(default_factory=LogSettings)
    temporary: bool = False
    """Whether `root` is the temporary folder of jobs without storage."""


def make_job_id(name: str, suffix: str) -> JobId:
    """Id of a run of a job, safe as the name of a folder. ConfigurationError for a name without letters or digits.

    For a name with letters beyond ASCII the id has a hash of the name, so that two such names do not share an id.
    """
    check_name(f"execute({name!r})", "a job's name", name)
    if not any(character.isalnum() for character in name):
        raise ConfigurationError(f"execute({name!r}): a job's name needs letters or digits")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    if any(character.isalnum() and not character.isascii() for character in name):
        slug = f"{slug or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return JobId(f"{slug}-{suffix}")


def check_meaning(request: JobRequest, open_store: OpenStore) -> JobRequest:
    """The request, with what operators report of the checkpoint that it names. It only reads.

    Raises IncompatibleStateError if the program does not fit the checkpoint.

    `execute` calls it before it takes the name of the job, so that a refusal leaves nothing behind. Whatever else is
    wrong with the checkpoint is reported by `prepare`, when no other job of the name runs any more. What could not be
    read here is read again there, and so is another checkpoint if that is the newest one by then.
    """
    if request.restore is None:
        return request
    try:
        found, _, _ = checked(request, open_store, announce=False)
    except IncompatibleStateError:
        raise
    except TidegateError as error:
        log.debug("restore=%r is looked at again under the name of the job: %s", request.restore, error)
        return request
    return replace(request, rehearsal=found.rehearsal)


def report_on(request: JobRequest, open_store: OpenStore) -> RestoreReport:
    """What the restore that a request names would do. It only reads.

    Raises ConfigurationError if there is no such checkpoint, CorruptionError and StorageError.
    """
    restore, metadata = restore_point(
        request.restore, request.name, request.root, request.checkpoints.ignore_in_flight_of, open_store
    )
    if restore is None or metadata is None:
        return RestoreReport(None)
    refused, rehearsal = None, _rehearsal(request, restore, metadata, open_store)
    try:
        request, _, _ = checked(replace(request, rehearsal=rehearsal), open_store, announce=False)
        for table in request.tables:
            table.log.check_description(table.info, evolves=table.options.evolves)
        check_collected(request.collected, _lineage(request.root, restore, metadata, open_store), open_store)
    except (ConfigurationError, TableError) as error:
        refused = str(error)
    pointer = CheckpointPointer(restore.root, restore.job_id, restore.checkpoint_id, restore.savepoint)
    return restore_report(
        str(pointer), metadata, request.graph, request.allow_non_restored_state, refused, rehearsal.found
    )


def checked(
    request: JobRequest, open_store: OpenStore, *, announce: bool = True
) -> tuple[JobRequest, RestorePoint | None, CheckpointMetadata | None]:
    """The request with the graph and the key groups of the checkpoint that it starts from, and that checkpoint.

    Raises IncompatibleStateError if the program does not fit it, and ConfigurationError, CorruptionError and
    StorageError. It only reads.
    """
    restore, metadata = restore_point(
        request.restore, request.name, request.root, request.checkpoints.ignore_in_flight_of, open_store
    )
    if metadata is None or restore is None:
        return request, None, None
    rehearsal = _rehearsal(request, restore, metadata, open_store)
    request = replace(request, rehearsal=rehearsal)
    if request.max_parallelism is None:
        request = replace(request, graph=with_key_groups_of(metadata, request.graph))
    check_restorable(
        open_store(restore.root),
        metadata,
        request.graph,
        ignore_in_flight=restore.ignore_in_flight,
        allow_non_restored_state=request.allow_non_restored_state,
        announce=announce,
        rehearsal=rehearsal.found,
        dropped_states=rehearsal.dropped_states,
    )
    return request, replace(restore, dropped_states=rehearsal.dropped_states), metadata


def _rehearsal(
    request: JobRequest, restore: RestorePoint, metadata: CheckpointMetadata, open_store: OpenStore
) -> Rehearsal:
    """What operators report of their states that are opened on the columns of the checkpoint.

    A process opens them once for each checkpoint, because functions of users may be slow to open.
    """
    if any(subtask.native for subtask in metadata.subtasks):
        need(f"restore={request.restore!r}, a checkpoint with files of RocksDB,", "rocksdb")
    if request.rehearsal is not None and request.rehearsal.restore == restore:
        return request.rehearsal
    found = rehearse(
        open_store(restore.root),
        metadata,
        request.graph,
        allow_non_restored_state=request.allow_non_restored_state,
    )
    return Rehearsal(restore, tuple(found))


def prepare(request: JobRequest, open_store: OpenStore) -> Submission:
    """Resolve the restore point, stage the sources, and claim the tables.

    Raises ConfigurationError, TableError and StorageError; nothing has started then.
    """
    _check_hooks(request.hooks)
    if request.checkpoints.backend == "rocksdb":
        need("the rocksdb backend", "rocksdb")
    periodic = request.checkpoints.interval is not None
    check_fed_sources(request.graph, periodic_checkpoints=periodic, detached=request.detached)
    request, restore, metadata = checked(request, open_store)
    line = _lineage(request.root, restore, metadata, open_store)
    covering = [] if restore is None or metadata is None else checkpoints_up_to(restore, metadata, open_store)
    check_collected(request.collected, line, open_store)
    bound = {
        rows.placeholder: rows.bind(collect_url(request.root, request.job_id, rows, line, covering, open_store))
        for rows in request.collected
    }
    tables = [*request.tables, *bound.values()]
    covering = with_places(covering, {placeholder: table.url for placeholder, table in bound.items()})
    check_sinks(request.graph, covering, request.allow_non_restored_state)
    check_tables(tables, request.job_id, covering, open_store, now_ms())
    folder = partial(taskowned_url, request.root, request.job_id, SOURCE)
    savepoints = request.checkpoints.savepoints

    def fed_job(uid: OperatorUid) -> FedJob:
        return FedJob(request.job_id, request.name, request.root, uid, folder(uid), savepoints, open_store)

    restored = set() if metadata is None else {info.uid for info in metadata.operators}
    staged = with_staged_sources(request.graph, folder, fed_job, restored, line)
    if metadata is not None and restore is not None:
        check_unread(open_store(restore.root), metadata, staged.graph)
    graph = with_filtered_sources(with_projected_sources(staged.graph))
    commit_left_over(request.graph, covering, request.checkpoints.storage_outage)
    first_versions, table_heads = claim_tables(tables, request.job_id, covering, open_store, request.root)
    graph = _with_tables(graph, bound, {table.url: table for table in tables}, first_versions)
    splits = {
        v.source.uid: tuple(SplitPosition(split) for split in splits_of(v.source))
        for v in graph.vertices
        if v.source is not None
    }
    assigned, aligned = assigned_sources(graph, splits, metadata), aligned_sources(graph)
    in_memory = request.checkpoints.checkpoint_storage == "jobmanager"
    context = JobContext(
        request.job_id,
        request.name,
        request.root,
        graph,
        splits,
        replace(
            request.options,
            limits=_limits_of(request.checkpoints, request.options.limits),
            exactly_once=request.checkpoints.mode == "exactly_once",
            backend=_backend_of(request.checkpoints, request.options.backend),
            local_copies=_local_copies_of(request.checkpoints),
            inline_bytes_max=request.checkpoints.max_state_size if in_memory else request.checkpoints.inline_threshold,
            state_bytes_max=request.checkpoints.max_state_size if in_memory else None,
            paused_ms_max=paused_ms_max(request.checkpoints.timeout, request.checkpoints.interval),
        ),
        request.hooks,
        request.checkpoints.lease,
        request.checkpoints.storage_outage,
        request.checkpoints.heartbeats(),
        processes_of(request.checkpoints),
        tuple(rows.url for rows in request.collected if rows.handed_on),
        {t.url: t.options.compaction for t in request.tables if t.options.compaction is not None},
        {t.url: t.options.history_ms for t in request.tables if t.options.history_ms is not None},
        frozenset(source.uid for source in assigned),
        log=request.log,
        configuration=shown_settings(request.checkpoints, request.restart),
        temporary=request.temporary,
    )
    spec = replace(
        _spec(request, graph, restore),
        assigned_sources=assigned,
        aligned_sources=aligned,
        table_heads=table_heads,
    )
    keeps = request.checkpoints.keep_events
    kept = "whole" if keeps else "from its newest snapshots on; keep_events=True (jobmanager.keep-events) keeps all"
    log.info("The history of job %s is kept %s", spec.job_id, kept)
    return Submission(spec, context, savepoints, request.detached, now_ms(), staged.services)


def processes_of(config: CheckpointConfig) -> ProcessSettings:
    """What a job with these settings keeps beside the processes of its tasks, and how they start."""
    return ProcessSettings(config.standbys, config.slot_request_timeout)


def _backend_of(config: CheckpointConfig, options: StateBackendOptions) -> StateBackendOptions:
    directory = own_folder(config.backend_directory, "state")
    return replace(
        options,
        kind=config.backend,
        incremental=config.incremental or config.changelog,
        changelog=config.changelog,
        compression=config.compression,
        directory=directory if config.backend == "rocksdb" else None,
        memory_bytes=config.backend_memory,
        cache_bytes=config.backend_cache,
        database=DatabaseTuning(
            config.rocksdb_threads,
            config.rocksdb_write_buffer,
            config.rocksdb_block_size,
            config.rocksdb_open_files,
        ),
        undo_bytes=config.rewind_memory,
    )


def _limits_of(config: CheckpointConfig, limits: BufferLimits) -> BufferLimits:
    return replace(limits, debloat_target_ms=config.debloat_target if config.debloat else 0)


def _local_copies_of(config: CheckpointConfig) -> str | None:
    if not config.local_copies:
        return None
    return own_folder(config.local_directory, "copies")


def _spec(request: JobRequest, graph: JobGraph, restore: RestorePoint | None) -> JobSpec:
    config = request.checkpoints
    return JobSpec(
        job_id=request.job_id,
        job_name=request.name,
        root=request.root,
        tasks=graph.tasks(),
        sources=tuple(
            TaskId(v.vertex, SubtaskIndex(i))
            for v in graph.vertices
            if v.source is not None
            for i in range(v.parallelism)
        ),
        operators=graph.operator_infos(),
        checkpoints=CheckpointSettings(
            interval_ms=config.interval,
            timeout_ms=config.timeout,
            min_pause_ms=config.min_pause,
            tolerable_failures=config.tolerable_failed_checkpoints,
            retained=config.num_retained,
            exactly_once=config.mode == "exactly_once",
            unaligned=config.unaligned,
            aligned_timeout_ms=config.aligned_timeout if config.unaligned else None,
            max_concurrent=config.max_concurrent,
            retention=_RETENTION[config.retention],
            history_max=config.history,
            keep_events=config.keep_events,
            ignore_in_flight_of=None
            if config.ignore_in_flight_of is None
            else CheckpointId(config.ignore_in_flight_of),
        ),
        restart=request.restart,
        storage_outage_ms=config.storage_outage,
        restore=restore,
        edges=tuple(
            JobEdgeInfo(e.upstream, e.downstream, e.partitioning.kind is PartitioningKind.FORWARD) for e in graph.edges
        ),
        hooks=tuple(hook.identifier for hook in request.hooks),
        tables=graph.table_urls,
        seed=request.seed,
        failover=FailoverStrategy(config.failover),
        adoption_timeout_ms=config.takeover_timeout,
        deploy_timeout_ms=config.deploy_timeout,
    )


def _check_hooks(hooks: Sequence[MasterHook]) -> None:
    """Raise ConfigurationError for what is no hook, and for two hooks whose data could be mixed up."""
    seen: set[str] = set()
    for hook in hooks:
        if not isinstance(hook, MasterHook):
            raise ConfigurationError(f"{hook!r} is no master hook: it needs identifier, trigger and restore")
        if hook.identifier in seen:
            raise ConfigurationError(f"two master hooks have the identifier {hook.identifier!r}: give each its own")
        seen.add(hook.identifier)


def _lineage(
    own_root: str, restore: RestorePoint | None, metadata: CheckpointMetadata | None, open_store: OpenStore
) -> list[tuple[str, JobId]]:
    """The jobs that this one goes on from, newest first, as (root, job id)."""
    if restore is None or metadata is None:
        return []
    at = CheckpointPointer(restore.root, restore.job_id, restore.checkpoint_id, restore.savepoint)
    return list(lineage(at, metadata, own_root, open_store))


def _with_tables(
    graph: JobGraph,
    bound: Mapping[str, OutputTable],
    tables: Mapping[str, OutputTable],
    first_versions: Mapping[str, int],
) -> JobGraph:
    """The graph with URLs of collected streams, and with sinks whose rows are newer than those in their tables."""

    def with_table(spec: OperatorSpec) -> OperatorSpec:
        if spec.table is None or spec.sink is not None:
            return spec
        table = bound[spec.table] if spec.table in bound else tables[spec.table]
        factory = partial(table_sink, table.info, first_versions[table.url], table.options.file_bytes)
        return replace(spec, table=table.url, factory=factory)

    vertices = tuple(replace(v, operators=tuple(with_table(spec) for spec in v.operators)) for v in graph.vertices)
    return replace(graph, vertices=vertices)


@runtime_checkable
class StagedSource(Protocol):
    """A source that must be written to files before it can be read twice, such as a DataFrame."""

    def stage(self, url: str) -> Source:
        """Write the input under `url`, once, and return what reads it."""
        ...

    def reopen(self, url: str) -> Source:
        """What reads the input that was staged under `url` for an earlier job. NotFoundError if nothing was."""
        ...


@runtime_checkable
class FedSource(StagedSource, Protocol):
    """A staged source to which more is written while the job runs, such as a streaming DataFrame."""

    def feed(self, staged: Source, job: FedJob) -> DriverService:
        """The service that writes the input while the job runs. ConfigurationError while another job feeds it."""
        ...


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """The graph with staged sources, and the services that feed some of them."""

    graph: JobGraph
    services: tuple[DriverService, ...]


def check_fed_sources(graph: JobGraph, *, periodic_checkpoints: bool, detached: bool) -> None:
    """Raise ConfigurationError for a fed source in a job that is detached or takes no periodic checkpoints."""
    for vertex in graph.vertices:
        if vertex.source is None or not isinstance(vertex.source.source, FedSource):
            continue
        named = f"source {vertex.source.uid!r} is a streaming DataFrame, and"
        if detached:
            raise ConfigurationError(
                f"{named} its Spark query lives in this driver: a detached job would outlive it. Leave detached out"
            )
        if not periodic_checkpoints:
            raise ConfigurationError(
                f"{named} the job takes no periodic checkpoints: its rows would stay on disk for ever. Set an interval "
                '(CheckpointConfig(interval="10s"))'
            )


def with_staged_sources(
    graph: JobGraph,
    own_url: Callable[[OperatorUid], str],
    fed_job: Callable[[OperatorUid], FedJob],
    restored: set[OperatorUid],
    line: Sequence[tuple[str, JobId]],
) -> StagedGraph:
    """Stage the sources of a graph under `own_url`; reopen those in `restored`, which a job of the `line` has staged.

    Raises ConfigurationError if what was staged is gone, and what staging raises.
    """
    services: list[DriverService] = []

    def staged(spec: SourceSpec) -> SourceSpec:
        if not isinstance(spec.source, StagedSource):
            return spec
        again = spec.uid in restored
        source = _reopen(spec.source, spec.uid, line) if again else spec.source.stage(own_url(spec.uid))
        if isinstance(spec.source, FedSource):
            services.append(spec.source.feed(source, fed_job(spec.uid)))
        return replace(spec, source=source)

    return StagedGraph(graph.with_sources(staged), tuple(services))


def _reopen(source: StagedSource, uid: OperatorUid, line: Sequence[tuple[str, JobId]]) -> Source:
    for root, job_id in line:
        try:
            return source.reopen(taskowned_url(root, job_id, SOURCE, uid))
        except NotFoundError:
            continue
    raise ConfigurationError(
        f"source {uid!r}: the rows that were staged for {line[0][1]} or a job before it are gone, so it cannot go "
        "on where the checkpoint was; start without restore"
    )


def aligned_sources(graph: JobGraph) -> tuple[AlignedSource, ...]:
    """Those of a graph."""
    found = []
    for vertex in graph.vertices:
        alignments = _alignments(vertex)
        for name, alignment in alignments:
            where = f"{name!r} is in watermark group {alignment.group!r}"
            if vertex.source is None:
                raise ConfigurationError(
                    f"{where}, and does not run in the task of a source; call assign_timestamps right behind the "
                    "source, with its parallelism, and before several steps take the stream"
                )
            if isinstance(vertex.source.source, ExternallyInducedSource):
                raise ConfigurationError(
                    f"{where}, and its source says itself when checkpoints are taken, which would have to wait as "
                    "well; remove alignment="
                )
            found.append(AlignedSource(vertex.vertex, alignment.group, alignment.max_drift_ms))
        if len(alignments) > 1:
            raise ConfigurationError(f"{vertex.name!r}: a source can be in one watermark group, and is in two")
    return tuple(found)


def _alignments(vertex: JobVertex) -> list[tuple[str, WatermarkAlignment]]:
    made = ((spec.name, spec.factory()) for spec in vertex.operators)
    return [
        (name, operator.alignment)
        for name, operator in made
        if isinstance(operator, WatermarkGenerator) and operator.alignment is not None
    ]


def assigned_sources(
    graph: JobGraph,
    splits: Mapping[OperatorUid, Sequence[SplitPosition]],
    metadata: CheckpointMetadata | None,
) -> tuple[AssignedSource, ...]:
    """Those of a graph, restored from this checkpoint or savepoint. `splits`: what each source says now."""
    restored = set() if metadata is None else {info.uid for info in metadata.operators}
    found = []
    for vertex in graph.vertices:
        if vertex.source is None:
            continue
        uid = vertex.source.uid
        now = [StoredSplit(p.split.split_id, p.split.payload, p.split.rows) for p in splits[uid]]
        if metadata is not None and uid in restored:
            pool = {split.split_id: split for split in metadata.pool_of(uid)}
            # What is read is what the checkpoint says. A file that is gone since is noticed when it is read.
            gone = pool.keys() - {split.split_id for split in now}
            now = [pool.get(split.split_id, split) for split in now] + [pool[split_id] for split_id in sorted(gone)]
            unread = tuple(number for number, split in enumerate(now) if split.split_id in pool)
        else:
            shares = is_assignable(vertex.source.source) and len(now) > vertex.parallelism > 1
            unread = tuple(range(len(now))) if shares else ()
        if unread:
            found.append(AssignedSource(uid, vertex.vertex, tuple(now), unread))
    return tuple(found)


def collect_url(
    root: str,
    job_id: JobId,
    rows: CollectedRows,
    line: Sequence[tuple[str, JobId]],
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
) -> str:
    """URL of the rows: that of the restored job, if it has collected before, so that `to_arrow` gives all rows.

    `line` are the jobs that this one goes on from, newest first. `covering` are the checkpoints whose sink files may
    not be committed yet.
    """
    own = taskowned_url(root, job_id, COLLECT, rows.uid)
    for before_root, _, url in _earlier(rows, line, open_store):
        if parse_savepoint_name(before_root.rstrip("/").rpartition("/")[2]) is None:
            return url
        covered = (c for metadata in covering for subtask in metadata.subtasks for c in subtask.committables)
        uncommitted = [file for c in covered if c.table == rows.placeholder for file in c.files]
        copy_table(open_store(url), open_store(own), uncommitted)
        return own
    return own


def check_collected(
    collected: Iterable[CollectedRows], line: Sequence[tuple[str, JobId]], open_store: OpenStore
) -> None:
    """Raise TableError where rows that a job of the line has collected have other columns than the program's.

    ConfigurationError if rows to collect were handed on with `for_each_checkpoint` before.
    """
    for rows in collected:
        for _, before, url in _earlier(rows, line, open_store):
            if not rows.handed_on and newest_mark(open_store(url))[0]:
                raise ConfigurationError(
                    f"collect (uid {rows.uid!r}): job {before} handed the rows of this uid on with "
                    "for_each_checkpoint, and they are gone; give collect() another uid"
                )
            stored = TableLog(open_store(url)).snapshot().info.arrow_schema
            if difference := schema_difference(stored, rows.info.arrow_schema):
                step = "for_each_checkpoint" if rows.handed_on else "collect"
                raise TableError(
                    f"{step} (uid {rows.uid!r}): job {before} has stored its rows with other columns: {difference}. "
                    f"Give {step}() another uid, so that it begins without these rows; or restore the former columns"
                )
            break


def _earlier(
    rows: CollectedRows, line: Sequence[tuple[str, JobId]], open_store: OpenStore
) -> Iterator[tuple[str, JobId, str]]:
    """Root, job and URL of the rows that jobs of the line have collected under this uid, newest first."""
    for root, job_id in line:
        url = taskowned_url(root, job_id, COLLECT, rows.uid)
        if TableLog(open_store(url)).exists():
            yield root, job_id, url


def with_places(covering: Sequence[CheckpointMetadata], urls: Mapping[str, str]) -> list[CheckpointMetadata]:
    """The checkpoints with URLs for placeholders: a relocated savepoint knows collected rows only by their uid."""
    return [
        replace(metadata, subtasks=tuple(_with_places(subtask, urls) for subtask in metadata.subtasks))
        for metadata in covering
    ]


def _with_places(subtask: SubtaskState, urls: Mapping[str, str]) -> SubtaskState:
    def placed(committable: Committable) -> Committable | None:
        if not committable.table.startswith(CollectedRows.PREFIX):
            return committable
        url = urls.get(committable.table)
        if url is None:
            log.warning("rows of %s in the savepoint are left behind: the program collects none", committable.table)
            return None
        return replace(committable, table=url)

    found = (placed(committable) for committable in subtask.committables)
    return replace(subtask, committables=tuple(committable for committable in found if committable is not None))


def check_sinks(graph: JobGraph, covering: Sequence[CheckpointMetadata], allow_non_restored: bool) -> None:
    """Raise ConfigurationError if the checkpoints have something for a sink that the program does not have."""
    places = {c.table for metadata in covering for c in _prepared(metadata)} - graph.sinks.keys()
    for place in sorted(places):
        uid = place.partition(":")[2]
        said = f"the restored checkpoint covers rows that the sink with uid {uid!r} may not have committed"
        if not allow_non_restored:
            raise ConfigurationError(
                f"{said}, and the program has no such sink: give it back, with this uid, or leave what was not "
                "committed behind with allow_non_restored_state=True"
            )
        log.warning("%s: they are left behind, because the program has no such sink", said)


def commit_left_over(graph: JobGraph, covering: Sequence[CheckpointMetadata], limit_ms: int) -> None:
    """Commit what checkpoints cover, the oldest first. SinkFailedError, also if a call is not back after `limit_ms`."""
    sinks = SinkCommitters(graph.sinks, limit_ms)
    for metadata in covering:
        sinks.commit(metadata.job_id, metadata.checkpoint_id, (c for c in _prepared(metadata) if c.table in sinks))


def _prepared(metadata: CheckpointMetadata) -> list[Committable]:
    return [c for subtask in metadata.subtasks for c in subtask.committables if is_own_sink(c.table)]
