"""The settings of a job that are in effect, as text by key, for people who look at it from outside."""

from __future__ import annotations

from tidegate.api.config.sections.checkpoint_config import CheckpointConfig
from tidegate.api.config.sections.restart_config import keys_of
from tidegate.api.config.sections.setting_names import setting_keys
from tidegate.api.config.settings_table import restart_text, value_text
from tidegate.recovery.restart_strategy import RestartStrategy


def shown_settings(checkpoints: CheckpointConfig, restart: RestartStrategy) -> dict[str, str]:
    """Every setting by the newest of its keys, with its value as YAML has it; defaults included."""
    shown = {
        setting_keys(name)[-1]: value_text(CheckpointConfig, name, getattr(checkpoints, name))
        for name in CheckpointConfig.model_fields
    }
    return shown | {key: restart_text(key, value) for key, value in keys_of(restart).items()}
