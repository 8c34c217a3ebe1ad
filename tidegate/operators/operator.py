"""`Operator`, the contract between the task machine and the code that transforms batches.

`OperatorChain` calls operators. An operator runs inside one task, on one thread. Its output depends only on its input
and its state. An operator has no I/O, no clock, no threads and no randomness, so every runtime produces the same
result. The task passes event time as watermarks, and processing time with each event that it handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.connectors.pushed_filters import Rows
from tidegate.operators.source_splits import Due, SourceSplits, as_they_are
from tidegate.operators.user_metrics import UserMetrics
from tidegate.protocol.stream_elements import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from tidegate.state.common.backend import KeyedBackend
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

Emit = Callable[[pa.RecordBatch], None]
"""A function that passes a batch to the next operator of the chain, or to the outputs of the task."""

EmitAside = Callable[[str, pa.RecordBatch], None]
"""A function that passes a batch to the side output with this name. The batch is sent before the next barrier."""

Columns = frozenset[str] | None
"""Names of columns, or None for all columns."""


def together(first: Columns, second: Columns) -> Columns:
    """Returns the union of two sets of columns. None means all columns."""
    return None if first is None or second is None else first | second


STEP_TIMERS_MAX = 1_000
"""Greatest number of timers that fire in one step.

High enough for the results of a step to fill a batch of useful size.
"""


@dataclass(slots=True)
class ProcessingTime:
    """The processing time of a task, in ms since 1970: the time at which the current event was passed to the task."""

    now_ms: int = 0


@dataclass(slots=True)
class StepPace:
    """Limits how many timers fire in one step, and counts the rows and timers of the current turn of a task.

    A turn is the handling of one event.
    """

    timers_max: int = STEP_TIMERS_MAX
    """Greatest number of timers that an operator fires in one step. Lower while timers take long."""
    rows: int = 0
    """Rows processed in this turn."""
    timers: int = 0
    """Timers fired in this turn."""

    def begin_turn(self, timers_max: int) -> None:
        """Starts a turn in which each step fires at most `timers_max` timers."""
        self.timers_max = min(STEP_TIMERS_MAX, timers_max)
        self.rows = 0
        self.timers = 0


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """The position of an operator in the job (uid, name, subtask), and the services that its task provides."""

    uid: OperatorUid
    name: str
    subtask: SubtaskIndex
    parallelism: int
    max_parallelism: int
    time: ProcessingTime = field(default_factory=ProcessingTime, compare=False)
    pace: StepPace = field(default_factory=StepPace, compare=False)
    splits: SourceSplits = field(default_factory=SourceSplits, compare=False)
    """For the task of a source: the split of the current rows, and the event time of each split."""
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """Options of the keyed state backend: its kind, and how snapshots are taken."""
    kept: KeyedBackend | None = field(default=None, compare=False)
    """Keyed state backend of the previous attempt, rewound to the checkpoint from which the operator starts.

    None if there is none.
    """
    metrics: UserMetrics = field(default_factory=lambda: UserMetrics("an operator"), compare=False)
    """The metrics that the operator's function creates."""
    emit_aside: EmitAside = field(default=lambda tag, batch: None, compare=False)
    """Passes a batch to a side output."""


