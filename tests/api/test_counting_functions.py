"""Metrics of a user's functions in jobs: read while they run and after the end, and without effect on anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, opening

import tidegate as tg
from tidegate.testing import Faults, simulate

KEYS = pa.schema([("k", pa.int64())])


class Counting(tg.ProcessFunction):
    """Counts its rows, and remembers the newest one."""

    def open(self, context: tg.ProcessContext) -> None:
        self.seen = context.metrics.counter("seen")
        self.newest = context.metrics.gauge("newest")

    def process(self, row: dict[str, int], context: tg.ProcessContext) -> Iterator[dict[str, int]]:
        self.seen.inc()
        self.newest.set(row["k"])
        yield {"k": row["k"]}


class Measuring(tg.BatchFunction):
    """Measures its batches."""

    def open(self, context: tg.BatchContext) -> None:
        self.rows = context.metrics.histogram("rows")

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.rows.update(batch.num_rows)
        return batch


def test_functions_by_row_and_by_batch_tell_of_themselves(tmp_path: Path) -> None:
    """All subtasks under their operators, from the start on, and as they were last when the job is over."""
    with opening(GatedSource(20, gates=[10])) as source, local() as env:
        measured = env.from_source(source, parallelism=1).map_batches(Measuring(), name="measure")
        measured.key_by("k").process(Counting(), schema=KEYS, name="count").collect()
        job = env.execute("counted", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(10)
        job.savepoint(tmp_path / "savepoint", "4min")
        during = job.user_metrics()
        assert set(during) == {"rows", "seen", "newest"}
        assert [(m.operator, m.kind) for m in during["seen"]] == [("count", "counter")] * 2
        assert sum(m.value for m in during["seen"]) == 10
        source.open_all()
        job.wait("4min")
    after = job.user_metrics()
    assert sum(m.value for m in after["seen"]) == 20
    measured_by = after["rows"]
    assert [(m.operator, m.kind) for m in measured_by] == [("measure", "histogram")] * 2
    quantiles = [m.quantiles for m in measured_by if m.value]
    assert quantiles
    assert all(1 <= each[0][1] <= each[-1][1] <= 20 for each in quantiles)


def test_a_name_that_is_no_name_fails_the_job_with_a_reason(tmp_path: Path) -> None:
    """Rather than a series that never comes."""

    class Misnamed(tg.BatchFunction):
        """Has a blank in a name."""

        def open(self, context: tg.BatchContext) -> None:
            context.metrics.counter("rows seen")

    with local(parallelism=1) as env:
        env.from_batches(pa.table({"k": [1]})).map_batches(Misnamed(), schema=KEYS, name="score").collect()
        with pytest.raises(tg.JobFailedError, match="'rows seen' of operator 'score': a name consists of letters"):
            finish(env, tmp_path)


@pytest.mark.slow
def test_functions_that_count_are_simulated_like_all_others() -> None:
    """Counts are in no checkpoint and decide nothing: whatever crashes, rows come out once, and a run is its seed's."""

    def build(env: tg.StreamEnvironment) -> None:
        rows = env.from_batches(pa.table({"k": [n % 5 for n in range(60)]}))
        rows.map_batches(Measuring()).key_by("k").process(Counting(), schema=KEYS).to_table("memory://out")

    runs = [simulate(build, seed=7, faults=Faults(crash=0.05, storage=0.03, delay="0..1s")) for _ in range(2)]
    assert all(run.ok for run in runs), runs[0]
    assert runs[0] == runs[1]
    assert runs[0].restarts > 0
