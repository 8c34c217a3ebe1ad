"""A whole job of task machines joined by links that a seed drives: who moves next, how long anything takes, is drawn.

Small on purpose, beside the simulator: frames keep their order on a channel and nothing is lost, but turns, frames,
credit, reads, writes, timers and the coordinator's messages come in any interleaving. Each completed checkpoint is
a `Parts`, from which a fresh network can start.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import pyarrow as pa
from frozen_tables import tables_of
from link import ATTEMPT, describe, handle_of

from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.task import events as ev
from tidegate.actors.task import instructions as do
from tidegate.actors.task.channels import InFlightElement
from tidegate.actors.task.output_gate import BufferLimits
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.actors.task.task_machine import TaskMachine
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.operator import Emit, Operator, OperatorContext
from tidegate.protocol.identity import ChannelId, TaskId
from tidegate.protocol.stream_elements import BarrierOptions
from tidegate.storage.checkpoints.metadata import StateHandle, StateKind
from tidegate.storage.ids import CheckpointId, OperatorUid
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateChunk, StateTable

PENDING_MAX = 3
STEPS_MAX = 60_000
TURNS_MS = (0, 0, 1, 20, 400)


@dataclass(frozen=True)
class _Rows:
    rows: tuple[int, ...]
    state: str = "rows"
    kind: StateKind = StateKind.LIST
    removed: bool = False

    def chunks(self) -> Iterator[StateChunk]:
        yield StateChunk(pa.record_batch({"x": pa.array(self.rows, pa.int64())}))


class Collecting(Operator):
    """Keeps every row; `found`, where all tasks of a network leave theirs, is the output of a whole life."""

    def __init__(self, found: list[int]) -> None:
        self._rows: list[int] = []
        self._found = found

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        super().open(context, restored)
        self._rows = [x for table in restored for x in table.rows.column("x").to_pylist()]

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        self._rows += batch.column("x").to_pylist()

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        return OperatorSnapshot(self.context.uid, (_Rows(tuple(self._rows)),))

    def finish(self, emit: Emit) -> Iterator[None]:
        self._found += self._rows
        return iter(())


@dataclass
class Part:
    """One task's part of a checkpoint."""

    tables: tuple[tuple[OperatorUid, tuple[StateTable, ...]], ...] = ()
    taken: dict[ChannelId, int] = field(default_factory=dict)
    put: dict[ChannelId, int] = field(default_factory=dict)
    in_flight: tuple[do.InFlight, ...] = ()
    finished: bool = False
    output: tuple[int, ...] = ()
    """The output of the job as the task took its snapshot."""


Parts = dict[TaskId, Part]


