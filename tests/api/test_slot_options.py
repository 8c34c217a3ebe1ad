"""Slots of steps in the public API: resources and slot sharing groups, and what is refused when a program is made."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, finish, local, numbers, opening, rows

import tidegate as tg
from tidegate.actors.graph.job_graph import JobGraph
from tidegate.actors.graph.resources import Resources
from tidegate.api.environment import check_slots

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
        with pytest.raises(tg.ConfigurationError, match="score: num_gpus=-1 is not an amount"):
            stream.map_batches(lambda batch: batch, name="score", num_gpus=-1)
        with pytest.raises(TypeError, match="score: unexpected keyword argument 'num_gpu'"):
            stream.map_batches(lambda batch: batch, name="score", num_gpu=1)  # type: ignore[call-arg]


SOURCES = {
    "batches": lambda env, **slot: env.from_batches(numbers(10), **slot),
    "rows": lambda env, **slot: env.from_rows([{"k": 1}], **slot),
    "files": lambda env, **slot: env.from_files("data/*.txt", format="text", **slot),
    "rate": lambda env, **slot: env.from_rate(10, rows=10, **slot),
    "socket": lambda env, **slot: env.from_socket("localhost", 1, lossy=True, **slot),
    "source": lambda env, **slot: env.from_source(GatedSource(10, 10), **slot),
}


def planned(env: tg.StreamEnvironment, folder: Path, **settings: Any) -> JobGraph:
    """The graph that a program is translated to."""
    return env.plan("job", checkpoints=tg.CheckpointConfig(storage=str(folder)), **settings).context.graph


def groups(graph: JobGraph) -> dict[str, str]:
    """The slot sharing group of each step."""
    return {uid: vertex.slot_group for vertex in graph.vertices for uid in vertex.uids}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_source_and_what_follows_it_are_in_a_slot_sharing_group(source: Any, tmp_path: Path) -> None:
    """Until a step names another one."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("1\n")
    with local() as env, contextlib.chdir(tmp_path):
        stream = source(env, uid="source", slot_sharing_group="orders")
        stream.filter(lambda row: True, uid="clean").filter(
            lambda row: True, uid="score", slot_sharing_group="scoring"
        ).collect(uid="all")
        found = groups(planned(env, tmp_path))
    assert found == {"source": "orders", "clean": "orders", "score": "scoring", "all": "scoring"}


def test_a_program_without_groups_is_in_the_default_one(tmp_path: Path) -> None:
    """Also behind a step with resources."""
    with local() as env:
        stream = env.from_batches(numbers(10), uid="source")
        stream.map(lambda row: row, uid="score", num_gpus=1).map(lambda row: row, uid="after").collect(uid="all")
        assert set(groups(planned(env, tmp_path)).values()) == {"default"}


@pytest.mark.parametrize(
    "slot", [{"num_gpus": 1}, {"num_cpus": 2}, {"resources": {"tpu": 1}}], ids=lambda s: next(iter(s))
)
def test_a_group_and_resources_of_one_step_are_refused(slot: Any) -> None:
    """A step with resources shares its slots with nothing."""
    (name,) = slot
    with local() as env:
        stream = env.from_batches(numbers(10))
        message = rf"score: slot_sharing_group='a' and {name}= exclude each other: .*Remove one of them"
        with pytest.raises(tg.ConfigurationError, match=message):
            stream.map(lambda row: row, name="score", slot_sharing_group="a", **slot)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("", "a name must be a string that is not empty, not ''"),
        (3, "a name must be a string that is not empty, not 3"),
        ("a\nb", "a name cannot have control characters"),
        ("a" * 201, "a name has 201 characters; use at most 200"),
    ],
)
def test_a_group_is_a_name(group: Any, message: str) -> None:
    """Of a step, and of a source."""
    with local() as env:
        stream = env.from_batches(numbers(10))
        with pytest.raises(tg.ConfigurationError, match=rf"^score\(slot_sharing_group=\): {message}"):
            stream.map(lambda row: row, name="score", slot_sharing_group=group)
        with pytest.raises(tg.ConfigurationError, match=rf"^numbers\(slot_sharing_group=\): {message}"):
            env.from_batches(numbers(10), name="numbers", slot_sharing_group=group)


def test_slot_sharing_is_an_argument_or_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument counts more. It is on where nothing is said."""

    def shares(config: Any = None, **settings: Any) -> bool:
        with tg.StreamEnvironment.local(config=config) as env:
            env.from_batches(numbers(10)).collect()
            return planned(env, tmp_path, **settings).slot_sharing

    assert shares()
    assert not shares(slot_sharing=False)
    assert not shares({"slot.sharing": False})
    assert shares({"slot": {"sharing": False}}, slot_sharing=True)
    monkeypatch.setenv("TIDEGATE_SLOT_SHARING", "false")
    assert not shares({"slot.sharing": True})
    with pytest.raises(tg.ConfigurationError, match=r"execute\(slot_sharing=...\): give True or False, not 'no'"):
        shares(slot_sharing="no")


@pytest.mark.parametrize("slot_sharing", [True, False])
def test_groups_change_nothing_in_the_result(tmp_path: Path, slot_sharing: bool) -> None:
    """On the local runtime, where nothing is reserved."""
    with local(2) as env:
        stream = env.from_batches(numbers(500), slot_sharing_group="in")
        numbered = stream.key_by("k").process(Count(), schema=SEEN, slot_sharing_group="counting")
        out = numbered.map(lambda row: row, schema=SEEN, slot_sharing_group="out").collect()
        env.execute("job", checkpoints=config(tmp_path), slot_sharing=slot_sharing).wait("4min")
    by_key = out.to_arrow().group_by("k").aggregate([("seen", "list")]).to_pylist()
    assert sum(len(row["seen_list"]) for row in by_key) == 500
    assert all(sorted(row["seen_list"]) == list(range(1, len(row["seen_list"]) + 1)) for row in by_key)


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
