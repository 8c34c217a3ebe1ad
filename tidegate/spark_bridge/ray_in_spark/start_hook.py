"""What Ray asks before it starts a node in Spark: the environment of the node, which carries the token.

Ray on Spark gives its nodes the environment of whoever starts them: of this process for the head, of a Python worker of
Spark for the others, which knows nothing of this process. It has a hook that can add to both. Rules:
* Every node gets the token and the mode of this process, and a `PATH` with the `ray` that a node is started by.
* A hook that was set before, or the one that Ray has for Databricks, is asked first and does the rest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

VARIABLE = "RAY_ON_SPARK_START_HOOK"


@dataclass(slots=True)
class _Given:
    """What the hook gives to nodes, and the hook that was there before."""

    environment: Mapping[str, str]
    before: str | None


_given: list[_Given] = []


class StartHook:
    """The hook of the session that is being started, or runs. Ray makes one whenever it needs it."""

    def __init__(self) -> None:
        self._given = _given[-1]
        self._inner = _inner(self._given.before)

    def custom_environment_variables(self) -> dict[str, str]:
        """Beside those of the hook before."""
        return {**self._inner.custom_environment_variables(), **self._given.environment}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def nodes_get(environment: Mapping[str, str]) -> Iterator[None]:
    """Within this context nodes of Ray on Spark get these variables."""
    before = os.environ.get(VARIABLE)
    _given.append(_Given(dict(environment), before))
    os.environ[VARIABLE] = f"{StartHook.__module__}.{StartHook.__qualname__}"
    try:
        yield
    finally:
        _given.pop()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _inner(before: str | None) -> Any:
    from ray._common.utils import load_class
    from ray.util.spark.databricks_hook import DefaultDatabricksRayOnSparkStartHook
    from ray.util.spark.start_hook_base import RayOnSparkStartHook
    from ray.util.spark.utils import is_in_databricks_runtime

    if before is not None:
        made: Any = load_class(before)
        return made()
    kind: Any = DefaultDatabricksRayOnSparkStartHook if is_in_databricks_runtime() else RayOnSparkStartHook
    return kind(False)
