"""Row tables in the contract tests of state backends: a backend with row tables, beside a plain model."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
from backend_model import KEYS, Key, MakeBackend, Rows, composed, key_batch, key_of
from hypothesis import strategies as st

from tidegate.storage.state.snapshot import StateTable

ROW_BATCHES = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(("append", "append", "append", "remove", "expire", "find")),
        st.integers(0, 5),
    ),
    max_size=12,
)
"""Batches of changes of `RowsOfKeys`."""
ROW_VALUES = pa.schema(
    {"x": pa.float64(), "t": pa.string(), "l": pa.list_(pa.int32()), "b": pa.bool_(), "at": pa.timestamp("us")}
)


class RowsOfKeys:
    """A backend with two row tables, beside what the first should hold: rows of each key, in the order they came."""

    def __init__(
        self, make: MakeBackend, incremental: bool, stored: Sequence[StateTable] = (), files: Rows | None = None
    ) -> None:
        """Opens a backend like `ObjectState`. `stored` and `files`: the state that it starts from."""
        self.backend = make(incremental)
        self.table = self.backend.rows("r", ROW_VALUES)
        self.other = self.backend.rows("other", pa.schema({"x": pa.int8()}))
        self.backend.fix_keys(KEYS)
        for table in stored:
            self.backend.load(table)
        self.backend.loaded()
        rows = (composed(stored) if files is None else files).get("r", {})
        self._model: dict[Key, list[dict[str, Any]]] = {}
        for key in sorted(rows, key=lambda key: key[2]):
            self._model.setdefault(key[:2], []).append(copy.deepcopy(rows[key]))

    def batch(self, changes: Sequence[tuple[int, str, int]]) -> None:
        """Apply changes (key, what, with which number): rows are appended, or removed as found by key or by a scan."""
        added = [(number, _row(with_)) for number, what, with_ in changes if what == "append"]
        values = pa.RecordBatch.from_pylist([row for _, row in added], ROW_VALUES)
        self.table.append(key_batch([number for number, _ in added]), values)
        for number, row in added:
            self._model.setdefault(key_of(number), []).append(row)
        asked = [number for number, what, _ in changes if what != "append"]
        self._check(asked)
        for number, what, with_ in changes:
            if what == "remove":
                found = self.table.find(key_batch([number]))
                self.table.remove(found.refs[with_ % 2 :])
                self._model[key_of(number)] = self._model.get(key_of(number), [])[: with_ % 2]
            elif what == "expire":
                for batch, refs in self.table.scan(["x"], 3):
                    self.table.remove(refs[np.array([x == with_ for x in batch.column("x").to_pylist()])])
                self._model = {key: [r for r in rows if r["x"] != with_] for key, rows in self._model.items()}
        self._check(asked)
        self.table.done()

    def expected(self) -> Rows:
        """What a checkpoint must hold now."""
        rows = {(*key, i): row for key, held in self._model.items() for i, row in enumerate(held)}
        return {"r": copy.deepcopy(rows)} if rows else {}

    def check(self) -> None:
        """Everything is as the model has it, read from the backend, by key and by a scan."""
        self._check(sorted({key[0] for key in self._model}))
        found: dict[Key, int] = Counter()
        for batch, refs in self.table.scan(["k", "s"], 4):
            assert batch.num_rows == len(refs) > 0
            found.update((row["k"], row["s"]) for row in batch.to_pylist())
        assert found == {key: len(rows) for key, rows in self._model.items() if rows}
        listed = [row["k"] for keys in self.backend.keys("r", 5) for row in keys.to_pylist()]
        assert set(listed) == {key[0] for key, rows in self._model.items() if rows}
        assert self.other.find(key_batch([1, 2])).refs.tolist() == []
        self.other.done()
        self.table.done()

    def _check(self, numbers: Sequence[int]) -> None:
        found = self.table.find(key_batch(numbers))
        rows = self.table.take(found.refs).to_pylist()
        told = [(numbers[position], row) for position, row in zip(found.keys.tolist(), rows, strict=True)]
        wanted = [
            (n, dict(zip(KEYS.names, key_of(n), strict=True)) | row)
            for n in numbers
            for row in self._model.get(key_of(n), [])
        ]
        assert told == wanted
        assert found.keys.tolist() == sorted(found.keys.tolist())


def _row(number: int) -> dict[str, Any]:
    """Values of a row, some of them null."""
    at = None if number % 3 == 1 else datetime(2026, 1, 1, microsecond=number)
    items = None if number % 4 == 2 else [number, None]
    return {
        "x": float(number),
        "t": None if number % 3 == 0 else f"t{number}",
        "l": items,
        "b": number % 2 == 0,
        "at": at,
    }
