"""What is said of the end of an actor, from what Ray says."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from tidegate.actors.ray.exit_probe import death_of, memory_death, went_with_its_node
from tidegate.actors.ray.worker_pool import WorkerHandle, reason_of

HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tactor_id: 3f37\n\tpid: 31865\n"


def died(text: str) -> ActorDiedError:
    """An error of Ray with this text."""
    error = ActorDiedError()
    error.error_msg = text
    error.args = (text,)
    return error


@pytest.mark.parametrize(
    ("error", "said", "node"),
    [
        (
            died(
                f"{HEAD}\tip: 192.0.2.2\nThe actor died because its node has died. Node Id: 718bf6\n\tthe actor's node "
                "was terminated unexpectedly: health check failed\nThe actor never ran - it was cancelled"
            ),
            "its node 718bf6 was lost (the actor's node was terminated unexpectedly: health check failed)",
            True,
        ),
        (
            ActorUnavailableError("RPC error: recvmsg", None),
            "the connection to it broke, as it does when its node",
            True,
        ),
        (
            died(
                "The actor died because of an error raised in its creation task, \x1b[36mray::j/coordinator:__init__()"
                "\x1b[39m (pid=5625)\n    ^^^^^^\n  File x\nJobFailedError: nobody holds the program"
            ),
            "it could not start: JobFailedError: nobody holds the program",
            False,
        ),
        (
            died(f"{HEAD}The actor is dead because its owner has died. Owner Id: 0200 Owner worker exit type: X"),
            "the process that it belonged to has ended",
            False,
        ),
        (GetTimeoutError("Get timed out"), "Ray does not report that its process has ended", False),
        (
            died(f"{HEAD}Worker exit detail: End of file. Some common causes include: (1) OOM"),
            "End of file",
            False,
        ),
    ],
)
def test_an_end_is_told_without_ids_of_owners_and_guesses(error: Exception, said: str, node: bool) -> None:
    """Which node, which error, or how the process ended."""
    assert death_of(error).startswith(said)
    assert "\n" not in death_of(error)
    assert "Owner" not in death_of(error)
    assert went_with_its_node(error) is node


KILLED = """5 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: \
1cc521481ce57845be506711005bcf8e) was 5.61GB used / 23.54GB limit (0.238410)
OOM kill reason: Memory usage 5963497472B exceeded threshold of 5953761280B (23.6% of 25276059648B limit)
Ray killed 5 worker(s) based on the killing policy
Selected to kill: (Worker with no lease granted: pid=15431, actual memory used=9.03GB, worker ID=4df8)
Selected to kill: (Actor(a776): job ID=01, lease ID=00, task name=f05/coordinator:CoordinatorProcess.__init__, \
required resources={}, pid=10251, actual memory used=0.09GB, worker ID=68c2)
Selected to kill: (Actor(0d66): job ID=01, lease ID=01, task name=f05/rows -> map (1/1)#0:WorkerProcess.__init__, \
required resources={}, pid=15433, actual memory used=2.15GB, worker ID=7992)
"""
"""As Ray 2.60 reports it."""


def test_the_memory_monitor_is_named_with_its_figures() -> None:
    """And the largest process of those that it has killed."""
    told = memory_death(KILLED)
    assert told is not None
    assert told == death_of(died(f"{HEAD}Worker exit detail: {KILLED}"))
    assert told.startswith(
        "killed by Ray's memory monitor, because node 1cc52148 had 5.61GB of 23.54GB of memory in use, above the "
        "threshold of 23.6 %; the largest process that it killed was f05/rows -> map (1/1)#0 with 2.15 GB"
    )
    assert "RAY_memory_usage_threshold" in told


def test_less_text_of_the_monitor_is_told_as_far_as_it_goes() -> None:
    """Another version of Ray may say less."""
    assert str(memory_death(KILLED.splitlines()[0])).startswith(
        "killed by Ray's memory monitor, because node 1cc52148 had 5.61GB of 23.54GB of memory in use (lower"
    )
    assert memory_death("Worker exit detail: End of file") is None


def test_a_process_that_the_monitor_killed_is_told_with_it() -> None:
    """Not only that it got SIGKILL."""
    member = WorkerHandle("f05/rows (1/1)#0", None, None, Future())
    assert reason_of(member, died(KILLED)).startswith("killed by Ray's memory monitor, because node 1cc52148")