class Network:
    """One attempt of a job. `cut`: what it starts from; None: from the beginning."""

    def __init__(
        self, graph: JobGraph, limits: BufferLimits, random: Random, found: list[int], cut: Parts | None
    ) -> None:
        self.graph = graph
        self.machines = {
            task: TaskMachine(
                describe(
                    graph,
                    task.vertex,
                    task.subtask,
                    # A source reads no more than a turn; without a limit there, those behind it get batches to cut.
                    limits if graph.vertex(task.vertex).source is None else replace(limits, turn_rows_max=1_000),
                    rows_max=3,
                )
            )
            for task in graph.tasks()
        }
        self.completed: list[Parts] = []
        self.statistics: Counter[str] = Counter()
        self.written: list[StateHandle] = []
        self.owned: list[str] = []
        self._random = random
        self._found = found
        self._now_ms = 1_000
        self._number = 0
        self._pending: dict[CheckpointId, Parts] = {}
        self._acknowledged: dict[CheckpointId, set[TaskId]] = {}
        self._ready: set[TaskId] = set()
        self._wires: dict[object, deque[tuple[TaskId, Callable[[], ev.TaskEvent]]]] = {}
        self._timers: list[tuple[int, TaskId, ev.TaskTimer]] = []
        for task in graph.tasks():
            restored = _restored(graph, task, cut)
            self._post(("mail", task), task, lambda r=restored: r)

    # --- what drives it -------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether every task has ended."""
        return all(machine.status is TaskStatus.FINISHED for machine in self.machines.values())

    def _turn_of(self, task: TaskId) -> ev.TurnGranted:
        if not self.machines[task].descriptor.limits.debloat_target_ms:
            return ev.TurnGranted(self._now_ms)
        return ev.TurnGranted(self._now_ms, self._random.choice(TURNS_MS), self._random.choice(TURNS_MS))

    def step(self) -> bool:
        """Something that can happen happens. Whether there was anything but time."""
        moves: list[Callable[[], None]] = [lambda k=k: self._deliver(k) for k in self._wires]
        for task, machine in self.machines.items():
            if machine.runnable:
                moves.append(lambda t=task: self._tell(t, self._turn_of(t)))  # type: ignore[misc]
        due = [timer for timer in self._timers if timer[0] <= self._now_ms]
        moves += [lambda t=timer: self._fire(t) for timer in due]
        if moves and self._random.random() < 0.95:
            self._random.choice(moves)()
            return True
        self._now_ms += self._random.choice([1, 7, 30])
        return bool(moves) or bool(self._timers)

    def trigger(self, options: BarrierOptions) -> None:
        """Begin a checkpoint, if every task is there and not too many are under way.

        Tasks that have left take no part. Those that have nobody before them any more are triggered.
        """
        gone = {task for task, machine in self.machines.items() if machine.status is TaskStatus.FINISHED}
        if len(self._ready) < len(self.machines) or len(self._pending) >= PENDING_MAX or self.finished:
            return
        self._number += 1
        number = CheckpointId(self._number)
        self._pending[number] = {task: self._last_of(task) if task in gone else Part() for task in self.machines}
        self._acknowledged[number] = set(gone)
        for task, machine in self.machines.items():
            if task not in gone and all(self.graph.sender(channel) in gone for channel in machine.descriptor.inputs):
                event = ev.CheckpointTriggered(self._now_ms, ATTEMPT, number, self._now_ms, options)
                self._post(("mail", task), task, lambda e=event: e)

    def _last_of(self, task: TaskId) -> Part:
        """What holds of a task that has left: it did so after a checkpoint that has it as finished."""
        last = self.completed[-1][task]
        assert last.finished
        return replace(last, tables=(), in_flight=())

    def abort_one(self) -> None:
        """Give up the oldest checkpoint that is under way."""
        if self._pending:
            self._abort(min(self._pending))

    def settle(self) -> None:
        """Let everything happen that is still to happen."""
        for _ in range(STEPS_MAX):
            if not self.step():
                return
        raise AssertionError("the network never comes to rest")

    @property
    def left_behind(self) -> list[str]:
        """What was written and is neither acknowledged nor discarded, or more than once."""
        return sorted(str(handle.path) for handle in self.written if self.owned.count(str(handle.path)) != 1)

    @property
    def under_way(self) -> list[CheckpointId]:
        """Checkpoints that are neither complete nor given up."""
        return sorted(self._pending)

    # --- events ---------------------------------------------------------------------------------------------------

    def _post(self, wire: object, task: TaskId, event: Callable[[], ev.TaskEvent]) -> None:
        self._wires.setdefault(wire, deque()).append((task, event))

    def _deliver(self, wire: object) -> None:
        task, event = self._wires[wire].popleft()
        if not self._wires[wire]:
            del self._wires[wire]
        self._tell(task, event())

    def _fire(self, timer: tuple[int, TaskId, ev.TaskTimer]) -> None:
        self._timers.remove(timer)
        self._tell(timer[1], ev.TimerDue(self._now_ms, timer[2]))

    def _tell(self, task: TaskId, event: ev.TaskEvent) -> None:
        for instruction in self.machines[task].handle(event):
            self._perform(task, instruction)

    def _perform(self, task: TaskId, instruction: do.TaskInstruction) -> None:
        match instruction:
            case do.SendFrame(_, channel, first, elements):
                to = self.graph.receiver(channel)
                frame = (channel, first, elements)
                self._post(channel, to, lambda f=frame: ev.FrameArrived(self._now_ms, ATTEMPT, *f))
            case do.GrantCredit(_, channel, total_bytes, window_bytes):
                grant = (channel, total_bytes, window_bytes)
                self._post(
                    ("credit", channel),
                    self.graph.sender(channel),
                    lambda g=grant: ev.CreditGranted(self._now_ms, ATTEMPT, *g),
                )
            case do.ReadSource():
                self._post(("read", task), task, lambda r=instruction: self._read(task, r))
            case do.PersistSnapshot(checkpoint_id):
                self._post((task, checkpoint_id, "state"), task, lambda i=instruction: self._state_written(task, i))
                if (cut := self._pending.get(checkpoint_id)) is not None:
                    cut[task].taken = dict(instruction.input_positions)
                    cut[task].put = dict(instruction.output_positions)
                    cut[task].output = tuple(self._found)
            case do.PersistChannelState(checkpoint_id, channels):
                handle = self._write(task, checkpoint_id, "channels")
                told = (checkpoint_id, handle)
                self._post(
                    (task, checkpoint_id, "channels"),
                    task,
                    lambda t=told: ev.ChannelStatePersisted(self._now_ms, *t),
                )
                if (cut := self._pending.get(checkpoint_id)) is not None:
                    cut[task].in_flight = channels
            case do.DiscardState(paths):
                self.owned += paths
            case do.SetTaskTimer(timer, due_at_ms):
                self._timers.append((due_at_ms, task, timer))
            case do.ReportReady():
                self._ready.add(task)
                if len(self._ready) == len(self.machines):
                    for each in self.machines:
                        self._post(("mail", each), each, lambda: ev.TasksStarted(self._now_ms))
            case do.Acknowledge():
                self._acknowledge(task, instruction)
            case do.Decline(_, checkpoint_id):
                self._abort(checkpoint_id)
            case do.ReportEndOfData() | do.ReportFinished():
                pass
            case _:
                raise AssertionError(f"nobody does {instruction}")

    def _read(self, task: TaskId, read: do.ReadSource) -> ev.SourceBatchRead:
        spec = self.machines[task].descriptor.source
        assert spec is not None
        assert isinstance(spec.source, MemorySource)
        result = spec.source.reader().read(read.split, read.offset, read.rows_max)
        return ev.SourceBatchRead(self._now_ms, read.read, result.batch, result.next_offset, result.at_end)

    def _write(self, task: TaskId, checkpoint_id: CheckpointId, part: str) -> StateHandle:
        handle = handle_of(f"{task}/{checkpoint_id}/{part}")
        assert handle is not None
        self.written.append(handle)
        return handle

    def _state_written(self, task: TaskId, instruction: do.PersistSnapshot) -> ev.SnapshotPersisted:
        """The asynchronous part, that runs beside later processing: what was frozen must still be as it was."""
        tables = tuple(
            (s.uid, tuple(table for state in s.states for table in tables_of(state))) for s in instruction.snapshots
        )
        if (cut := self._pending.get(instruction.checkpoint_id)) is not None:
            cut[task].tables = tables
        handle = self._write(task, instruction.checkpoint_id, "state")
        return ev.SnapshotPersisted(self._now_ms, instruction.checkpoint_id, handle)

    def _acknowledge(self, task: TaskId, ack: do.Acknowledge) -> None:
        number = ack.checkpoint_id
        self.owned += ack.state.paths
        if number not in self._pending:
            return
        part = self._pending[number][task]
        part.finished = ack.state.finished
        assert (ack.state.in_flight is None) == (not part.in_flight)
        assert task not in self._acknowledged[number], "acknowledged once"
        self._acknowledged[number].add(task)
        if len(self._acknowledged[number]) < len(self.machines):
            return
        cut = self._pending.pop(number)
        for older in [n for n in self._pending if n < number]:
            self._abort(older)
        self.completed.append(cut)
        self.statistics["with in-flight"] += any(p.in_flight for p in cut.values())
        self.statistics["recovered again"] += any(f.recovered for p in cut.values() for f in p.in_flight)
        self.statistics["partly finished"] += len({p.finished for p in cut.values()}) == 2
        for each in self.machines:
            event = ev.CheckpointCompleted(self._now_ms, ATTEMPT, number)
            self._post(("mail", each), each, lambda e=event: e)

    def _abort(self, number: CheckpointId) -> None:
        if self._pending.pop(number, None) is None:
            return
        for task in self.machines:
            event = ev.CheckpointAborted(self._now_ms, ATTEMPT, number)
            self._post(("mail", task), task, lambda e=event: e)


def _restored(graph: JobGraph, task: TaskId, cut: Parts | None) -> ev.TaskRestored:
    """In-flight input by the rule of the restore: of a channel first what its receiver held, then its sender's."""
    if cut is None:
        return ev.TaskRestored(1_000, ())
    in_flight: dict[ChannelId, tuple[InFlightElement, ...]] = {}
    for direction in (do.Direction.INPUT, do.Direction.OUTPUT):
        for part in cut.values():
            for held in part.in_flight:
                if held.direction is direction and graph.receiver(held.channel) == task:
                    in_flight[held.channel] = in_flight.get(held.channel, ()) + held.elements
    tables = () if cut[task].finished else cut[task].tables
    return ev.TaskRestored(1_000, tables, cut[task].finished, tuple(in_flight.items()))
