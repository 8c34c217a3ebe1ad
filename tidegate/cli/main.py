"""The `tidegate` command, whose entry point is `main`.

It puts the commands together, which are in `tidegate/cli/`. A command imports what it needs when it runs, so that
`--help` is fast.
"""

from __future__ import annotations

from tidegate.cli.checkpoints_command import app, checkpoints_app, state_app
from tidegate.cli.config_command import config_app
from tidegate.cli.doctor_command import doctor_command, main_options
from tidegate.cli.events_command import (
    events_command,
    explain_command,
    read_command,
    relocate_command,
    write_command,
)
from tidegate.cli.jobs_command import job_app, jobs_command
from tidegate.cli.run_command import run_command
from tidegate.cli.simulate_command import simulate_command
from tidegate.cli.tables_command import vacuum_command
from tidegate.storage.errors import TidegateError

__all__ = ["app", "main"]

app.callback()(main_options)
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
    """Run the command line. A TidegateError ends it with one sentence, never with a traceback."""
    try:
        app()
    except TidegateError as error:
        raise SystemExit(f"tidegate: {error}") from error
