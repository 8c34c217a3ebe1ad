"""Prints the page of the coordinator's states: `python -m tidegate.actors.coordinator > docs/coordinator-states.md`."""

from __future__ import annotations

from tidegate.actors.coordinator.job.states_page import render

if __name__ == "__main__":
    print(render(), end="")
