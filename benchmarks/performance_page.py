"""What `bench_all.py` keeps of a run, what has become worse since an earlier one, and the page of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WORSE = 0.15
"""A figure that is worse by more than this is named."""


@dataclass(frozen=True)
class Suite:
    """The figures of one benchmark in one run, and those of them that are floors and peers, `yardsticks`.

    A yardstick is a figure that all others are compared with, or one of a figure alone: that of `q0` is then called
    `q0, Spark`, where `Spark` is the yardstick.
    """

    script: str
    title: str
    command: str
    unit: str
    higher_is_better: bool
    figures: Mapping[str, float]
    yardsticks: Sequence[str]
    compared: str
    load: float
    """The load of the machine when it began."""

    def times_as_good(self, figure: float, other: float) -> float:
        """How many times as good a figure is as another one."""
        return figure / other if self.higher_is_better else other / figure

    def is_yardstick(self, name: str) -> bool:
        """Whether others are compared with this figure, and it with none."""
        return any(name == each or name.endswith(f", {each}") for each in self.yardsticks)

    def ratio(self, name: str, yardstick: str) -> float | None:
        """How many times as good a figure is as its yardstick of this name. None if it has none."""
        if self.is_yardstick(name) or not name.startswith(self.compared):
            return None
        other = self.figures.get(f"{name}, {yardstick}", self.figures.get(yardstick))
        return None if other is None else self.times_as_good(self.figures[name], other)


@dataclass(frozen=True)
class Results:
    """One file. `name` is its date."""

    name: str
    machine: Mapping[str, str]
    suites: Sequence[Suite]

    @classmethod
    def of(cls, name: str, content: Mapping[str, Any]) -> Results:
        """A file that was read."""
        return cls(name, content["machine"], [Suite(**suite) for suite in content["suites"]])


def changed(
    suite: Suite, name: str, machine: Mapping[str, str], earlier: Sequence[Results]
) -> tuple[str, float] | None:
    """The date of the newest earlier figure on a machine of the same kind, and how many times as good this one is.

    Where the suite has a floor, ratios to it are compared: so it counts out how fast the machine was at the moment.
    """
    for results in reversed(earlier):
        for other in results.suites if results.machine["kind"] == machine["kind"] else ():
            if other.script == suite.script and other.command == suite.command and name in other.figures:
                ratio = suite.times_as_good(suite.figures[name], other.figures[name])
                floor = suite.yardsticks[0] if suite.yardsticks else ""
                now, before = suite.ratio(name, floor), other.ratio(name, floor)
                if now is not None and before is not None:
                    ratio = now / before
                return results.name, ratio
    return None


def regressions(newest: Results, earlier: Sequence[Results]) -> Iterator[str]:
    """A line for each figure that has become worse, floors and peers apart: what became of these is the machine."""
    for suite in newest.suites:
        for name, figure in suite.figures.items():
            known = changed(suite, name, newest.machine, earlier)
            if known is not None and not suite.is_yardstick(name) and known[1] < 1 - WORSE:
                yield f"{suite.script}, {name}: {_shown(figure)} {suite.unit}, x {known[1]:.2f} of {known[0]}"


def page(results: Sequence[Results]) -> str:
    """The page of the newest file."""
    newest, earlier = results[-1], results[:-1]
    lines = [
        "# Performance",
        "",
        "Made from the newest run of `make bench-all`. Benchmarks that it did not run are missing. What each",
        "line measures is in [the benchmarks](../benchmarks/README.md), with the figures of many others.",
        "",
        "Only ratios count. `x` means times as good. Floors and peers were measured in the same run, in turns. A floor",
        "is a plain loop over the same batches that does nothing else. The last column compares with the newest",
        "earlier run on a machine of the same kind. It compares ratios to the floor, if there is one.",
        "",
        f"{newest.name}: {newest.machine['kind']}, Python {newest.machine['python']}.",
        "",
    ]
    for suite in newest.suites:
        lines += [f"## {suite.title}", "", f"    {suite.command}", ""]
        lines += [f"Load when it began: {suite.load}. In {suite.unit}.", ""]
        heads = ["", suite.unit, *(f"x {name}" for name in suite.yardsticks), "x before"]
        lines += [_row(heads), _row(["---"] * len(heads))]
        for name, figure in suite.figures.items():
            if suite.is_yardstick(name) and name not in suite.yardsticks:
                continue  # a ratio in the line of its figure
            found = [suite.ratio(name, other) for other in suite.yardsticks]
            ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in found]
            known = changed(suite, name, newest.machine, earlier)
            change = "" if known is None else f"x {known[1]:.2f}"
            lines.append(_row([name, _shown(figure), *ratios, change]))
        lines.append("")
    worse = list(regressions(newest, earlier))
    lines += ["## Worse than before", ""]
    lines += [f"- {line}" for line in worse] or [
        f"No figure is more than {WORSE:.0%} worse than in the newest earlier file of such a machine."
        if any(each.machine["kind"] == newest.machine["kind"] for each in earlier)
        else "There is no earlier file of such a machine."
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(figure: float) -> str:
    return f"{figure / 1e6:.2f} M" if figure >= 1e5 else f"{figure:.1f}"
