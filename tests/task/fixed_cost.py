"""What a batch costs whoever takes it: so much a batch, so much a row, and noise."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tidegate.actors.task.turn_pacer import TURN_MS_MAX


@dataclass
class FixedCost:
    """A batch costs `fixed_ms` and `slope_ms` a row, give or take the part `noise` of that."""

    fixed_ms: float
    slope_ms: float
    noise: float = 0.0

    def ms(self, rows: int, chance: random.Random) -> float:
        """How long a batch takes."""
        return (self.fixed_ms + rows * self.slope_ms) * (1 + self.noise * chance.uniform(-1, 1))

    def best_rows_a_ms(self, batch_rows: int) -> float:
        """The throughput of the best constant size within a turn; where none is within it, of the largest batch."""
        rows = batch_rows
        if self.fixed_ms + self.slope_ms <= TURN_MS_MAX and self.slope_ms:
            rows = min(batch_rows, int((TURN_MS_MAX - self.fixed_ms) / self.slope_ms))
        return rows / max(1e-9, self.fixed_ms + rows * self.slope_ms)
