"""Sources of a watermark group wait for each other: whole local jobs, and what is refused when a job is submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import GatedSource
from waiting import until

import tidegate as tg
from tidegate import recovery

_ROWS, _GATE, _DRIFT, _BATCH = 5_000, 100, 200, 50
_AHEAD = _GATE + _DRIFT + 4 * _BATCH
"""So far may the quick source have read while the other one stands at its gate: the drift, and what is read ahead."""


class Quick:
    """Rows 0, 1, 2, … in the columns `k` and `x`, `_BATCH` in a batch. Tells how far it was read; lives here alone."""

    schema = pa.schema([("k", pa.int64()), ("x", pa.int64())])

    def __init__(self) -> None:
        self.furthest = 0
        self.came_to = {row: threading.Event() for row in (_GATE + _DRIFT, _ROWS)}

    def splits(self) -> list[tg.SourceSplit]:
        return [tg.SourceSplit("all", b"", _ROWS)]

    def reader(self) -> Quick:
        return self

    def read(self, split: tg.SourceSplit, offset: int, rows_max: int) -> tg.ReadResult:
        stop = min(offset + min(rows_max, _BATCH), _ROWS)
        self.furthest = max(self.furthest, stop)
        for row, came in self.came_to.items():
            if stop >= row:
                came.set()
        xs = list(range(offset, stop))
        batch = pa.record_batch({"k": [x % 5 for x in xs], "x": xs}, schema=self.schema)
        return tg.ReadResult(batch, stop, stop >= _ROWS)

    def close(self) -> None:
        """Nothing to release."""


def _joined(env: tg.StreamEnvironment, quick: Quick, slow: GatedSource, drift: int | None) -> tg.CollectedRows:
    waits = None if drift is None else tg.WatermarkAlignment("both", drift, "20ms")
    sides = [
        env.from_source(source, uid=uid).assign_timestamps("x", alignment=waits, uid=f"{uid}-time")
        for source, uid in ((quick, "quick"), (slow, "slow"))
    ]
    return sides[0].join(sides[1], on="k", window=tg.Tumbling(10), uid="join").collect()


def _join_rows(savepoint: str) -> int:
    operators = recovery.inspect(savepoint).operators
    return sum(state.rows for operator in operators if operator.uid == "join" for state in operator.states)


@pytest.mark.slow
@pytest.mark.parametrize("drift", [_DRIFT, None])
def test_alignment_bounds_what_a_join_keeps(tmp_path: Path, drift: int | None) -> None:
    """While one input stands still the other one is read as far as the drift allows, and the join keeps no more.

    Savepoints pass meanwhile, and all rows are joined in the end. Without a group all of the other input lies in the
    join.
    """
    quick, slow = Quick(), GatedSource(_ROWS, gates=[_GATE])
    with tg.StreamEnvironment.local(parallelism=1) as env:
        rows = _joined(env, quick, slow, drift)
        job = env.execute("join", checkpoints=tg.CheckpointConfig(storage=tmp_path / "checkpoints", interval="10min"))
        slow.await_gate(_GATE)
        until("the quick side", quick.came_to[_ROWS if drift is None else _GATE + _DRIFT].is_set)
        kept = [_join_rows(job.savepoint(tmp_path / f"savepoint {number}")) for number in range(2)]
        furthest = quick.furthest
        slow.open_all()
        assert job.wait("4min") == "finished"
    assert rows.to_arrow().num_rows == 2 * _ROWS
    if drift is None:
        assert kept[-1] > _ROWS - _AHEAD
    else:
        assert furthest <= _AHEAD
        assert max(kept) <= _AHEAD


def test_who_waits_goes_on_when_the_slowest_source_ends(tmp_path: Path) -> None:
    """At once, and not with the next of the intervals, which are longer than any job. Sources take a group, too."""
    slow, quick = pa.table({"t": [0, 1, 2]}), pa.table({"t": list(range(10_000))})
    waits = tg.WatermarkAlignment("both", 10, "1h")
    with tg.StreamEnvironment.local(parallelism=1) as env:
        sides = [env.from_batches(data, splits=1, timestamp="t", alignment=waits) for data in (slow, quick)]
        rows = sides[0].union(sides[1]).collect()
        job = env.execute("union", checkpoints=tg.CheckpointConfig(storage=tmp_path / "checkpoints"))
        assert job.wait("4min") == "finished"
    assert rows.to_arrow().num_rows == 10_003


def test_a_group_needs_event_time() -> None:
    """A source that has none cannot be ahead of others."""
    with (
        tg.StreamEnvironment.local() as env,
        pytest.raises(tg.ConfigurationError, match="name its column with timestamp="),
    ):
        env.from_batches(pa.table({"t": [1]}), alignment=tg.WatermarkAlignment("a", 1))


def _apart(env: tg.StreamEnvironment) -> tg.Stream:
    source = env.from_batches(pa.table({"t": [1, 2]}), splits=1, parallelism=1)
    return source.rebalance().assign_timestamps("t", alignment=tg.WatermarkAlignment("a", 1), parallelism=2)


def _in_two_groups(env: tg.StreamEnvironment) -> tg.Stream:
    stream = env.from_batches(pa.table({"t": [1, 2]}), splits=1)
    for group in "ab":
        stream = stream.assign_timestamps("t", alignment=tg.WatermarkAlignment(group, 1))
    return stream


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_apart, "does not run in the task of a source; call assign_timestamps directly after the source"),
        (_in_two_groups, "is in two watermark groups, and a source can only be in one"),
    ],
)
def test_what_cannot_wait_is_refused(build: Callable[[tg.StreamEnvironment], tg.Stream], words: str) -> None:
    """When the job is submitted, and with what to do."""
    with tg.StreamEnvironment.local(parallelism=2) as env:
        build(env).collect()
        with pytest.raises(tg.ConfigurationError, match=words):
            env.execute("refused")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", "1s"), "give the group a name"),
        (("a", "soon"), "max_drift"),
        (("a", -1), "max_drift"),
        (("a", "1s", 0), "update_interval must be greater than 0"),
    ],
)
def test_an_alignment_is_checked(arguments: tuple[object, ...], words: str) -> None:
    """Where it is written."""
    with pytest.raises(tg.ConfigurationError, match=words):
        tg.WatermarkAlignment(*arguments)  # type: ignore[arg-type]
