"""Prints the page `docs/barriers.md`, with the states of the barrier aligner.

Run `python -m tidegate.actors.task > docs/barriers.md`.
"""

from __future__ import annotations

import sys

from tidegate.actors.task.barrier_aligner import TABLE, BarrierInput, BarrierState


def transition_table() -> list[tuple[BarrierState, BarrierInput, tuple[BarrierState, ...]]]:
    """Returns, for every state and input, the states to which the input may lead. Empty if the input is not
    allowed.
    """
    return [(state, given, TABLE[state, given].to) for state in BarrierState for given in BarrierInput]


def render() -> str:
    """Returns the page: the meanings of states and inputs, and a table with a row for each input and a column for
    each state.
    """
    names = [state.name for state in BarrierState]
    lines = [
        "# Barriers of an exactly-once task",
        "",
        "Generated from the transition table in `tidegate/actors/task/barrier_aligner.py`:",
        "`python -m tidegate.actors.task > docs/barriers.md`.",
        "",
        "A task in mode exactly-once has one aligner. The task passes it each barrier, each trigger and abort of the",
        "coordinator, and each channel that ends. The aligner decides when the task takes its snapshot, and which",
        "channels wait. One checkpoint at a time is *pending*: the task has taken one of its barriers, a barrier of it",
        "has overtaken queued elements, or the coordinator has triggered it.",
        "A barrier has *arrived* when it is in the queue of its channel, behind the elements that came before it. It",
        "is *taken* when the task has processed these elements and reaches the barrier.",
        "",
        "| state | what it means |",
        "| --- | --- |",
        *(f"| {state.name} | {state.value} |" for state in BarrierState),
        "",
        "An *overtaking* barrier does not wait for what is queued before it: it is unaligned, or its timeout is over.",
        "",
        "| input | what it means |",
        "| --- | --- |",
        *(f"| {given.name} | {given.value} |" for given in BarrierInput),
        "",
        "Each field has the states that an input may lead to. `=` is the same state; `!` is an illegal input, which",
        "raises `ProtocolError` and changes nothing. NEWER first ends the pending checkpoint. The aligner is idle",
        "then, and takes the same input once more, as one of another row.",
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


if __name__ == "__main__":
    sys.stdout.write(render())
