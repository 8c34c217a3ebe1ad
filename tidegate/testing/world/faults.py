"""`Faults`: which faults happen in a simulation, and how often."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.storage.argument_checks import check_whole, invalid_field
from tidegate.storage.errors import ConfigurationError
from tidegate.storage.units import parse_duration_ms

FAULT_KINDS = (
    "crash",
    "hang",
    "coordinator_crash",
    "storage",
    "slow",
    "duplicate",
    "drop",
    "damage",
    "node_loss",
    "cut",
    "restore_crash",
    "table_loss",
)
"""The fields of `Faults` that are probabilities."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities and ranges of the faults of a run.

    Faults happen only in the first `duration` of a run. After that the job must finish.

    Faults of processes:

    - crash: a process dies with all tasks of its slot, per element that one of them processes, at most `crashes_max`
      times in a run.
    - hang: a process stops and no longer answers, per element. It counts as a crash.
    - heartbeats: a process that does not answer for this long counts as hung. A coordinator that is cut off then
      considers all of its tasks as hung. None switches the check off, and nothing hangs.
    - restore_crash: a process dies while a task in it restores its state or waits for other tasks that do so, per I/O
      operation. It counts as a crash.
    - coordinator_crash: the coordinator dies or is cut off, per message to it and per entry of its log, at most
      `coordinator_crashes_max` times.

    Faults of nodes:

    - node_loss: the node of a process is lost with all processes on it, per element.
    - cut: the node is cut off from storage and from all other nodes, for a time within `cut_for`. Then it is connected
      again or lost. Both faults happen at most `nodes_max` times in a run.

    Faults of messages:

    - delay: how long a message takes, as "from..to".
    - duplicate, drop: a message on a channel, or a notification, arrives twice or not at all.

    Faults of storage:

    - storage: a storage operation fails. Half of the failed operations have taken effect nevertheless.
    - slow: an I/O operation takes up to `slow_by`.
    - slow_copies: the longest time for copying a savepoint into its own folder. None means as long as any I/O
      operation.
    - damage: a checkpoint is damaged after it has completed. One checkpoint from which the job can continue always
      stays undamaged, so nothing is damaged if only one is retained.
    - table_loss: the log of a table loses its newest entries, although storage had acknowledged them. This may happen
      before each commit and, for each table, between two jobs. The job must report it, or the table must be correct
      nevertheless.
    - outage: "from..to", the times after the start between which no storage operation succeeds, independent of
      `duration`.

    Others:

    - clock: how far the wall clock is set back after the first whole second, forward after the next one, and so on,
      while faults happen. The monotonic clock does not change. None: the wall clock is not set.
    - faults_max: the largest number of faults, whatever their probabilities are. Delays do not count. None means no
      limit.
    """

    crash: float = 0.0
    hang: float = 0.0
    coordinator_crash: float = 0.0
    storage: float = 0.0
    slow: float = 0.0
    duplicate: float = 0.0
    drop: float = 0.0
    damage: float = 0.0
    node_loss: float = 0.0
    cut: float = 0.0
    restore_crash: float = 0.0
    table_loss: float = 0.0
    cut_for: str = "50ms..3s"
    nodes_max: int = 3
    delay: str = "0ms..5ms"
    slow_by: str = "3s"
    slow_copies: str | None = None
    heartbeats: str | None = None
    duration: str = "30s"
    crashes_max: int = 8
    coordinator_crashes_max: int = 3
    outage: str | None = None
    clock: str | None = None
    faults_max: int | None = None

    def __post_init__(self) -> None:
        for name in FAULT_KINDS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
                raise invalid_field(self, name, "a probability, a number from 0 to 1")
        for name in ("delay", "cut_for", "outage"):
            _check_range(self, name, none=name == "outage")
        for name in ("slow_by", "duration"):
            parse_duration_ms(getattr(self, name), setting=f"Faults({name})")
        for name in ("slow_copies", "heartbeats", "clock"):
            if getattr(self, name) is not None:
                parse_duration_ms(getattr(self, name), setting=f"Faults({name})")
        check_whole(self, "nodes_max", "crashes_max", "coordinator_crashes_max", least=0)
        check_whole(self, "faults_max", least=0, none=True)
        if self.hang > 0 and self.heartbeats is None:
            raise ConfigurationError(
                f"Faults(hang={self.hang}): a process that hangs is never noticed without heartbeats. "
                'Give heartbeats too, such as heartbeats="2s"'
            )

    @property
    def delay_ms(self) -> tuple[int, int]:
        """Returns the shortest and the longest delay of a message, in ms."""
        return _range_ms("delay", self.delay)

    @property
    def cut_ms(self) -> tuple[int, int]:
        """Returns the shortest and the longest time in ms for which a node is cut off."""
        return _range_ms("cut_for", self.cut_for)

    @property
    def outage_ms(self) -> tuple[int, int]:
        """Returns start and end of the outage, in ms after the start of the run; (0, 0) if there is none."""
        return (0, 0) if self.outage is None else _range_ms("outage", self.outage)

    @property
    def clock_ms(self) -> int:
        """Returns how far the wall clock is set back, in ms; 0 if it is not set."""
        return 0 if self.clock is None else parse_duration_ms(self.clock)

    @property
    def slow_ms(self) -> int:
        """Returns the longest time of a slow I/O operation in ms."""
        return parse_duration_ms(self.slow_by)

    @property
    def copy_ms(self) -> int:
        """Returns the longest time for copying a savepoint, in ms; 0 if a copy takes as long as any I/O operation."""
        return 0 if self.slow_copies is None else parse_duration_ms(self.slow_copies)

    @property
    def silence_ms(self) -> int:
        """Returns the time in ms after which a process that does not answer counts as hung; 0 if it never does."""
        return 0 if self.heartbeats is None else parse_duration_ms(self.heartbeats)

    @property
    def duration_ms(self) -> int:
        """Returns for how many ms of virtual time faults happen."""
        return parse_duration_ms(self.duration)


def _check_range(faults: Faults, name: str, *, none: bool) -> None:
    value = getattr(faults, name)
    if value is None and none:
        return
    if not isinstance(value, str):
        raise invalid_field(faults, name, f"a range such as '0ms..2s'{', or None' if none else ''}")
    low_ms, high_ms = _range_ms(name, value)
    if low_ms > high_ms:
        raise invalid_field(faults, name, "the shorter time first, as in '0ms..2s'")


def _range_ms(name: str, value: str) -> tuple[int, int]:
    low, separator, high = value.partition("..")
    if not separator:
        raise ConfigurationError(f"Faults({name}={value!r}): write a range such as '0ms..2s'")
    if low.strip().isdigit():
        low += high.lstrip("0123456789. ")
    setting = f"Faults({name})"
    return parse_duration_ms(low, setting=setting), parse_duration_ms(high, setting=setting)
