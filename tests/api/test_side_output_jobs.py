"""Side outputs in whole jobs: with the program they are checked, and each row leaves by one output."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import finish, local

import tidegate as tg

SCHEMA = pa.schema([("k", pa.int64())])
ODD = tg.OutputTag("odd", pa.schema([("k", pa.int64()), ("half", pa.float64())]))
ROWS = 300


class Parted(tg.ProcessFunction):
    """Odd rows go aside."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        if row["k"] % 2:
            context.emit(ODD, {"k": row["k"], "half": row["k"] / 2})
        else:
            yield row


class Both(tg.CoProcessFunction):
    """The rows of the second stream go aside."""

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield row

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        context.emit("odd", {**row, "half": None})


def numbers(env: tg.StreamEnvironment) -> tg.Stream:
    """So many rows."""
    return env.from_batches(pa.table({"k": pa.array(range(ROWS), pa.int64())}), splits=4)


def test_each_row_leaves_by_one_output(tmp_path: Path) -> None:
    """Out of a chain, behind a key, from two inputs; read by several steps, also again by key and in a union."""
    env = local()
    first = numbers(env).process(Parted(), schema=SCHEMA, side_outputs=[ODD])
    keyed = numbers(env).key_by("k").process(Parted(), schema=SCHEMA, side_outputs=[ODD])
    joined = numbers(env).connect(numbers(env)).process(Both(), schema=SCHEMA, side_outputs=[ODD])
    read = {
        "main": first.filter(pl.col("k") >= 0).collect(),
        "aside": first.side_output("odd").select("k").collect(),
        "twice": first.side_output(ODD).key_by("k").aggregate(n=tg.count(), emit="final").collect(),
        "keyed": keyed.union(keyed.side_output("odd").select("k")).collect(),
        "second": joined.side_output("odd").collect(),
    }
    finish(env, tmp_path)
    found = {name: sorted(rows.to_arrow()["k"].to_pylist()) for name, rows in read.items()}
    odd, every = list(range(1, ROWS, 2)), list(range(ROWS))
    assert found == {"main": every[::2], "aside": odd, "twice": odd, "keyed": every, "second": every}


def divided(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch, unless one of its numbers is a hundred: then none of it."""
    for k in batch["k"].to_pylist():
        7 // (k % 100)
    return batch


class Dividing(tg.ProcessFunction):
    """Returns each row, and once more aside, and fails behind that for every hundredth."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        context.emit(ODD, {"k": row["k"], "half": None})
        yield row
        7 // (row["k"] % 100)


class TwoDividing(tg.CoProcessFunction):
    """Fails for every hundredth row of the first stream; drops the second."""

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        context.emit(ODD, {"k": row["k"], "half": None})
        yield row
        7 // (row["k"] % 100)

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        return None


@pytest.mark.slow
def test_rows_that_fail_leave_with_their_error(tmp_path: Path) -> None:
    """The job continues, and nothing else of such a row is emitted."""
    env = local()
    made = numbers(env).map(lambda row: {"k": 7 // (row["k"] % 100)}, schema=SCHEMA, errors_to="bad")
    several = numbers(env).flat_map(lambda row: [row] * (7 // (row["k"] % 100)), schema=SCHEMA, errors_to="bad")
    kept = numbers(env).filter(lambda row: 7 // (row["k"] % 100) > 99, errors_to="bad")
    batches = numbers(env).map_batches(divided, schema=SCHEMA, errors_to="bad")
    processed = numbers(env).process(Dividing(), schema=SCHEMA, side_outputs=[ODD], errors_to="bad")
    keyed = numbers(env).key_by("k").process(Dividing(), schema=SCHEMA, side_outputs=[ODD], errors_to="bad")
    peeked = numbers(env).peek(lambda row: 7 // (row["k"] % 100), errors_to="bad")
    two = numbers(env).connect(numbers(env)).key_by("k", "k")
    connected = two.process(TwoDividing(), schema=SCHEMA, side_outputs=[ODD], errors_to=("bad", None))
    steps = (made, several, kept, batches, processed, keyed, peeked, connected)
    read = [step.side_output("bad").collect() for step in steps]
    good = [step.collect() for step in (batches, processed, keyed, peeked, connected)]
    good += [step.side_output(ODD).collect() for step in (processed, keyed, connected)]
    finish(env, tmp_path)
    for rows in good:
        assert sorted(rows.to_arrow()["k"].to_pylist()) == [k for k in range(ROWS) if k % 100]
    for rows in read:
        table = rows.to_arrow().to_pydict()
        assert sorted(table["k"]) == [0, 100, 200]
        assert set(table["error"]) == {"ZeroDivisionError: integer division or modulo by zero"}


def test_what_no_step_emits_is_refused_with_the_program() -> None:
    """A tag of another step, one of nobody, an expression that fails for no single row, and a schema with views."""
    env = local()
    parted = numbers(env).process(Parted(), schema=SCHEMA, side_outputs=[ODD])
    with pytest.raises(tg.ConfigurationError, match=r"no side output 'even': it has 'odd'"):
        parted.side_output("even")
    with pytest.raises(tg.ConfigurationError, match=r"'filter'.* has no side output 'odd': it has none"):
        parted.filter(pl.col("k") > 1).side_output(ODD)
    with pytest.raises(tg.ConfigurationError, match="several streams are united here"):
        parted.union(numbers(env)).side_output("odd")
    with pytest.raises(tg.ConfigurationError, match="errors_to= is for functions"):
        numbers(env).filter(pl.col("k") > 1, errors_to="bad")
    two = numbers(env).connect(numbers(env)).key_by("k", "k")
    with pytest.raises(tg.ConfigurationError, match="give a name for each"):
        two.process(TwoDividing(), schema=SCHEMA, side_outputs=[ODD], errors_to="bad")  # type: ignore[arg-type]
    with pytest.raises(tg.ConfigurationError, match="errors_to= needs schema="):
        numbers(env).process(Dividing(), side_outputs=[ODD], errors_to="bad")
    views = tg.OutputTag("views", pa.schema([("s", pa.string_view())]))
    with pytest.raises(tg.ConfigurationError, match=r"side output 'views' of operator 'process'.*string_view"):
        numbers(env).process(Parted(), side_outputs=[views])
    with pytest.raises(tg.ConfigurationError, match="updates"):
        numbers(env).key_by("k").aggregate(n=tg.count()).map(lambda row: row, errors_to="bad")
