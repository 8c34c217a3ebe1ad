"""A whole job on a real S3 server, over a wire that breaks: it ends, and every row is counted once."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from s3_proxy import Fault, Request, S3Proxy, run_proxy
from seaweed import BUCKET, S3Server, forget_clients

import tidegate as tg
from tidegate import recovery
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.table_log import TableLog

ROWS = pa.table({"k": [i % 50 for i in range(10_000)], "v": [i % 11 for i in range(10_000)]})


def _break(proxy: S3Proxy) -> list[Fault]:
    """What decides something is done and not answered; what is large breaks off; a whole checkpoint is refused.

    Returns the faults that every run meets.
    """

    def is_put(request: Request, part: str) -> bool:
        return request.method == "PUT" and part in request.path

    surely = [
        proxy.inject("lose answer", 2, lambda r: is_put(r, "/events/0")),
        proxy.inject("cut request", 2, lambda r: is_put(r, ".parquet")),
        proxy.inject("lose answer", 1, lambda r: is_put(r, "/_metadata")),
        proxy.inject("lose answer", 1, lambda r: is_put(r, "/_tidegate/log/")),
    ]
    proxy.inject("busy", 14, lambda r: is_put(r, "/chk-2/") or is_put(r, "/shared/chk-2/"))
    proxy.inject("cut answer", 4, lambda r: r.method == "GET")
    return surely


def test_a_broken_wire_costs_time_and_nothing_else(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost answers, resets and a server that is busy for longer than one checkpoint tries: each row counts once."""
    broken = threading.Event()

    def held(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert broken.wait(240), "nothing of the job is done before the wire breaks"
        return batch

    with run_proxy(s3_server) as proxy:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3_server.options["key"]))
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(s3_server.options["secret"]))
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        forget_clients()
        storage, table = f"s3://{BUCKET}/broken/checkpoints", f"s3://{BUCKET}/broken/table"
        checkpoints = tg.CheckpointConfig(
            interval="50ms", storage=storage, inline_threshold=100, tolerable_failed_checkpoints=100
        )
        with tg.StreamEnvironment.local(parallelism=2, options=tg.DataPlaneOptions(source_rows_max=500)) as env:
            rows = env.from_batches(ROWS).map_batches(held, schema=ROWS.schema)
            totals = rows.key_by("k").aggregate(n=tg.count(), total=tg.sum("v"), emit="final")
            out = totals.to_table(table)
            job = env.execute("on broken s3", checkpoints=checkpoints)
            faults = _break(proxy)
            broken.set()
            assert job.wait("240s") == "finished"

        expected = ROWS.group_by("k").aggregate([("v", "count"), ("v", "sum")]).sort_by("k")
        found = out.to_arrow().sort_by("k")
        assert found.column("n").to_pylist() == expected.column("v_count").to_pylist()
        assert found.column("total").to_pylist() == expected.column("v_sum").to_pylist()
        newest = recovery.latest(storage, job="on broken s3")
        assert newest is not None
        assert [fault.times for fault in faults] == [0] * len(faults)
        committed = [file.path for entry in TableLog(open_store(table)).entries() for file in entry.files]
        assert len(committed) == len(set(committed))
