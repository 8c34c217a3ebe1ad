"""The spare processes of an environment: those of each of its jobs that names none itself."""

from __future__ import annotations

from typing import cast

from tidegate.actors.hosts.process_settings import Standbys
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.setting_names import titled
from tidegate.api.config.setting_values import spare_processes
from tidegate.storage.errors import ConfigurationError


def standbys_of(given: object, config: CheckpointConfig) -> Standbys | None:
    """What the environment was given in Python; None: nothing.

    Raises ConfigurationError for what is no number, and where its configuration says something, too.
    """
    if given is None:
        return None
    if config.standbys is not None:
        raise ConfigurationError(
            f"standbys={given!r} and {titled('standbys')} in config= are one setting; give it once"
        )
    return spare_processes(given, "standbys")


def with_standbys(config: CheckpointConfig, standbys: Standbys | None) -> CheckpointConfig:
    """The settings of a job in such an environment. ConfigurationError where they contradict it."""
    if standbys is None or config.standbys is not None:
        return config
    given = cast("dict[str, object]", config.model_dump(exclude_unset=True))
    return CheckpointConfig.model_validate(given | {"standbys": standbys})
