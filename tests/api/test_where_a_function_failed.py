"""An exception in a user's function shows the file, the line and the frames of the user wherever it is shown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

_X = pa.schema({"x": pa.int64()})


def _helper(value: int) -> int:
    return {"a": 1}[value]  # type: ignore[index]


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {"x": _helper(row["x"])}


class _Process(tg.ProcessFunction):
    def process(self, row: dict[str, Any], context: tg.ProcessContext) -> Iterator[dict[str, Any]]:
        yield _row(row)


class _Open(tg.BatchFunction):
    def open(self, context: Any) -> None:
        _helper(1)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


async def _call(row: dict[str, Any]) -> dict[str, Any]:
    return _row(row)


STEPS: dict[str, Callable[[tg.Stream], tg.Stream]] = {
    "map": lambda s: s.map(_row, schema=_X),
    "flat_map": lambda s: s.flat_map(lambda row: [_row(row)], schema=_X),
    "filter": lambda s: s.filter(lambda row: bool(_row(row))),
    "map_batches": lambda s: s.map_batches(lambda batch: _row({"x": batch.num_rows}), schema=_X),
    "open": lambda s: s.map_batches(_Open(), schema=_X),
    "process": lambda s: s.process(_Process(), schema=_X),
    "apply": lambda s: s.window(tg.Count(1)).apply(lambda rows: _row({"x": rows.num_rows}), schema=_X),
    "map_async": lambda s: s.map_async(_call, schema=_X, retries=0),
}


@pytest.mark.parametrize("step", STEPS)
def test_the_users_frames_are_shown(step: str, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the error of the job and its cause, and in the job's reason, without frames of tidegate."""
    with tg.StreamEnvironment.local(1) as env, caplog.at_level(logging.WARNING):
        STEPS[step](env.from_batches(pa.table({"x": [1]}), splits=1)).collect()
        job = env.execute("fails", progress="off", restart=tg.RestartStrategy.none())
        with pytest.raises(tg.JobFailedError) as failed:
            job.wait()
        reason = job.progress().reason
    line = _helper.__code__.co_firstlineno + 1
    frame = f'  File "{__file__}", line {line}, in _helper\n    return {{"a": 1}}[value]'
    for text in (str(failed.value), str(failed.value.__cause__), reason, caplog.text):
        assert text is not None
        assert frame in text
        assert str(Path(tg.__file__).parent) not in text
        assert "KeyError: 1" in text


def test_a_way_back_is_recommended_only_if_there_is_one() -> None:
    """Without a completed checkpoint there is nothing for restore="latest"."""
    with tg.StreamEnvironment.local(1) as env:
        env.from_batches(pa.table({"x": [1]})).map(_row, schema=_X).collect()
        with pytest.raises(tg.JobFailedError, match="It has completed no checkpoint") as failed:
            env.execute("fails", progress="off", restart=tg.RestartStrategy.none()).wait()
    assert "latest" not in str(failed.value)
