"""What the settings of state mean for a job: backends, increments, local copies, the coordinator's memory."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from local_jobs import GatedSource, config, opening

import tidegate as tg
from tidegate.storage.state.local_copies import PrivateFolder, copies_below, job_folder

pytestmark = pytest.mark.slow

ROWS, KEYS = 60_000, 3_000


def counted(checkpoints: tg.CheckpointConfig) -> tuple[tg.Job, pa.Table]:
    """A keyed count in the local runtime, run to its end."""
    table = pa.table({"k": np.arange(ROWS) % KEYS, "v": np.ones(ROWS)})
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=200)) as env:
        rows = env.from_batches(table, splits=4).key_by("k").aggregate(n=tg.count(), emit="final").collect()
        job = env.execute("counts", checkpoints=checkpoints)
        assert job.wait("4min") == "finished"
    return job, rows.to_arrow()


@pytest.mark.parametrize("backend", ["columnar", "hashmap", "rocksdb"])
@pytest.mark.parametrize("incremental", [False, True])
def test_every_backend_gives_the_same_rows(tmp_path: Path, backend: str, incremental: bool) -> None:
    """Whichever backend holds the state, and however it is written."""
    settings = tg.CheckpointConfig(
        interval="10ms",
        storage=tmp_path / "ckpt",
        backend=backend,
        incremental=incremental,
        **({"backend_directory": tmp_path / "work"} if backend == "rocksdb" else {}),
    )
    job, rows = counted(settings)
    assert rows.num_rows == KEYS
    assert {ROWS // KEYS} == set(rows["n"].to_pylist())
    assert job.statistics().completed >= 1
    left = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    assert left == []


def test_state_in_the_coordinators_memory_needs_no_folder(tmp_path: Path) -> None:
    """Everything is in the metadata: a checkpoint has no other file."""
    job, rows = counted(tg.CheckpointConfig(interval="10ms", storage=tmp_path, checkpoint_storage="jobmanager"))
    assert rows.num_rows == KEYS
    files = [path.name for path in (tmp_path / job.job_id).glob("chk-*/*")]
    assert {"_metadata"} == set(files)
    job, rows = counted(tg.CheckpointConfig(interval="10ms", checkpoint_storage="jobmanager"))
    assert rows.num_rows == KEYS
    assert job.root.startswith("memory://")


def test_state_that_is_too_large_for_the_coordinators_memory_is_refused(tmp_path: Path) -> None:
    """The checkpoint fails, and the error says whose state it is, how large it may be, and what to do."""
    source = GatedSource(500_000, gates=(450_000,))
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=50_000)) as env, opening(source):
        rows = env.from_source(source).key_by("x")
        rows.aggregate(n=tg.count(), emit="final", uid="counts", name="counts").collect()
        job = env.execute(
            "large",
            checkpoints=config(tmp_path, checkpoint_storage="jobmanager"),
            restart=tg.RestartStrategy.none(),
        )
        source.await_gate(450_000)
        with pytest.raises(tg.CheckpointError):
            job.trigger_checkpoint()
        with pytest.raises(tg.JobFailedError, match=r"counts.* subtask 0 has [\d,]+ bytes.*at most 5,242,880.*s3://"):
            job.wait("4min")


def test_local_copies_are_those_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """While the job runs; when it is over there are none."""
    source = GatedSource(2_000, gates=(1_000,))
    with tg.StreamEnvironment.local(1, options=tg.DataPlaneOptions(source_rows_max=100)) as env, opening(source):
        env.from_source(source).key_by("k").aggregate(n=tg.count(), emit="final").collect()
        copies = tmp_path / "copies"
        job = env.execute(
            "copied", checkpoints=config(tmp_path, local_copies=True, local_directory=copies, inline_threshold=0)
        )
        source.await_gate(1_000)
        for _ in range(2):
            number = int(job.trigger_checkpoint().rpartition("-")[2])
        folder, of_job = PrivateFolder(str(copies / "tidegate-copies")), job_folder(job.job_id)
        found = {n for task in folder.list(of_job) for n, _, _ in copies_below(folder, f"{of_job}/{task}")}
        assert number == max(found)
        source.open_all()
        assert job.wait("4min") == "finished"
    assert job.job_id not in folder.list()


def test_a_local_folder_that_cannot_be_used_costs_one_warning_a_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints complete without copies."""
    (tmp_path / "in-the-way").write_text("a file")
    settings = tg.CheckpointConfig(
        interval="10ms",
        storage=tmp_path / "ckpt",
        inline_threshold=0,
        local_copies=True,
        local_directory=tmp_path / "in-the-way",
    )
    with caplog.at_level(logging.WARNING):
        job, rows = counted(settings)
    assert rows.num_rows == KEYS
    warned = [record.getMessage() for record in caplog.records if "Local copies" in record.getMessage()]
    assert warned
    assert len(warned) == len(set(warned))
    assert job.statistics().completed >= 1
