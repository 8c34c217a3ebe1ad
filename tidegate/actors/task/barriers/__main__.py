"""Prints the page of the aligner's states: `python -m tidegate.actors.task.barriers > docs/barriers.md`."""

from __future__ import annotations

import sys

from tidegate.actors.task.barriers.diagram import render

if __name__ == "__main__":
    sys.stdout.write(render())
