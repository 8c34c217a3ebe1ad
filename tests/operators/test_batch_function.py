"""Functions over batches with a life: one object a subtask, opened before its rows and closed whatever happens."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from operator_harness import context, opened, run

import tidegate as tg
from tidegate.operators.functions.batch_functions import BatchFunctionOperator, batch_operator
from tidegate.protocol.failures import OperatorError

_BATCH = pa.record_batch({"x": [1, 2, 3]})


class Scaled(tg.BatchFunction):
    """Multiplies `x` by a factor that it has from `open`; notes what becomes of it."""

    def __init__(self, factor: int) -> None:
        self.factor: int | None = None
        self.life: list[str] = []
        self._given = factor

    def open(self, context: tg.BatchContext) -> None:
        self.factor = self._given
        self.life.append(f"open {context.subtask + 1}/{context.parallelism}")

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        assert self.factor is not None
        self.life.append("process")
        return pa.record_batch({"x": pa.array([x * self.factor for x in batch["x"].to_pylist()], pa.int64())})

    def close(self) -> None:
        self.life.append("close")


def test_a_function_is_opened_fed_and_closed() -> None:
    """In this order, and on a copy: the object that was given is left as it was."""
    given = Scaled(10)
    operator = BatchFunctionOperator(given)
    operator.open(context(), ())
    assert [out["x"].to_pylist() for out in run(operator, [_BATCH, _BATCH])] == [[10, 20, 30], [10, 20, 30]]
    operator.close()
    used = operator.function
    assert isinstance(used, Scaled)
    assert used.life == ["open 1/1", "process", "process", "close"]
    assert used.context.subtask == 0
    assert (given.factor, given.life) == (None, [])


class Broken(tg.BatchFunction):
    """Fails where it is told to."""

    def __init__(self, where: str) -> None:
        self._where = where

    def open(self, context: tg.BatchContext) -> None:
        if self._where == "open":
            raise FileNotFoundError("no model")

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        raise ValueError("odd")


def test_what_open_raises_names_the_operator() -> None:
    """As what any other function of the user raises."""
    with pytest.raises(OperatorError, match=r"failed on subtask 1 of 1: FileNotFoundError: no model; in open"):
        BatchFunctionOperator(Broken("open")).open(context(), ())


def test_what_process_raises_shows_the_first_row() -> None:
    """As with a plain function."""
    with pytest.raises(OperatorError, match=r"odd; first row of the batch: .\{'x': 1\}."):
        run(opened(BatchFunctionOperator(Broken("process"))), [_BATCH])


def test_a_function_without_process_says_so() -> None:
    """It is the one method that must be there."""
    with pytest.raises(OperatorError, match=r"BatchFunction needs a method process\(self, batch\)"):
        run(opened(BatchFunctionOperator(tg.BatchFunction())), [_BATCH])


class Locked(tg.BatchFunction):
    """Has what cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_class_is_refused_and_so_is_what_cannot_be_copied() -> None:
    """When the stream is made, with what to do."""
    with tg.StreamEnvironment.local() as env:
        stream = env.from_batches(pa.table({"x": [1]}))
        with pytest.raises(tg.ConfigurationError, match=r"score: Scaled is a class; pass an object of it, Scaled"):
            stream.map_batches(Scaled, name="score")  # type: ignore[arg-type]
        with pytest.raises(tg.ConfigurationError, match="Locked cannot be copied"):
            stream.map_batches(Locked())


def test_plain_functions_stay_plain() -> None:
    """They are shared, and have no life."""
    assert not isinstance(batch_operator(lambda batch: batch, None, "plain")(), BatchFunctionOperator)


NUMBERS = itertools.count()
OPENED: list[tuple[int, int]] = []
CLOSED: list[int] = []


class Tracked(tg.BatchFunction):
    """Has a number of its own, which it adds to rows; fails once, as long as there is no flag."""

    def __init__(self, flag: Path) -> None:
        self._flag = flag

    def open(self, context: tg.BatchContext) -> None:
        self.number = next(NUMBERS)
        OPENED.append((context.subtask, self.number))

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if 150 in batch["x"].to_pylist() and not self._flag.exists():
            self._flag.touch()
            raise ValueError("row 150 is odd")
        return batch.append_column("by", pa.array([self.number] * batch.num_rows, pa.int64()))

    def close(self) -> None:
        CLOSED.append(self.number)


def test_each_subtask_of_each_attempt_has_an_object_of_its_own(tmp_path: Path) -> None:
    """In the local runtime as well, where all share a process; after a failure every row counts once."""
    OPENED.clear()
    CLOSED.clear()
    schema = pa.schema({"x": pa.int64(), "by": pa.int64()})
    options = tg.DataPlaneOptions(source_rows_max=50)
    with tg.StreamEnvironment.local(2, options=options) as env:
        rows = env.from_batches(pa.table({"x": range(300)}), splits=2)
        found = rows.map_batches(Tracked(tmp_path / "flag"), schema=schema).collect()
        restart = tg.RestartStrategy.fixed_delay(2, "0ms")
        job = env.execute("life", checkpoints=tg.CheckpointConfig(storage=str(tmp_path / "c")), restart=restart)
        assert job.wait("4min") == "finished"
    shown = found.to_arrow()
    assert sorted(shown["x"].to_pylist()) == list(range(300))
    numbers = [number for _, number in OPENED]
    assert len(set(numbers)) == len(numbers) >= 3
    assert {subtask for subtask, _ in OPENED} == {0, 1}
    assert sorted(CLOSED) == sorted(numbers), "also those of the attempt that failed"
    assert len(set(shown["by"].to_pylist())) == 2
