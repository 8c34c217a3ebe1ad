"""A restart from the node's own copies beside one from S3, on Ray: how long, and what is asked of S3.

    python benchmarks/state_restore.py [--keys 10000000] [--rounds 2]

The job of `state_snapshots.py` keeps its checkpoints on a real S3 server (SeaweedFS, on loopback and with its files on
the same disk, so S3 is as near as it can be). When all keys are there and a checkpoint is complete, the process of a
keyed task is killed. The clock runs from the moment when the coordinator knew of the loss until the last task had its
state. Requests are counted by a proxy in front of the server; those for state are reads of files of the checkpoint but
`_metadata`. Jobs with and without local copies take turns.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import describe_machine, kill, local_ray
from rich.console import Console
from rich.table import Table
from state_snapshots import KEY_BYTES, PARALLELISM, SOURCE, SUMS, TOTALS, GatedSource, open_gate

import tidegate as tg
from tidegate.actors.ray.ray_runtime import RayRuntime

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
_PROXY: Any = importlib.import_module("s3_proxy")
_SEAWEED: Any = importlib.import_module("seaweed")
"""The server and the proxy are those of the tests."""

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Restore:
    """One restart: milliseconds from the failure to the last task that was ready, and what was read of state on S3."""

    restore_ms: int
    requests: int
    read_bytes: int


def restart(local: bool, number: int, proxy: Any, arguments: argparse.Namespace) -> Restore:
    """Fill a job, take a checkpoint, kill a keyed task, and follow the restart."""
    folder = arguments.folder
    gate = folder / f"gate-{number}"
    open_gate(gate, 0)
    runtime = RayRuntime(standbys=1)
    env = tg.StreamEnvironment(runtime, PARALLELISM, options=tg.DataPlaneOptions(source_rows_max=65_536))
    rows = env.from_source(GatedSource(arguments.keys, str(gate)), name=SOURCE, uid=SOURCE)
    sums: dict[str, Any] = {f"s{position}": tg.sum(f"v{position}") for position in range(SUMS)}
    keyed = rows.key_by("key")
    totals = keyed.aggregate(emit="final", name=TOTALS, uid=TOTALS, parallelism=PARALLELISM, n=tg.count(), **sums)
    totals.to_table(str(folder / f"table-{number}"), uid="table")
    copies = {"local_copies": True, "local_directory": str(folder / "copies")} if local else {}
    config = tg.CheckpointConfig(
        storage=f"s3://{_SEAWEED.BUCKET}/restore-{number}",
        timeout="10min",
        incremental=True,
        retention="no_externalized_checkpoints",
        **copies,
    )
    job = env.execute("restore", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(attempts=5, delay=0))
    try:
        open_gate(gate, arguments.keys // PARALLELISM)
        _until(lambda: job.progress().rows_in.get(TOTALS, 0) >= arguments.keys)
        path = job.trigger_checkpoint("10min")
        before = job.progress().attempt
        victim = next(info for info in job.processes() if info.task.vertex == TOTALS)
        proxy.forget()
        kill(victim.pid)
        failed_ms, ready_ms = _restart_times(job, before)
        folders = (f"/{path.rpartition('/')[2]}/", "/shared/")
        read = [r for r in proxy.requests("GET") if any(f in r.path for f in folders) and "_metadata" not in r.path]
        return Restore(ready_ms - failed_ms, len(read), sum(r.answer_bytes for r in read))
    finally:
        job.cancel()
        job.wait("2min")
        runtime.stop()


def _restart_times(job: tg.Job, before: int) -> tuple[int, int]:
    """When the coordinator knew of the loss, and when the last task of the next attempt was ready (ms)."""
    tasks = len(job.processes())
    ready: list[int] = []
    failed: list[int] = []

    def all_ready() -> bool:
        events = job.events()
        ready[:] = [e.at_ms for e in events if type(e).__name__ == "TaskReady" and e.attempt == before + 1]
        failed[:] = [e.at_ms for e in events if type(e).__name__ == "TaskFailed" and e.attempt == before]
        return len(ready) == tasks

    _until(all_ready)
    return min(failed), max(ready)


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited in vain")
        time.sleep(0.05)


def show(found: dict[str, list[Restore]], keys: int, console: Console) -> None:
    """Both side by side."""
    table = Table(title=f"Restart with {keys:,} keys, {keys * KEY_BYTES / 1e9:.2f} GB")
    table.add_column("")
    for name in found:
        table.add_column(name, justify="right")
    medians = {name: statistics.median(r.restore_ms for r in runs) for name, runs in found.items()}
    slowest = max(medians.values())
    table.add_row("ms until all tasks had their state", *(f"{ms:.0f}" for ms in medians.values()))
    table.add_row("against the slower one", *(f"{ms / slowest:.2f}" for ms in medians.values()))
    table.add_row("reads of state on S3", *("/".join(str(r.requests) for r in runs) for runs in found.values()))
    megabytes = ("/".join(f"{r.read_bytes / 1e6:.0f}" for r in runs) for runs in found.values())
    table.add_row("MB of state read from S3", *megabytes)
    console.print(table)


def main() -> int:
    """Exit code 1 if a restart from local copies read state from S3."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=10_000_000, help="distinct keys (default 10,000,000)")
    parser.add_argument("--rounds", type=int, default=2, help="restarts of each kind (default 2)")
    parser.add_argument("--folder", type=Path, default=Path(".bench/restore"), help="where files go")
    arguments = parser.parse_args()
    console = Console()
    describe_machine(console)
    arguments.folder = arguments.folder.resolve()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    (arguments.folder / "s3").mkdir(parents=True)
    found: dict[str, list[Restore]] = {"S3": [], "local copies": []}
    with ExitStack() as stack:
        server = stack.enter_context(_SEAWEED.run_seaweed(arguments.folder / "s3"))
        proxy = stack.enter_context(_PROXY.run_proxy(server))
        os.environ |= {
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": str(server.options["key"]),
            "AWS_SECRET_ACCESS_KEY": str(server.options["secret"]),
            "AWS_ENDPOINT_URL": proxy.url,
        }
        stack.enter_context(local_ray())
        for round_number in range(arguments.rounds):
            for offset, (name, local) in enumerate((("S3", False), ("local copies", True))):
                restore = restart(local, 2 * round_number + offset, proxy, arguments)
                found[name].append(restore)
                console.print(f"{name}: {restore}", highlight=False, soft_wrap=True)
    shutil.rmtree(arguments.folder, ignore_errors=True)
    show(found, arguments.keys, console)
    return 1 if any(restore.requests for restore in found["local copies"]) else 0


if __name__ == "__main__":
    sys.exit(main())
