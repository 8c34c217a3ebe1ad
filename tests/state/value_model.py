"""Values that are used by the batch in the contract tests of state backends, beside a plain model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from backend_model import KEYS, Key, MakeBackend, Rows, composed, key_batch, key_of
from hypothesis import strategies as st

from tidegate.state.common.backend import StateDescriptor
from tidegate.storage.state.snapshot import StateTable

VALUE_BATCHES = st.lists(
    st.tuples(st.integers(0, 30), st.sampled_from(("put", "put", "none", "remove", "one", "drop")), st.integers(0, 5)),
    max_size=12,
)
"""Batches of changes of `ValuesByBatch`."""
_RECORD = pa.struct({"a": pa.int64(), "b": pa.bool_(), "at": pa.timestamp("us")})
_SPECS = (
    StateDescriptor("n", pa.int32(), by_batch=True),
    StateDescriptor("r", _RECORD, by_batch=True),
    StateDescriptor("t", pa.string(), by_batch=True),
)


class ValuesByBatch:
    """A backend with a number, a record and a text for each key, beside what they should hold."""

    def __init__(
        self, make: MakeBackend, incremental: bool, stored: Sequence[StateTable] = (), files: Rows | None = None
    ) -> None:
        """Opens a backend like `ObjectState`. `stored` and `files`: the state that it starts from."""
        self.backend = make(incremental)
        self.states = {spec.name: self.backend.values(spec) for spec in _SPECS}
        self.backend.fix_keys(KEYS)
        for table in stored:
            self.backend.load(table)
        self.backend.loaded()
        rows = composed(stored) if files is None else files
        self._model: dict[str, dict[Key, Any]] = {
            name: {key: row[name] for key, row in copy.deepcopy(rows.get(name, {})).items()} for name in self.states
        }

    def batch(self, changes: Sequence[tuple[int, str, int]]) -> None:
        """Remove the values of keys, then put those of others (null is none), the last of several; then one by one."""
        refs = self.backend.enter_batch(key_batch([key for key, _, _ in changes]))
        self._check(refs, [key for key, _, _ in changes])
        kinds = np.array([what for _, what, _ in changes], dtype=object)
        gone, put = kinds == "remove", (kinds == "put") | (kinds == "none")
        for spec in _SPECS:
            state, model = self.states[spec.name], self._model[spec.name]
            state.remove_many(refs[gone])
            told = [(n, _value(spec.name, x) if what == "put" else None) for n, what, x in changes]
            told = [each for each, is_put in zip(told, put, strict=True) if is_put]
            state.put_many(refs[put], pa.array([value for _, value in told], spec.column_type))
            for number, what, _ in changes:
                if what == "remove":
                    model.pop(key_of(number), None)
            for number, value in told:
                model.pop(key_of(number), None)
                if value is not None:
                    model[key_of(number)] = value
            for ref, (number, what, x) in zip(refs.tolist(), changes, strict=True):
                if what == "one":
                    state.put(ref, _value(spec.name, x))
                    model[key_of(number)] = _value(spec.name, x)
                elif what == "drop":
                    state.remove(ref)
                    model.pop(key_of(number), None)
        self._check(refs, [key for key, _, _ in changes])
        self.backend.leave()

    def expected(self) -> Rows:
        """What a checkpoint must hold now."""
        found = {name: {key: {name: held} for key, held in of.items()} for name, of in self._model.items()}
        return copy.deepcopy({name: of for name, of in found.items() if of})

    def check(self) -> None:
        """Everything is as the model has it, read from the backend."""
        known = sorted({key[0] for of in self._model.values() for key in of})
        self._check(self.backend.enter_batch(key_batch(known)), known)
        self.backend.leave()
        for name, of in self._model.items():
            found = [(row["k"], row["s"]) for keys in self.backend.keys(name, 3) for row in keys.to_pylist()]
            assert len(found) == len(set(found))
            assert set(found) == set(of)

    def _check(self, refs: Any, numbers: Sequence[int]) -> None:
        for name, state in self.states.items():
            wanted = [self._model[name].get(key_of(number)) for number in numbers]
            many = state.get_many(refs)
            many.validate(full=True)
            assert many.to_pylist() == wanted
            assert [state.get(ref) for ref in refs.tolist()] == wanted


def _value(state: str, number: int) -> Any:
    """A value of a state; a record may have nulls in it."""
    at = pa.scalar(number, pa.timestamp("us")).as_py()
    record = {"a": None if number == 3 else number, "b": number % 2 == 0, "at": None if number == 4 else at}
    return {"n": number, "t": f"t{number}", "r": record}[state]
