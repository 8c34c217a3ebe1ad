"""What every process of a job needs to know: the graph with its code, the storage, the sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.hooks import MasterHook
from tidegate.actors.identity import TaskId
from tidegate.actors.task.descriptor import TaskDescriptor, describe_task
from tidegate.actors.task.outputs import BufferLimits
from tidegate.actors.task.source import SplitPosition
from tidegate.storage.ids import AttemptNumber, JobId, OperatorUid
from tidegate.storage.layout import CheckpointLayout
from tidegate.storage.store import Store

OpenStore = Callable[[str], Store]
"""Opens the store at a url. The simulator passes its own."""


@dataclass(frozen=True, slots=True)
class DataPlaneOptions:
    """Sizes of the data plane of a job."""

    limits: BufferLimits = field(default_factory=BufferLimits)
    source_rows_max: int = 262_144
    inline_bytes_max: int = 20 * 1024
    exactly_once: bool = True
    """False: barriers block nothing, and rows may be processed twice after a failure."""


@dataclass(frozen=True, slots=True)
class JobContext:
    """One job, as its tasks and their runtime see it. Travels by cloudpickle."""

    job_id: JobId
    job_name: str
    root: str
    graph: JobGraph
    splits: dict[OperatorUid, tuple[SplitPosition, ...]]
    """Splits of each source, for a fresh start."""
    options: DataPlaneOptions = field(default_factory=DataPlaneOptions)
    hooks: tuple[MasterHook, ...] = ()

    @property
    def layout(self) -> CheckpointLayout:
        """Where the files of this job lie under `root`."""
        return CheckpointLayout(self.job_id)

    def describe(self, task: TaskId, attempt: AttemptNumber) -> TaskDescriptor:
        """Descriptor of one task; splits are dealt out round-robin."""
        vertex = self.graph.vertex(task.vertex)
        splits: tuple[SplitPosition, ...] = ()
        if vertex.source is not None:
            splits = self.splits[vertex.source.uid][task.subtask :: vertex.parallelism]
        return describe_task(
            self.graph,
            task,
            attempt,
            splits,
            self.options.limits,
            self.options.source_rows_max,
            self.options.exactly_once,
        )
