"""Cuts a batch so that each of its rows can be judged by the watermark that the rows before it have made.

Rules:

- A piece is judged by the watermark that stands at its first row. So a cut comes before each row to which its own
  watermark does something else than that of the piece. Such a row lies behind its watermark. In ordinary data none
  does, and nothing is cut.
- Which watermarks make a difference to a row is for those to say who judge rows (`Due`). A window is done at one moment
  for all its rows, so there is one cut at most for each window that is done within the batch, however many late rows
  it has. Sessions may end at any moment, so rows that could still join one are cut at each watermark.
- No piece has more than PIECE_ROWS rows: watermarks go on within a large batch, and results need not wait for its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tidegate.operators.source_splits import Due
from tidegate.protocol.stream_elements import MIN_WATERMARK_MS
from tidegate.state.kernels.jit import kernel

PIECE_ROWS = 131_072
"""The most rows of a piece: results do not wait for a whole large batch, and a cut stays rare.

What a turn of the source takes is bounded as well, and so is a batch whose rows take long. Behind an exchange each
piece is shared by all subtasks: of 32,768 rows two subtasks got batches that cost a third more a row in windows.
"""

Times: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `[start, stop)` of a batch. `newest_ms`: the greatest time of these and all rows before."""

    start: int
    stop: int
    newest_ms: int


def pieces_of(
    times: Times, before_ms: int, delay_ms: int, dues: Sequence[Due], movers: Times | None = None
) -> list[Piece]:
    """The pieces of a batch whose rows have these times; MIN_WATERMARK_MS for those that have none.

    `before_ms`: the greatest time of the rows before the batch. A watermark is the greatest time less `delay_ms`.
    Of rows that do not move event time, `movers` has MIN_WATERMARK_MS instead of their time; None: all do.
    """
    rows = len(times)
    moving = times if movers is None else movers
    newest_ms = max(before_ms, int(moving.max()))
    if not _any_behind(times, moving, before_ms, delay_ms, MIN_WATERMARK_MS):
        return _in_order(moving, before_ms)
    before = np.empty(rows, np.int64)
    before[0] = before_ms
    np.maximum(np.maximum.accumulate(moving[:-1]), before_ms, out=before[1:])
    watermarks = np.maximum(before, MIN_WATERMARK_MS + delay_ms) - delay_ms
    starts = [
        start for cut, stop in _pairs(_cuts(times, watermarks, dues), rows) for start in range(cut, stop, PIECE_ROWS)
    ]
    return [Piece(start, stop, int(before[stop]) if stop < rows else newest_ms) for start, stop in _pairs(starts, rows)]


def _in_order(times: Times, before_ms: int) -> list[Piece]:
    """Pieces of bounded size; no row of the batch lies behind any watermark that its rows make."""
    pieces = []
    for start in range(0, len(times), PIECE_ROWS):
        stop = min(start + PIECE_ROWS, len(times))
        before_ms = max(before_ms, int(times[start:stop].max()))
        pieces.append(Piece(start, stop, before_ms))
    return pieces


def _cuts(times: Times, watermarks: Times, dues: Sequence[Due]) -> list[int]:
    """Where pieces must begin so that the watermark at the beginning judges every row as its own would."""
    late: list[tuple[int, int]] = []
    behind = np.flatnonzero((times <= watermarks) & (times > MIN_WATERMARK_MS))
    for due in dues:
        limits = due(times[behind], watermarks[behind])
        found = np.flatnonzero(limits <= watermarks[behind])
        late += zip(behind[found].tolist(), limits[found].tolist(), strict=True)
    cuts = [0]
    for row, limit_ms in sorted(late) if len(dues) > 1 else late:
        if limit_ms > watermarks[cuts[-1]]:
            cuts.append(row)
    return cuts


def _pairs(starts: Sequence[int], rows: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], rows], strict=True))


@kernel
def _any_behind(times: Times, movers: Times, newest_ms: int, delay_ms: int, least_ms: int) -> bool:
    """Whether the time of a row is no later than the watermark before it; `least_ms`: it has no time."""
    newest_ms = max(newest_ms, least_ms + delay_ms)
    for row in range(times.shape[0]):
        if times[row] <= newest_ms - delay_ms and times[row] != least_ms:
            return True
        newest_ms = max(newest_ms, movers[row])
    return False
