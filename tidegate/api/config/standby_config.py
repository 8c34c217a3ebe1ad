"""How many spare processes an environment keeps for each of its jobs."""

from __future__ import annotations

from tidegate.actors.hosts.process_settings import Standbys
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.setting_names import titled
from tidegate.api.config.setting_values import spare_processes
from tidegate.storage.errors import ConfigurationError


def standbys_of(given: object, config: CheckpointConfig) -> Standbys:
    """What the environment was given in Python; None: "auto". A number in its configuration comes with the job.

    Raises ConfigurationError for what is no number, and where both say something.
    """
    if given is None:
        return "auto"
    if config.standbys is not None:
        raise ConfigurationError(
            f"standbys={given!r} and {titled('standbys')} in config= are one setting; give it once"
        )
    return spare_processes(given, "standbys")
