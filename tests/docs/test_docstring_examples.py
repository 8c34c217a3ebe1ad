"""Examples in docstrings of the public API run, and print what the docstring says.

They see `tg`, `pl`, `pa`, a local environment `env`, and two streams with event time, `orders` and `payments`. An
ellipsis stands for any text. The working folder is empty.
"""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from programs import begin_anew

import tidegate as tg

CLASSES = (tg.StreamEnvironment, tg.Stream, tg.KeyedStream, tg.WindowedStream, tg.ConnectedStreams)
"""Classes of which each public method has an example."""
WITH_EXAMPLE = (
    tg.BatchFunction,
    tg.BroadcastProcessFunction,
    tg.CoProcessFunction,
    tg.Cumulating,
    tg.KeyedBroadcastProcessFunction,
    tg.ProcessFunction,
    tg.ProcessWindowFunction,
    tg.Session,
    tg.Sliding,
    tg.Tumbling,
)
"""Classes with an example of their own, which programs derive from or make."""
ORDERS = [
    {"user": "ann", "amount": 30, "at": 0},
    {"user": "bob", "amount": 5, "at": 1000},
    {"user": "ann", "amount": 12, "at": 2000},
]
PAYMENTS = [{"user": "ann", "paid": 42, "at": 500}, {"user": "bob", "paid": 5, "at": 1500}]


def examples() -> Iterator[tuple[str, str]]:
    """Yields the name and the docstring of each public method, and of each class with an example of its own."""
    for kind in WITH_EXAMPLE:
        yield kind.__name__, inspect.getdoc(kind) or ""
    for kind in CLASSES:
        for name, member in inspect.getmembers(kind, inspect.isroutine):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}", inspect.getdoc(member) or ""


EXAMPLES = dict(examples())


@pytest.fixture(scope="module")
def env() -> Iterator[tg.StreamEnvironment]:
    """The environment of all examples."""
    with tg.StreamEnvironment.local() as made:
        yield made


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_its_docstring_says(
    name: str, env: tg.StreamEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each public method of a stream, and each class in `WITH_EXAMPLE`, has an example that runs."""
    monkeypatch.chdir(tmp_path)
    begin_anew(env)
    names = {
        "tg": tg,
        "pl": pl,
        "pa": pa,
        "env": env,
        "orders": env.from_rows(ORDERS, timestamp="at"),
        "payments": env.from_rows(PAYMENTS, timestamp="at"),
    }
    flags = doctest.ELLIPSIS | doctest.REPORT_NDIFF
    test = doctest.DocTestParser().get_doctest(EXAMPLES[name], names, name, None, 0)
    assert test.examples, f"{name} has no example"
    lines: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(test, out=lines.append)
    assert not lines, "".join(lines)
