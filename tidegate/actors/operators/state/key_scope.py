"""`KeyScope`: the current key of a function over rows: the key of the row, or of the timer, that is being processed.

`ProcessOperator` chooses the key; states and timers ask for it. Rules:

- The keys of a batch of rows, or of a step of timers, are entered together and left together.
- State knows a key by the backend's reference. Python values of a key are made only if a timer or the function asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidegate.actors.operators.state.keys import Key, KeyCodec
from tidegate.actors.state_backends.common.backend import KeyRef
from tidegate.storage.errors import ConfigurationError


class EnteredKeys:
    """The keys of the rows or timers that are being processed, by number, as stored key columns and as Python keys."""

    __slots__ = ("_codec", "_columns", "_keys", "_rows")

    def __init__(self, codec: KeyCodec, columns: pa.RecordBatch | None, keys: Sequence[Key] | None = None) -> None:
        self._codec = codec
        self._columns = columns
        self._keys = keys
        self._rows: list[dict[str, Any]] | None = None

    @property
    def columns(self) -> pa.RecordBatch:
        """Stored key columns."""
        if self._columns is None:
            self._columns = self._codec.decode(self._keys or ())
        return self._columns

    def key(self, number: int) -> Key:
        """The key as a Python key."""
        if self._keys is None:
            self._keys = self._codec.encode(self.columns)
        return self._keys[number]

    def row(self, number: int) -> dict[str, Any]:
        """The key as people know it: the value of each key column."""
        if self._rows is None:
            self._rows = self.columns.to_pylist()
        return dict(self._rows[number])


class KeyScope:
    """The key that a function works on now; there is none outside of rows and timers."""

    __slots__ = ("_entered", "_number", "ref")

    def __init__(self) -> None:
        self._entered: EnteredKeys | None = None
        self._number = 0
        self.ref: KeyRef = None
        """How the backend knows the key; None where there is no key, or no state."""

    def enter(self, entered: EnteredKeys) -> None:
        """From now on `choose` chooses among these keys."""
        self._entered = entered

    def choose(self, number: int, ref: KeyRef) -> None:
        """Make an entered key the current one."""
        self._number = number
        self.ref = ref

    def leave(self) -> None:
        """There is no key any more."""
        self._entered = self.ref = None

    def current(self, what: str) -> Key:
        """The key. ConfigurationError, naming `what` was asked for, where there is none."""
        return self._entered_for(what).key(self._number)

    def current_number(self, what: str) -> int:
        """The number of the key among those that were entered. ConfigurationError as `current`."""
        self._entered_for(what)
        return self._number

    def entered_columns(self, numbers: Sequence[int]) -> pa.RecordBatch:
        """Stored key columns of some of the keys that were entered."""
        assert self._entered is not None, "no keys were entered"
        return self._entered.columns.take(pa.array(numbers, pa.int64()))

    def current_row(self, what: str) -> dict[str, Any]:
        """The key columns of the key. ConfigurationError as `current`."""
        return self._entered_for(what).row(self._number)

    def _entered_for(self, what: str) -> EnteredKeys:
        if self._entered is None:
            raise ConfigurationError(
                f"{what} is kept per key: it can be used in process and on_timer on a keyed stream, but not in open or "
                "finish, nor in process_broadcast"
            )
        return self._entered
