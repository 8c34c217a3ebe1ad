"""Rows in flight of an unaligned checkpoint that another program made than the one which is restored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import config, local
from restored_graphs import check_fits, checkpoint_of, store_in_flight

import tidegate as tg
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.storage.checkpoints.metadata import CheckpointMetadata
from tidegate.storage.files.file_system_store import FileSystemStore

ROWS = pa.table({"k": [1, 2], "v": [3, 4], "s": ["a", "b"], "left": [0, 0]})
Step = Callable[[Any], Any]


class _Count(tg.ProcessFunction):
    def open(self, context: tg.ProcessContext) -> None:
        self.n = context.state(tg.ValueState("n", int))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Any:
        self.n.update((self.n.value() or 0) + 1)
        yield {"n": self.n.value()}


def _graph(folder: Path, step: Step, behind: Step) -> JobGraph:
    with local() as env:
        made = step(env.from_batches(ROWS, uid="in"))
        behind(made.key_by("k").process(_Count(), schema=pa.schema({"n": pa.int64()}), uid="op")).collect(uid="out")
        return env.plan("plan", checkpoints=config(folder / "plan")).context.graph


def _checkpoint(folder: Path, graph: JobGraph) -> CheckpointMetadata:
    """A checkpoint with rows on the edge to the keyed step."""
    (edge,) = [edge for edge in graph.edges if edge.downstream == "op"]
    rows = pa.record_batch({"k": [1], "v": [3]})
    store = FileSystemStore(str(folder / "store"))
    held = store_in_flight(store, str(edge.upstream), "op", {("input", 0, 0): [rows]}, edge=graph.edge_name(edge))
    return checkpoint_of(graph, in_flight=held)


def _same(stream: Any) -> Any:
    return stream


SELECTED: Step = lambda s: s.select("k", "v", uid="sel")  # noqa: E731

REFUSED: dict[str, tuple[Step, Step]] = {
    "a column is added": (SELECTED, lambda s: s.select("k", "v", extra="s", uid="sel")),
    "a column is removed": (lambda s: s.select("k", "v", extra="s", uid="sel"), SELECTED),
    "another type": (lambda s: s.select("k", v=pl.col("v").cast(pl.Int32), uid="sel"), SELECTED),
    "another expression": (SELECTED, lambda s: s.select("k", v=pl.col("v") + 1, uid="sel")),
    "another filter": (
        lambda s: s.filter(pl.col("v") > 1, uid="sel"),
        lambda s: s.filter(pl.col("v") > 2, uid="sel"),
    ),
    "a step before the step": (
        lambda s: s.with_columns(v=pl.col("v") + 1, uid="add").rebalance().select("k", "v", uid="sel", parallelism=1),
        lambda s: s.with_columns(v=pl.col("v") + 2, uid="add").rebalance().select("k", "v", uid="sel", parallelism=1),
    ),
    "another schema of a function": (
        lambda s: s.map(lambda row: row, schema=ROWS.schema, uid="sel"),
        lambda s: s.map(lambda row: row, schema=ROWS.schema.append(pa.field("w", pa.int64())), uid="sel"),
    ),
    "a new step between": (SELECTED, lambda s: s.filter(pl.col("v") > 1, uid="new").select("k", "v", uid="sel")),
}

RIGHT: dict[str, tuple[Step, Step]] = {
    "the same": (SELECTED, SELECTED),
    "the order of columns": (SELECTED, lambda s: s.select("v", "k", uid="sel")),
    "another parallelism": (SELECTED, lambda s: s.select("k", "v", uid="sel", parallelism=3)),
    "the body of a function": (
        lambda s: s.map(lambda row: {**row, "v": 1}, schema=ROWS.schema, uid="sel"),
        lambda s: s.map(lambda row: {**row, "v": 2}, schema=ROWS.schema, uid="sel"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_another_program_made_are_refused(tmp_path: Path, case: str) -> None:
    """The error names the edge, the step and both ways out; with the rows given up the program is taken."""
    old, new = REFUSED[case]
    metadata = _checkpoint(tmp_path, _graph(tmp_path, old, _same))
    with pytest.raises(
        tg.IncompatibleStateError, match=r"(?s)in-flight rows on the edge '.*->op#0'.*savepoint"
    ) as error:
        check_fits(metadata, _graph(tmp_path, new, _same))
    assert "ignore_in_flight_of=5" in str(error.value)
    check_fits(metadata, _graph(tmp_path, new, _same), ignore_in_flight=True)


@pytest.mark.parametrize("case", RIGHT)
def test_rows_that_the_program_would_make_are_taken(tmp_path: Path, case: str) -> None:
    """The order of columns does not count, and bodies of functions cannot be compared."""
    old, new = RIGHT[case]
    check_fits(_checkpoint(tmp_path, _graph(tmp_path, old, _same)), _graph(tmp_path, new, _same))


def test_steps_behind_the_rows_may_change(tmp_path: Path) -> None:
    """Only what made the rows counts."""
    metadata = _checkpoint(tmp_path, _graph(tmp_path, SELECTED, lambda s: s.filter(pl.col("n") > 1, uid="last")))
    check_fits(metadata, _graph(tmp_path, SELECTED, lambda s: s.filter(pl.col("n") > 2, uid="last")))


def test_columns_that_a_source_did_not_read_are_missed(tmp_path: Path) -> None:
    """A source reads only what is used, so its rows in flight lack what a step behind them uses now."""

    def program(*columns: str) -> JobGraph:
        with local() as env:
            env.from_batches(ROWS, uid="in").rebalance().select(*columns, uid="op", parallelism=1).collect(uid="out")
            return env.plan("plan", checkpoints=config(tmp_path / "plan")).context.graph

    metadata = _checkpoint(tmp_path, program("k", "v"))
    check_fits(metadata, program("k", "v"))
    with pytest.raises(tg.IncompatibleStateError, match="had not read s, which the program uses now"):
        check_fits(metadata, program("k", "v", "s"))
    check_fits(metadata, program("k"))


def test_columns_that_another_step_uses_do_not_count(tmp_path: Path) -> None:
    """Rows behind a select have what it names, whatever else the source reads now."""

    def program(aside: bool) -> JobGraph:
        with local() as env:
            rows = env.from_batches(ROWS, uid="in")
            rows.select("k", "v", uid="sel").rebalance().filter(pl.col("v") > 1, uid="op", parallelism=1).collect(
                uid="out"
            )
            if aside:
                rows.select("s", uid="texts").collect(uid="other")
            return env.plan("plan", checkpoints=config(tmp_path / "plan")).context.graph

    check_fits(_checkpoint(tmp_path, program(False)), program(True))
