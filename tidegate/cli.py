"""The `tidegate` command.

Most commands are recovery's; this module adds those that need the rooms above. Commands import what they need when
they run, so that `--help` is there at once.
"""

from __future__ import annotations

from tidegate.events_cli import events_command, explain_command, read_command, relocate_command, write_command
from tidegate.jobs_cli import job_app, jobs_command
from tidegate.recovery.command import app, checkpoints_app, state_app
from tidegate.simulate_cli import simulate_command
from tidegate.storage.errors import TidegateError

__all__ = ["app", "main"]

app.command("jobs")(jobs_command)
app.add_typer(job_app, name="job", no_args_is_help=True)
app.command("events")(events_command)
checkpoints_app.command("explain")(explain_command)
checkpoints_app.command("relocate")(relocate_command)
state_app.command("read")(read_command)
state_app.command("write")(write_command)
app.command("simulate")(simulate_command)


def main() -> None:
    """Entry point: an error of ours is shown as one sentence, never as a traceback."""
    try:
        app()
    except TidegateError as error:
        raise SystemExit(f"tidegate: {error}") from error
