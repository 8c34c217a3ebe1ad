"""The `tidegate` command, whose entry point is `main`.

It combines the command groups. `terminal.py` has helpers that all groups use.
"""

from __future__ import annotations

import typer

from tidegate.cli.checkpoints_command import checkpoints_app
from tidegate.cli.doctor_command import doctor_command, main_options
from tidegate.cli.events_command import (
    events_command,
    explain_command,
    read_command,
    relocate_command,
    write_command,
)
from tidegate.cli.jobs_command import job_app, jobs_command
from tidegate.cli.run_command import config_app, run_command
from tidegate.cli.simulate_command import simulate_command
from tidegate.cli.tables_command import vacuum_command
from tidegate.storage.errors import TidegateError

__all__ = ["app", "main"]

app = typer.Typer(
    help="Look at tidegate's checkpoints and event logs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Boxes around the help would cost more time than everything else.
)
app.callback()(main_options)
app.add_typer(checkpoints_app, name="checkpoints", no_args_is_help=True)
state_app = typer.Typer(help="The state in completed checkpoints and savepoints, as data.")
app.add_typer(state_app, name="state", no_args_is_help=True)
app.command("run")(run_command)
app.command("doctor")(doctor_command)
app.add_typer(config_app, name="config", no_args_is_help=True)
app.command("jobs")(jobs_command)
app.add_typer(job_app, name="job", no_args_is_help=True)
app.command("events")(events_command)
checkpoints_app.command("explain")(explain_command)
checkpoints_app.command("relocate")(relocate_command)
state_app.command("read")(read_command)
state_app.command("write")(write_command)
app.command("vacuum")(vacuum_command)
app.command("simulate")(simulate_command)


def main() -> None:
    """Runs the command line. After a TidegateError it ends with one sentence, without a traceback."""
    try:
        app()
    except TidegateError as error:
        raise SystemExit(f"tidegate: {error}") from error