class Operator:
    """One operator of a chain. The default methods suit an operator without state and with one input."""

    context: OperatorContext

    def needed_columns(self, after: Columns) -> Columns:
        """Returns the input columns that affect the columns `after` of the output.

        Sources may skip all other columns. An operator that passes rows to functions of users needs all columns.
        """
        return None

    def needed_rows(self, after: Rows) -> Rows:
        """Returns the input rows that affect the rows `after` of the output.

        Sources may skip all other rows, and then the operator does not receive them.
        """
        return None

    generates_watermarks: bool = False
    """True if the operator generates the watermarks for the operators after it. Watermarks from upstream then stop
    here, except the last one (`MAX_WATERMARK_MS`), which ends event time for every operator."""

    has_keyed_state: bool = False
    """True if the operator may have keyed state. Known before `open`."""

    @property
    def waits_for_event_time(self) -> bool:
        """Returns True if the operator must be called with watermarks. Must be correct before `open`.

        Other operators are not called with watermarks, because such a call costs more than a batch.
        """
        return type(self).advance_watermark is not Operator.advance_watermark

    @property
    def dues(self) -> Sequence[Due]:
        """Returns the rules that tie the treatment of a row to the watermark before it, such as dropping late rows.

        Must be correct before `open`. The watermark generator, which may run in another task, divides batches by these
        rules, so that each row arrives after the right watermark.
        """
        return (as_they_are,) if self.waits_for_event_time else ()

    holds_back_ms: int = 0
    """By how much the watermark that the operator forwards is behind the watermark that arrived, in ms.

    Results that are emitted when a watermark arrives are then not late.
    """

    def reached_ms(self, watermark_ms: int) -> int:
        """Returns the watermark to forward, in ms, after `watermark_ms` has arrived.

        An operator may return an earlier time, which delays event time. The final watermark (end of event time) is not
        delayed.
        """
        held_ms = self.holds_back_ms if watermark_ms < MAX_WATERMARK_MS else 0
        return max(MIN_WATERMARK_MS, watermark_ms - held_ms)

    watermark_ms: int | None = None
    """For a watermark generator: its current watermark in ms, or None before the first one.

    The chain reads it after each batch.
    """

    idleness_ms: int | None = None
    """For a watermark generator: after this time in ms, a split without rows no longer holds event time back.

    None disables this.
    """

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Opens the operator. Called once, before all other calls.

        `restored` holds the state tables of this operator from the checkpoint and is empty on a fresh start. Keyed
        state contains only the key groups of this subtask. An operator that may get many tables iterates over them
        with `taken`, which releases each table after its turn.
        """
        self.context = context

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes one non-empty batch. May emit any number of batches."""
        raise NotImplementedError

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Processes one non-empty batch of input `index`. An operator with one input implements only `process`."""
        self.process(batch, emit)

    def splits_moved(self) -> None:
        """Called on a watermark generator when the set of source splits that hold event time back has changed."""

    def end_input(self, index: int, emit: Emit) -> None:
        """Called once for each input when it has ended, before `finish`."""

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the results that become due at event time `watermark_ms`. Yields between two steps.

        The watermark is forwarded to the next operator after the last step. A snapshot may be taken between two steps:
        the finished steps are in the state or were emitted, and the remaining steps happen at the next watermark after
        a restore. A batch may also be processed between two steps, if the operators before this one emit several.
        """
        return iter(())

    def next_processing_time_ms(self) -> int | None:
        """Returns the processing time, in ms, at which to call `on_processing_time` next. None if no call is needed."""
        return None

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Emits the results that become due at processing time `now_ms`. Yields between two steps.

        If the input ends first, the remaining steps are dropped.
        """
        return iter(())

    def prepare_snapshot(self, emit: Emit) -> None:
        """Emits rows that must come before the barrier. Called before the barrier is forwarded."""

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns a snapshot of the state that `cut` selects. None if the operator has no state."""
        return None

    def changes(self, cut: Cut) -> OperatorSnapshot | None:
        """Returns the changes of keyed state since the last call, for the changelog.

        None if the operator has no keyed state.
        """
        return None

    @property
    def changed_bytes(self) -> int:
        """Approximate number of bytes of keyed state that changed since the last snapshot."""
        return 0

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """Backend that stores the keyed state once the operator is open. None if the operator has no keyed state."""
        return None

    def load(self, tables: Sequence[StateTable]) -> None:
        """Loads further tables of keyed state. Their values replace older values of the same keys.

        Allowed only for an operator with keyed state that has not processed anything yet.
        """
        raise NotImplementedError

    def hand_over(self) -> None:
        """Drops the references to the backend without closing it, because the next attempt of the task continues with
        it.

        Only `close` is called afterwards.
        """

    def finish(self, emit: Emit) -> Iterator[None]:
        """Emits the remaining results at the end of the input. Nothing is processed afterwards.

        An operator with many results yields after each batch. The task waits for space in its output before it
        continues.
        """
        return iter(())

    def close(self) -> None:
        """Releases resources. Called once, also after a failure."""


OperatorFactory = Callable[[], Operator]
"""A function that creates a new operator for each subtask and attempt. cloudpickle must be able to pickle it."""


class FunctionContext:
    """Information about the subtask in which a user's function runs."""

    def __init__(self, operator: OperatorContext) -> None:
        self._operator = operator

    @property
    def subtask(self) -> int:
        """Returns the index of this subtask, from 0."""
        return self._operator.subtask

    @property
    def parallelism(self) -> int:
        """Returns the number of subtasks of the operator."""
        return self._operator.parallelism

    @property
    def metrics(self) -> UserMetrics:
        """Returns the function's own counters, gauges and histograms: `self.late = context.metrics.counter("late")`."""
        return self._operator.metrics

    @property
    def current_processing_time(self) -> int:
        """Processing time in ms since 1970: when the task started to process the current rows or timer."""
        return self._operator.time.now_ms
