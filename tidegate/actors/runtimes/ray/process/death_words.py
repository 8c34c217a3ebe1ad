"""What Ray says of the end of an actor, in words for people: what died, and why; without ids of owners, and guesses."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, GetTimeoutError

from tidegate.actors.protocol.failure_reasons import bounded_text, error_text

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NODE_DIED = re.compile(r"because its node has died\. Node Id: (\w+)(.*)", re.DOTALL)
_NEVER_RAN = "The actor never ran"
_INIT = "raised in its creation task"
_OWNER = "because its owner has died"
_GUESSES = (" Some common causes include", " There are some potential root causes")


def death_of(error: BaseException) -> str:
    """In one line: how an actor has ended, as far as Ray knows."""
    return bounded_text(_death_of(error))


def _death_of(error: BaseException) -> str:
    text = _COLOUR.sub("", str(error))
    if (node := _NODE_DIED.search(text)) is not None:
        why = " ".join(node[2].partition(_NEVER_RAN)[0].split())
        return f"its node {node[1]} was lost" + (f" ({why})" if why else "")
    if isinstance(error, GetTimeoutError):
        return "Ray does not report that its process has ended, and it answers no call: it hangs or is stopped"
    if isinstance(error, ActorUnavailableError):
        return "the connection to it broke, as it does when its node is lost"
    if _INIT in text:
        lines = [line.strip() for line in text.splitlines() if line.strip(" ^~")]
        return f"it could not start: {lines[-1]}"
    if _OWNER in text:
        return "the process that it belonged to has ended"
    line = " ".join(error_text(error).split())
    line = line.partition("Worker exit detail: ")[2] or line
    for guesses in _GUESSES:
        line = line.partition(guesses)[0]
    return line.rstrip(".")


def went_with_its_node(error: BaseException | None) -> bool:
    """Whether an actor has ended, as far as is known, with its node: that says nothing about the actor."""
    return isinstance(error, ActorUnavailableError) or (error is not None and "its node has died" in str(error))
