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
from story import HERE

WAIT_S = 270


@pytest.mark.slow
def test_ray_shows_which_task_each_process_holds(tmp_path: Path) -> None:
    """Each actor has a `repr` of its job and task. A standby that has taken a task keeps its name and its `repr`; its
    pending call, and the lines that its functions print, have the name of the task.
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
            "orders/rows (1/1)#0": "orders: rows (1/1)",
            "orders/check -> out (1/1)#0": "orders: check -> out (1/1)",
            "orders/standby#0": "orders: standby",
        },
        "moved": "orders/standby#0",
        "call": "orders: check -> out (1/1), attempt 1",
        "still": "orders: standby",
        "status": "finished",
    }, printed
    line = next(line for line in printed.splitlines() if "that was spare" in line)
    assert re.search(r"\(orders: check -> out \(1/1\) pid=\d+\)", line), printed
    assert ":actor_name:" not in printed
