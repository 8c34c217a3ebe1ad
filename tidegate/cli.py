"""The `tidegate` command, whose entry point is `main`.

Most commands are in `recovery/commands/command.py`. This module adds those that need the rooms above recovery. A
command imports what it needs when it runs, so that `--help` is fast.
"""

from __future__ import annotations

from tidegate.config_cli import config_app
from tidegate.events_cli import events_command, explain_command, read_command, relocate_command, write_command
from tidegate.jobs_cli import job_app, jobs_command
from tidegate.recovery.commands.command import app, checkpoints_app, state_app
from tidegate.run_cli import run_command
from tidegate.simulate_cli import simulate_command
from tidegate.storage.errors import TidegateError
from tidegate.tables_cli import vacuum_command

__all__ = ["app", "main"]

app.command("run")(run_command)
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
