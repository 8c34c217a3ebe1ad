"""A program that has read a table ends as it should: threads of Arrow that were still busy aborted it now and then."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUNS = 50

PROGRAM = """
import os, sys
import pyarrow as pa
from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.table_files import read_data_file, write_data_file

ROWS = 10_000
rows = pa.record_batch({
    "word": pa.array([f"v{i % 97}" for i in range(ROWS)]).dictionary_encode(),
    "list": [[i, 2, 3] for i in range(ROWS)],
    "record": [{"x": i, "y": "z"} for i in range(ROWS)],
})
store = open_store("memory://exit")
file = write_data_file(store, "f", [rows])
failed = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        for _ in range(3):
            assert read_data_file(store, file).num_rows == ROWS
        sys.exit(0)
    failed += os.waitpid(child, 0)[1] != 0
print(failed)
"""


@pytest.mark.slow
def test_a_program_that_has_read_nested_columns_ends() -> None:
    """Fifty of fifty times. The children are forks of one process, so that only one imports what they all need."""
    # From 3.12 on Python warns where a process with threads forks.
    quiet = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", PROGRAM, str(RUNS)]
    done = subprocess.run(quiet, capture_output=True, text=True, timeout=240, check=False)

    assert (done.stdout, done.stderr) == ("0\n", "")
