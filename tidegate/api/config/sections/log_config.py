"""`LogConfig`: how the driver, the coordinator and the tasks of a job log."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tidegate.actors.drivers.log_lines import LogSettings, log_to, set_levels
from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import KEYS
from tidegate.storage.user_values import show_rows_in_logs

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class LogConfig(Section):
    """Nothing is set up where nobody says anything: then the driver logs as the program has it."""

    log_level: Annotated[Level | None, BeforeValidator(of.level)] = Field(default=None, alias=KEYS["log_level"][0])
    """Level of all of tidegate's loggers. None: WARNING in the driver and in tasks, INFO in a coordinator on Ray, whose
    lines are then in Ray's log files alone."""

    log_levels: Annotated[dict[str, Level], BeforeValidator(of.levels)] = Field(
        default_factory=dict, alias=KEYS["log_levels"][0]
    )
    """Levels of single loggers, by name: `log.levels.tidegate.actors.coordinator: DEBUG`."""

    log_format: Annotated[Literal["text", "json"], BeforeValidator(of.log_format)] = Field(
        default="text", alias=KEYS["log_format"][0]
    )
    """`json`: each line is an object with job, attempt, checkpoint, task and cause."""

    log_rows: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["log_rows"][0])
    """Whether values of rows, keys and records may be in logs, the event log, the job page and REST. Off, they have
    `<withheld>` instead, and only the error that the driver raises has the values. Passwords and keys are never
    shown."""

    @property
    def settings(self) -> LogSettings:
        """What the processes of a job are told."""
        return LogSettings(self.log_level, dict(self.log_levels), self.log_format == "json", self.log_rows)

    def set_up_driver(self) -> None:
        """Let this process log so, if anything was said.

        Where the program has handlers of its own, and the lines are to be text, they go there.
        """
        show_rows_in_logs(self.log_rows)
        if not self.given():
            return
        if self.log_format == "text" and logging.getLogger().hasHandlers():
            set_levels(self.settings)
            return
        log_to(sys.stderr, self.settings, "WARNING", {"process": "driver"})
