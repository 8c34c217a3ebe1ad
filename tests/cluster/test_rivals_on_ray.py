"""Two drivers that start a job of one name at the same moment on one Ray: one of them wins."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from rival_program import DRIVERS, NAME, ROWS
from story import Story

from tidegate.storage.files.file_system_store import open_store
from tidegate.storage.tables.table_files import read_table


@pytest.mark.slow
def test_of_two_drivers_that_start_a_name_at_once_one_wins(plain_ray: None, tmp_path: Path) -> None:
    """Both ask for the name before either looks. The loser's error names the winner, which has each row once."""
    address = ray.get_runtime_context().gcs_address
    folders = [tmp_path / f"driver-{number}" for number in range(DRIVERS)]
    for folder in folders:
        folder.mkdir()
    drivers = [Story("rival_program.py", folder, RAY_ADDRESS=address) for folder in folders]
    try:
        started = [driver.told("started")[0] for driver in drivers]
        assert sorted(started) == [False, True]
        winner, loser = started.index(True), started.index(False)
        (refused,) = drivers[loser].told("refused")
        (job_id,) = drivers[winner].told("job_id")
        assert f"a job named {NAME!r} is being started at this moment: {job_id}" in refused
        (tmp_path / "gate").touch()
        assert drivers[winner].told("status") == ["finished"]
        found = read_table(open_store(str(tmp_path / "out")))
        assert sorted(found["x"].to_pylist()) == list(range(ROWS))
        for driver in drivers:
            driver.check_nothing_is_left()
    finally:
        for driver in drivers:
            driver.end()
