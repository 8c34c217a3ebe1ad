"""The `tidegate` command.

The commands are recovery's; this module knows the whole house, so it imports the modules whose wire types
appear in event logs, without which an entry could not be decoded.
"""

from __future__ import annotations

import tidegate.actors.coordinator.events
import tidegate.actors.coordinator.instructions
import tidegate.actors.coordinator.state  # noqa: F401 (imported for the wire types that they register)
from tidegate.recovery.cli import app

__all__ = ["app"]
