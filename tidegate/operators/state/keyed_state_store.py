"""`KeyedStates` manages all keyed states of one operator. It binds them to the state backend, restores them, looks up
the keys of each batch in the backend, and takes snapshots.

`ProcessOperator` calls it. Rules:

- Names of states are unique, and differ from the names of key columns.
- The function must bind every restored state. States that the user has agreed to drop are removed before the restore
  (`restore_task.py`).
- Stored rows are converted to the declared types if that loses nothing (see `tidegate/storage/schemas/evolution.py`).
- A program may add a time to live to a restored state. It starts at the restore. A program may not remove a time to
  live.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa

from tidegate.operators.operator import OperatorContext
from tidegate.operators.state.keyed_state import KeyedState, S, StateNames
from tidegate.operators.state.keys import EnteredKeys, Key, KeyCodec, KeyScope
from tidegate.operators.state.operator_backend import frozen_backend, make_backend
from tidegate.operators.state.state_types import check_serializers, holds_pickles
from tidegate.operators.state.timers import Timers
from tidegate.operators.state.ttl import Clock, FrozenUnexpired, timed_now
from tidegate.operators.state.undo import StateUndo
from tidegate.state.common.backend import KeyRef
from tidegate.storage.errors import ConfigurationError, IncompatibleStateError
from tidegate.storage.schemas.arrow_types import widened
from tidegate.storage.schemas.column_names import is_reserved
from tidegate.storage.schemas.evolution import migrated
from tidegate.storage.state.snapshot import Cut, FrozenChanged, FrozenState, OperatorSnapshot, StateChunk, StateTable
from tidegate.storage.state.stored_rows import TIMERS_STATE

_KEYS_BATCH_ROWS = 4096


class KeyedStates:
    """The keyed states of one operator. `key_names` are its key columns, `names` has the names of all its states.

    `scope` holds the current key. `by_batch` is True if the function reads and writes state for whole batches. `undo`
    records changes, so that they can be undone if a call fails. None if that is never needed.
    """

    def __init__(
        self,
        context: OperatorContext,
        key_names: Sequence[str],
        scope: KeyScope,
        names: StateNames,
        by_batch: bool = False,
        undo: StateUndo | None = None,
    ) -> None:
        self._context = context
        self._where = f"operator {context.name!r} (uid {context.uid!r})"
        self._undo = undo
        self._by_batch = by_batch
        self._names = names
        self.backend = make_backend(context, key_names)
        self._key_names = tuple(key_names)
        self._scope = scope
        self.timers = Timers(scope, self.backend.timers)
        """Timers of the keys."""
        self._states: dict[str, KeyedState] = {}
        self._clocks: dict[str, Clock] = {}
        self._codec: KeyCodec | None = None
        self._complete = False
        self._handed_over = False

    def complete(self) -> None:
        """Ends the binding of states. `bind` raises an error from now on."""
        self._complete = True

    @property
    def stored_fields(self) -> dict[str, pa.Field]:
        """Returns the field of the checkpoint column of each bound state, by state name."""
        return {name: state.stored_field for name, state in self._states.items()}

    @property
    def bound(self) -> Mapping[str, KeyedState]:
        """Returns the bound states, by name."""
        return self._states

    def bind(self, declared: S) -> S:
        """Binds a state that a user has declared. Returns the bound state.

        Raises ConfigurationError after `open`, and for a name that is in use or reserved.
        """
        if self._complete:
            raise ConfigurationError(
                f"{self._where}: state {declared.name!r} is bound too late: call context.state(...) in open"
            )
        self._names.take(declared.name)
        return self._bound(declared)

    def bind_own(self, declared: S) -> S:
        """Binds a state of tidegate itself, under a reserved name. Returns the bound state."""
        self._names.take_own(declared.name)
        return self._bound(declared)

    def _bound(self, declared: S) -> S:
        name = declared.name
        if name in self._key_names:
            raise ConfigurationError(
                f"{self._where}: state {name!r} has the name of a key column; give the state another name"
            )
        if declared.ttl is not None:
            self._clocks[name] = Clock(declared.ttl, self._context.time)
        migrate = partial(self._declared, declared)
        backend = self.backend if self._undo is None else self._undo.backend(self.backend)
        state = declared.bound(self._scope, backend, self._clocks.get(name), migrate, self._by_batch)
        self._states[name] = state
        return state

    def fix_keys(self, codec: KeyCodec) -> None:
        """Sets the types of the key columns in the backend. Called once, after all states are bound."""
        self._codec = codec
        self.backend.fix_keys(codec.schema)

    def stored_keys(self) -> pa.Schema | None:
        """Returns the schema of the key columns that the restored files of the backend have. None if there are none."""
        return self.backend.stored_keys

    def enter(self, columns: pa.RecordBatch | None, keys: Sequence[Key] | None = None) -> Sequence[KeyRef]:
        """Makes keys available until `leave`. The keys are passed as stored key columns, Python keys, or both.

        Returns the backend's reference to each key. If no state is bound, the references are None.
        """
        assert self._codec is not None, "keys without a type"
        entered = EnteredKeys(self._codec, columns, keys)
        self._scope.enter(entered)
        if self._states:
            return self.backend.enter(entered.columns)
        return [None] * (len(keys or ()) if columns is None else columns.num_rows)

    def enter_batch(self, columns: pa.RecordBatch) -> None:
        """Makes the keys of a batch available, given as stored key columns, for a function that processes whole
        batches.
        """
        assert self._codec is not None, "keys without a type"
        refs = self.backend.enter_batch(columns) if self._states else None
        self._scope.enter_batch(EnteredKeys(self._codec, columns), refs)

    def leave(self, rows: int) -> None:
        """Ends the processing of a batch of `rows` rows or timers. Then checks up to `rows` keys for expired state."""
        self.timers.flush()
        self._scope.leave()
        if self._states:
            self.backend.leave()
            if self._clocks:
                self.backend.sweep(rows)

    def each_key(self, state: KeyedState) -> Iterator[None]:
        """Iterates over all keys that have a value in `state`, and makes each the current key in turn. The state may be
        changed during the iteration.

        Raises ConfigurationError for a state that `bind` has not returned.
        """
        if self._states.get(state.name) is not state:
            raise ConfigurationError(
                f"{self._where}: state {state.name!r} is declared but not bound; pass the object that "
                "context.state(...) returned in open"
            )
        # List all of them first: work on one key may move others within the backend.
        for columns in list(self.backend.keys(state.name, _KEYS_BATCH_ROWS)) if self._codec else ():
            try:
                for number, ref in enumerate(self.enter(columns)):
                    self._scope.choose(number, ref)
                    yield
            finally:
                self.leave(0)

    def load(self, table: StateTable) -> None:
        """Loads a stored table into the state with its name.

        Raises UndeclaredStateError if no state with the name is bound, ConfigurationError for a type that cannot be
        converted to the declared type, IncompatibleStateError for timers of a function that has no method for them, and
        CorruptionError if a key occurs twice (which may be noticed only in `loaded`).
        """
        if table.state == TIMERS_STATE:
            if self.timers.no_method is not None and not table.removed:
                raise IncompatibleStateError(f"{self._where}: {pending_timers(self.timers.no_method)}")
            self.backend.load(table)
            return
        state = self._states.get(table.state)
        if state is None:
            raise self._names.not_bound(
                table.state,
                f"{self._where}: the checkpoint has {table.state!r}, tidegate's state for timers of windows, but the "
                "function no longer has a method on_timer. Keep the method, or change the operator's uid"
                if is_reserved(table.state)
                else f"{self._where}: the checkpoint has a state {table.state!r} that the function does not bind (it "
                f"binds {sorted(self._states)}): call self.context.state(...) for it in open, or change the "
                "operator's uid",
            )
        self.backend.load(table if table.removed else replace(table, rows=self._declared(state, table.rows)))

    def loaded(self) -> None:
        """Ends the restore. Raises CorruptionError if a key occurred twice."""
        self.backend.loaded()

    def freeze(self, cut: Cut) -> OperatorSnapshot:
        """Returns a snapshot of all states and timers.

        With `cut.base`, the snapshot has only the changes since that checkpoint.
        """
        if self._codec is None:
            return OperatorSnapshot(self._context.uid)
        snapshot = frozen_backend(self._context, self.backend, cut)
        states, layer = (
            tuple(self._as_stored(frozen, cut) for frozen in part) for part in (snapshot.states, snapshot.layer)
        )
        return replace(snapshot, states=states, layer=layer)

    def hand_over(self) -> None:
        """Drops the states without closing the backend, because the next attempt of the task continues with it.

        Keys cannot be entered any more.
        """
        self._states, self._codec, self._handed_over = {}, None, True

    def close(self) -> None:
        """Closes the backend, unless the next attempt of the task has taken it over."""
        if not self._handed_over:
            self.backend.close()

    def _as_stored(self, frozen: FrozenState, cut: Cut) -> FrozenState:
        if frozen.removed or frozen.state not in self._states:  # timers, and what the operator itself keeps
            return frozen
        clock, field = self._clocks.get(frozen.state), self._states[frozen.state].stored_field
        if clock is not None and cut.base is None:
            frozen = FrozenUnexpired(frozen, clock.expired_ms)
        return FrozenMarked(frozen, field) if holds_pickles(field) else frozen

    def _declared(self, state: KeyedState, stored: pa.RecordBatch) -> pa.RecordBatch:
        """Returns stored rows of a state, converted to its declared type.

        Raises IncompatibleStateError or ConfigurationError if they cannot be converted.
        """
        rows, field = widened(stored), state.stored_field
        position = rows.num_columns - 1
        if rows.schema.names != [*self._key_names, state.name]:
            raise IncompatibleStateError(
                f"{self._where}: stored rows of state {state.name!r} have columns {rows.schema.names}, not "
                f"{[*self._key_names, state.name]}; restore with the program that wrote them, or change the uid"
            )
        had_ttl = state.expires(rows.schema.field(position).type)
        if state.ttl is None and had_ttl:
            raise ConfigurationError(
                f"{self._where}: state {state.name!r} was written with a time to live, and the program declares none, "
                "so expired values would come back. Declare it with ttl=tg.StateTtl(...), or give the state a new name"
            )
        if state.ttl is not None and not had_ttl:
            timed = timed_now(rows.column(position), field.type, self._context.time.now_ms)
            rows = rows.set_column(position, pa.field(state.name, timed.type), timed)
        check_serializers(rows.schema.field(position), field, state.name, self._where)
        expected = pa.schema([*(rows.schema.field(n) for n in range(position)), field])
        return migrated(rows, expected, state.name, self._context.uid)


def pending_timers(no_method: str) -> str:
    """Returns the error text for stored timers that no method gets. `no_method` names the method that is missing."""
    return (
        f"the checkpoint has pending timers, and {no_method}, so they would be lost. Keep the method (one that does "
        "nothing drops them), or change the operator's uid"
    )


@dataclass(frozen=True, slots=True)
class FrozenMarked(FrozenChanged):
    """A snapshot of a state with pickled values.

    Adds the field metadata that marks pickled values, because backends do not store it.
    """

    field: pa.Field

    def chunks(self) -> Iterator[StateChunk]:
        """Yields the chunks of the snapshot, with the metadata of `field` in their schema."""
        for chunk in self.frozen.chunks():
            position = chunk.rows.num_columns - 1
            rows = chunk.rows.set_column(position, self.field, chunk.rows.column(position))
            yield StateChunk(rows, chunk.first_group, chunk.group_rows)
