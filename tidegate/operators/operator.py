"""`Operator`: the contract between the task machine and the code that transforms batches.

`OperatorChain` calls it. An operator runs inside one task, on one thread. It is a function of its input and its state:
no I/O, no clock, no threads, no randomness. So it gives the same result on every runtime. Time comes in from outside:
event time as watermarks, processing time with the events of the task.

### MERGE
`FunctionContext`: what every function of the user may ask about where it runs.
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
"""Hands a batch to the next operator of the chain or to the task's outputs."""


EmitAside = Callable[[str, pa.RecordBatch], None]
"""Hands a batch to what reads the operator's side output of that name; nothing is held back over a barrier."""

Columns = frozenset[str] | None
"""Columns of rows, by name; None: all of them."""


def together(first: Columns, second: Columns) -> Columns:
    """The columns of both."""
    return None if first is None or second is None else first | second


STEP_TIMERS_MAX = 1_000
"""Timers that fire in one step at most. With so many, what they emit together makes a batch worth its cost."""


@dataclass(slots=True)
class ProcessingTime:
    """The processing time of a task, in milliseconds since 1970: the time of the event that it handles."""

    now_ms: int = 0


@dataclass(slots=True)
class StepPace:
    """How many timers may fire before the task looks at what else has come in, and what this turn has done so far."""

    timers_max: int = STEP_TIMERS_MAX
    """Timers that an operator may fire in one step; fewer where timers are slow."""
    rows: int = 0
    """Rows that this turn has taken in."""
    timers: int = 0
    """Timers that have fired in this turn."""

    def begin_turn(self, timers_max: int) -> None:
        """A turn begins. `timers_max` timers may fire in each step of it."""
        self.timers_max = min(STEP_TIMERS_MAX, timers_max)
        self.rows = self.timers = 0


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """Where an operator runs, and what time it is there."""

    uid: OperatorUid
    name: str
    subtask: SubtaskIndex
    parallelism: int
    max_parallelism: int
    time: ProcessingTime = field(default_factory=ProcessingTime, compare=False)
    pace: StepPace = field(default_factory=StepPace, compare=False)
    splits: SourceSplits = field(default_factory=SourceSplits, compare=False)
    """In the task of a source: which split the current rows are from."""
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """Where keyed state lives, and how it is written."""
    kept: KeyedBackend | None = field(default=None, compare=False)
    """The backend of the attempt before, which has gone back to the checkpoint that the operator starts from."""
    metrics: UserMetrics = field(default_factory=lambda: UserMetrics("an operator"), compare=False)
    """What the operator's function counts of itself."""
    emit_aside: EmitAside = field(default=lambda tag, batch: None, compare=False)
    """Takes the rows of side outputs."""


