"""What Ray says of the end of an actor, in words for people: what died, and why; without ids of owners, and guesses."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, GetTimeoutError

from tidegate.protocol.failure_reasons import bounded_text, error_text

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NODE_DIED = re.compile(r"because its node has died\. Node Id: (\w+)(.*)", re.DOTALL)
_NEVER_RAN = "The actor never ran"
_INIT = "raised in its creation task"
_OWNER = "because its owner has died"
_NODE_MEMORY = re.compile(r"Memory on the node \(IP: [^,)]*, ID: (\w+)\)[^/]* was ([\d.]+ ?GB)[^/]*/ ([\d.]+ ?GB)")
_LIMIT = re.compile(r"exceeded threshold of \d+B \(([\d.]+)%")
_KILLED = re.compile(
    r"Selected to kill: \(Actor[^\n]*task name=([^\n]*?):\w+\.__init__[^\n]*actual memory used=([\d.]+)GB"
)
NODE_CHARACTERS = 8
_GUESSES = (" Some common causes include", " There are some potential root causes")


def death_of(error: BaseException) -> str:
    """In one line: how an actor has ended, as far as Ray knows."""
    return bounded_text(_death_of(error))


def memory_death(text: str) -> str | None:
    """What Ray reports of a process that its memory monitor has killed, in one line; None of any other end.

    It names the figures of the node, and the largest of the processes that were killed with it.
    """
    node = _NODE_MEMORY.search(text)
    if node is None:
        return None
    limit = _LIMIT.search(text)
    above = f", above the threshold of {float(limit[1]):g} %" if limit is not None else ""
    killed = [(float(used_gb), name) for name, used_gb in _KILLED.findall(text)]
    largest = max(killed, default=None)
    which = "" if largest is None else f"; the largest process that it killed was {largest[1]} with {largest[0]:g} GB"
    return (
        f"killed by Ray's memory monitor, because node {node[1][:NODE_CHARACTERS]} had {node[2]} of {node[3]} of "
        f"memory in use{above}{which} (lower the parallelism or the memory of the functions, add memory or nodes, or "
        "raise RAY_memory_usage_threshold)"
    )


def _death_of(error: BaseException) -> str:
    text = _COLOUR.sub("", str(error))
    if (memory := memory_death(text)) is not None:
        return memory
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
