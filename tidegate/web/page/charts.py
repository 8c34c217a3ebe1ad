"""`charts_of`: rows a second, lag and checkpoint durations over the last hour, as lines for small pictures.

All charts of a page share one time axis, from the first sample to the last one. A vertical axis begins at zero. A line
has a gap where nothing was reported, for example while the job restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidegate.web.page import texts

WIDTH, HEIGHT = 360, 64
"""Of the picture, in its own units. The page stretches it."""
_TOP = 4
"""Where the largest value stands, so that its line is not cut."""

SERIES: tuple[tuple[str, str, str, Callable[[object], str]], ...] = (
    ("rows", "Rows a second", "rows-per-second", texts.rate),
    ("lag", "Lag of event time", "lag", texts.span),
    ("duration", "Checkpoint duration", "checkpoint-duration", texts.span),
)
"""For each chart: the class of its colour, its title, the name in the samples, and how a value is written."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `path` is empty if nothing was reported. `words`: all of it in one sentence."""

    kind: str
    title: str
    path: str
    latest: str
    least: str
    most: str
    words: str


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts of a job. `since`, `until`: ms since the epoch; None without a sample."""

    charts: tuple[Chart, ...]
    since: object
    until: object


def charts_of(samples: Sequence[Mapping[str, Any]]) -> Charts:
    """The charts of `last_hour` of the model."""
    if not samples:
        return Charts((), None, None)
    times = [sample["timestamp"] for sample in samples]
    charts = tuple(
        _chart(kind, title, times, [texts.number(sample[name]) for sample in samples], text)
        for kind, title, name, text in SERIES
    )
    return Charts(charts, times[0], times[-1])


def _chart(
    kind: str, title: str, times: Sequence[int], values: Sequence[float | None], text: Callable[[object], str]
) -> Chart:
    known = [value for value in values if value is not None]
    if not known:
        return Chart(kind, title, "", texts.UNKNOWN, texts.UNKNOWN, texts.UNKNOWN, f"{title}: nothing was reported.")
    latest, least, most = (text(value) for value in (known[-1], min(known), max(known)))
    words = f"{title}, latest {latest}, minimum {least}, maximum {most}, over {texts.span(times[-1] - times[0])}."
    return Chart(kind, title, _path(times, values, max(known)), latest, least, most, words)


def _path(times: Sequence[int], values: Sequence[float | None], most: float) -> str:
    """The line in the language of SVG. A value with gaps on both sides is a short dash."""
    whole = max(1, times[-1] - times[0])
    parts, drawing = [], False
    for at_ms, value in zip(times, values, strict=True):
        if value is None:
            drawing = False
            continue
        x = round(WIDTH * (at_ms - times[0]) / whole, 1)
        y = round(HEIGHT - (HEIGHT - _TOP) * value / (most or 1.0), 1)
        parts.append(f"L{x},{y}" if drawing else f"M{x},{y}h1")
        drawing = True
    return "".join(parts)
