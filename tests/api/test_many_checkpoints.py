"""A job that takes checkpoint after checkpoint does not grow with them."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening
from programs import running_of

import tidegate as tg
from tidegate.actors.coordinator import job_history
from tidegate.actors.local.local_runtime import LocalJob
from tidegate.storage.checkpoints.metadata import DataFile
from tidegate.storage.tables.log import tail


def objects() -> Counter[type]:
    """What of tidegate is in memory."""
    for _ in range(3):
        gc.collect()
    return Counter(type(each) for each in gc.get_objects() if str(type(each).__module__).startswith("tidegate"))


@pytest.mark.slow
def test_a_coordinator_does_not_grow_with_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of checkpoints that are over it keeps what its limits say: not one object for each."""
    monkeypatch.setattr(tail, "PARTS_WEIGHT_MAX", 50)
    monkeypatch.setattr(job_history, "LINES_MAX", 20)
    source = GatedSource(40, gates=(20,))
    with local() as env, opening(source):
        stream = env.from_source(source)
        stream.to_table(str(tmp_path / "table"), mode="upsert", keys=["k"], uid="table")
        job = env.execute("grows", checkpoints=config(tmp_path / "c", history=5), restart=NO_RESTART)
        source.await_gate(20)

        def objects_after(checkpoints: int) -> Counter[type]:
            for _ in range(checkpoints):
                job.trigger_checkpoint()
            return objects()

        before = objects_after(60)
        grown = objects_after(60) - before
        running = running_of(job)
        assert isinstance(running, LocalJob)
        timers, orders = len(running.timers), len(running.coordinator.causes.stored())
        source.open_all()
        assert job.wait("4min") == "finished"
    assert timers < 10
    assert orders < 2 * 130, "of two kinds those of the newest 200 checkpoints"
    assert grown[DataFile] < 20
    assert sum(grown.values()) < 30, grown.most_common(5)
    assert tg.open_table(str(tmp_path / "table")).to_arrow().num_rows == 5
