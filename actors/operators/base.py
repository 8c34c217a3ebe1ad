"""What an operator is: the contract between the task machine and the code that transforms batches.

An operator runs inside one task, on one thread. It is a function of its input and its state: no I/O, no
clock, no threads, no randomness, so that the same machine gives the same result on every runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from tidegate.storage.ids import OperatorUid, SubtaskIndex
from tidegate.storage.state import OperatorSnapshot, StateTable

Emit = Callable[[pa.RecordBatch], None]
"""Hands a batch to the next operator of the chain or to the task's outputs."""


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """Where an operator runs."""

    uid: OperatorUid
    name: str
    subtask: SubtaskIndex
    parallelism: int
    max_parallelism: int


class Operator:
    """One operator of a chain. The defaults are those of a stateless operator."""

    context: OperatorContext

    def open(self, context: OperatorContext, restored: Sequence[StateTable]) -> None:
        """Called once, before anything else.

        `restored` holds the tables of this operator's states from the checkpoint, already cut to the key
        groups of this subtask for keyed state; empty on a fresh start.
        """
        self.context = context

    def process(self, batch: pa.RecordBatch, emit: Emit) -> None:
        """Process one non-empty batch; may emit any number of batches."""
        raise NotImplementedError

    def prepare_snapshot(self, emit: Emit) -> None:
        """Called before the barrier is sent on: the last chance to emit what belongs before it."""

    def snapshot(self) -> OperatorSnapshot | None:
        """The synchronous part of a snapshot: freeze the state. None from a stateless operator."""
        return None

    def finish(self, emit: Emit) -> Iterator[None]:
        """End of input: emit what is left. Nothing is processed afterwards.

        What may be much is emitted in steps: yield after each batch, and the task waits for room before the next one.
        """
        return iter(())

    def close(self) -> None:
        """Release resources. Called once, also after a failure."""


OperatorFactory = Callable[[], Operator]
"""Makes a fresh operator for each subtask and attempt; must be picklable by cloudpickle."""
