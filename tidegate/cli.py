"""The `tidegate` command.

Most commands are recovery's; this module knows the whole house, so it adds `simulate`, and imports the modules whose
wire types appear in event logs, without which an entry could not be decoded.
"""

from __future__ import annotations

import tidegate.actors.coordinator.messages.events
import tidegate.actors.coordinator.messages.instructions
import tidegate.actors.coordinator.state.coordinator_state  # noqa: F401 (imported for the wire types that they register)
from tidegate.recovery.command import app
from tidegate.simulate_cli import simulate_command
from tidegate.storage.errors import TidegateError

__all__ = ["app", "main"]

app.command("simulate")(simulate_command)


def main() -> None:
    """Entry point: an error of ours is shown as one sentence, never as a traceback."""
    try:
        app()
    except TidegateError as error:
        raise SystemExit(f"tidegate: {error}") from error
