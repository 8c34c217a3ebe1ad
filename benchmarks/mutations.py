"""How many random seeds it takes until the simulator notices each deliberate break of the protocol.

    python benchmarks/mutations.py [--seeds-max 600] [--workers 2] [--only TEXT]

Prints a line a break: the invariant that it belongs to, how many seeds it took, and what was seen. An error that a
broken machine raises has been noticed too, and says so. A `*` marks breaks whose scenarios are drawn in part only.
Exit code 1 if a break was not noticed, not tried, or does not fit the code that it breaks any more.
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "simulation"))
BROKEN: dict[str, Any] = importlib.import_module("broken").BROKEN
"""The breaks lie beside the tests that use them."""


_MISFITS = (TypeError, AttributeError, NameError, ImportError)
"""What a break raises when the function that it replaces has changed: it proves nothing then."""


@dataclass(frozen=True, slots=True)
class _Finding:
    """What came of one break."""

    rule: str
    seeds: int
    took_s: float
    seen: str | None
    raised: bool = False
    """Whether a machine raised an error before the oracle saw anything."""
    misfit: str | None = None
    """The error of a break that does not fit the code any more."""


def main() -> int:
    """Try every break; returns the exit code."""
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
    """Seeds until a break is noticed."""
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
