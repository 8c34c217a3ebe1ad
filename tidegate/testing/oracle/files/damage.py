"""Damages checkpoints after they have completed, as disks and people do: their metadata, or a state file of their own.

Rule: of the checkpoints that a restart could choose from, the newest or the one before it stays whole, so that the job
can go on.
"""

from __future__ import annotations

from tidegate.testing.oracle.files.files_at_rest import FilesOracle
from tidegate.testing.world.disk import SimulatedDisk

RETAINED_MIN = 2


class Damager:
    """Damages checkpoints of one job."""

    def __init__(self, disk: SimulatedDisk, files: FilesOracle, retained: int) -> None:
        self._disk = disk
        self._files = files
        self._retained = retained

    def completed(self, number: int) -> None:
        """The coordinator knows that a checkpoint is complete, and from now on nobody reads it before a restore."""
        files, world = self._files, self._disk.world
        before = [n for n in files.present if n < number and n not in files.passed_over]
        if self._retained < RETAINED_MIN or number not in files.present or not before or max(before) in files.damaged:
            return
        if not world.chance("damage"):
            return
        metadata, *states = files.own_names(number)
        victim = metadata if not states or world.random.random() < 0.5 else world.random.choice(states)
        data = bytearray(self._disk.files[victim])
        data[world.random.randrange(len(data))] ^= 1
        self._disk.files[victim] = bytes(data)
        files.damage(number, unreadable=victim == metadata)
        world.note("damage:", victim)
