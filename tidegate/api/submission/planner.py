"""Turns a driver's streams into a job that a runtime can run.

`StreamEnvironment` makes a `JobRequest`, and `prepare` turns it into a `Submission`. All checks come before any change:
only after them `prepare` writes sources in memory to files, and then makes the job the owner of its tables.
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
from tidegate.connectors.source import (
    ExternallyInducedSource,
    MasterHook,
    Source,
    SourceSplit,
    TwoPartSource,
    is_assignable,
)
from tidegate.operators.sinks.table_sink import table_sink
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.edges import PartitioningKind
from tidegate.protocol.identity import TaskId
from tidegate.recovery.restart_strategy import RestartStrategy
from tidegate.recovery.restore_chain import COLLECT, SOURCE, restore_chain, taskowned_url
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
from tidegate.storage.state.rocksdb.tuning import DatabaseTuning
from tidegate.storage.tables.handed_rows import newest_mark
from tidegate.storage.tables.table_copy import copy_table
from tidegate.storage.tables.table_info import schema_difference
from tidegate.storage.tables.table_log import TableLog

log = logging.getLogger(__name__)

# Flink's words for users, and the policy of its coordinator for each.
_RETENTION = {
    "retain_on_cancellation": Retention.RETAIN_ON_CANCELLATION,
    "delete_on_cancellation": Retention.RETAIN_ON_FAILURE,
    "no_externalized_checkpoints": Retention.NEVER_RETAIN,
}


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """How well the operators of a program fit the state in a checkpoint.

    Found by opening the operators on the schemas of this state, without running them.
    """

    restore: RestorePoint
    found: tuple[Comparison, ...]

    @property
    def dropped_states(self) -> tuple[tuple[OperatorUid, str], ...]:
        """Returns pairs of operator uid and state name: states of functions that the restore drops because the user set
        `allow_non_restored_state`.
        """
        return tuple((each.uid, state) for each in self.found for state in each.dropped_states)


@dataclass(frozen=True, slots=True)
class JobRequest:
    """The arguments of `StreamEnvironment.execute`, with defaults filled in from the configuration."""

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
    """Number of key groups, or None if the user did not set it.

    A restored job then has the number of key groups of its checkpoint, other jobs the default.
    """
    allow_non_restored_state: bool = False
    rehearsal: Rehearsal | None = None
    """How the operators fit the checkpoint that the job starts from, or None if this is not known yet."""
    detached: bool = False
    log: LogSettings = field(default_factory=LogSettings)
    temporary: bool = False
    """True if the user named no storage, so that `root` is the temporary folder for such jobs."""


def make_job_id(name: str, suffix: str) -> JobId:
    """Returns the id of a run of a job: its name in lower case, made safe as the name of a folder, and then
    `suffix`.

    For a name with letters beyond ASCII the id includes a hash of the name, so that two such names have different ids.
    Raises ConfigurationError for a name without letters or digits.
    """
    check_name(f"execute({name!r})", "a job's name", name)
    if not any(character.isalnum() for character in name):
        raise ConfigurationError(
            f"execute({name!r}): a job's name needs at least one letter or digit; choose another name"
        )
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    if any(character.isalnum() and not character.isascii() for character in name):
        slug = f"{slug or 'job'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return JobId(f"{slug}-{suffix}")


def check_meaning(request: JobRequest, open_store: OpenStore) -> JobRequest:
    """Checks that the operators of the program fit the checkpoint that the request names. Writes nothing.

    Returns the request with the findings in `rehearsal`, or unchanged if the checkpoint cannot be read. `execute` calls
    this before it takes the name of the job, so that a refused program leaves no files behind. `prepare` makes all
    checks again when no other job of the name runs any more, because the newest checkpoint may then be another one.

    Raises IncompatibleStateError if the program does not fit the checkpoint.
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
    """Returns a report of what the restore of a request would do. Writes nothing.

    Raises ConfigurationError if the requested checkpoint does not exist, CorruptionError and StorageError.
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
    """Makes all checks of a request against its checkpoint. Writes nothing.

    Returns the request, its restore point and the metadata of its checkpoint.

    The graph of the returned request has the number of key groups of the checkpoint. Restore point and metadata are
    None if the job starts without a checkpoint. With `announce` the state that the restore drops is logged.

    Raises IncompatibleStateError if the program does not fit the checkpoint, ConfigurationError, CorruptionError and
    StorageError.
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
    """Opens the operators of the program on the schemas of the state in the checkpoint, and returns how well they fit.

    Returns the result in the request if it belongs to this checkpoint, because functions of users may be slow to open.
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
    """Resolves the checkpoint to restore, writes sources in memory to files, and makes the job the owner of its
    tables.

    Raises ConfigurationError, TableError and StorageError. No task has started when it raises one of them.
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
    check_targets(request.graph)
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
    """Returns the settings of a job's processes: the number of spare processes, and how long the job waits for
    slots.
    """
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
        committing=tuple(
            vertex.vertex for vertex in graph.vertices if any(spec.committing is not None for spec in vertex.operators)
        ),
    )


