"""`JobSettings`: what `execute` may be told of a job beside its checkpoints and restarts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tidegate.api.config.sections import setting_values as of
from tidegate.api.config.sections.section import Section
from tidegate.api.config.sections.setting_names import KEYS
from tidegate.operators.local_aggregation.combining_rule import CombiningMode


class JobSettings(Section):
    """Each is an argument of `execute`, too, which counts more."""

    name: Annotated[str | None, BeforeValidator(of.name)] = Field(default=None, alias=KEYS["name"][0])
    """The job's name, where `execute` gives none."""

    restore: Annotated[str | None, BeforeValidator(of.restore)] = Field(default=None, alias=KEYS["restore"][0])
    """Where the job starts: a path, `latest` or `latest_or_fresh`. None: at the beginning."""

    allow_non_restored_state: Annotated[bool, BeforeValidator(of.switch)] = Field(
        default=False, alias=KEYS["allow_non_restored_state"][0]
    )
    """Whether state is left behind whose operator, aggregate or function's declaration is no longer in the program."""

    detached: Annotated[bool, BeforeValidator(of.switch)] = Field(default=False, alias=KEYS["detached"][0])
    """Whether the job continues when its driver ends. On Ray alone."""

    progress: Annotated[Literal["auto", "bar", "lines", "off"], BeforeValidator(of.progress)] = Field(
        default="auto", alias=KEYS["progress"][0]
    )
    """How the progress of a job that ends by itself is shown: `auto` is a bar in a terminal, else lines."""

    local_aggregation: Annotated[CombiningMode, BeforeValidator(of.local_aggregation)] = Field(
        default="auto", alias=KEYS["local_aggregation"][0]
    )
    """Whether rows of a batch are combined by key before they are sent to an aggregate: `auto` where that pays, `on`
    wherever the result is the same, or `off`. Flink's words are `AUTO`, `TWO_PHASE` and `ONE_PHASE`."""

    slot_sharing: Annotated[bool, BeforeValidator(of.switch)] = Field(default=True, alias=KEYS["slot_sharing"][0])
    """Whether the subtasks of a slot share one process. With `false` each has a process of its own in that slot."""
