"""Jobs whose driver is killed: a detached one goes on, and another driver attaches to it; any other ends at once."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import waiting
from ray_jobs import expected_table, shown_table, until

from tidegate.actors.ray.detached import clean_up_lost_job
from tidegate.actors.ray.ray_runtime import RayRuntime, jobs_on_ray
from tidegate.actors.runtimes.running_job import JobOverview, SnapshotRequest
from tidegate.spark_bridge import RayDPSession
from tidegate.storage.checkpoints.metadata import SnapshotKind

WAIT_S = 240.0
HERE = Path(__file__).parent
DRIVER = """
import sys
from dataclasses import replace
from pathlib import Path

from ray_jobs import keyed_job
import tidegate as tg

address, folder = sys.argv[1], Path(sys.argv[2])
env = tg.StreamEnvironment.ray(address)
for name in ("stays", "goes"):
    job = keyed_job(folder / name, folder / "gate", name=name, interval_ms=None, parallelism=1)
    env._runtime.submit(replace(job.submission, detached=name == "stays"))
print("started", flush=True)
sys.stdin.read()
"""


@contextmanager
def driver(address: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another driver, which has started its jobs."""
    paths = [str(HERE), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, address, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    try:
        while (line := lines.get(timeout=WAIT_S)) != "started\n":
            assert line, "the driver has ended before its jobs were started"
        yield process
    finally:
        process.kill()
        process.wait(WAIT_S)


def names() -> list[str]:
    """Of the jobs on this Ray."""
    return [job.overview.card.name for job in jobs_on_ray() if isinstance(job.overview, JobOverview)]


def test_a_detached_job_outlives_its_driver_and_is_finished_by_another(
    raydp_session: RayDPSession, tmp_path: Path
) -> None:
    """The driver is killed; this process attaches, sees the job go on, takes a savepoint, and reads what it wrote."""
    runtime, card = RayRuntime(), None
    try:
        with driver(ray.get_runtime_context().gcs_address, tmp_path) as process:
            assert names() == ["goes", "stays"]
            process.send_signal(signal.SIGKILL)
            process.wait(WAIT_S)
            waiting.until("the job of the dead driver to end", lambda: names() == ["stays"], names)

            card, job = runtime.attach("stays")

            before = until("rows", job.progress, lambda p: p.rows_in.get("totals", 0) > 0).rows_in["totals"]
            until("more rows", job.progress, lambda p: p.rows_in.get("totals", 0) > before)
            answer = job.request(SnapshotRequest(SnapshotKind.SAVEPOINT, str(tmp_path / "savepoints")), WAIT_S)
            assert (card.detached, answer.error) == (True, None)
            (tmp_path / "gate").touch()
            end = job.wait(WAIT_S)
            assert end is not None
            assert (end.status, end.attempt) == ("finished", 0)
            assert shown_table(tmp_path / "stays" / "table") == expected_table()
    finally:
        if card is not None:
            clean_up_lost_job(card.name, card.job_id)
