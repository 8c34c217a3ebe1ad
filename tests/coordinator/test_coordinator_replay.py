"""Random histories of a job: invariants from outside, and the fold over the log as the coordinator's only memory."""

from __future__ import annotations

from random import Random
from typing import get_args

import pytest
from coordinator_world import ADOPTED, BUSY, CONCURRENT, JOB, CoordinatorWorld, replayed
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.actors.coordinator import instructions as do
from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.coordinator.events import CoordinatorEvent
from tidegate.actors.coordinator.instructions import CoordinatorInstruction
from tidegate.actors.coordinator.job_spec import JobSpec
from tidegate.actors.task.events import CallsAnswered, TaskEvent, TaskRestored
from tidegate.actors.task.instructions import (
    MakeCalls,
    PersistChannelState,
    PersistSegment,
    PersistSnapshot,
    TaskInstruction,
)
from tidegate.storage.codec import decode, encode, wire_types

histories = st.builds(
    lambda seed, steps: [Random(f"{seed}:{step}").randrange(2**20) for step in range(steps)],
    st.integers(0, 2**32),
    st.integers(1, 400),
)
"""Choices, step by step: long ones, which lists of Hypothesis rarely are, and a shorter history is a prefix."""

WITH_PERMITS: set[type] = {
    do.WriteSavepoint,
    do.DiscardSavepoint,
    do.WriteMetadata,
    do.CommitSinks,
    do.DiscardCheckpoint,
    do.DiscardFiles,
}
"""Instructions that cannot be taken back: their permits hold in one process alone."""


@pytest.mark.parametrize("job", [JOB, CONCURRENT, ADOPTED])
@given(histories)
@settings(max_examples=60)
def test_after_any_faults_the_job_finishes_with_every_file_committed_once(job: JobSpec, choices: list[int]) -> None:
    """Tasks die, answers and messages are lost, coordinators change: once that stops, the job ends as it should."""
    world = CoordinatorWorld(job)
    for choice in choices:
        world.step(choice)
    world.settle()

    assert {end.status for end in world.ends} == {"finished"}
    world.check_committed()
    assert world.leftovers == set(), "shared files go with the last checkpoint that needs them"


@given(histories)
@settings(max_examples=60)
def test_concurrent_checkpoints_savepoints_hooks_and_stops_keep_their_promises(choices: list[int]) -> None:
    """Whatever is asked for and fails: the job ends, requests are answered once, files are committed in order."""
    world = CoordinatorWorld(BUSY)
    for choice in choices:
        world.step(choice)
    world.settle()

    (status,) = {end.status for end in world.ends}
    world.check_requests()
    if status != "failed":
        world.check_committed()


@pytest.mark.parametrize("job", [JOB, CONCURRENT, BUSY, ADOPTED])
@given(histories, st.floats(0, 1))
@settings(max_examples=40)
def test_folding_the_log_gives_the_same_state_and_the_same_decisions(
    job: JobSpec, choices: list[int], where: float
) -> None:
    """Replay from the start, and from a stored fold anywhere in the middle, agrees with what happened.

    Events, instructions without a permit and the fold go through the codec on the way.
    """
    world = CoordinatorWorld(job)
    for choice in choices:
        world.step(choice)
    events = decode(encode(world.log))
    assert events == tuple(world.log)
    travel = [tuple(i for i in answer if type(i) not in WITH_PERMITS) for answer in world.answers]
    assert decode(encode(travel)) == tuple(travel)

    fresh = CoordinatorMachine()
    assert replayed(events, fresh) == world.answers
    assert fresh.state == world.machine.state

    middle = int(where * len(events))
    first = CoordinatorMachine()
    replayed(events[:middle], first)
    second = CoordinatorMachine(decode(encode(first.state)))
    assert second.state == first.state
    assert replayed(events[middle:], second) == world.answers[middle:]
    assert second.state == world.machine.state


@pytest.mark.parametrize(
    ("messages", "stay"),
    [
        (CoordinatorEvent, set()),
        (CoordinatorInstruction, WITH_PERMITS),
        (TaskEvent, {TaskRestored, CallsAnswered}),
        (TaskInstruction, {PersistSnapshot, PersistChannelState, PersistSegment, MakeCalls}),
    ],
)
def test_every_message_can_travel(messages: object, stay: set[type]) -> None:
    """Events and instructions are wire types, but for those that hold a task's memory, what a user's function gets and
    gives, or a permit."""
    known = set(wire_types().values())

    assert {cls for cls in get_args(messages) if cls not in known} == stay
