"""The command `tidegate simulate`: runs a pipeline under faults with each seed of a range."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from tidegate.cli.seed_runs import Run
    from tidegate.testing import Faults


def simulate_command(
    pipeline: Annotated[str, typer.Argument(help="MODULE:FUNC or FILE.py:FUNC; the function gets an environment")],
    seeds: Annotated[str, typer.Option(help="a seed, or a range FIRST..LAST")] = "0..99",
    workers: Annotated[int, typer.Option(help="number of processes; 0 starts one for each core")] = 1,
    crash: Annotated[float, typer.Option(help="probability that a task's process dies, per element")] = 0.01,
    coordinator_crash: Annotated[float, typer.Option(help="probability that the coordinator dies, per message")] = 0.01,
    storage: Annotated[float, typer.Option(help="probability that a storage operation fails")] = 0.05,
    slow: Annotated[float, typer.Option(help="probability that a storage operation is slow")] = 0.05,
    duplicate: Annotated[float, typer.Option(help="probability that a message arrives twice")] = 0.03,
    drop: Annotated[float, typer.Option(help="probability that a message is lost")] = 0.003,
    damage: Annotated[float, typer.Option(help="probability that a completed checkpoint is damaged")] = 0.0,
    delay: Annotated[str, typer.Option(help="how long messages take")] = "0ms..100ms",
    parallelism: Annotated[int, typer.Option(help="parallelism of the environment")] = 2,
    trace: Annotated[int, typer.Option(help="lines of history to show of a seed that fails")] = 60,
) -> None:
    """Run a pipeline under seeded faults; exit code 1 if an invariant is violated.

    The exit code is also 1 if the pipeline's output differs without any fault, because it depends on the order of rows.

    Ends with a table of what the seeds exercised. The first violation is shown with its messages.
    """
    # Imported here, so that `--help` is fast.
    from tidegate.cli.seed_runs import parse_range, run_seeds
    from tidegate.testing import Faults

    faults = Faults(
        crash=crash,
        coordinator_crash=coordinator_crash,
        storage=storage,
        slow=slow,
        duplicate=duplicate,
        drop=drop,
        damage=damage,
        delay=delay,
    )
    make_run = partial(_make_run, pipeline, faults, parallelism)
    failed = run_seeds(
        make_run, parse_range(seeds), workers, trace, lambda seed: f"tidegate simulate {pipeline} --seeds {seed}"
    )
    if failed:
        raise typer.Exit(1)


def _make_run(pipeline: str, faults: Faults, parallelism: int) -> Run:
    from tidegate.cli.run_command import load_function
    from tidegate.testing import SimulatedPipeline

    simulated = SimulatedPipeline(load_function(pipeline), parallelism=parallelism)
    return lambda seed: simulated.run(seed, faults)
