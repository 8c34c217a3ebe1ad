"""Barrier handlers driven by short scripts: what is told to them, and what they answer, as text.

Steps: `a1` barrier 1 is taken from channel a; `a!1` it has arrived there; `a~1` a cancel barrier is taken; `a$` the
channel has ended; `*1` the coordinator triggers; `~1` it aborts; `@7` the time is 7 ms from now on; `T` the timer.
A barrier is aligned; a `u` behind its number makes it unaligned, `f` forced aligned, `t` aligned with a 100 ms timeout.

Answers: `-` nothing; `x1` given up, with the reason in brackets; `s1` snapshot (`s1u`: unaligned); `T100` a timer.
"""

from __future__ import annotations

import re

from tidegate.actors.task.barrier_handler import BarrierHandler, Outcome
from tidegate.protocol.identity import ChannelId
from tidegate.protocol.stream_elements import Alignment, Barrier, BarrierOptions
from tidegate.storage.ids import CheckpointId, SubtaskIndex

TIMEOUT_MS = 100
A, B, C, D = (ChannelId(0, SubtaskIndex(i), SubtaskIndex(0)) for i in range(4))
NAMES = {"a": A, "b": B, "c": C, "d": D}

_OPTIONS = {
    "": BarrierOptions(),
    "u": BarrierOptions(Alignment.UNALIGNED),
    "f": BarrierOptions(Alignment.FORCED_ALIGNED),
    "t": BarrierOptions(Alignment.ALIGNED, TIMEOUT_MS),
}
_STEP = re.compile(r"(?P<channel>[a-d]?)(?P<what>[!~*$@T]?)(?P<number>\d*)(?P<option>[uft]?)")


def channels_of(names: str) -> frozenset[ChannelId]:
    """The channels of these names."""
    return frozenset(NAMES[name] for name in names)


def barrier(checkpoint_id: int, option: str = "") -> Barrier:
    """A barrier of this checkpoint, triggered at time 0."""
    return Barrier(CheckpointId(checkpoint_id), 0, _OPTIONS[option])


class Script:
    """One handler and the time."""

    def __init__(self, handler: BarrierHandler) -> None:
        self.handler = handler
        self.at_ms = 0

    def run(self, steps: str) -> list[str]:
        """The answers to these steps, one for each that is not a time."""
        return [text(self.step(step)) for step in steps.split() if not self._is_time(step)]

    def step(self, step: str) -> Outcome:
        """One step's outcome."""
        found = _STEP.fullmatch(step)
        assert found is not None, step
        what, n, option = found["what"], CheckpointId(int(found["number"] or 0)), found["option"]
        told = Barrier(n, 0, _OPTIONS[option])
        if not found["channel"]:
            if what == "T":
                return self.handler.timer(self.at_ms)
            return self.handler.abort(n) if what == "~" else self.handler.trigger(told, self.at_ms)
        channel = NAMES[found["channel"]]
        if what == "$":
            return self.handler.channel_ended(channel, self.at_ms)
        if what == "~":
            return self.handler.cancel_barrier(channel, n, self.at_ms)
        take_in = self.handler.announced if what == "!" else self.handler.barrier
        return take_in(channel, told, self.at_ms)

    def blocked(self, names: str) -> str:
        """Those of these channels that are blocked."""
        return "".join(name for name in names if self.handler.blocks(NAMES[name]))

    def _is_time(self, step: str) -> bool:
        if step.startswith("@"):
            self.at_ms = int(step[1:])
        return step.startswith("@")


def text(outcome: Outcome) -> str:
    """An outcome in the script's words."""
    parts = [f"x{n}" if reason is None else f"x{n}({reason.name})" for n, reason in outcome.cancelled]
    if outcome.snapshot is not None:
        suffix = "u" if outcome.snapshot.options.alignment is Alignment.UNALIGNED else ""
        parts.append(f"s{outcome.snapshot.checkpoint_id}{suffix}")
    if outcome.timer_at_ms is not None:
        parts.append(f"T{outcome.timer_at_ms}")
    return " ".join(parts) or "-"
