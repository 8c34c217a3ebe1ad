"""A native savepoint of RocksDB is restored from its files, also by a program that declares other types."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from local_jobs import NO_RESTART, GatedSource, config, local, opening

import tidegate as tg
from tidegate.actors.restore import restore_task
from tidegate.storage.checkpoints.metadata import NativeState

ROWS, GATE = 40, 20
TOLD = pa.schema([(name, pa.int64()) for name in ("k", "last", "n", "entries")])


class Remembers(tg.ProcessFunction):
    """Keeps a value, a list and a map of each key in types that a test chooses."""

    def __init__(self, number: pa.DataType, ttl: tg.StateTtl | None) -> None:
        self._states = (
            tg.ValueState("last", number, ttl=ttl),
            tg.ListState("all", number, ttl=ttl),
            tg.MapState("by rest", pa.string(), number, ttl=ttl),
        )

    def open(self, context: tg.ProcessContext) -> None:
        self.last, self.all, self.by_rest = map(context.state, self._states)

    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        x = int(row["x"])
        self.last.update(x)
        self.all.add(x)
        self.by_rest.put(str(x % 3), x)
        yield {"k": row["k"], "last": x, "n": len(self.all.get()), "entries": len(dict(self.by_rest.items()))}


def run(folder: Path, name: str, changed: bool, ttl: bool, restore: str | None, parallelism: int = 2) -> Any:
    """A job that takes a native savepoint at the gate, or (restored from it) goes on to the end: its last rows."""
    number = pa.int64() if changed else pa.int32()
    program = Remembers(number, tg.StateTtl("1d") if ttl else None)
    with opening(GatedSource(ROWS, gates=[] if restore else [GATE])) as source, local(parallelism) as env:
        rows = env.from_source(source, uid="source", parallelism=1)
        keyed = rows.with_columns(pl.col("x").cast(pl.Float64 if changed else pl.Int64)).key_by("k")
        told = keyed.process(program, schema=TOLD, uid="remembers").to_table(str(folder / name / "told"), uid="told")
        sums = keyed.aggregate(n=tg.count(), total=tg.sum("x"), emit="final", uid="sums")
        table = sums.to_table(str(folder / name / "sums"), uid="sums-out")
        checkpoints = config(folder / name / "ckpt", backend="rocksdb", backend_directory=folder / name / "work")
        job = env.execute("native", checkpoints=checkpoints, restart=NO_RESTART, restore=restore)
        if restore is None:
            source.await_gate(GATE)
            return job.stop(savepoint=folder / "sp", format="native", timeout="4min")
        assert job.wait("4min") == "finished"
        last = told.to_arrow().sort_by([("k", "ascending"), ("last", "ascending")]).to_pylist()[3::4]
        return last, table.to_arrow().sort_by("k").to_pylist()


@pytest.mark.parametrize(("changed", "ttl", "parallelism"), [(False, False, 2), (True, True, 2), (True, True, 3)])
def test_a_program_goes_on_with_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool, ttl: bool, parallelism: int
) -> None:
    """Wider numbers, a time to live, sums that become floats; at another parallelism rows are read out of them."""
    path = run(tmp_path, "first", False, False, None)
    fetched: list[NativeState] = []
    fetch = restore_task.fetch_native
    monkeypatch.setattr(restore_task, "fetch_native", lambda *of: fetched.append(of[1]) or fetch(*of))

    last, sums = run(tmp_path, "second", changed, ttl, path, parallelism)

    assert [row["n"] for row in last] == [ROWS // 5] * 5
    assert [row["entries"] for row in last] == [3] * 5
    assert sums == [{"k": k, "n": 8, "total": sum(range(k, ROWS, 5))} for k in range(5)]
    assert bool(fetched) == (parallelism == 2)
