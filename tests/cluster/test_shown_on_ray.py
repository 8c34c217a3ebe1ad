"""What Ray shows of the actors of a job: in its lists, which its dashboard reads, and before printed lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import shown_program
from story import HERE, WAIT_S


@pytest.mark.slow
def test_ray_shows_which_steps_each_process_runs(tmp_path: Path) -> None:
    """Each actor has a `repr` of its job, its slot and the steps in it. A standby that has taken a slot keeps its name
    and its `repr`; the lines that its functions print have the name of the slot.
    """
    done = subprocess.run(
        [sys.executable, shown_program.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "support")])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    facts: dict[str, object] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    assert facts == {
        "before": {
            "orders/coordinator": "orders: coordinator",
            "orders/slot 1 of 1#0": "orders: slot 1 of 1 (rows, check -> out)",
            "orders/standby#0": "orders: standby",
        },
        "moved": "orders/standby#0",
        "still": "orders: standby",
        "status": "finished",
    }, printed
    line = next(line for line in printed.splitlines() if "that was spare" in line)
    assert re.search(r"\(orders: slot 1 of 1 \(rows, check -> out\) pid=\d+\)", line), printed
    assert ":actor_name:" not in printed
