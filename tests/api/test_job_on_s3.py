"""A whole job over the wire: checkpoints, event log and output table on a real S3 server."""

from __future__ import annotations

import pyarrow as pa
import pytest
from seaweed import BUCKET, S3Server, forget_clients

import tidegate as tg
from tidegate import recovery

ROWS = pa.table({"k": [i % 50 for i in range(20_000)], "v": [i % 11 for i in range(20_000)]})


def test_a_job_keeps_everything_on_s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata, state files, log entries and table commits are conditional creates and puts of a real server."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", str(s3_server.options["key"]))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", str(s3_server.options["secret"]))
    monkeypatch.setenv("AWS_ENDPOINT_URL", str(s3_server.options["endpoint_url"]))
    forget_clients()
    storage, table = f"s3://{BUCKET}/job/checkpoints", f"s3://{BUCKET}/job/table"
    checkpoints = tg.CheckpointConfig(interval="50ms", storage=storage, inline_threshold=100)
    with tg.StreamEnvironment.local(parallelism=2, options=tg.DataPlaneOptions(source_rows_max=500)) as env:
        totals = env.from_batches(ROWS).key_by("k").aggregate(n=tg.count(), total=tg.sum("v"), emit="final")
        out = totals.to_table(table)
        job = env.execute("on s3", checkpoints=checkpoints)
        assert job.wait("4min") == "finished"

    expected = ROWS.group_by("k").aggregate([("v", "count"), ("v", "sum")]).sort_by("k")
    found = out.to_arrow().sort_by("k")
    assert found.column("n").to_pylist() == expected.column("v_count").to_pylist()
    assert found.column("total").to_pylist() == expected.column("v_sum").to_pylist()
    newest = recovery.latest(storage, job="on s3")
    assert newest is not None
    assert newest.job_id == job.job_id
    assert recovery.verify(newest.path).ok
    assert type(job.events()[-1]).__name__ in ("TaskFinished", "SinksCommitted", "CheckpointDiscarded")
