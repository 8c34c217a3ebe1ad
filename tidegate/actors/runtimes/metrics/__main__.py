"""Prints the page of the metrics: `python -m tidegate.actors.runtimes.metrics > docs/metrics.md`."""

from __future__ import annotations

from tidegate.actors.runtimes.metrics.page import render

if __name__ == "__main__":
    print(render(), end="")
