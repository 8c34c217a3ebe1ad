"""Renders the aligner's transition table as the Markdown page `docs/barriers.md`."""

from __future__ import annotations

from tidegate.actors.task.barriers.barrier_aligner import TABLE
from tidegate.actors.task.barriers.states import BarrierInput, BarrierState


def transition_table() -> list[tuple[BarrierState, BarrierInput, tuple[BarrierState, ...]]]:
    """Every state with every input and the states that it may lead to; none: the input is illegal there."""
    return [(state, given, TABLE[state, given].to) for state in BarrierState for given in BarrierInput]


def render() -> str:
    """The page: what the states and inputs mean, and a row an input with a column a state."""
    names = [state.name for state in BarrierState]
    lines = [
        "# Barriers of an exactly-once task",
        "",
        "Generated from the transition table in `actors/task/barriers`:",
        "`python -m tidegate.actors.task.barriers > docs/barriers.md`.",
        "",
        "| state | what it means |",
        "| --- | --- |",
        *(f"| {state.name} | {state.value} |" for state in BarrierState),
        "",
        'An "overtaking" barrier is UNALIGNED, or aligned and over its timeout.',
        "",
        "| input | what it means |",
        "| --- | --- |",
        *(f"| {given.name} | {given.value} |" for given in BarrierInput),
        "",
        "The states that an input may lead to; `=` stays, `!` is a ProtocolError and changes nothing. After NEWER the",
        "same input is answered once more, by what it is in IDLE.",
        "",
        f"| input | {' | '.join(names)} |",
        f"| --- |{' --- |' * len(names)}",
    ]
    for given in BarrierInput:
        cells = [_cell(state, TABLE[state, given].to) for state in BarrierState]
        lines.append(f"| {given.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(state: BarrierState, to: tuple[BarrierState, ...]) -> str:
    if not to:
        return "!"
    return " or ".join("=" if next_state is state else next_state.name for next_state in to)
