"""A function for each checkpoint: orders go into a database, each once, although the driver is killed on the way.

    .venv/bin/python examples/orders_to_sqlite.py

The job runs in a process of its own. When its function has written the rows of the first checkpoint, it kills that
process, before anybody could note that the call has returned. The next process goes on with the newest checkpoint. It
makes the same call again, with the same id, and the database has these rows already.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import tidegate as tg

ROWS = 200_000


def write(folder: Path, df: pa.Table, checkpoint_id: int) -> bool:
    """Rows and id in one transaction; nothing, and False, where the id is there."""
    with sqlite3.connect(folder / "orders.db") as database:
        database.execute("CREATE TABLE IF NOT EXISTS done (id INTEGER PRIMARY KEY)")
        database.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY, shop TEXT)")
        if database.execute("SELECT 1 FROM done WHERE id = ?", (checkpoint_id,)).fetchone():
            return False
        database.execute("INSERT INTO done VALUES (?)", (checkpoint_id,))
        database.executemany("INSERT INTO orders VALUES (:number, :shop)", df.to_pylist())
        return True


def run(folder: Path, dies: bool) -> None:
    """The job, to its end or to the death of this process."""

    def call(df: pa.Table, checkpoint_id: int) -> None:
        written = write(folder, df, checkpoint_id)
        print(f"  id {checkpoint_id}: {df.num_rows} rows {'written' if written else 'were there already'}", flush=True)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    orders = pa.table({"number": range(ROWS), "shop": ["north", "south", "east", "west"] * (ROWS // 4)})
    options = tg.DataPlaneOptions(source_rows_max=500)
    with tg.StreamEnvironment.local(2, options=options) as env:
        env.from_batches(orders, uid="orders").for_each_checkpoint(call, uid="to-sqlite")
        checkpoints = tg.CheckpointConfig(interval="20ms", storage=str(folder / "checkpoints"))
        env.execute("orders", checkpoints=checkpoints, restore="latest").wait("5min")


def main() -> None:
    """Run it twice: the first process is killed, the second one ends the work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dies in ("dies", "lives"):
            print(f"a driver that {dies}:", flush=True)
            subprocess.run([sys.executable, __file__, name, dies], check=dies == "lives")
        with sqlite3.connect(folder / "orders.db") as database:
            (count,) = database.execute("SELECT count(*) FROM orders").fetchone()
        print(f"{count} of {ROWS} orders are in the database, each once")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(Path(sys.argv[1]), sys.argv[2] == "dies")
    else:
        main()
