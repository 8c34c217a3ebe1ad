"""Turns a driver's streams into a job that a runtime can run.

`StreamEnvironment` makes a `JobRequest`, and `prepare` makes a `Submission` of it. Whatever can be known to be wrong is
refused before anything starts. Checks come first; at the end sources are staged, and then tables are claimed.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tidegate.actors.coordinator.job.job_spec import (
    CheckpointSettings,
    FailoverStrategy,
    JobEdgeInfo,
    JobSpec,
    RestorePoint,
    Retention,
)
from tidegate.actors.drivers.job_context import DataPlaneOptions, JobContext
from tidegate.actors.drivers.log_lines import LogSettings
from tidegate.actors.drivers.process_settings import ProcessSettings
from tidegate.actors.drivers.write_pace import paused_ms_max
from tidegate.actors.graph.filtered_sources import with_filtered_sources
from tidegate.actors.graph.job_graph import JobGraph, OperatorSpec
from tidegate.actors.graph.needed_columns import with_projected_sources
from tidegate.actors.graph.source_checks import splits_of
from tidegate.actors.restore.meaning_checks import Comparison
from tidegate.actors.restore.restore_checks import (
    check_restorable,
    check_unread,
    rehearse,
    with_key_groups_of,
)
from tidegate.actors.runtimes.running_job import FedJob, Submission
from tidegate.actors.task.channels.output_gate import BufferLimits
from tidegate.actors.task.pipeline.split_positions import SplitPosition
from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.config.sections.heartbeat_config import heartbeats_of
from tidegate.api.config.shown_settings import shown_settings
from tidegate.api.given_names import check_name
from tidegate.api.submission.aligned_sources import aligned_sources
from tidegate.api.submission.assigned_sources import assigned_sources
from tidegate.api.submission.collected_places import check_collected, collect_url, with_places
from tidegate.api.submission.left_to_sinks import check_sinks, commit_left_over
from tidegate.api.submission.local_folders import own_folder
from tidegate.api.submission.restore_report import RestoreReport, restore_report
from tidegate.api.submission.staged_sources import check_fed_sources, with_staged_sources
from tidegate.api.submission.starting_checkpoint import checkpoints_up_to, restore_point
from tidegate.api.submission.table_claims import check_tables, claim_tables
from tidegate.api.tables.output_tables import CollectedRows, OutputTable
from tidegate.connectors.master_hooks import MasterHook
from tidegate.operators.sinks.table_sink import table_sink
from tidegate.protocol.identity import TaskId
from tidegate.protocol.partitioning import PartitioningKind
from tidegate.recovery.job_lineage import SOURCE, lineage, taskowned_url
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.checkpoints.layout import CheckpointPointer
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.clock import now_ms
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError, TableError, TidegateError
from tidegate.storage.extras import need
from tidegate.storage.files.store import OpenStore
from tidegate.storage.ids import CheckpointId, JobId, OperatorUid, SubtaskIndex
from tidegate.storage.rocksdb.tuning import DatabaseTuning

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
            inline_bytes_max=request.checkpoints.state_size if in_memory else request.checkpoints.inline_bytes,
            state_bytes_max=request.checkpoints.state_size if in_memory else None,
            paused_ms_max=paused_ms_max(request.checkpoints.timeout, request.checkpoints.interval),
        ),
        request.hooks,
        request.checkpoints.lease,
        request.checkpoints.storage_outage,
        heartbeats_of(request.checkpoints),
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
    return Submission(spec, context, savepoints, request.detached, now_ms(), staged.companions)


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
        undo_bytes=config.undo_memory,
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
            retained=config.retained,
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
        adoption_timeout_ms=config.adoption_timeout,
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
