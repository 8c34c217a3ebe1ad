"""`Operator`: the contract between the task machine and the code that transforms batches.

An operator runs inside one task, on one thread. It is a function of its input and its state: no I/O, no
clock, no threads, no randomness, so that the same machine gives the same result on every runtime. Time comes in:
event time as watermarks, processing time with the events of the task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tidegate.actors.operators.source_splits import SourceSplits
from tidegate.actors.state_backends.common.backend import KeyedBackend
from tidegate.actors.state_backends.common.options import StateBackendOptions
from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state.snapshot import Cut, OperatorSnapshot, StateTable

Emit = Callable[[pa.RecordBatch], None]
"""Hands a batch to the next operator of the chain or to the task's outputs."""


STEP_TIMERS_MAX = 1_000
"""Timers that fire in one step at most: so many that what they emit together makes a batch worth its cost."""


@dataclass(slots=True)
class ProcessingTime:
    """The processing time of a task, in milliseconds since 1970: that of the event which it handles now."""

    now_ms: int = 0


@dataclass(slots=True)
class StepPace:
    """How many timers may fire before the task looks at what else has come in; less where they are slow."""

    timers_max: int = STEP_TIMERS_MAX
    """Timers that an operator may fire in one step."""
    rows: int = 0
    """Rows that came in in this turn."""
    timers: int = 0
    """Timers that fired in this turn."""

    def begin_turn(self, timers_max: int) -> None:
        """A turn begins in which so many timers may fire in a step."""
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
    """Of which split of the task's source the rows are, in the task of a source."""
    backend: StateBackendOptions = field(default_factory=StateBackendOptions)
    """Where keyed state lives, and how it is written."""
    kept: KeyedBackend | None = field(default=None, compare=False)
    """The backend of the attempt before, which has gone back to the checkpoint that the operator starts from."""


class Operator:
    """One operator of a chain. The defaults are those of a stateless operator with one input."""

    context: OperatorContext

    generates_watermarks: bool = False
    """Whether the operator makes the watermarks of what follows it: then those from before it end there, but for the
    last one (`MAX_WATERMARK_MS`), which is the end of event time for everybody."""

    has_keyed_state: bool = False
    """Whether the operator may have state of keys, known before it is opened."""

    watermark_ms: int | None = None
    """The own watermark of an operator that generates them; the task looks after each batch. None: none yet."""

    idleness_ms: int | None = None
    """For a generator of watermarks: after how long without rows a split holds them back no longer. None: never."""

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Called once, before anything else.

        `restored` holds the tables of this operator's states from the checkpoint, already cut to the key
        groups of this subtask for keyed state; empty on a fresh start. Whoever may be given many goes through them with
        `taken`, which lets go of each.
        """
        self.context = context

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process one non-empty batch; may emit any number of batches."""
        raise NotImplementedError

    def process_input(self, index: int, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process one non-empty batch that came by input `index`; the operator with one input does not ask."""
        self.process(batch, emit)

    def splits_moved(self) -> None:
        """Other splits of the source hold event time back now, of which an operator that generates watermarks hears."""

    def end_input(self, index: int, emit: Emit) -> None:
        """Nothing more comes by input `index`. Called once for each input, before `finish`."""

    def advance_watermark(self, watermark_ms: int, emit: Emit) -> Iterator[None]:
        """Event time has got to `watermark_ms`: emit what waited for that, in steps, as in `finish`.

        The watermark goes to the next operator after the last step. Between two steps the operator may be asked for a
        snapshot, and then it holds nothing back: what has been done is in its state or emitted, and what has not waits
        for the next watermark after a restore. It may also get a batch there, where those before it emit several.
        """
        return iter(())

    def next_processing_time_ms(self) -> int | None:
        """When `on_processing_time` is to be called next. None: no need."""
        return None

    def on_processing_time(self, now_ms: int, emit: Emit) -> Iterator[None]:
        """Processing time has got to `now_ms`: emit what waited for that, in steps, as in `advance_watermark`.

        The last steps are left out if the input ends before.
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
        """What holds the keyed state of an operator that is open; None for an operator that has none."""
        return None

    def load(self, tables: Sequence[StateTable]) -> None:
        """Take in layers of keyed state that came above those with which the operator was opened.

        Only of an operator with keyed state, and only where nothing has been processed.
        """
        raise NotImplementedError

    def hand_over(self) -> None:
        """Let go of that: the operator of the next attempt goes on with it. Only `close` is called afterwards."""

    def finish(self, emit: Emit) -> Iterator[None]:
        """End of input: emit what is left. Nothing is processed afterwards.

        What may be much is emitted in steps: yield after each batch, and the task waits for room before the next one.
        """
        return iter(())

    def close(self) -> None:
        """Release resources. Called once, also after a failure."""


OperatorFactory = Callable[[], Operator]
"""Makes a fresh operator for each subtask and attempt; must be picklable by cloudpickle."""
