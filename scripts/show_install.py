"""Run `pip install` and show how far it is: a line that counts on a terminal, a line now and then elsewhere.

    python scripts/show_install.py PINS COMMAND...      PINS: the file that pins what COMMAND installs

pip's own output is kept and shown only if the installation fails. Needs nothing but Python itself, because nothing is
installed yet. Exit code: that of COMMAND.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FOUND = re.compile(r"(?:Collecting|Requirement already satisfied:) (?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)")
DOWNLOAD = re.compile(r"\s+(?:Downloading|Using cached) \S+ \((?P<size>[^)]+)\)")
INSTALLING = "Installing collected packages:"
LINES_BETWEEN_REPORTS = 25
"""Elsewhere than on a terminal: packages from one line to the next."""


def reports(lines: Iterable[str], total: int) -> Iterator[tuple[int, str]]:
    """What to show for pip's output: (packages found so far, text), one for each package and for the last step.

    `total` is how many packages there are at most.
    """
    names: set[str] = set()
    name = ""
    for line in lines:
        if (found := FOUND.match(line)) is not None:
            name = found["name"]
            names.add(name.lower().replace("_", "-"))
            yield len(names), f"package {len(names)} of about {max(total, len(names))}: {name}"
        elif (download := DOWNLOAD.match(line)) is not None:
            yield len(names), f"package {len(names)} of about {max(total, len(names))}: {name}, {download['size']}"
        elif line.startswith(INSTALLING):
            count = len(line.removeprefix(INSTALLING).split(","))
            yield count, f"unpacking {count} packages"


def show(found: Iterable[tuple[int, str]], terminal: bool) -> None:
    """Print reports: over one another on a terminal, else a few of them, each on its own line."""
    told = -LINES_BETWEEN_REPORTS
    for count, text in found:
        if terminal:
            print(f"\r\033[K{text}", end="", flush=True)
        elif count >= told + LINES_BETWEEN_REPORTS or text.startswith("unpacking"):
            told = count
            print(text, flush=True)
    if terminal:
        print("\r\033[K", end="", flush=True)


def main() -> int:
    """Run the command; print all that it said if it fails."""
    pins, command = Path(sys.argv[1]), sys.argv[2:]
    total = len(pins.read_text().splitlines())
    began = time.monotonic()
    kept: list[str] = []

    def lines(output: Iterable[str]) -> Iterator[str]:
        for line in output:
            kept.append(line)
            yield line

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None, "it is a pipe"
        show(reports(lines(pip.stdout), total), sys.stdout.isatty())
    if pip.returncode:
        sys.stderr.writelines(kept)
    else:
        print(f"installed in {time.monotonic() - began:.0f} s")
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main())
