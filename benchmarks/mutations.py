"""Measures how many random seeds it takes until the simulator notices each deliberate break of the protocol.

    python benchmarks/mutations.py [--seeds-max 600] [--workers 2] [--only TEXT]

Prints a line for each break: its invariant, the number of seeds, and the observation. An error that a broken machine
raises counts as noticed, and is shown as such. A `*` marks breaks for which some values of the scenario are fixed. Exit
code 1 if a break was not noticed, not tried, or no longer fits the code that it patches.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(_TESTS / "simulation"), str(_TESTS / "support")]
BROKEN: dict[str, Any] = importlib.import_module("broken").BROKEN
"""Breaks by their rule. They are defined next to the tests that use some of them."""


_MISFITS = (TypeError, AttributeError, NameError, ImportError)
"""Errors of a break whose patched function has changed. Such a break proves nothing."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """The result of one break."""

    rule: str
    seeds: int
    took_s: float
    seen: str | None
    raised: bool = False
    """True if a machine raised an error before the oracle noticed the break."""
    misfit: str | None = None
    """Error of a break that no longer fits the code, or None."""


def main() -> int:
    """Tries every break and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds-max", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    started = time.monotonic()
    wanted = [(rule, options.seeds_max) for rule in BROKEN if options.only in rule]
    unnoticed = raised = tried = 0
    print(f"{'inv.':>4} {'seeds':>6} {'s':>6}  {'break':<56} seen")
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for found in pool.imap(_try, wanted, 1):
            tried += 1
            unnoticed += found.seen is None
            raised += found.raised
            name = found.rule + (" *" if BROKEN[found.rule].fixed else "")
            print(
                f"{BROKEN[found.rule].invariant:>4} {found.seeds:>6} {found.took_s:>6.1f}  {name:<56} "
                f"{(found.seen or found.misfit or 'NOTHING')[:110]}",
                flush=True,
            )
    print(
        f"{tried} of {len(wanted)} breaks tried, {unnoticed} not noticed, {raised} noticed by an error, "
        f"{time.monotonic() - started:,.0f} s"
    )
    return 1 if unnoticed or tried < len(wanted) else 0


def _try(task: tuple[str, int]) -> _Finding:
    """Runs seeds until a break is noticed."""
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    rule, seeds_max = task
    started = time.monotonic()
    seen = None
    seeds = 0
    while seen is None and seeds < seeds_max:
        seeds += 1
        try:
            seen = BROKEN[rule].simulate(seeds - 1).violation
        except _MISFITS as error:
            return _Finding(rule, seeds, time.monotonic() - started, None, misfit=repr(error))
        except Exception as error:  # noqa: BLE001 (one break must not end the others: a StopIteration would, silently)
            return _Finding(rule, seeds, time.monotonic() - started, f"raises {error!r}", raised=True)
    return _Finding(rule, seeds, time.monotonic() - started, seen)


if __name__ == "__main__":
    sys.exit(main())
