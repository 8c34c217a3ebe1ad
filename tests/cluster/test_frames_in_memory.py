"""Tasks on one node share memory for rows and a socket for all else, and stay exact when either process is killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from ray import cloudpickle

import tidegate as tg
from tidegate.actors.runtimes.ray.ray_runtime import RayRuntime, SlotPlacement
from tidegate.actors.sources.memory_source import MemorySource
from tidegate.spark_bridge import RayDPSession

# Processes of the job cannot import the modules of the tests: they are sent by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS, KEYS, ROWS_A_BATCH = 300_000, 1_000, 4_000
DIES_AFTER = 60_000
"""Rows that a task sees before it dies, many times what a channel carries before memory is shared."""


@dataclass
class DiesOnce(tg.BatchFunction):
    """Passes rows on, says whether the process shares memory and a socket with others, and is killed once."""

    flag: Path
    column: str

    def open(self, context: tg.BatchContext) -> None:
        """Nothing was seen."""
        self.rows = 0

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Pass the rows on."""
        self.rows += batch.num_rows
        if self.rows > DIES_AFTER and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        shares = "memfd:tidegate" in Path("/proc/self/maps").read_text() and any(
            thread.name == "tidegate-link" for thread in threading.enumerate()
        )
        return batch.append_column(self.column, pa.array([shares] * batch.num_rows))


def test_rows_are_exact_through_the_loss_of_either_end(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """The sender is killed while frames of it lie in memory, and so is the receiver while it holds rows of them."""
    rows = pa.table({"k": pa.array([n % KEYS for n in range(ROWS)]), "v": pa.array(range(ROWS))})
    bundles = tuple(raydp_session.bundle_of_slot(slot) for slot in range(raydp_session.slots))
    runtime = RayRuntime(SlotPlacement(raydp_session.placement_group, bundles), standbys=0)
    one = rows.schema.append(pa.field("sender", pa.bool_()))
    both = one.append(pa.field("receiver", pa.bool_()))
    flags = [tmp_path / "sender", tmp_path / "receiver"]
    options = tg.DataPlaneOptions(source_rows_max=ROWS_A_BATCH, sockets=True)
    with tg.StreamEnvironment(runtime, parallelism=2, options=options) as env:
        table = (
            env.from_source(MemorySource(rows, 4))
            .map_batches(DiesOnce(flags[0], "sender"), schema=one, uid="sender")
            .rebalance()
            .map_batches(DiesOnce(flags[1], "receiver"), schema=both, uid="receiver")
            .to_table(str(tmp_path / "out"), uid="table")
        )
        config = tg.CheckpointConfig(interval="50ms", storage=str(tmp_path / "checkpoints"))
        job = env.execute("shared", checkpoints=config, restart=tg.RestartStrategy.fixed_delay(5, 0))
        assert job.wait("4min") == "finished"
        found = table.to_arrow()
    assert all(flag.exists() for flag in flags)
    assert found.select(["k", "v"]).sort_by("v") == rows
    assert pc.any(found["sender"]).as_py()
    assert pc.any(found["receiver"]).as_py()
