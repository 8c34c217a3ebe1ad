"""`OperatorChain`: runs the operators of one task in a row. Each operator passes its output to the next by a plain
call.

The task machine calls it with batches, watermarks and processing time. Rules:

- Only the first operator has several inputs.
- A watermark passes the operators in order. Each operator first emits the rows that waited for it. The operators behind
  it process these rows, and then get the watermark. An operator that generates watermarks passes on no upstream
  watermark, except the last one.
- The task sets the processing time. When a timer fires, it is never before the time for which the timer was set.
  Otherwise a timer that sets itself for the next full second would be due at once, again and again.
- Once finishing has begun no processing-time timer fires any more: as in Flink, these timers are dropped at the end.
- Timers fire in steps (Flink's interruptible timers). The first step is done at once, later ones when the task calls
  `step`. Meanwhile the task gives the chain nothing else.
- If several operators have steps left, the last in the chain goes first, to be up to date when the operators before it
  emit again. Watermarks that wait for the same operator merge into the newest. A generator of watermarks emits a batch
  in pieces because the watermark between two of them makes a difference: all of its steps come before the next piece,
  and before the rows of another batch of the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import pyarrow as pa

from tidegate.actors.graph.job_graph import OperatorSpec
from tidegate.actors.task import instructions as do
from tidegate.actors.task.events import TaskTimer
from tidegate.actors.task.instructions import MakeCalls
from tidegate.actors.task.task_descriptor import TaskStatus
from tidegate.actors.task.turn_pacer import ROWS_UNLIMITED
from tidegate.operators.functions.async_map import Answer, AsyncMap
from tidegate.operators.operator import Emit, EmitAside, Operator, OperatorContext, ProcessingTime, StepPace
from tidegate.operators.sinks.sink import StagedRows, StagingSink
from tidegate.operators.source_splits import SourceSplits
from tidegate.operators.user_metrics import UserMetric, UserMetrics
from tidegate.operators.watermarks.watermark_generator import WatermarkAlignment, WatermarkGenerator
from tidegate.protocol.edges import SideOutput
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend, StateSize
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.ids import CheckpointId, OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable


def _nobody(*told: object) -> None:
    """Does nothing. The default receiver of watermarks, idleness and side outputs."""


def _aside(output: Callable[[SideOutput, pa.RecordBatch], None], uid: OperatorUid) -> EmitAside:
    return lambda tag, batch: output(SideOutput(uid, tag), batch)


class OperatorChain:
    """Runs the operators of one task, one after the other.

    `output` receives the rows that the last operator emits, `output_watermark` its watermarks, `output_idle` whether
    the task is idle in event time, and `output_aside` the rows of side outputs.
    """

    def __init__(
        self,
        specs: Sequence[OperatorSpec],
        subtask: SubtaskIndex,
        parallelism: int,
        max_parallelism: int,
        output: Emit,
        output_watermark: Callable[[int], None] = _nobody,
        output_idle: Callable[[bool], None] = _nobody,
        backend: StateBackendOptions | None = None,
        output_aside: Callable[[SideOutput, pa.RecordBatch], None] = _nobody,
    ) -> None:
        self._time = ProcessingTime()
        self.pace = StepPace()
        """Limits how many rows and timers one step processes, and counts the work of the current turn."""
        self.splits = SourceSplits()
        """Tracks which split of the task's source has the current rows."""
        self._contexts = [
            OperatorContext(
                spec.uid,
                spec.name,
                subtask,
                parallelism,
                max_parallelism,
                self._time,
                self.pace,
                self.splits,
                backend or StateBackendOptions(),
                metrics=UserMetrics(spec.name),
                emit_aside=_aside(output_aside, spec.uid),
            )
            for spec in specs
        ]
        self._output = output
        self._output_watermark = output_watermark
        self._output_idle = output_idle
        self._idle = False
        """True if downstream was notified that this task is idle in event time."""
        self.links = [link_of(spec, partial(self._emitted, position)) for position, spec in enumerate(specs)]
        self._behind: set[int] = set()
        """Indices of operators that have not finished the newest watermark that they have received."""
        self._clock: Iterator[None] | None = None
        """The remaining steps of processing-time timers that are firing; None if none is firing."""
        self._clock_ms = MIN_WATERMARK_MS
        """The processing time, in ms since 1970, of the timers that are firing."""
        self._task_ms = 0
        self._inputs_ended: set[int] = set()
        self._finishing = False
        self._closing = ExitStack()
        self.callers = AsyncCallers(specs, self.links, self._advance, self._step, self._feed)
        """The operators of the chain that call their functions asynchronously (`map_async`)."""
        self._sinks = {
            spec.uid: link.operator
            for spec, link in zip(specs, self.links, strict=True)
            if isinstance(link.operator, StagingSink)
        }

    def open(
        self,
        tables: Mapping[OperatorUid, Sequence[StateTable]],
        checkpoint_id: CheckpointId | None = None,
        kept: Mapping[OperatorUid, KeyedBackend] = MappingProxyType({}),
    ) -> None:
        """Opens every operator with its restored state, last one first, so that each may emit at once.

        `checkpoint_id`: the restored checkpoint of this job, or None. Backends in `kept` are rewound to it. All other
        backends can be rewound to it later.
        """
        for link, context in zip(reversed(self.links), reversed(self._contexts), strict=True):
            context = replace(context, kept=kept.get(context.uid))
            self._closing.callback(link.operator.close)
            if context.kept is not None:
                assert checkpoint_id is not None, "state is kept for a checkpoint"
                context.kept.go_back(checkpoint_id)
            link.operator.open(context, tables.get(context.uid, ()))
            if checkpoint_id is not None and context.kept is None and link.operator.keyed_backend is not None:
                link.operator.keyed_backend.keep(checkpoint_id)

    def checkpoint_completed(self, checkpoint_id: CheckpointId) -> None:
        """Notifies the backends that a checkpoint is complete, so that they can drop the undo data of older ones."""
        for backend in self.backends.values():
            backend.completed(checkpoint_id)

    def set_time(self, at_ms: int) -> None:
        """Sets the processing time (milliseconds since 1970) that operators see from now on."""
        self._task_ms = at_ms
        self._time.now_ms = max(at_ms, self._clock_ms)

    def process(self, batch: pa.RecordBatch, input_index: int = 0) -> None:
        """Processes one batch of an input, through the whole chain."""
        self.pace.rows += batch.num_rows
        self._say_idle(False)
        self._feed(0, batch, input_index)
        self.step()

    def advance_watermark(self, watermark_ms: int) -> None:
        """Passes a watermark, in ms, of the task's inputs through the chain."""
        self._advance(0, watermark_ms)
        self.step()

    @property
    def idleness_ms(self) -> int | None:
        """Returns the time in ms without rows after which a split of the source is idle. None if it never is."""
        found = [link.operator.idleness_ms for link in self.links if link.operator.generates_watermarks]
        return found[0] if found else None

    @property
    def aligned_generator(self) -> tuple[WatermarkAlignment, WatermarkGenerator] | None:
        """Returns the watermark alignment of the source's splits, and the operator that generates their watermarks.

        None if the splits are not aligned.
        """
        generators = (link.operator for link in self.links if isinstance(link.operator, WatermarkGenerator))
        return next(((each.alignment, each) for each in generators if each.alignment is not None), None)

    def awaited_generator(self, behind: bool) -> WatermarkGenerator | None:
        """Returns the first operator that generates watermarks if a later operator waits for them, else None.

        `behind`: whether operators of later tasks wait for watermarks.
        """
        found: WatermarkGenerator | None = None
        for link in self.links:
            if link.operator.generates_watermarks:
                if found is not None:
                    return None  # The next one ends the watermarks of the first.
                found = link.operator if isinstance(link.operator, WatermarkGenerator) else None
            elif found is not None and link.waits:
                return found
        return found if behind else None

    def splits_moved(self) -> None:
        """Notifies the operators that generate watermarks that other splits now limit the event time."""
        for position, link in enumerate(self.links):
            if link.operator.generates_watermarks:
                link.operator.splits_moved()
                self._generated(position)
        self.step()

    @property
    def advancing(self) -> bool:
        """Returns whether work of a watermark or of timers is not finished. The caller calls `step` until it is, before
        it processes anything else.
        """
        return bool(self._behind) or self._clock is not None

    def step(self) -> None:
        """Continues the work of watermarks and timers until one step is done, or nothing remains to be done."""
        while self.advancing:
            if self._step():
                return
            if self._clock is not None:
                for _ in self._clock:
                    return
                self._set_clock(None, MIN_WATERMARK_MS)
        if self.splits.all_idle:
            # After the last watermark: a watermark on an idle channel would not count.
            self._say_idle(True)

    def end_input(self, input_index: int = 0) -> None:
        """Handles the end of an input of the chain. A second call for the same input does nothing."""
        if self.links and input_index not in self._inputs_ended:
            self._inputs_ended.add(input_index)
            self.links[0].operator.end_input(input_index, self.links[0].emit)

    @property
    def next_processing_time_ms(self) -> int | None:
        """Returns the time, in ms since 1970, at which to call `fire_processing_time` next. None if no timer is
        set.
        """
        if self._finishing:
            return None
        times = (link.operator.next_processing_time_ms() for link in self.links)
        return min((time for time in times if time is not None), default=None)

    def fire_processing_time(self, now_ms: int) -> None:
        """Fires the processing-time timers that are due at `now_ms`, in the order of the operators, in steps."""
        assert not self.advancing, "what time has brought before comes first"
        if not self._finishing:
            self._set_clock(self._fire(now_ms), now_ms)
            self.step()

    def prepare_snapshot(self) -> None:
        """Makes every operator, in order, emit the rows that belong before the barrier."""
        for link in self.links:
            link.operator.prepare_snapshot(link.emit)

    def snapshot(self, cut: Cut) -> list[OperatorSnapshot]:
        """Freezes the state of every operator with state for a checkpoint, and returns it. `cut`: which changes
        to include.
        """
        snapshots = (link.operator.snapshot(cut) for link in self.links)
        return [snapshot for snapshot in snapshots if snapshot is not None]

    def changes(self, cut: Cut) -> tuple[OperatorSnapshot, ...]:
        """Freezes only the keyed state of every operator, for the changelog. `cut`: which changes to include."""
        changes = (link.operator.changes(cut) for link in self.links)
        return tuple(change for change in changes if change is not None)

    @property
    def changed_bytes(self) -> int:
        """Returns the approximate number of bytes of keyed state that have changed since it was last frozen."""
        return sum(link.operator.changed_bytes for link in self.links)

    def changed_rows(self, base: CheckpointId) -> tuple[int, int]:
        """Returns the approximate number of rows of keyed state in a snapshot based on `base`, and in a full
        snapshot.
        """
        changed = [backend.changed_rows(base) for backend in self.backends.values()]
        return sum(rows for rows, _ in changed), sum(rows for _, rows in changed)

    @property
    def backends(self) -> Mapping[OperatorUid, KeyedBackend]:
        """Returns the backends of all operators with keyed state, by operator."""
        pairs = zip(self._contexts, self.links, strict=True)
        found = ((context.uid, link.operator.keyed_backend) for context, link in pairs)
        return {uid: backend for uid, backend in found if backend is not None}

    @property
    def user_metrics(self) -> tuple[UserMetric, ...]:
        """Returns the metrics that users' functions have defined."""
        return tuple(metric for context in self._contexts for metric in context.metrics.read(context.uid))

    @property
    def state_sizes(self) -> tuple[tuple[str, StateSize], ...]:
        """Returns the name of each operator with keyed state, and the approximate size of the state."""
        pairs = zip(self._contexts, self.links, strict=True)
        found = ((context.name, link.operator.keyed_backend) for context, link in pairs)
        return tuple((name, backend.size) for name, backend in found if backend is not None)

    def hand_over(self) -> Mapping[OperatorUid, KeyedBackend]:
        """Returns the backends that can be rewound to a checkpoint, by operator, for the next attempt of the task.

        Afterwards only `close` may be called.
        """
        backends = {uid: backend for uid, backend in self.backends.items() if backend.goes_back}
        for context, link in zip(self._contexts, self.links, strict=True):
            if context.uid in backends:
                link.operator.hand_over()
        return backends

    def take_pending(self, force: bool) -> list[tuple[OperatorUid, StagedRows]]:
        """Returns the rows that the sinks of the chain are ready to write, each with the uid of the sink.
        `force`: all rows.
        """
        return [(uid, rows) for uid, sink in self._sinks.items() for rows in sink.take_files(force)]

    def finish(self, drain: bool = True) -> Iterator[None]:
        """Ends all inputs, and returns the remaining work as an iterator, which does one step at a time.

        First come steps of watermarks. Then, with `drain`, every operator emits its remaining rows, in order.
        """
        self._finishing = True
        self.callers.draining = drain
        self.splits.idle.clear()
        self._set_clock(None, MIN_WATERMARK_MS)
        return self._finish() if drain else self._catch_up()

    def close(self) -> None:
        """Closes every operator whose `open` was called, in the order of the chain.

        If one operator raises, the remaining operators are closed too.
        """
        self._closing.close()

    def _feed(self, position: int, batch: pa.RecordBatch, input_index: int = 0) -> None:
        """Passes a batch to the operator with index `position`, or to the task's output if there is no such
        operator.
        """
        if not batch.num_rows:
            return
        if position == len(self.links):
            self._output(batch)
            return
        link = self.links[position]
        if batch.num_rows > link.rows_max:
            # Operators before it may make more rows out of one turn than it takes at once.
            for start in range(0, batch.num_rows, link.rows_max):
                self._feed(position, batch.slice(start, link.rows_max), input_index)
            return
        link.operator.process_input(input_index, batch, link.emit)
        if link.operator.generates_watermarks:
            self._generated(position)

    def _emitted(self, position: int, batch: pa.RecordBatch) -> None:
        """Passes on a batch that the operator with index `position` has emitted.

        If the operator generates watermarks, first passes on the watermark of its earlier rows.
        """
        if self.links[position].operator.generates_watermarks:
            self._generated(position)
            while self._step(position):
                pass
        self._feed(position + 1, batch)

    def _generated(self, position: int) -> bool:
        """Passes on the watermark of a generator if it has advanced. Returns whether it has."""
        link = self.links[position]
        own_ms = link.operator.watermark_ms
        if own_ms is not None and own_ms > link.generated_ms:
            link.generated_ms = own_ms
            self._advance(position + 1, own_ms)
            return True
        return False

    def _say_idle(self, idle: bool) -> None:
        if idle != self._idle and any(link.operator.generates_watermarks for link in self.links):
            self._idle = idle
            self._output_idle(idle)

    def _advance(self, start: int, watermark_ms: int) -> None:
        """Passes a watermark down the chain from index `start`. Stops at an operator that has work to do for the
        watermark.
        """
        for position in range(start, len(self.links)):
            link = self.links[position]
            if isinstance(link.operator, AsyncMap) and not link.operator.let_pass(watermark_ms):
                return
            if link.operator.generates_watermarks:
                if watermark_ms < MAX_WATERMARK_MS:
                    return
                link.generated_ms = watermark_ms
            if link.waits:
                link.next_ms = watermark_ms
                self._behind.add(position)
                return
        self._say_idle(False)
        self._output_watermark(watermark_ms)

    def _steps_of(self, link: Link) -> Iterator[None]:
        """Returns the operator's remaining steps for its current watermark, or else the steps for its next
        watermark.
        """
        if link.steps is None:
            assert link.next_ms is not None, "an operator is behind a watermark"
            link.current_ms = link.next_ms
            link.next_ms = None
            link.steps = link.operator.advance_watermark(link.current_ms, link.emit)
        return link.steps

    def _step(self, behind: int = -1) -> bool:
        """Does one step of work for a watermark, in the last operator that has some. Returns False if there was no
        work.

        Operators up to index `behind` are not considered.
        """
        while (position := max(self._behind, default=-1)) > behind:
            for _ in self._steps_of(self.links[position]):
                return True
            self._arrived(position)
        return False

    def _arrived(self, position: int) -> None:
        """Passes the watermark for which the operator with index `position` has finished its work to the next
        operators.
        """
        link = self.links[position]
        link.steps = None
        if link.next_ms is None:
            self._behind.remove(position)
        self._advance(position + 1, link.operator.reached_ms(link.current_ms))

    def _set_clock(self, steps: Iterator[None] | None, time_ms: int) -> None:
        self._clock = steps
        self._clock_ms = time_ms
        self.set_time(self._task_ms)

    def _fire(self, now_ms: int) -> Iterator[None]:
        for link in self.links:
            yield from link.operator.on_processing_time(now_ms, link.emit)

    def _catch_up(self) -> Iterator[None]:
        """Does the remaining work for watermarks. Yields after each step."""
        while self.advancing:
            self.step()
            yield

    def _finish(self) -> Iterator[None]:
        yield from self._catch_up()
        for position, link in enumerate(self.links):
            # The inputs of the first operator may have ended already, one by one. Other operators have one input, which
            # ends now.
            if position or not self._inputs_ended:
                link.operator.end_input(0, link.emit)
            for _ in link.operator.finish(link.emit):
                yield
                yield from self._catch_up()
            yield from self._catch_up()