def _check_hooks(hooks: Sequence[MasterHook]) -> None:
    """Raises ConfigurationError for an object that is not a hook, and for two hooks with the same identifier."""
    seen: set[str] = set()
    for hook in hooks:
        if not isinstance(hook, MasterHook):
            raise ConfigurationError(f"hooks: {hook!r} is not a tg.MasterHook; derive its class from tg.MasterHook")
        if hook.identifier in seen:
            raise ConfigurationError(
                f"hooks: two master hooks have the identifier {hook.identifier!r}; give each hook another one"
            )
        seen.add(hook.identifier)


def _lineage(
    own_root: str, restore: RestorePoint | None, metadata: CheckpointMetadata | None, open_store: OpenStore
) -> list[tuple[str, JobId]]:
    """Returns the earlier jobs from which this job continues, newest first, each as (checkpoint root, job id)."""
    if restore is None or metadata is None:
        return []
    at = CheckpointPointer(restore.root, restore.job_id, restore.checkpoint_id, restore.savepoint)
    return list(restore_chain(at, metadata, own_root, open_store))


def _with_tables(
    graph: JobGraph,
    bound: Mapping[str, OutputTable],
    tables: Mapping[str, OutputTable],
    first_versions: Mapping[str, int],
) -> JobGraph:
    """Returns the graph with the URLs of collected streams, and with factories of table sinks.

    - `bound`: the tables of collected streams, by placeholder.
    - `tables`: the other tables, by URL.
    - `first_versions`: the first version of the rows that the job writes, by URL of the table. It is greater than all
      versions in the table.
    """

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
    """A source that must be written to files before it can be read a second time, such as a DataFrame."""

    def stage(self, url: str) -> Source:
        """Writes the rows of the source to files under `url`, and returns a source that reads these files."""
        ...

    def reopen(self, url: str) -> Source:
        """Returns a source that reads the files which an earlier job wrote under `url`.

        Raises NotFoundError if there are no such files.
        """
        ...


@runtime_checkable
class FedSource(StagedSource, Protocol):
    """A staged source that gets further rows while the job runs, such as a streaming DataFrame."""

    def feed(self, staged: Source, job: FedJob) -> DriverService:
        """Returns the service of the driver that writes further rows while the job runs. `staged` is the source that
        reads them.

        Raises ConfigurationError if another job already feeds the source.
        """
        ...


@dataclass(frozen=True, slots=True)
class StagedGraph:
    """A graph whose staged sources read from files, and the services of the driver that feed some of these sources."""

    graph: JobGraph
    services: tuple[DriverService, ...]


def check_fed_sources(graph: JobGraph, *, periodic_checkpoints: bool, detached: bool) -> None:
    """Raises ConfigurationError for a fed source in a job that is detached or takes no periodic checkpoints."""
    for vertex in graph.vertices:
        if vertex.source is None or not isinstance(vertex.source.source, FedSource):
            continue
        named = f"source {vertex.source.uid!r} is a streaming DataFrame"
        if detached:
            raise ConfigurationError(
                f"{named}, whose Spark query lives in this driver: a detached job would outlive it. Remove "
                "detached=True"
            )
        if not periodic_checkpoints:
            raise ConfigurationError(
                f"{named}, and without periodic checkpoints its rows would stay on disk for ever. Set an interval "
                '(CheckpointConfig(interval="10s"))'
            )


