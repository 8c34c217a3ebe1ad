"""The same program by rows and by batches: nothing that they tell or leave behind differs, on any backend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from frozen_tables import tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from process_harness import Driven, Row

from tidegate.operators.functions.process_functions import ProcessBatchContext, ProcessContext, ProcessFunction
from tidegate.operators.state.keyed_state import ValueState
from tidegate.operators.state.ttl import StateTtl
from tidegate.state.common.options import StateBackendOptions
from tidegate.storage.ids import CheckpointId
from tidegate.storage.state.snapshot import Cut, StateTable

_RECORD = pa.struct({"n": pa.int64(), "last": pa.int64()})
_INPUT = pa.schema({"k": pa.string(), "x": pa.int64(), "t": pa.int64()})
_TTL = StateTtl(1_000)


class ByRow(ProcessFunction):
    """Counts the rows of a key and keeps the newest; forgets a key at a negative number; tells all 10 ms later."""

    def open(self, context: ProcessContext) -> None:
        self.seen = context.state(ValueState("seen", _RECORD))
        self.text = context.state(ValueState("text", str))
        self.fresh = context.state(ValueState("fresh", float, ttl=_TTL))

    def process(self, row: Row, context: ProcessContext) -> Iterator[Row]:
        before = self.seen.value() or {"n": 0}
        if row["x"] < 0:
            self.seen.clear()
            self.text.clear()
        else:
            self.seen.update({"n": before["n"] + 1, "last": row["x"]})
            self.text.update(f"t{row['x']}")
            self.fresh.update(row["x"] / 2)
            context.timer_service.register_event_time_timer(row["t"] + 10)
        yield {"k": row["k"], "n": before["n"], "at": None}

    def on_timer(self, timestamp: int, context: ProcessContext) -> Iterator[Row]:
        seen = self.seen.value() or {"n": -1, "last": -1}
        text, fresh = self.text.value(), self.fresh.value()
        yield {**context.current_key, "n": seen["n"] + seen["last"], "at": f"{timestamp} {text} {fresh}"}


_OUTPUT = pa.schema({"k": pa.string(), "n": pa.int64(), "at": pa.string()})


class ByBatch(ProcessFunction):
    """The same where no batch has a key twice."""

    def open(self, context: ProcessContext) -> None:
        self.seen = context.state(ValueState("seen", _RECORD))
        self.text = context.state(ValueState("text", str))
        self.fresh = context.state(ValueState("fresh", float, ttl=_TTL))

    def process_batch(self, batch: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch:
        x = batch["x"].to_numpy()
        before = self.seen.get_many().field("n")
        counts = before.fill_null(0).to_numpy()
        self.seen.put_many(pa.StructArray.from_arrays([counts + 1, x], fields=list(_RECORD)))
        kept, gone = np.flatnonzero(x >= 0), pa.array(x < 0)
        self.seen.clear_many(gone)
        self.text.clear_many(gone)
        self.text.put_many([f"t{each}" for each in x[kept]], kept)
        self.fresh.put_many(x[kept] / 2, kept)
        context.timer_service.register_many(batch["t"].to_numpy()[kept] + 10, kept)
        return pa.record_batch([batch["k"], counts, pa.nulls(len(x), pa.string())], schema=_OUTPUT)

    def on_timer_batch(self, keys: pa.RecordBatch, context: ProcessBatchContext) -> pa.RecordBatch:
        seen, texts, fresh = self.seen.get_many(), self.text.get_many(), self.fresh.get_many()
        assert context.timestamps is not None
        told = [f"{at} {text} {f}" for at, text, f in zip(context.timestamps.to_pylist(), texts, fresh, strict=True)]
        counts, last = (seen.field(name).fill_null(-1).to_numpy() for name in ("n", "last"))
        return pa.record_batch([keys["k"], counts + last, told], schema=_OUTPUT)


class ByBatchAndTimer(ByBatch):
    """Batches come together, timers one by one."""

    on_timer_batch = ProcessFunction.on_timer_batch
    on_timer = ByRow.on_timer


_KEYS = st.sampled_from([None, *"abcdefgh"])
_STEPS = st.lists(
    st.tuples(st.just("rows"), st.dictionaries(_KEYS, st.integers(-2, 9), min_size=1, max_size=8))
    | st.tuples(st.sampled_from(["watermark", "clock"]), st.integers(1, 30))
    | st.tuples(st.just("restore"), st.integers(1, 3)),
    max_size=14,
)
OPTIONS = {
    "columnar": StateBackendOptions(),
    "incremental": StateBackendOptions(incremental=True),
    "rocksdb": StateBackendOptions(kind="rocksdb", directory="?"),
}


class _Run:
    """One function, driven through batches, time and restores: the next function of a cycle after each restore."""

    def __init__(self, functions: list[Callable[[], ProcessFunction]], options: StateBackendOptions, folder: Path):
        self._functions = itertools.cycle(functions)
        self._options, self._folder = options, folder
        self._attempts, self._cuts = itertools.count(), itertools.count(1)
        self._event_ms = self._now_ms = 0
        self.told: list[list[str]] = []
        self.driven = self._started(1, [])

    def step(self, what: str, argument: Any) -> None:
        """One step of a program."""
        if what == "rows":
            rows = [{"k": k, "x": x, "t": self._event_ms + abs(x)} for k, x in argument.items()]
            self._tell(self.driven.rows(*rows, schema=_INPUT))
        elif what == "watermark":
            self._event_ms += argument
            self._tell(self.driven.watermark(self._event_ms))
        elif what == "clock":
            self._now_ms += 100 * argument
            self.driven.clock(self._now_ms)
        else:
            self._restore(argument)

    def close(self) -> None:
        """End the attempt."""
        for operator in self.driven.operators:
            operator.close()

    def _restore(self, parallelism: int) -> None:
        """A snapshot, on which another one is built that has what changed since; then a restore from both."""
        incremental = self._options.incremental
        layers: list[StateTable] = []
        first = CheckpointId(next(self._cuts))
        cuts = [Cut(first, canonical=self._options.kind == "rocksdb")]
        if incremental:
            cuts.append(Cut(CheckpointId(next(self._cuts)), first))
        for layer, cut in enumerate(cuts):
            for operator in self.driven.operators:
                snapshot = operator.snapshot(cut)
                assert snapshot is not None
                frozen = [*snapshot.states, *snapshot.layer]
                layers += [table for state in frozen for table in tables_of(state, layer)]
            if layer == 0 and incremental:
                self.step("rows", {"a": 5, "z": 1, "b": -1})
        self.close()
        self.driven = self._started(parallelism, layers)

    def _started(self, parallelism: int, tables: list[StateTable]) -> Driven:
        options = self._options
        if options.directory is not None:
            options = StateBackendOptions(kind="rocksdb", directory=str(self._folder / str(next(self._attempts))))
        return Driven(
            next(self._functions)(),
            timestamps=["t"],
            parallelism=parallelism,
            restored=tables,
            schema=_OUTPUT,
            backend=options,
            now_ms=self._now_ms,
        )

    def _tell(self, rows: list[Row]) -> None:
        self.told.append(sorted(map(repr, rows)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", sorted(OPTIONS))
def test_batches_are_as_rows(backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A program by the batch tells what the same program by rows does, on every backend and at any parallelism; and
    state that one of them left is state for the other."""

    @settings(max_examples=8 if backend == "rocksdb" else 15, deadline=None)
    @given(steps=_STEPS)
    def program(steps: list[tuple[str, Any]]) -> None:
        folder = tmp_path_factory.mktemp(backend)
        told = []
        for number, functions in enumerate(([ByRow], [ByBatch], [ByBatchAndTimer, ByRow, ByBatch])):
            run = _Run(functions, OPTIONS[backend], folder / str(number))
            for step in [*steps, ("restore", 2), ("watermark", 100)]:
                run.step(*step)
            run.close()
            told.append(run.told)
        assert told[0] == told[1] == told[2]

    program()