@dataclass(slots=True)
class Link:
    """An operator of the chain, its output function, and the watermarks that it has received."""

    operator: Operator
    emit: Emit
    """The function that receives the operator's output."""
    rows_max: int
    """The largest number of rows that the operator gets in one call."""
    waits: bool
    """The value of `Operator.waits_for_event_time`, read once."""
    generated_ms: int = MIN_WATERMARK_MS
    """The newest watermark that the operator has generated and the chain has passed on, in ms since 1970."""
    next_ms: int | None = None
    """The newest watermark that the operator has received and not begun, in ms since 1970. None if there is none."""
    current_ms: int = MIN_WATERMARK_MS
    """The newest watermark that the operator has begun, in ms since 1970."""
    steps: Iterator[None] | None = None
    """The operator's remaining steps for the watermark `current_ms`, or None."""


def link_of(spec: OperatorSpec, emit: Emit) -> Link:
    """Creates the operator that a spec describes. `emit` receives its output."""
    operator = spec.factory()
    rows_max = ROWS_UNLIMITED if spec.batch_rows is None else spec.batch_rows.most
    return Link(operator, emit, rows_max, operator.waits_for_event_time)


_WORKING = (TaskStatus.RUNNING, TaskStatus.FINISHING)


class AsyncCallers:
    """The operators of a chain that call their functions asynchronously (`AsyncMap`).

    Rules:

    - A task takes no input while a caller has no room for more rows (`blocked`). At the end of its input it waits for
      all results.
    - Results of functions go to the next operator between two turns: rows, and watermarks that waited for them. All
      steps of such a watermark come before the rows behind it, which are judged by the watermark.

    `advance`, `step` and `feed` are methods of the chain.
    """

    def __init__(
        self,
        specs: Sequence[OperatorSpec],
        links: Sequence[Link],
        advance: Callable[[int, int], None],
        step: Callable[[int], bool],
        feed: Callable[[int, pa.RecordBatch], None],
    ) -> None:
        self._callers = {
            spec.uid: (position, link.operator)
            for position, (spec, link) in enumerate(zip(specs, links, strict=True))
            if isinstance(link.operator, AsyncMap)
        }
        self._advance = advance
        self._step = step
        self._feed = feed
        self.draining = False
        """True once the input has ended for good."""

    @property
    def blocked(self) -> bool:
        """Returns whether the task must wait for the result of a function before it can continue."""
        return any(caller.full or (self.draining and caller.busy) for _, caller in self._callers.values())

    def take_calls(self, status: TaskStatus) -> list[MakeCalls]:
        """Returns the calls to make now. Empty until the task runs, because results have no receiver before that."""
        if status not in _WORKING:
            return []
        taken = ((uid, tuple(caller.take_calls())) for uid, (_, caller) in self._callers.items())
        return [MakeCalls(uid, calls) for uid, calls in taken if calls]

    def answered(self, answers: Iterable[tuple[OperatorUid, Answer]], status: TaskStatus) -> None:
        """Passes the results of calls, or their errors, to the operators and then down the chain.

        A task that was stopped ignores the results, because the rows of these calls are in the savepoint.
        """
        if status not in _WORKING:
            return
        by_operator: dict[OperatorUid, list[Answer]] = {}
        for uid, answer in answers:
            by_operator.setdefault(uid, []).append(answer)
        for uid, found in by_operator.items():
            position, caller = self._callers[uid]
            for item in caller.answered(found):
                if isinstance(item, int):
                    self._advance(position + 1, item)
                    while self._step(position):
                        pass
                else:
                    self._feed(position + 1, item)


