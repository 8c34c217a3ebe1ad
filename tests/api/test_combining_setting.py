"""`local_aggregation`: which steps have their rows combined before they are sent, by setting and by program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

import tidegate as tg
from tidegate.api.config.config_file import load_config
from tidegate.operators.combined_rows import COMBINED

ROWS = pa.table({"k": [1, 2, 1, 1], "t": [1, 2, 3, 11], "x": [1, 2, 3, 4], "f": [0.5, 1.5, 2.5, 3.5]})
Stream = tg.Stream


def combined(build: Callable[[Stream], Any], **settings: Any) -> list[str]:
    """The modes of the edges on which rows may be combined."""
    with tg.StreamEnvironment.local(parallelism=2) as env:
        build(env.from_batches(ROWS, timestamp="t"))
        graph = env.plan("planned", **settings).context.graph
    return [edge.combines.mode for edge in graph.edges if edge.combines is not None]


def _sums(stream: Stream) -> Any:
    return stream.key_by("k").aggregate(n=tg.count(), total=tg.sum("x")).collect()


def _windows(stream: Stream, *, late: bool = False) -> Any:
    sums = stream.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count())
    return (sums.collect(), sums.late_rows().collect() if late else None)


BUILDS: dict[str, tuple[Callable[[Stream], Any], int]] = {
    "keys": (_sums, 1),
    "windows": (_windows, 1),
    "windows by the clock": (
        lambda s: s.key_by("k").window(tg.Tumbling(10), time="processing").aggregate(n=tg.count()).collect(),
        1,
    ),
    "late rows are read": (lambda s: _windows(s, late=True), 0),
    "an inexact one among others": (lambda s: s.key_by("k").aggregate(n=tg.count(), v=tg.var_pop("x")).collect(), 0),
    "sessions": (lambda s: s.key_by("k").window(tg.Session(5)).aggregate(n=tg.count()).collect(), 0),
    "a time to live": (lambda s: s.key_by("k").aggregate(n=tg.count(), ttl="1h").collect(), 0),
    "changes go in": (
        # The first aggregate is combined, the one that takes back is not.
        lambda s: s.key_by("k").aggregate(n=tg.count(), emit="changes").key_by("n").aggregate(
            m=tg.count(), emit="changes"
        ).collect(),
        1,
    ),
    "distinct values": (lambda s: s.key_by("k").aggregate(d=tg.count_distinct("x")).collect(), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
def test_what_is_combined(name: str) -> None:
    """Only what is the same to the bit, and for which nobody needs the rows."""
    build, edges = BUILDS[name]
    assert combined(build) == ["auto"] * edges


def test_the_setting_is_an_argument_or_in_the_configuration(tmp_path: Path) -> None:
    """The argument counts more. Flink's words hold, and YAML's booleans."""
    assert combined(_sums, local_aggregation="off") == []
    assert combined(_sums, local_aggregation="on") == ["on"]
    for written, mode in (("TWO_PHASE", "on"), ("ONE_PHASE", "off"), ("AUTO", "auto"), ("on", "on"), ("off", "off")):
        path = tmp_path / f"{written}.yaml"
        path.write_text(f"table.optimizer.agg-phase-strategy: {written}\n")
        assert load_config(path).job.local_aggregation == mode
    with pytest.raises(tg.ConfigurationError, match="'sometimes' is not known; give one of auto, on, off"):
        combined(_sums, local_aggregation="sometimes")


@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_results_are_the_same(mode: Any) -> None:
    """Of a job that runs."""
    with tg.StreamEnvironment.local(parallelism=2) as env:
        stream = env.from_batches(ROWS, timestamp="t")
        windows = stream.key_by("k").window(tg.Tumbling(10)).aggregate(n=tg.count(), total=tg.sum("x")).collect()
        every = stream.window(tg.Tumbling(10)).aggregate(n=tg.count(), most=tg.max("x")).collect()
        env.execute("same", local_aggregation=mode).wait("4min")
        found = [sorted(pl.DataFrame(rows.to_arrow()).rows()) for rows in (windows, every)]
    assert found == [[(1, 0, 10, 2, 4), (1, 10, 20, 1, 4), (2, 0, 10, 1, 2)], [(0, 10, 3, 3), (10, 20, 1, 4)]]


def test_its_columns_cannot_be_called_as_ours() -> None:
    """A stream with such a column would be taken for combined rows."""
    with tg.StreamEnvironment.local() as env, pytest.raises(tg.ConfigurationError, match="rename the column"):
        env.from_batches(pa.table({COMBINED: [1]}))
