"""A driver prints none of the warnings of Ray that describe how tidegate works, and not what a user has to act on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import noise_program
import pytest
from story import HERE

NOISE = ["infinite retries remaining", "worker processes have been started", "InvalidAuthToken", "NativeCodeLoader"]
WAIT_S = 270


@pytest.mark.slow
def test_a_driver_prints_no_noise_of_ray(tmp_path: Path) -> None:
    """Not with 12 tasks on a CPU, nor when one of them is killed; a warning of another kind is printed."""
    done = subprocess.run(
        [sys.executable, noise_program.__file__, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent / "support")])},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    facts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert facts == [{"status": "finished", "rows": 600}, {"last": True}, {"warned": True}], printed
    assert noise_program.LAST in printed
    assert [text for text in NOISE if text in printed] == [], printed
