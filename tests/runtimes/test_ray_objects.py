"""Objects of Ray in functions of detached jobs, and lines that Ray logs itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray

from tidegate.actors.drivers.log_lines import LogSettings
from tidegate.actors.graph.stream_graph import StreamNode, translate
from tidegate.actors.ray import actor_setup as actor_log
from tidegate.actors.ray.detached import warn_of_ray_objects
from tidegate.connectors.memory_source import MemorySource
from tidegate.operators.functions.batch_functions import MapBatches
from tidegate.storage.ids import OperatorUid


class Held:
    """An actor."""


def graph(held: object) -> Any:
    """A source, and a step whose function holds something."""
    source = MemorySource(pa.table({"k": [1]}), 1)
    rows = StreamNode(OperatorUid("rows"), "rows", 1, source.schema, source=source)

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert held is not None
        return batch

    step = StreamNode(
        OperatorUid("step"), "enrich", 1, None, factory=lambda: MapBatches(function), inputs=((rows, None),)
    )
    return translate([rows, step])


@pytest.mark.slow
def test_objects_that_end_with_the_driver_are_named_at_submission(
    plain_ray: None, caplog: pytest.LogCaptureFixture
) -> None:
    """By step; not values, and not actors that outlive the driver."""
    remote: Any = ray.remote(num_cpus=0)
    detached = remote(Held).options(name="held", namespace="tidegate", lifetime="detached").remote()
    try:
        for held, said in (
            ([1], None),
            (detached, None),
            ([ray.put(1)], "holds an object reference"),
            (remote(Held).remote(), "holds the handle of an actor that is not detached"),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING, logger="tidegate"):
                warn_of_ray_objects(graph(held))
            told = [record.getMessage() for record in caplog.records if "of this driver" in record.getMessage()]
            assert len(told) == (said is not None), (held, told)
            assert said is None or (said in told[0] and "enrich" in told[0])
    finally:
        ray.kill(detached)


@pytest.fixture
def levels() -> Iterator[logging.Logger]:
    """The logger of tidegate, which is as before afterwards."""
    logger = logging.getLogger("tidegate")
    level = logger.level
    yield logger
    logger.setLevel(level)


@pytest.mark.parametrize("given", [True, False])
def test_lines_that_ray_logs_are_not_logged_twice(
    given: bool, levels: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a `logging_config` of `ray.init` only the levels are tidegate's."""
    added: list[object] = []
    monkeypatch.setattr(actor_log, "log_to", lambda *arguments: added.append(arguments))
    worker = SimpleNamespace(job_logging_config=object() if given else None)
    monkeypatch.setattr(actor_log.ray._private.worker, "global_worker", worker)
    levels.setLevel(logging.ERROR)
    context: Any = SimpleNamespace(log=LogSettings())
    actor_log._log(context, "INFO", {})
    assert (bool(added), levels.level == logging.INFO) == (not given, given)
