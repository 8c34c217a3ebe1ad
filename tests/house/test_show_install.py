"""Setting up shows how far it is, and all that pip said if it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from repository import ROOT

SCRIPT = ROOT / "scripts" / "show_install.py"

PIP = """
print("Obtaining file:///somewhere")
for number in range(60):
    print(f"Collecting lib_{number}<2,>=1 (from tidegate==0.1.0)")
    print(f"  Downloading lib_{number}-1.0-py3-none-any.whl (3.4 MB)")
print("Requirement already satisfied: Lib-0 in elsewhere")
print("Installing collected packages: lib-0, lib-1")
"""


def run(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    """The script around a program that stands for pip, with eighty packages pinned."""
    pins = tmp_path / "pins.txt"
    pins.write_text("".join(f"lib-{number}==1.0\n" for number in range(80)))
    command = [sys.executable, str(SCRIPT), str(pins), sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_installation_shows_how_far_it_is(tmp_path: Path) -> None:
    """Elsewhere than on a terminal a line for some packages, with how many there are, and one for the last step."""
    done = run(tmp_path, PIP)
    assert done.returncode == 0
    *lines, last = done.stdout.splitlines()
    assert lines == [
        "package 1 of about 80: lib_0",
        "package 26 of about 80: lib_25",
        "package 51 of about 80: lib_50",
        "unpacking 2 packages",
    ]
    assert last.startswith("installed in ")
    assert done.stderr == ""


def test_an_installation_that_fails_shows_everything(tmp_path: Path) -> None:
    """The exit code is pip's, and so is what it had said, on both of its streams."""
    failing = PIP + "\nimport sys\nprint('ERROR: no such version', file=sys.stderr)\nsys.exit(3)\n"
    done = run(tmp_path, failing)
    assert done.returncode == 3
    assert "Downloading lib_59" in done.stderr
    assert "ERROR: no such version" in done.stderr
    assert "installed in" not in done.stdout
