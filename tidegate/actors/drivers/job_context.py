"""`JobContext`: the graph, storage and settings of one job, sent to each of its processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_bytes
from typing import TYPE_CHECKING, Literal, TypeAlias

from tidegate.actors.coordinator.job_spec import STORAGE_OUTAGE_MS
from tidegate.actors.drivers.log_lines import LogSettings
from tidegate.actors.drivers.work_folders import work_folder
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.split_positions import SplitPosition
from tidegate.actors.task.task_descriptor import TaskDescriptor, describe_task
from tidegate.connectors.source import MasterHook
from tidegate.protocol.identity import TaskId
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.argument_checks import check_folder, check_kind, check_switch, check_whole
from tidegate.storage.checkpoints.layout import CheckpointLayout
from tidegate.storage.checkpoints.lease import LEASE_MS_DEFAULT
from tidegate.storage.ids import AttemptNumber, JobId, OperatorUid

if TYPE_CHECKING:
    # Tasks must not load the modules of tables.
    from tidegate.storage.tables.maintenance import CompactionSettings

INTERVAL_MS = 10_000
TIMEOUT_MS = 50_000
TICK_MS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class HeartbeatSettings:
    """Settings of heartbeats, in ms.

    `interval_ms` is the time between two requests, and `timeout_ms` the time without an answer after which a process
    counts as hung. `call_timeout_ms` is the time limit for one call of a user's function, or None for no limit.
    """

    interval_ms: int = INTERVAL_MS
    timeout_ms: int = TIMEOUT_MS
    call_timeout_ms: int | None = None

    @property
    def tick_ms(self) -> int:
        """Returns the interval, in ms, at which the monitor checks for missing heartbeats."""
        return max(1, min(TICK_MS_MAX, self.interval_ms // 2))


SLOT_REQUEST_TIMEOUT_MS = 300_000
STANDBY_DELAY_MS = 3_000
AUTO_STANDBY_DELAY_MS = 10_000
"""Delay in ms, from a deployment on, before spare processes start, so that they do not take the processor from starting
tasks.
"""
Standbys: TypeAlias = int | Literal["auto", "warm"]
"""A number of spare processes, "auto" (as many as there are free slots for), or "warm" (as "auto", and for each
keyed task one that follows its state).
"""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """Settings of the processes of a job.

    `standbys` is None if the runtime decides. `slot_request_timeout_ms` is the time for which an attempt waits for
    slots.
    """

    standbys: Standbys | None = None
    slot_request_timeout_ms: int = SLOT_REQUEST_TIMEOUT_MS


SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class DataPlaneOptions:
    """Sizes and modes of the data plane of a job.

    Raises ConfigurationError, with the field, its value and what is allowed, for an invalid value. An environment also
    refuses fields that it would ignore: `exactly_once`, `inline_bytes_max`, `local_copies`, `state_bytes_max`,
    `paused_ms_max` and most settings of `backend` follow from its `CheckpointConfig`.
    """

    limits: BufferLimits = field(default_factory=BufferLimits)
    source_rows_max: int = 262_144
    shared_bytes: int = 16 * 1024 * 1024
    """Size in bytes of the shared memory for rows that a worker sends to another one on its node. 0 sends them over the
    socket.
    """
    sockets: bool = True
    """True if processes on one node exchange frames, credit and coordinator messages over sockets, and not by Ray
    calls.
    """
    inline_bytes_max: int = 20 * 1024
    exactly_once: bool = True
    """False for at-least-once: barriers block no channel, and rows may be processed twice after a failure."""
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """The backend of keyed state. All jobs of a user on a machine share its folder."""
    local_copies: str | None = None
    """Folder on each node for copies of the newest state of tasks, or None for no copies."""
    state_bytes_max: int | None = None
    """The largest state of a subtask, in bytes; None for no limit."""
    paused_ms_max: int = 0
    """Time in ms that the thread which writes a large snapshot may pause in total, so that processing continues.
    0 for no pauses.
    """

    def __post_init__(self) -> None:
        check_kind(self, "limits", BufferLimits)
        check_whole(self, "source_rows_max", least=1)
        check_whole(self, "shared_bytes", "inline_bytes_max", "paused_ms_max", least=0)
        check_switch(self, "sockets", "exactly_once")
        check_kind(self, "backend", StateBackendOptions)
        check_folder(self, "local_copies")
        check_whole(self, "state_bytes_max", least=1, none=True)


@dataclass(frozen=True, slots=True)
class JobContext:
    """The graph, storage and settings of one job, for its tasks and their runtime. Pickled with cloudpickle."""

    job_id: JobId
    job_name: str
    root: str
    graph: JobGraph
    splits: dict[OperatorUid, tuple[SplitPosition, ...]]
    """The splits of each source, by uid."""
    options: DataPlaneOptions = field(default_factory=DataPlaneOptions)
    hooks: tuple[MasterHook, ...] = ()
    lease_ms: int = LEASE_MS_DEFAULT
    """Duration of the job's lease in ms. A job whose lease is not renewed for this time counts as dead."""
    storage_outage_ms: int = STORAGE_OUTAGE_MS
    """Time in ms for which the tasks wait for storage that does not answer."""
    heartbeats: HeartbeatSettings = field(default_factory=HeartbeatSettings)
    """When a process of a task counts as hung, in a runtime that has processes."""
    processes: ProcessSettings = field(default_factory=ProcessSettings)
    """The spare processes that the job keeps, in a runtime that has processes."""
    handed_on: tuple[str, ...] = ()
    """URLs of tables with commits that a reader consumes. A slow reader may make the sources pause."""
    compactions: Mapping[str, CompactionSettings] = field(default_factory=dict)
    """Settings of compaction, by table URL, for tables whose small files are merged while the job runs."""
    histories: Mapping[str, int] = field(default_factory=dict)
    """Time in ms for which tables keep files that they no longer show, by table URL. Tables without an entry keep
    them forever.
    """
    assigned: frozenset[OperatorUid] = frozenset()
    """Sources whose splits the coordinator assigns."""
    log: LogSettings = field(default_factory=LogSettings)
    """Log settings of the job's processes."""
    configuration: Mapping[str, str] = field(default_factory=dict)
    """The effective settings of the job as text, by key."""
    temporary: bool = False
    """True if `root` is a temporary folder. The job's files are deleted from it after the end of the job."""
    secret: bytes = field(default_factory=partial(token_bytes, SECRET_BYTES), repr=False)
    """The secret that a process of the job presents when it connects to another process."""

    @property
    def layout(self) -> CheckpointLayout:
        """Returns the layout of the job's files under `root`."""
        return CheckpointLayout(self.job_id)

    @property
    def table_urls(self) -> list[str]:
        """Returns the URLs of the job's output tables, in the order of their operators."""
        return list(self.graph.table_urls)

    def describe(self, task: TaskId, attempt: AttemptNumber) -> TaskDescriptor:
        """Returns the descriptor of one task in an attempt. Splits that the coordinator does not assign are
        distributed round robin.
        """
        vertex = self.graph.vertex(task.vertex)
        splits: tuple[SplitPosition, ...] = ()
        asks_for_splits = vertex.source is not None and vertex.source.uid in self.assigned
        if vertex.source is not None and not asks_for_splits:
            splits = self.splits[vertex.source.uid][task.subtask :: vertex.parallelism]
        return describe_task(
            self.graph,
            task,
            attempt,
            splits,
            self.options.limits,
            self.options.source_rows_max,
            self.options.exactly_once,
            self._backend_of(task, attempt),
            asks_for_splits,
            self.job_id,
        )

    def _backend_of(self, task: TaskId, attempt: AttemptNumber) -> StateBackendOptions:
        """Returns the options of the state backend, with a folder for this task and attempt only.

        A process of an earlier attempt may still be alive and use its own folder.
        """
        backend = self.options.backend
        if backend.directory is None:
            return backend
        return replace(backend, directory=work_folder(backend.directory, self.job_id, task, attempt))
