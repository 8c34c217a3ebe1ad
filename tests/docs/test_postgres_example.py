"""The example that writes to PostgreSQL, on a real server where one is installed: what it moves, it moves once."""

from __future__ import annotations

import importlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    """The module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("flights_to_postgres")
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.slow
def test_rows_of_a_checkpoint_are_moved_once(example: Any) -> None:
    """By two at a time as well; rows of another checkpoint come beside them."""
    programs = [path for path in Path("/").glob(example.SERVERS.lstrip("/")) if (path / "initdb").exists()]
    if not programs:
        pytest.skip("there is no PostgreSQL server on this machine")
    # The server runs as another user, which may not enter the folders of tests.
    with tempfile.TemporaryDirectory(dir="/tmp") as name, example.server(max(programs), Path(name)) as port:
        database = example.Database(port)
        database.create()
        with psycopg.connect(host="127.0.0.1", port=port, user="tidegate", dbname="postgres") as connection:
            connection.execute(
                "CREATE TABLE arrived AS SELECT 'AA' carrier, 'JFK' origin, i delay FROM generate_series(1, 4) i"
            )
        with ThreadPoolExecutor(2) as pool:
            assert sorted(pool.map(lambda number: database.move("arrived", number), [7, 7, 7, 7])) == [False] * 3 + [
                True
            ]
        assert database.totals() == [("AA", 4, 10)]
        assert database.move("arrived", 8)
        assert database.totals() == [("AA", 8, 20)]
