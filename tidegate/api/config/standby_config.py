"""The `standbys=` of an environment: how many spare processes a job has that does not say so itself."""

from __future__ import annotations

from typing import cast

from tidegate.actors.hosts.process_settings import Standbys
from tidegate.api.config.checkpoint_config import CheckpointConfig
from tidegate.api.config.setting_names import titled
from tidegate.api.config.setting_values import spare_processes
from tidegate.storage.errors import ConfigurationError


def standbys_of(given: object, config: CheckpointConfig) -> Standbys | None:
    """The `standbys=` that an environment was given, checked; None if it was given none.

    Raises ConfigurationError for a wrong value, and if the environment's `config=` has the setting, too.
    """
    if given is None:
        return None
    if config.standbys is not None:
        raise ConfigurationError(
            f"standbys={given!r} and {titled('standbys')} in config= are one setting; give it once"
        )
    return spare_processes(given, "standbys")


def with_standbys(config: CheckpointConfig, standbys: Standbys | None) -> CheckpointConfig:
    """The settings of a job in such an environment. ConfigurationError if they contradict its standbys."""
    if standbys is None or config.standbys is not None:
        return config
    given = cast("dict[str, object]", config.model_dump(exclude_unset=True))
    return CheckpointConfig.model_validate(given | {"standbys": standbys})