class ProcessingTimeTimer:
    """Fires the processing-time timers of a task's operators.

    The task machine sets one timer of the runtime at a time, for the earliest time. When it is due, the operators'
    timers fire in steps, each in a separate turn. Remaining steps of a watermark go first.
    """

    def __init__(self, chain: OperatorChain, instruct: Callable[[do.TaskInstruction], None]) -> None:
        self._chain = chain
        self._instruct = instruct
        self._set_for_ms: int | None = None
        self._due_ms: int | None = None
        """The time, in ms since 1970, up to which timers are due and the operators have not fired them. None if
        no timer is due.
        """

    @property
    def due(self) -> bool:
        """Returns whether timers are due, or work for timers or watermarks is not finished."""
        return self._due_ms is not None or self._chain.advancing

    def fired(self, at_ms: int) -> None:
        """Records that the runtime's timer has fired. Timers up to `at_ms` are then due, even if the clock was
        set back since.
        """
        self._set_for_ms = None
        self._due_ms = at_ms

    def run(self, now_ms: int) -> None:
        """Does one step of the timers that are due, or of a watermark."""
        if self._chain.advancing:
            self._chain.step()
        else:
            at_ms = now_ms if self._due_ms is None else max(now_ms, self._due_ms)
            self._due_ms = None
            self._chain.fire_processing_time(at_ms)

    def set(self) -> None:
        """Sets the runtime's timer for the earliest operator timer.

        Does nothing if timers are due, or if the runtime's timer is set for that time or an earlier one.
        """
        if self.due:
            return
        due_at_ms = self._chain.next_processing_time_ms
        if due_at_ms is not None and (self._set_for_ms is None or due_at_ms < self._set_for_ms):
            self._set_for_ms = due_at_ms
            self._instruct(do.SetTaskTimer(TaskTimer.PROCESSING_TIME, due_at_ms))
