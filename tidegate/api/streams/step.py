"""`Step` describes the operator that a method of a stream adds to the program.

A step may have resources, so that each of its subtasks gets a separate slot, or a slot sharing group, or neither
(`docs/placement.md`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import pyarrow as pa

from tidegate.actors.graph.resources import Resources
from tidegate.api.name_checks import check_name
from tidegate.api.streams.changelog_mode import ChangelogMode
from tidegate.connectors.committing_sink import CommittingSink
from tidegate.connectors.sink import Sink
from tidegate.operators.functions.async_map import AsyncFunction
from tidegate.operators.local_aggregation import LocalAggregation
from tidegate.operators.operator import OperatorFactory
from tidegate.operators.watermarks.watermark_generator import EventTimeCheck
from tidegate.protocol.edges import OutputTag
from tidegate.storage.checkpoints.metadata import StateMeaning
from tidegate.storage.errors import ConfigurationError


class SlotOptions(TypedDict, total=False):
    """The slots of a step: the resources that each of its subtasks reserves, as in `ray.remote`, or its slot sharing
    group.
    """

    num_cpus: float
    """CPUs that each subtask reserves. 1 if only other resources are given."""
    num_gpus: float
    """GPUs that each subtask reserves. Fractions are allowed. The process of a subtask sees only these GPUs."""
    resources: Mapping[str, float]
    """Other Ray resources that each subtask reserves: amounts by name."""
    slot_sharing_group: str
    """Name of the slot sharing group.

    Steps of one group share slots. By default a step is in the group of its inputs, or in "default".
    """


@dataclass(frozen=True, slots=True)
class StepOptions:
    """The name, uid and placement of a step: the parameters that many methods of streams have in common."""

    name: str
    uid: str | None = None
    parallelism: int | None = None
    batch_rows: tuple[int, int] | None = None
    """The smallest and the largest number of rows that the function gets in one call, or None for the default."""
    slot: SlotOptions | None = None

    def part(self, what: str, parallelism: int | None) -> StepOptions:
        """Returns the options of an additional step that the same method adds, such as a step before an exchange."""
        return StepOptions(f"{self.name} {what}", None if self.uid is None else f"{self.uid}-{what}", parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Describes an operator to add after a stream, for `Stream._then`."""

    operator: OperatorFactory
    schema: pa.Schema | None
    """The columns of the result, or None if they are known only when the job runs."""
    options: StepOptions
    changelog: ChangelogMode | None = None
    """How rows of the result replace or retract each other.

    If it is None, the operator cannot follow a stream of updates.
    """
    takes_changes: bool = False
    """True if the operator supports streams of changes as input. Its inputs are then partitioned by key."""
    deletes: bool = False
    """True if the operator writes to a target from which it deletes retracted rows.

    Each change must then arrive exactly once.
    """
    side_outputs: Sequence[OutputTag] = ()
    meaning: StateMeaning | None = None
    combines: LocalAggregation | None = None
    """How senders combine rows before the exchange in front of the operator, or None if they do not."""
    table: str | None = None
    """The table that the operator writes to: its URL, or a placeholder that the job id completes."""
    sink: Sink | None = None
    committing: CommittingSink | None = None
    """The sink that the operator writes to, if the sink commits in its tasks, else None."""
    calls: AsyncFunction | None = None
    own: Collection[str] = ()
    """Names of result columns with reserved names, which tidegate itself adds."""
    computes: str = ""
    """The canonical text of the expressions that the operator evaluates, which a restore compares with the
    checkpoint.
    """
    key_texts: Mapping[str, str] = field(default_factory=dict)
    """Canonical texts of the expressions that compute key columns, by column."""
    retimes: str | None = None
    """Name of the event-time column, if the operator may change its values, else None."""
    event_time_check: EventTimeCheck | None = None


def slot_of(step: str, slot: SlotOptions | None) -> tuple[Resources | None, str | None]:
    """Returns the resources and the slot sharing group of a step. Each is None if it is not set.

    Raises ConfigurationError for wrong amounts, for an invalid group name, and if both are given. Raises TypeError for
    unknown keywords.
    """
    if slot is None:
        return None, None
    if unknown := sorted(set(slot) - SlotOptions.__optional_keys__):
        raise TypeError(f"{step}: unexpected keyword argument {unknown[0]!r}; remove it, or correct its name")
    resources = Resources.of(step, slot.get("num_cpus"), slot.get("num_gpus"), slot.get("resources"))
    group = checked_group(step, slot.get("slot_sharing_group"))
    if resources is not None and group is not None:
        named = [name for name in ("num_cpus", "num_gpus", "resources") if slot.get(name) is not None]
        raise ConfigurationError(
            f"{step}: slot_sharing_group={group!r} and {', '.join(f'{name}=' for name in named)} exclude each other: a "
            "step with resources shares its slots with no other step. Remove one of them"
        )
    return resources, group


def checked_group(step: str, group: str | None) -> str | None:
    """Returns the slot sharing group of a step, after checking it. Raises ConfigurationError if it cannot be a name."""
    if group is not None:
        check_name(f"{step}(slot_sharing_group=)", "a name", group)
    return group
