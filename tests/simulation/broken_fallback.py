"""Coordinators that break a rule of passing over damaged checkpoints."""

from __future__ import annotations

from dataclasses import replace

from tidegate.actors.coordinator import events as co
from tidegate.actors.coordinator import instructions as do
from tidegate.actors.drivers.coordinator_driver import CoordinatorDriver
from tidegate.testing import Protocol


class ForgetsTables(CoordinatorDriver):
    """Breaks: tables are taken back to the restored checkpoint. Here that is only reported."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        if isinstance(instruction, do.TakeTablesBack):
            self._port.run_io(lambda: co.TablesTakenBack(self._port.now_ms(), instruction.attempt))
            return
        super().perform(instruction)


class TriesAgain(CoordinatorDriver):
    """Breaks: what was passed over is not tried again. Here the next attempt starts from it all the same."""

    def perform(self, instruction: do.CoordinatorInstruction) -> None:
        damaged = self.machine.state.damaged
        if isinstance(instruction, do.DeployAttempt) and instruction.restore is not None and damaged:
            restore = replace(instruction.restore, checkpoint_id=damaged[-1].checkpoint_id)
            instruction = replace(instruction, restore=restore)
        super().perform(instruction)


class PassesOverTooMuch(CoordinatorDriver):
    """Breaks: only damage is a reason to pass over a checkpoint. Here a storage that does not answer is one, too."""

    def handle(self, event: co.CoordinatorEvent) -> None:
        restore, state = self.machine.deployer.restore_point() if self.machine.state.spec else None, self.machine.state
        if isinstance(event, co.RestoreDelayed) and restore is not None and len(state.completed) > 1:
            event = co.CheckpointDamaged(event.at_ms, event.attempt, restore.checkpoint_id, "no answer")
        super().handle(event)


FALLBACK_BREAKS: dict[str, tuple[int, Protocol]] = {
    "damage: the tables are not taken back": (6, Protocol(coordinator=ForgetsTables)),
    "damage: what was passed over is tried again": (7, Protocol(coordinator=TriesAgain)),
    "damage: a storage that does not answer is a reason to pass over": (7, Protocol(coordinator=PassesOverTooMuch)),
}
"""Each rule with the invariant that it belongs to."""

FALLBACK_FIXED: dict[str, dict[str, str | int]] = {
    rule: {"faults": "damage", "retained": 3} for rule in FALLBACK_BREAKS
}
"""Fixed values with which checkpoints are damaged and restored."""
