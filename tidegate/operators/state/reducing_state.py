"""`ReducingState` and `AggregatingState`: keyed state that folds what is added to it into one value for each key.

`ReducingState` folds by a function, `AggregatingState` by an aggregate function. Rules:

- Only the folded value is kept, in the declared type. So it survives a restore like any `ValueState`.
- The functions that fold are part of the program, never of a checkpoint. They must depend on their arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tidegate.operators.state.keyed_state import ValueState
from tidegate.operators.state.ttl import StateTtl


class AggregateFunction(Protocol):
    """How an `AggregatingState` folds (Flink's `AggregateFunction`)."""

    def create_accumulator(self) -> Any:
        """The accumulator that a key begins with, of the state's type."""
        ...

    def add(self, value: Any, accumulator: Any) -> Any:
        """The accumulator after a value."""
        ...

    def get_result(self, accumulator: Any) -> Any:
        """The result of an accumulator."""
        ...


class ReducingState(ValueState):
    """One value for each key: the first that was added, then `reduce(kept, added)`."""

    def __init__(
        self, name: str, reduce: Callable[[Any, Any], Any], dtype: Any, *, ttl: StateTtl | None = None
    ) -> None:
        super().__init__(name, dtype, ttl=ttl)
        self._reduce = reduce

    def add(self, value: Any) -> None:
        """Fold a value in. TypeError if it, or the result, is None or not of the declared type."""
        kept, added = self.value(), self._typed.taken(value)
        if kept is not None:
            added = self._typed.taken(self._reduce(kept, self._typed.handed_out(added)))
        self._cells.put(self._ref(), added)

    def get(self) -> Any:
        """What was folded for the current key; None where nothing was."""
        return self.value()


class AggregatingState(ValueState):
    """One accumulator for each key, of type `dtype`, that an aggregate function folds values into."""

    def __init__(self, name: str, function: AggregateFunction, dtype: Any, *, ttl: StateTtl | None = None) -> None:
        super().__init__(name, dtype, ttl=ttl)
        self._function = function

    def add(self, value: Any) -> None:
        """Fold a value in. TypeError if the accumulator becomes None, or not of the declared type."""
        kept = self.value()
        accumulator = self._function.create_accumulator() if kept is None else kept
        self._cells.put(self._ref(), self._typed.taken(self._function.add(value, accumulator)))

    def get(self) -> Any:
        """The result for the current key; None where nothing was added."""
        kept = self.value()
        return None if kept is None else self._function.get_result(kept)
