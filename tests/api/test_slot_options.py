"""Steps with resources in the public API: which slots a program asks for, and what is refused when it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, numbers, opening, rows

import tidegate as tg
from tidegate.actors.graph.resources import Resources
from tidegate.api.ray_slots import check_slots

GPU = Resources(1.0, 1.0)


class Count(tg.ProcessFunction):
    """Numbers the rows of a key."""

    def open(self, context: tg.ProcessContext) -> None:
        self.seen = context.state(tg.ValueState("seen", pa.int64()))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> list[dict[str, Any]]:
        seen = (self.seen.value() or 0) + 1
        self.seen.update(seen)
        return [row | {"seen": seen}]


class Both(tg.CoProcessFunction):
    """Passes rows of either stream on."""

    def process1(self, row: dict[str, Any], context: tg.ProcessContext) -> list[dict[str, Any]]:
        return [row]

    def process2(self, row: dict[str, Any], context: tg.ProcessContext) -> list[dict[str, Any]]:
        return [row]


STEPS = {
    "map_batches": lambda s: s.map_batches(lambda batch: batch, schema=s.schema, uid="step", num_gpus=1),
    "map": lambda s: s.map(lambda row: row, schema=s.schema, uid="step", num_gpus=1),
    "flat_map": lambda s: s.flat_map(lambda row: [row], schema=s.schema, uid="step", num_gpus=1),
    "filter": lambda s: s.filter(lambda row: True, uid="step", num_gpus=1),
    "filter by expression": lambda s: s.filter(pl.col("k") >= 0, uid="step", num_gpus=1),
    "process": lambda s: s.process(Identity(), schema=s.schema, uid="step", num_gpus=1),
    "keyed process": lambda s: s.key_by("k").process(Count(), uid="step", num_gpus=1),
    "connected process": lambda s: s.connect(s).process(Both(), schema=s.schema, uid="step", num_gpus=1),
}


class Identity(tg.ProcessFunction):
    """Passes rows on."""

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> list[dict[str, Any]]:
        return [row]


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_says_what_it_reserves(step: Any, tmp_path: Path) -> None:
    """Every step that calls a function of the user's; what follows it is in the common slots again."""
    with local() as env:
        stream = step(env.from_batches(numbers(10)))
        stream.map(lambda row: row, uid="after")
        graph = env.plan("job", checkpoints=tg.CheckpointConfig(storage=str(tmp_path))).context.graph
    found = {spec.uid: v.resources for v in graph.vertices for spec in v.operators}
    assert found == {"step": GPU, "after": None}


def test_a_wrong_amount_and_a_wrong_word_are_refused_when_the_step_is_made() -> None:
    """The amount as any wrong setting, the word as Python refuses one."""
    with local() as env:
        stream = env.from_batches(numbers(10))
        with pytest.raises(tg.ConfigurationError, match="score: num_gpus=-1 is no amount"):
            stream.map_batches(lambda batch: batch, name="score", num_gpus=-1)
        with pytest.raises(TypeError, match="score: unexpected keyword argument 'num_gpu'"):
            stream.map_batches(lambda batch: batch, name="score", num_gpu=1)  # type: ignore[call-arg]


def test_resources_change_nothing_in_the_result(tmp_path: Path) -> None:
    """On the local runtime nothing is reserved, and the tasks are cut as on a cluster: the same rows come out."""
    found = []
    for gpus in (None, 1):
        slot: Any = {} if gpus is None else {"num_gpus": gpus}
        with local() as env:
            counted = env.from_batches(numbers(500)).key_by("k").process(Count(), schema=SEEN, **slot)
            out = counted.map(lambda row: row | {"seen": row["seen"] + 1}, schema=SEEN).collect()
            finish(env, tmp_path / str(gpus))
        found.append(rows(out.to_arrow().select(["k", "seen"])))
    assert found[0] == found[1]
    assert len(found[0]) == 500


SEEN = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("y", pa.float64()), ("seen", pa.int64())])


COUNTED = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("seen", pa.int64())])


def counted(env: tg.StreamEnvironment, source: GatedSource, **slot: Any) -> tg.CollectedRows:
    """The rows of a source, numbered by key, in a step that may have resources."""
    numbered = env.from_source(source, uid="source").key_by("k").process(Count(), schema=COUNTED, uid="count", **slot)
    return numbered.map(lambda row: row, schema=COUNTED, uid="map").collect(uid="all")


@pytest.mark.parametrize("parallelism", [2, 3])
def test_a_job_goes_on_when_a_step_gets_resources(tmp_path: Path, parallelism: int) -> None:
    """State belongs to the operator, and not to the task into which it was chained, at any parallelism."""
    with opening(GatedSource(60, 60, gates=[20])) as source, local(2, 7) as env:
        counted(env, source)
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART)
        source.await_gate(20)
        checkpoint = job.trigger_checkpoint("4min")
        job.cancel()
        assert job.wait("4min") == "cancelled"
    with local(parallelism, 7) as env:
        found = counted(env, GatedSource(60, 60), num_gpus=1)
        job = env.execute("job", checkpoints=config(tmp_path), restart=NO_RESTART, restore=checkpoint)
        assert job.wait("4min") == "finished"
    by_key = found.to_arrow().group_by("k").aggregate([("seen", "list")]).to_pylist()
    assert [sorted(row["seen_list"]) for row in by_key] == [list(range(1, 25))] * 5


def test_slots_of_a_reservation_hold_the_parallelism() -> None:
    """Else no job of the environment could ever run."""
    check_slots(None, "pack", 8)
    check_slots(8, "spread", 8)
    with pytest.raises(tg.ConfigurationError, match=r"slots=7: .* parallelism=8 needs that many"):
        check_slots(7, "spread", 8)
    with pytest.raises(tg.ConfigurationError, match="placement='near'"):
        check_slots(None, "near", 1)  # type: ignore[arg-type]