def with_staged_sources(
    graph: JobGraph,
    own_url: Callable[[OperatorUid], str],
    fed_job: Callable[[OperatorUid], FedJob],
    restored: set[OperatorUid],
    line: Sequence[tuple[str, JobId]],
) -> StagedGraph:
    """Writes the sources in memory of a graph to files, and returns the graph with sources that read these files.

    - `own_url`: returns the URL for the files of a source, given its uid.
    - `fed_job`: returns the job in the form that a `FedSource` needs, given the uid of the source.
    - `restored`: uids of sources with state in the restored checkpoint. They read the files that an earlier job wrote.
    - `line`: these earlier jobs, newest first, each as (checkpoint root, job id).

    Raises ConfigurationError if the files of earlier jobs are gone, and the errors of writing.
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
        f"source {uid!r}: the rows that were staged for {line[0][1]} or a job before it are gone, so it cannot "
        "continue from the checkpoint; start without restore"
    )


def aligned_sources(graph: JobGraph) -> tuple[AlignedSource, ...]:
    """Returns the sources of a graph that belong to a watermark alignment group.

    Raises ConfigurationError if a watermark alignment is set on a step that does not run in the task of a source.
    """
    found = []
    for vertex in graph.vertices:
        alignments = _alignments(vertex)
        for name, alignment in alignments:
            where = f"{name!r} is in watermark group {alignment.group!r}"
            if vertex.source is None:
                raise ConfigurationError(
                    f"{where}, but does not run in the task of a source; call assign_timestamps directly after the "
                    "source, with the same parallelism, and before several steps read the stream"
                )
            if isinstance(vertex.source.source, ExternallyInducedSource):
                raise ConfigurationError(
                    f"{where}, but its source itself triggers the checkpoints, which would have to wait as well; "
                    "remove alignment="
                )
            found.append(AlignedSource(vertex.vertex, alignment.group, alignment.max_drift_ms))
        if len(alignments) > 1:
            raise ConfigurationError(
                f"{vertex.name!r} is in two watermark groups, and a source can only be in one; remove one alignment="
            )
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
    """Returns the sources of a graph whose splits the coordinator assigns.

    `splits` has the splits that each source lists now, by the uid of the source. `metadata` belongs to the restored
    checkpoint or savepoint. It is None if the job starts without one.
    """
    restored = set() if metadata is None else {info.uid for info in metadata.operators}
    found = []
    for vertex in graph.vertices:
        if vertex.source is None:
            continue
        uid = vertex.source.uid
        source = vertex.source.source
        now = [StoredSplit(p.split.split_id, p.split.payload, p.split.rows) for p in splits[uid]]
        if metadata is not None and uid in restored:
            pool = {split.split_id: split for split in metadata.pool_of(uid)}
            # The splits of the checkpoint are read. A file that was deleted since then is noticed when it is read.
            gone = pool.keys() - {split.split_id for split in now}
            now = [pool.get(split.split_id, split) for split in now] + [pool[split_id] for split_id in sorted(gone)]
            unread = tuple(number for number, split in enumerate(now) if split.split_id in pool)
        else:
            shares = is_assignable(source) and len(now) > vertex.parallelism > 1
            unread = tuple(range(len(now))) if shares or isinstance(source, TwoPartSource) else ()
        if isinstance(source, TwoPartSource):
            found.append(_two_parts(AssignedSource(uid, vertex.vertex, tuple(now), unread), source))
        elif unread:
            found.append(AssignedSource(uid, vertex.vertex, tuple(now), unread))
    return tuple(found)


def _two_parts(assigned: AssignedSource, source: TwoPartSource) -> AssignedSource:
    """Adds the two parts of a source to the `AssignedSource`: puts the splits of the first part first, and stores their
    number.

    A source has two parts if, for example, a stream follows a history.
    """
    is_second = [source.is_second(SourceSplit(s.split_id, s.payload, s.rows)) for s in assigned.splits]
    order = sorted(range(len(is_second)), key=is_second.__getitem__)
    unread = {*assigned.unread}
    return replace(
        assigned,
        splits=tuple(assigned.splits[number] for number in order),
        unread=tuple(place for place, number in enumerate(order) if number in unread),
        second=is_second.count(False),
    )


def collect_url(
    root: str,
    job_id: JobId,
    rows: CollectedRows,
    line: Sequence[tuple[str, JobId]],
    covering: Sequence[CheckpointMetadata],
    open_store: OpenStore,
) -> str:
    """Returns the URL of collected rows.

    If an earlier job has collected rows under the same uid, the job continues with their URL, so that `to_arrow`
    returns all rows. Rows in a savepoint are copied to the folder of the job.

    - `line`: the jobs from which this job continues, newest first, each as (checkpoint root, job id).
    - `covering`: checkpoints of the restored job whose sink files may not be committed yet.
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
    """Checks the rows that the earlier jobs `line` have collected, against the program.

    Raises TableError if an earlier job has collected rows with other columns than the program.

    Raises ConfigurationError if an earlier job passed the rows of this uid to `for_each_checkpoint`, and the program
    collects them.
    """
    for rows in collected:
        for _, before, url in _earlier(rows, line, open_store):
            if not rows.handed_on and newest_mark(open_store(url))[0]:
                raise ConfigurationError(
                    f"collect (uid {rows.uid!r}): job {before} has passed the rows of this uid to for_each_checkpoint, "
                    "and they are deleted; give collect() another uid"
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
    """Yields the rows that the jobs of `line` have collected under the uid of `rows`, newest job first, each as
    (checkpoint root, job id, URL).
    """
    for root, job_id in line:
        url = taskowned_url(root, job_id, COLLECT, rows.uid)
        if TableLog(open_store(url)).exists():
            yield root, job_id, url


def with_places(covering: Sequence[CheckpointMetadata], urls: Mapping[str, str]) -> list[CheckpointMetadata]:
    """Returns the checkpoints with the URLs of collected rows in place of their placeholders.

    `urls` has the URLs by placeholder. A savepoint that can be moved has placeholders, because it names collected rows
    only by their uid.
    """
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
            log.warning("rows of %s in the savepoint are dropped: the program does not collect them", committable.table)
            return None
        return replace(committable, table=url)

    found = (placed(committable) for committable in subtask.committables)
    return replace(subtask, committables=tuple(committable for committable in found if committable is not None))


def check_sinks(graph: JobGraph, covering: Sequence[CheckpointMetadata], allow_non_restored: bool) -> None:
    """Raises ConfigurationError if a checkpoint in `covering` has uncommitted rows for a sink that the program does not
    have.

    With `allow_non_restored` these rows are dropped, with a warning.
    """
    places = {c.table for metadata in covering for c in _prepared(metadata)} - graph.sinks.keys()
    for place in sorted(places):
        uid = place.partition(":")[2]
        reason = f"the restored checkpoint covers rows that the sink with uid {uid!r} may not have committed"
        if not allow_non_restored:
            raise ConfigurationError(
                f"{reason}, and the program has no such sink: add the sink again, with this uid, or drop the rows that "
                "were not committed with allow_non_restored_state=True"
            )
        log.warning("%s: these rows are dropped, because the program has no such sink", reason)
    if covering:
        _check_prepared(graph, covering[-1], allow_non_restored)


def _check_prepared(graph: JobGraph, metadata: CheckpointMetadata, allow_non_restored: bool) -> None:
    """Raises ConfigurationError if the checkpoint has prepared rows that no sink of the program would commit: the sink
    is missing, or has too few subtasks.
    """
    buckets: dict[OperatorUid, int] = {}
    for rows in (rows for subtask in metadata.subtasks for rows in subtask.prepared):
        buckets[rows.uid] = max(buckets.get(rows.uid, 0), *(part.bucket for part in rows.parts))
    for uid, bucket in sorted(buckets.items()):
        spec = graph.committing.get(uid)
        reason = f"the restored checkpoint has prepared rows of the sink with uid {uid!r}, which may not be committed"
        if spec is None:
            if not allow_non_restored:
                raise ConfigurationError(
                    f"{reason}, and the program has no such tg.CommittingSink: add the sink again, with this uid, or "
                    "drop the rows that were not committed with allow_non_restored_state=True"
                )
            log.warning("%s: these rows are dropped, because the program has no such sink", reason)
            continue
        assert spec.committing is not None
        if bucket >= spec.committing.buckets:
            raise ConfigurationError(
                f"{reason}: they are in bucket {bucket}, and the sink has {spec.committing.buckets} buckets now. Give "
                "it the number of buckets that it had"
            )


def check_targets(graph: JobGraph) -> None:
    """Lets each sink of the program check the system to which it writes. Raises ConfigurationError if a check fails."""
    for spec in (spec for vertex in graph.vertices for spec in vertex.operators):
        for sink in (spec.sink, spec.committing):
            if sink is not None:
                sink.check()


def commit_left_over(graph: JobGraph, covering: Sequence[CheckpointMetadata], limit_ms: int) -> None:
    """Commits to the sinks of the program the rows that were prepared for the checkpoints `covering`, oldest checkpoint
    first.

    Raises SinkFailedError if a sink fails, or does not return within `limit_ms`.
    """
    sinks = SinkCommitters(graph.sinks, limit_ms)
    for metadata in covering:
        sinks.commit(metadata.job_id, metadata.checkpoint_id, (c for c in _prepared(metadata) if c.table in sinks))


def _prepared(metadata: CheckpointMetadata) -> list[Committable]:
    return [c for subtask in metadata.subtasks for c in subtask.committables if is_own_sink(c.table)]
