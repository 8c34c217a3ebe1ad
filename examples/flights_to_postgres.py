"""Delays of flights go into PostgreSQL by Spark's JDBC writer, each once, although the driver is killed on the way.

    .venv/bin/python examples/flights_to_postgres.py
    TIDEGATE_TOPOLOGY=local-cluster .venv/bin/python examples/flights_to_postgres.py    # see topology.py

Spark reads the flights out of New York in 2013, tidegate streams them beside the Spark executors, and a function
writes the rows of each checkpoint to the database: Spark's executors into a table of their own, and one transaction
moves them from there. The first driver is killed between that transaction and the note that the call has returned. The
second driver makes the same call again, with the same id, and the transaction changes nothing. At the end the database
has each flight once.

It needs a PostgreSQL server and its JDBC driver, which the script looks for, and starts and stops the server itself, on
loopback, in a folder of its own. On Debian: `apt install postgresql libpostgresql-jdbc-java`; for Python:
`pip install 'tidegate[examples]'`.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from flight_delays import flights
from psycopg import sql
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from topology import environment

import tidegate as tg

SERVERS = "/usr/lib/postgresql/*/bin"
DRIVERS = ("/usr/share/java/postgresql.jar", "~/.m2/repository/org/postgresql/postgresql/*/postgresql-*.jar")
ROWS_AT_ONCE = 20_000


class Database:
    """The delays of flights in a PostgreSQL database, and which checkpoints they are of."""

    def __init__(self, port: int) -> None:
        self._address = {"host": "127.0.0.1", "port": port, "user": "tidegate", "dbname": "postgres"}
        self.jdbc_url = f"jdbc:postgresql://127.0.0.1:{port}/postgres"

    def create(self) -> None:
        """The tables, where they are not there."""
        with self._connected() as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS delays (carrier text, origin text, delay bigint)")
            connection.execute("CREATE TABLE IF NOT EXISTS done (id bigint PRIMARY KEY, rows bigint)")

    def write(self, df: DataFrame, checkpoint_id: int) -> bool:
        """The rows of a checkpoint, by executors, and then in one transaction; False where they were there."""
        # Spark commits each partition by itself: what it writes is overwritten if this call is repeated.
        properties = {"user": "tidegate", "driver": "org.postgresql.Driver"}
        df.write.jdbc(self.jdbc_url, "arrived", mode="overwrite", properties=properties)
        return self.move("arrived", checkpoint_id)

    def move(self, staged: str, checkpoint_id: int) -> bool:
        """Rows of another table and the id of their checkpoint, or nothing, and False, where the id is there."""
        with self._connected() as connection:
            # Who comes second waits here until the first one has committed.
            noted = connection.execute("INSERT INTO done VALUES (%s, 0) ON CONFLICT DO NOTHING", (checkpoint_id,))
            if not noted.rowcount:
                return False
            copy = sql.SQL("INSERT INTO delays SELECT carrier, origin, delay FROM {}").format(sql.Identifier(staged))
            moved = connection.execute(copy).rowcount
            connection.execute("UPDATE done SET rows = %s WHERE id = %s", (moved, checkpoint_id))
            return True

    def totals(self) -> list[tuple[Any, ...]]:
        """Carrier, number of flights and sum of delays, in order."""
        with self._connected() as connection:
            asked = "SELECT carrier, count(*), sum(delay)::bigint FROM delays GROUP BY carrier ORDER BY carrier"
            return connection.execute(asked).fetchall()

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(**self._address)  # type: ignore[arg-type]


@contextmanager
def server(programs: Path, folder: Path) -> Iterator[int]:
    """A PostgreSQL server of its own, on loopback; gives its port, and ends with the block."""
    data = folder / "postgres"
    data.mkdir()
    # The server refuses to run as root.
    user = "postgres" if os.getuid() == 0 else None
    if user is not None:
        os.chmod(folder, 0o755)
        shutil.chown(data, user, pwd.getpwnam(user).pw_gid)
    initdb = [str(programs / "initdb"), "--pgdata", str(data), "--username", "tidegate", "--auth", "trust", "--no-sync"]
    subprocess.run(initdb, user=user, cwd=data, check=True, stdout=subprocess.DEVNULL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["-D", str(data), "-p", str(port), "-k", str(data), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
    with (folder / "postgres.log").open("wb") as log:
        running = subprocess.Popen([str(programs / "postgres"), *options], user=user, cwd=data, stderr=log, stdout=log)
    try:
        ready = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-t", "1"]
        for _ in range(600):
            if subprocess.run(ready, stdout=subprocess.DEVNULL, check=False).returncode == 0:
                break
            if running.poll() is not None:
                sys.exit(f"PostgreSQL does not start:\n{(folder / 'postgres.log').read_text()}")
        yield port
    finally:
        running.send_signal(signal.SIGINT)
        running.wait()


def found(patterns: tuple[str, ...], what: str) -> Path:
    """The newest file or folder of these patterns."""
    paths = [path for text in patterns for path in Path("/").glob(str(Path(text).expanduser()).lstrip("/"))]
    if not paths:
        sys.exit(f"there is no {what}: apt install postgresql libpostgresql-jdbc-java, or say where it is (--help)")
    return max(paths)


def run(folder: Path, port: int, driver: Path, dies: bool) -> None:
    """The job, to its end or to the death of this process."""
    database = Database(port)

    def write(df: DataFrame, checkpoint_id: int) -> None:
        written = database.write(df, checkpoint_id)
        print(f"  id {checkpoint_id}: {'written' if written else 'was there already'}", flush=True)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)

    options = tg.DataPlaneOptions(source_rows_max=ROWS_AT_ONCE)
    with environment(executors=1, spark_configs={"spark.jars": str(driver)}, options=options) as env:
        arrived = flights(env.spark, folder, repeat=1)
        env.from_dataframe(arrived, uid="flights").for_each_checkpoint(write, uid="to-postgres")
        checkpoints = tg.CheckpointConfig(interval="300ms", storage=str(folder / "checkpoints"))
        env.execute("flights-to-postgres", checkpoints=checkpoints, restore="latest").wait("10min")
        expected = arrived.groupBy("carrier").agg(F.count("*"), F.sum("delay")).orderBy("carrier").collect()
    if (totals := database.totals()) != [tuple(row) for row in expected]:
        sys.exit(f"the database has {totals}, and Spark finds {expected}")
    print(f"{sum(count for _, count, _ in totals)} flights are in the database, each once, as Spark counts them")


def main() -> None:
    """Start the server, and run it twice: the first driver is killed, the second one ends the work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", type=Path, help=f"folder with initdb and postgres (default: {SERVERS})")
    parser.add_argument("--driver", type=Path, help=f"the JDBC driver's jar (default: {', '.join(DRIVERS)})")
    parser.add_argument("--run", nargs=3, metavar=("FOLDER", "PORT", "DIES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    driver = arguments.driver or found(DRIVERS, "JDBC driver of PostgreSQL")
    if arguments.run:
        folder, port, dies = arguments.run
        return run(Path(folder), int(port), driver, dies == "dies")
    programs = arguments.server or found((SERVERS,), "PostgreSQL server")
    with tempfile.TemporaryDirectory() as name, server(programs, Path(name)) as port:
        Database(port).create()
        for dies in ("dies", "lives"):
            print(f"a driver that {dies}:", flush=True)
            command = [sys.executable, __file__, "--driver", str(driver), "--run", name, str(port), dies]
            subprocess.run(command, check=dies == "lives")
    return None


if __name__ == "__main__":
    main()
