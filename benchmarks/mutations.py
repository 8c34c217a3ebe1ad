"""How many random seeds it takes until the simulator notices each deliberate break of the protocol.

    python benchmarks/mutations.py [--seeds-max 400] [--only TEXT]

Prints a line a break: the invariant that it belongs to, the first seed that shows it, and what was seen. Exit code 1 if
a break was not noticed.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from pathlib import Path

from tidegate.testing import Protocol, simulate_random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "simulation"))
BROKEN: dict[str, tuple[int, Protocol]] = importlib.import_module("broken").BROKEN
"""The breaks lie beside the tests that use them."""


def main() -> int:
    """Try every break; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds-max", type=int, default=400)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    unnoticed = 0
    print(f"{'inv.':>4} {'seeds':>6} {'s':>6}  {'break':<56} seen")
    for rule, (invariant, protocol) in BROKEN.items():
        if options.only not in rule:
            continue
        started = time.monotonic()
        seen = None
        seeds = 0
        while seen is None and seeds < options.seeds_max:
            report = simulate_random(seeds, protocol=protocol, shrink=False)
            seen = report.violation
            seeds += 1
        unnoticed += seen is None
        took_s = time.monotonic() - started
        print(f"{invariant:>4} {seeds:>6} {took_s:>6.1f}  {rule:<56} {(seen or 'NOTHING')[:110]}", flush=True)
    print(f"{len(BROKEN)} breaks, {unnoticed} not noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
