"""Draws the messages of a run as text: a lane for the user, the coordinator and each task, time goes down.

    ms        user    coordinator  src[0]   agg[0]
       120    |       >------------>        |       CheckpointTriggered(3)
       124    |       |            >--------> Barrier(3)

Runs of data between two tasks are drawn once, with their number. The drawing is bounded in lines and lanes; what is
left out is said.
"""

from __future__ import annotations

from collections.abc import Iterable

from tidegate.testing.world.virtual_time import START_MS, Note

LANES_MAX = 12
LANE_WIDTH = 10
_FIRST = ("user", "storage", "coordinator")


def draw_sequence(notes: Iterable[Note], lines_max: int) -> str:
    """The last `lines_max` messages and happenings, drawn."""
    rows = _merged(notes)
    left_out = max(0, len(rows) - lines_max)
    rows = rows[left_out:]
    seen = {str(end) for _, sender, receiver, _ in rows for end in (sender, receiver) if end is not None}
    lanes = [*(name for name in _FIRST if name in seen), *sorted(seen - set(_FIRST))]
    hidden = lanes[LANES_MAX:]
    lanes = lanes[:LANES_MAX]
    place = {name: index for index, name in enumerate(lanes)}
    lines = [f"{'ms':>8}  " + "".join(f"{_short(name):<{LANE_WIDTH}}" for name in lanes)]
    if left_out:
        lines.append(f"{'':>8}  ... {left_out} earlier lines are left out")
    if hidden:
        lines.append(f"{'':>8}  ... {len(hidden)} tasks have no lane: {', '.join(hidden)}")
    for at_ms, sender, receiver, text in rows:
        lines.append(f"{at_ms - START_MS:>8}  {_arrow(place, sender, receiver, len(lanes))}{text}".rstrip())
    return "\n".join(lines)


def _merged(notes: Iterable[Note]) -> list[tuple[int, object, object, str]]:
    """Messages with text; consecutive frames of data alone over one channel are one line."""
    rows: list[tuple[int, object, object, str]] = []
    counts: dict[int, tuple[int, int]] = {}
    for note in notes:
        batches = _data_only(note)
        same = rows and (rows[-1][1], rows[-1][2]) == (note.sender, note.receiver) and len(rows) - 1 in counts
        if batches and same:
            frames, total = counts[len(rows) - 1]
            counts[len(rows) - 1] = frames + 1, total + batches
            at_ms, sender, receiver, _ = rows[-1]
            rows[-1] = at_ms, sender, receiver, f"{note.what[0]} data: {total + batches} batches"
            continue
        rows.append((note.at_ms, note.sender, note.receiver, note.text))
        if batches:
            counts[len(rows) - 1] = 1, batches
            rows[-1] = note.at_ms, note.sender, note.receiver, f"{note.what[0]} data: {batches} batches"
    return rows


def _data_only(note: Note) -> int:
    elements = note.what[-1] if note.receiver is not None and note.what else None
    if not isinstance(elements, tuple) or not elements:
        return 0
    return len(elements) if all(hasattr(element, "num_rows") for element in elements) else 0


def _arrow(place: dict[str, int], sender: object, receiver: object, lanes: int) -> str:
    cells = list(("|" + " " * (LANE_WIDTH - 1)) * lanes)
    start, end = place.get(str(sender)), place.get(str(receiver))
    if sender is None or start is None or end is None:
        return "".join(cells) if sender is None else "".join(cells) + f"{sender} -> {receiver} "
    left, right = min(start, end) * LANE_WIDTH, max(start, end) * LANE_WIDTH
    for column in range(left, right + 1):
        cells[column] = "-"
    cells[start * LANE_WIDTH] = "o"
    cells[end * LANE_WIDTH] = ">" if end > start else "<"
    return "".join(cells)


def _short(name: str) -> str:
    return name if len(name) < LANE_WIDTH else name[: LANE_WIDTH - 2] + "~"
