"""The handlers of both machines: each says which events it takes."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any

import pytest

from tidegate.actors.coordinator.coordinator_machine import CoordinatorMachine
from tidegate.actors.task.task_machine import TaskMachine


@pytest.mark.parametrize("machine", [TaskMachine, CoordinatorMachine])
def test_a_handler_is_annotated_with_all_that_it_takes(machine: Any) -> None:
    """One event, or several: exactly those that it is called with."""
    registered: dict[Any, set[type]] = {}
    for event, handler in vars(machine)["_on"].dispatcher.registry.items():
        if event is not object:
            registered.setdefault(handler, set()).add(event)
    assert registered
    for handler, events in registered.items():
        annotated = typing.get_type_hints(handler)["event"]
        assert set(typing.get_args(annotated) if isinstance(annotated, UnionType) else [annotated]) == events, handler
