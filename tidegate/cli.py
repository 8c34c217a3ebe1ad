"""The `tidegate` command.

Most commands are recovery's. This module knows the whole house: it adds `simulate`, and names the modules whose classes
appear in event logs. Commands import what they need when they run, so that `--help` is there at once.
"""

from __future__ import annotations

from tidegate.recovery.command import app, wire_modules
from tidegate.simulate_cli import simulate_command
from tidegate.storage.errors import TidegateError

__all__ = ["app", "main"]

app.command("simulate")(simulate_command)
wire_modules += [
    "tidegate.actors.coordinator.messages.events",
    "tidegate.actors.coordinator.messages.instructions",
    "tidegate.actors.coordinator.state.coordinator_state",
]


def main() -> None:
    """Entry point: an error of ours is shown as one sentence, never as a traceback."""
    try:
        app()
    except TidegateError as error:
        raise SystemExit(f"tidegate: {error}") from error
