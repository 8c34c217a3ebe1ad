"""Canonical and native savepoints of whole jobs: the first are the same bytes whatever the backend is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate import recovery
from tidegate.cli.checkpoints_command import report_object
from tidegate.storage.checkpoints.metadata import CheckpointMetadata, SavepointFormat, SubtaskState
from tidegate.storage.state.handover import Spool, SpooledTables
from tidegate.storage.state.snapshot import StateTable

BACKENDS: dict[str, dict[str, Any]] = {
    "columnar": {},
    "columnar incremental": {"incremental": True},
    "columnar changelog": {"changelog": True},
    "rocksdb": {"backend": "rocksdb"},
    "rocksdb changelog": {"backend": "rocksdb", "changelog": True},
}
ROWS, GATE = 80, 60
FAR_MS = 10**9


class Remembers(tg.ProcessFunction):
    """Keeps a value, a list, a map and timers of each key, and tells at the end how much it has kept."""

    def open(self, context: tg.ProcessContext) -> None:
        self.last = context.state(tg.ValueState("last", int))
        self.all = context.state(tg.ListState("all", int))
        self.by_rest = context.state(tg.MapState("by rest", float, str))

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> None:
        x = row["x"]
        self.last.update(x)
        self.all.add(x)
        # The first entries are put last, so that they are not in the order of their keys.
        self.by_rest.put(float(7 - x % 7), "x" * x)
        context.timer_service.register_event_time_timer(FAR_MS - x)

    def on_timer(self, timestamp_ms: int, context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        if timestamp_ms == FAR_MS - self.last.value():
            shown = {
                "last": self.last.value(),
                "n": len(list(self.all.get())),
                "rests": len(dict(self.by_rest.items())),
            }
            yield {"k": self.last.value() % 5, **shown}


TOLD = pa.schema([(name, pa.int64()) for name in ("k", "last", "n", "rests")])


def pipeline(env: tg.StreamEnvironment, source: GatedSource, folder: Path) -> tuple[tg.OutputTable, tg.OutputTable]:
    """What the function tells, and sums, both at the end."""
    keyed = env.from_source(source, uid="source", parallelism=1).key_by("k")
    told = keyed.process(Remembers(), schema=TOLD, uid="remembers")
    sums = keyed.aggregate(n=tg.count(), mean=tg.mean("x"), emit="final", uid="sums")
    return told.to_table(str(folder / "told"), uid="told"), sums.to_table(str(folder / "sums"), uid="sums-out")


def settings(name: str, folder: Path, **given: Any) -> tg.CheckpointConfig:
    """Those of a backend; one checkpoint is retained."""
    given |= BACKENDS[name]
    if given.get("backend") == "rocksdb":
        given["backend_directory"] = folder / "work"
    return config(folder / "ckpt", **given)


def savepoint_of(folder: Path, name: str, savepoint_format: str = "canonical", taken: int = 0) -> str:
    """A savepoint of a job with that backend that has read up to the gate, and has taken checkpoints before."""
    with opening(GatedSource(ROWS, gates=[20, GATE])) as source, local() as env:
        pipeline(env, source, folder / name)
        checkpoints = settings(name, folder / name, inline_threshold=0)
        job = env.execute("formats", checkpoints=checkpoints, restart=NO_RESTART)
        source.await_gate(20)
        for _ in range(taken):
            job.trigger_checkpoint()
        source.open_gate(20)
        source.await_gate(GATE)
        path = job.savepoint(folder / name / "sp", format=savepoint_format)  # type: ignore[arg-type]
        job.cancel()
        assert job.wait("4min") == "cancelled"
    return path


def finish_from(folder: Path, path: str, name: str) -> tuple[list[Any], list[Any]]:
    """What the same program writes that goes on from a savepoint with that backend, a subtask fewer of each."""
    folder = folder / f"on {name}"
    with opening(GatedSource(ROWS)) as source, local(parallelism=1) as env:
        told, sums = pipeline(env, source, folder)
        job = env.execute("formats", checkpoints=settings(name, folder), restart=NO_RESTART, restore=path)
        assert job.wait("4min") == "finished"
        return told.to_arrow().sort_by("k").to_pylist(), sums.to_arrow().sort_by("k").to_pylist()


EXPECTED = (
    [{"k": k, "last": ROWS - 5 + k, "n": ROWS // 5, "rests": 7} for k in range(5)],
    [{"k": k, "n": ROWS // 5, "mean": (k + ROWS - 5 + k) / 2} for k in range(5)],
)


def metadata_of(path: str) -> CheckpointMetadata:
    """What is written in a savepoint."""
    return recovery.inspect(path).metadata


def keyed_files(path: str) -> dict[str, bytes]:
    """The bytes of the state files of a savepoint."""
    folder = Path(path)
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()} | {
        "_metadata": repr(_without_ids(metadata_of(path))).encode()
    }


def _without_ids(metadata: CheckpointMetadata) -> Any:
    return [replace(subtask, committables=()) for subtask in metadata.subtasks], metadata.operators


@pytest.mark.slow
def test_canonical_savepoints_are_the_same_bytes_whatever_the_backend_is(tmp_path: Path) -> None:
    """Jobs that have read the same rows: values, lists, maps, timers, aggregates and positions, file by file."""
    names = ("columnar", "columnar changelog", "rocksdb", "rocksdb changelog")
    paths = {name: savepoint_of(tmp_path, name, taken=1) for name in names}

    files = {name: keyed_files(path) for name, path in paths.items()}
    assert all(found == files["columnar"] for found in files.values())
    assert len(files["columnar"]) > 4, "every task with state has a file of its own"
    assert metadata_of(paths["rocksdb"]).savepoint_format is SavepointFormat.CANONICAL
    assert finish_from(tmp_path / "later", paths["rocksdb changelog"], "columnar changelog") == EXPECTED


@pytest.mark.parametrize(
    ("name", "other"),
    [("columnar incremental", "rocksdb"), ("columnar changelog", "columnar"), ("rocksdb", "columnar incremental")],
)
def test_a_native_savepoint_is_what_the_backend_writes_and_any_backend_takes_it(
    tmp_path: Path, name: str, other: str
) -> None:
    """It has copies of all files of which the job's checkpoints share some, so the job's folder may go."""
    path = savepoint_of(tmp_path, name, "native", taken=2)
    for subtask in metadata_of(path).subtasks:
        assert_as_backend_writes(name, subtask)
    assert metadata_of(path).savepoint_format is SavepointFormat.NATIVE
    assert recovery.verify(path).ok
    assert '"savepoint_format": "native"' in json.dumps(report_object(recovery.inspect(path)))

    (tmp_path / name / "ckpt").rename(tmp_path / "away")

    assert finish_from(tmp_path / "other", path, other) == EXPECTED
    assert finish_from(tmp_path / "same", path, name) == EXPECTED


@pytest.mark.parametrize(
    ("name", "savepoint_format"), [("columnar incremental", "native"), ("rocksdb", "native"), ("columnar", "canonical")]
)
def test_rocksdb_is_restored_from_what_waits_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, savepoint_format: str
) -> None:
    """Where nothing may be in memory: layers, files of another parallelism, sorted rows; all of it is taken in."""
    monkeypatch.setattr("tidegate.storage.state.handover.MEMORY_BYTES", 0)
    kept: list[list[StateTable | SpooledTables]] = []
    keep = Spool.keep
    monkeypatch.setattr(Spool, "keep", lambda *of: kept.append(found := keep(*of)) or found)
    path = savepoint_of(tmp_path, name, savepoint_format, taken=2)

    assert finish_from(tmp_path / "other", path, "rocksdb changelog") == EXPECTED

    spooled = [each for tables in kept for each in tables if isinstance(each, SpooledTables)]
    assert {each.head.state for each in spooled} == {"last", "all", "by rest", "_tidegate_timers", "aggregate"}
    assert not any(Path(each.path).exists() for each in spooled)


def assert_as_backend_writes(name: str, subtask: SubtaskState) -> None:
    """Files of RocksDB, or layers, where there is keyed state."""
    if any(operator in subtask.vertex for operator in ("remembers", "sums")):
        assert bool(subtask.native) == (name == "rocksdb")
        assert bool(subtask.layers) == (name != "rocksdb")


@pytest.mark.parametrize("name", ["columnar incremental", "columnar changelog", "rocksdb changelog"])
def test_checkpoints_after_a_canonical_savepoint_lack_nothing(tmp_path: Path, name: str) -> None:
    """The savepoint is the only checkpoint that is retained, and has no layers: what is written next is whole."""
    with opening(GatedSource(ROWS, gates=[20, 40, GATE])) as source, local() as env:
        pipeline(env, source, tmp_path / "first")
        job = env.execute("formats", checkpoints=settings(name, tmp_path, inline_threshold=0), restart=NO_RESTART)
        source.await_gate(20)
        job.trigger_checkpoint()
        source.open_gate(20)
        source.await_gate(40)
        job.savepoint(tmp_path / "sp")
        source.open_gate(40)
        source.await_gate(GATE)
        newest = job.trigger_checkpoint()
        report = recovery.verify(newest)
        assert report.ok, report.problems
        assert all(s.layers for s in metadata_of(newest).subtasks if "sums" in s.vertex and s.handle is None)
        job.cancel()
        assert job.wait("4min") == "cancelled"


def test_a_format_that_there_is_not_is_refused(tmp_path: Path) -> None:
    """Before anything is asked for, with those that there are."""
    with opening(GatedSource(ROWS, gates=[20])) as source, local() as env:
        pipeline(env, source, tmp_path)
        job = env.execute("formats", checkpoints=config(tmp_path / "ckpt"), restart=NO_RESTART)
        source.await_gate(20)
        for ask in (job.savepoint, lambda **how: job.stop(savepoint=tmp_path, **how)):
            with pytest.raises(tg.ConfigurationError, match="'parquet' is not a format of savepoints"):
                ask(format="parquet")
        assert job.status() == "running"
