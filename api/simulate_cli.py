"""`tidegate simulate`: a range of seeds over one pipeline."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from tidegate.storage.errors import ConfigurationError
from tidegate.testing import Faults, simulate


def simulate_command(
    pipeline: Annotated[str, typer.Argument(help="MODULE:FUNC or FILE.py:FUNC; the function gets an environment")],
    seeds: Annotated[str, typer.Option(help="a seed, or a range FIRST..LAST")] = "0..99",
    crash: Annotated[float, typer.Option(help="a task's process dies, per element")] = 0.01,
    coordinator_crash: Annotated[float, typer.Option(help="the coordinator dies, per message")] = 0.01,
    storage: Annotated[float, typer.Option(help="a storage operation fails")] = 0.05,
    slow: Annotated[float, typer.Option(help="a storage operation is slow")] = 0.05,
    duplicate: Annotated[float, typer.Option(help="a message comes twice")] = 0.03,
    drop: Annotated[float, typer.Option(help="a message is lost")] = 0.003,
    delay: Annotated[str, typer.Option(help="how long messages take")] = "0ms..100ms",
    parallelism: Annotated[int, typer.Option(help="of the environment")] = 2,
    trace: Annotated[int, typer.Option(help="lines of history to show of a seed that fails")] = 60,
) -> None:
    """Run a pipeline under seeded faults; exit code 1 if an invariant is violated, with the seed that shows it."""
    console = Console()
    first, last = _range(seeds)
    build = _load(pipeline)
    faults = Faults(
        crash=crash,
        coordinator_crash=coordinator_crash,
        storage=storage,
        slow=slow,
        duplicate=duplicate,
        drop=drop,
        delay=delay,
    )
    # What a simulated coordinator warns of is what the simulation does to it on purpose.
    logging.getLogger("tidegate").setLevel(logging.CRITICAL)
    totals = {"checkpoints": 0, "restarts": 0, "task crashes": 0, "coordinator crashes": 0}
    violated = []
    for seed in track(range(first, last + 1), description=f"seeds {first}..{last}", console=console):
        report = simulate(build, seed=seed, faults=faults, parallelism=parallelism)
        totals["checkpoints"] += report.checkpoints
        totals["restarts"] += report.restarts
        totals["task crashes"] += report.crashes
        totals["coordinator crashes"] += report.coordinator_crashes
        if not report.ok:
            violated.append(seed)
            console.print(f"[bold red]{report}", highlight=False)
            if len(violated) == 1:
                console.print("\n".join(report.trace[-trace:]), highlight=False, markup=False)
    summary = ", ".join(f"{count:,} {what}" for what, count in totals.items())
    console.print(f"{last - first + 1} seeds, {len(violated)} violations; {summary}")
    if violated:
        console.print(f"replay with: tidegate simulate {pipeline} --seeds {violated[0]}")
        raise typer.Exit(1)


def _range(text: str) -> tuple[int, int]:
    first, separator, last = text.partition("..")
    try:
        bounds = int(first), int(last) if separator else int(first)
    except ValueError:
        raise ConfigurationError(f"--seeds {text!r}: write a seed such as 7, or a range such as 0..999") from None
    if bounds[0] > bounds[1]:
        raise ConfigurationError(f"--seeds {text!r}: the range is empty")
    return bounds


def _load(reference: str) -> Callable[..., Any]:
    place, separator, name = reference.rpartition(":")
    if not separator:
        raise ConfigurationError(f"{reference!r}: write MODULE:FUNC or FILE.py:FUNC")
    if place.endswith(".py"):
        path = Path(place).resolve()
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ConfigurationError(f"{place} is not there, or no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"there is no module {place!r} (from {reference!r}): {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigurationError(f"{place} has no function {name!r}")
    found: Callable[..., Any] = function
    return found
