"""A job on RocksDB that fails goes on with the files of its last checkpoint, exactly once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from local_jobs import GatedSource, opening

import tidegate as tg
from tidegate.actors.restore import restore_task as restore

ROWS, GATE = 2_000, 1_000


class Running(tg.ProcessFunction):
    """Counts the rows of each key, and fails at the row that it is told to, once."""

    failures: list[int]

    def open(self, context: tg.ProcessContext) -> None:
        self._count = context.state(tg.ValueState("count", int))
        self._seen = context.state(tg.ListState("seen", int))

    def process(self, row: Any, context: tg.ProcessContext) -> list[dict[str, Any]]:
        if row["x"] in self.failures:
            self.failures.remove(row["x"])
            raise RuntimeError("as told")
        count = (self._count.value() or 0) + 1
        self._count.update(count)
        self._seen.add(row["x"])
        return [{"k": row["k"], "count": count, "last": max(self._seen.get()), "seen": len(self._seen.get())}]


@pytest.mark.slow
@pytest.mark.parametrize("local_copies", [False, True])
def test_a_restart_goes_on_with_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local_copies: bool) -> None:
    """Each key's rows are counted once, and no state was read row by row."""
    fetched, failures = [], [GATE + 500]
    fetch = restore.fetch_native

    def noted(*arguments: Any) -> None:
        fetched.append(arguments[2])
        fetch(*arguments)

    monkeypatch.setattr(restore, "fetch_native", noted)
    monkeypatch.setattr(Running, "failures", failures, raising=False)
    source = GatedSource(ROWS, gates=(GATE,))
    schema = pa.schema({"k": pa.int64(), "count": pa.int64(), "last": pa.int64(), "seen": pa.int64()})
    with tg.StreamEnvironment.local(2, options=tg.DataPlaneOptions(source_rows_max=100)) as env, opening(source):
        rows = env.from_source(source).key_by("k")
        totals = rows.aggregate(n=tg.count(), emit="final").collect()
        running = rows.process(Running(), schema=schema).collect()
        job = env.execute(
            "restarts",
            checkpoints=tg.CheckpointConfig(
                storage=tmp_path / "ckpt",
                backend="rocksdb",
                backend_directory=tmp_path / "work",
                **({"local_copies": True, "local_directory": tmp_path / "copies"} if local_copies else {}),
            ),
            restart=tg.RestartStrategy.fixed_delay(1, "1ms"),
        )
        source.await_gate(GATE)
        job.trigger_checkpoint()
        source.open_all()
        assert job.wait("4min") == "finished"
    assert failures == []
    assert fetched
    assert {row["k"]: row["n"] for row in totals.to_arrow().to_pylist()} == dict.fromkeys(range(5), ROWS // 5)
    found = sorted((row["k"], row["count"], row["last"], row["seen"]) for row in running.to_arrow().to_pylist())
    assert found == sorted((x % 5, x // 5 + 1, x, x // 5 + 1) for x in range(ROWS))
    assert [path for path in (tmp_path / "work").rglob("*") if path.is_file()] == []
