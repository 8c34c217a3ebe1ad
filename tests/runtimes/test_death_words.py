"""What is said of the end of an actor, from what Ray says."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from tidegate.actors.runtimes.ray.process.death_words import death_of, went_with_its_node

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
