"""Runs random jobs in the simulator, one for each seed of a range. Exit code 1 if an invariant is violated.

    make simulate ARGS="--seeds 0..999 --workers 2"

Ends with a table of what the seeds exercised. The first violation is shown with its messages.
"""

from __future__ import annotations

import argparse
import sys

from random_jobs.ledger_topologies import ledger_run, slot_run
from random_jobs.scenarios import random_run
from tidegate.cli.seed_runs import parse_range, run_seeds
from tidegate.storage.errors import ConfigurationError

_RUNS = {"random": random_run, "ledger": ledger_run, "slot": slot_run}


def main() -> int:
    """Runs the seeds and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="make simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0..99", help="a seed, or a range FIRST..LAST")
    parser.add_argument(
        "--scenarios",
        choices=_RUNS,
        default="random",
        help="ledger: jobs with a sink that commits in its tasks; slot: they also read a replication slot",
    )
    parser.add_argument("--workers", type=int, default=1, help="number of processes; 0 starts one for each core")
    parser.add_argument("--trace", type=int, default=60, help="lines of history to show of a seed that fails")
    options = parser.parse_args()
    try:
        seeds = parse_range(options.seeds)
    except ConfigurationError as error:
        parser.error(str(error))
    kind = options.scenarios
    given = "" if kind == "random" else f"--scenarios {kind} "
    failed = run_seeds(
        _RUNS[kind],
        seeds,
        options.workers,
        options.trace,
        lambda seed: f'make simulate ARGS="{given}--seeds {seed}"',
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