class Operator:
    """One operator of a chain. The defaults are those of a stateless operator with one input."""

    context: OperatorContext

    def needed_columns(self, after: Columns) -> Columns:
        """The columns of its input that make a difference, if only those of `after` do in its output.

        Sources need not read the others. An operator that hands rows to functions of users needs all.
        """
        return None

    def needed_rows(self, after: Rows) -> Rows:
        """The rows of its input that make a difference, if only those of `after` do in its output.

        Sources need not read the others, and then the operator does not see them.
        """
        return None

    generates_watermarks: bool = False
    """Whether the operator makes the watermarks for what follows it. Then those from upstream end here, except the last
    one (`MAX_WATERMARK_MS`): it is the end of event time for everybody."""

    has_keyed_state: bool = False
    """Whether the operator may have keyed state; known before it is opened."""

    @property
    def waits_for_event_time(self) -> bool:
        """Whether watermarks make the operator do anything; known before it is opened.

        Others do not see them: showing them costs more than a batch.
        """
        return type(self).advance_watermark is not Operator.advance_watermark

    @property
    def dues(self) -> Sequence[Due]:
        """How the operator tells rows apart by the watermark before them; known before it is opened.

        Whoever makes the watermarks cuts batches accordingly, also in another task.
        """
        return (as_they_are,) if self.waits_for_event_time else ()

    holds_back_ms: int = 0
    """So far the watermark that goes on lies behind the one that came: what is emitted at that one is not late then."""

    def reached_ms(self, watermark_ms: int) -> int:
        """The watermark that goes on when one has come; the end of event time is held back by nobody."""
        held_ms = self.holds_back_ms if watermark_ms < MAX_WATERMARK_MS else 0
        return max(MIN_WATERMARK_MS, watermark_ms - held_ms)

    watermark_ms: int | None = None
    """The watermark of an operator that generates them; the chain looks at it after each batch. None: none yet."""

    idleness_ms: int | None = None
    """For a generator of watermarks: after how long without rows a split holds them back no longer. None: never."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Called once, before anything else.

        `restored` holds the tables of this operator's states from the checkpoint; empty on a fresh start. Keyed state
        is cut to the key groups of this subtask already. An operator that may get many tables goes through them with
        `taken`, which lets go of each.
        """
        self.context = context

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process one non-empty batch; may emit any number of batches."""
        raise NotImplementedError

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process one non-empty batch of input `index`. An operator with one input needs only `process`."""
        self.process(batch, emit)

    def splits_moved(self) -> None:
        """Other splits of the source hold event time back now. Called if the operator generates watermarks."""

    def end_input(self, index: int, emit: Emit) -> None:
        """Input `index` has ended. Called once for each input, before `finish`."""

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Event time has reached `watermark_ms`: emit what waited for that, in steps, as in `finish`.

        The watermark goes to the next operator after the last step. A snapshot may come between two steps: what was
        done by then is in the state or was emitted, and what is left waits for the next watermark after a restore. A
        batch may come between two steps as well, if the operators before this one emit several.
        """
        return iter(())

    def next_processing_time_ms(self) -> int | None:
        """When `on_processing_time` is to be called next. None: no need."""
        return None

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Processing time has reached `now_ms`: emit what waited for that, in steps, as in `advance_watermark`.

        If the input ends first, the steps that are left are dropped.
        """
        return iter(())

    def prepare_snapshot(self, emit: Emit) -> None:
        """Called before the barrier is sent on: the last chance to emit what belongs before it."""

    def snapshot(self, cut: Cut) -> OperatorSnapshot | None:
        """The synchronous part of a snapshot: freeze the state that `cut` asks for. None from a stateless operator."""
        return None

    def changes(self, cut: Cut) -> OperatorSnapshot | None:
        """Freeze keyed state alone, between two snapshots: for the changelog. None from an operator that has none."""
        return None

    @property
    def changed_bytes(self) -> int:
        """About how many bytes of keyed state have changed since it was last frozen."""
        return 0

    @property
    def keyed_backend(self) -> KeyedBackend | None:
        """The backend of the keyed state, once the operator is open; None if it has none."""
        return None

    def load(self, tables: Sequence[StateTable]) -> None:
        """Take in further layers of keyed state, above those that the operator was opened with.

        Only for an operator with keyed state that has processed nothing yet.
        """
        raise NotImplementedError

    def hand_over(self) -> None:
        """Let go of the backend: the next attempt goes on with it. Only `close` is called afterwards."""

    def finish(self, emit: Emit) -> Iterator[None]:
        """End of input: emit what is left. Nothing is processed afterwards.

        An operator that may have much left yields after each batch. The task waits for room before the next one.
        """
        return iter(())

    def close(self) -> None:
        """Release resources. Called once, also after a failure."""


OperatorFactory = Callable[[], Operator]
"""Makes a fresh operator for each subtask and attempt; must be picklable by cloudpickle."""


class FunctionContext:
    """Where a function runs."""

    def __init__(self, operator: OperatorContext) -> None:
        self._operator = operator

    @property
    def subtask(self) -> int:
        """Index of this subtask."""
        return self._operator.subtask

    @property
    def parallelism(self) -> int:
        """Number of subtasks."""
        return self._operator.parallelism

    @property
    def metrics(self) -> UserMetrics:
        """Counters, gauges and histograms of the function's own: `self.late = context.metrics.counter("late")`."""
        return self._operator.metrics

    @property
    def current_processing_time(self) -> int:
        """Processing time in milliseconds: when the task took up what is being processed."""
        return self._operator.time.now_ms
