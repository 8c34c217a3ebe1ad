"""A process of a task imports pandas when somebody uses it, and Arrow then knows."""

from __future__ import annotations

import subprocess
import sys
from functools import partial, wraps
from threading import Lock

import cloudpickle
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidegate as tg
from tidegate.actors.graph.stream_graph import translate
from tidegate.actors.operators.aggregates import aggregate as aggregates
from tidegate.actors.operators.aggregates.keyed_aggregate import KeyedAggregate
from tidegate.actors.runtimes.ray.process.late_pandas import is_all_ours

BEGIN = """
import sys
import pyarrow as pa
from tidegate.actors.runtimes.ray.process.late_pandas import import_pandas_late
from tidegate.actors.runtimes.ray.task.warm_up import warm_up

def must(holds, why):
    if not holds:
        sys.exit(why)

import_pandas_late()
before = list(sys.meta_path)
import_pandas_late()
must(sys.meta_path == before, "pandas is waited for twice")
warm_up()
must("pandas" not in sys.modules, "warming up imports pandas")
must(pa.array([1, None]).to_pylist() == [1, None], "Arrow alone")
"""

END = """
must("pandas" not in sys.modules, "a look is an import")
import pandas as pd
after = list(sys.meta_path)
must(not [finder for finder in after if "late_pandas" in type(finder).__module__], "the finder stays")
must("late_pandas" not in type(pd.__spec__.loader).__module__ + type(pd.__loader__).__module__, "the loader stays")
must(pa.array(pd.Series([1.0, None])).null_count == 1, "Arrow does not know that this is of pandas")
must(pa.table({"x": [1]}).to_pandas().x.tolist() == [1], "to_pandas")
must(type(pa.array([1], pa.timestamp("ns"))[0].as_py()) is pd.Timestamp, "nanoseconds")
import_pandas_late()
must(sys.meta_path == after, "pandas is there, so nothing is to be done")
"""

LOOKS = {
    "nobody": "",
    "polars": "import polars",
    "find_spec": """
from importlib.util import find_spec
must(find_spec("pandas").loader.is_package("pandas"), "who looks may ask the loader")
find_spec("pandas")
""",
    "a thread": """
from importlib.util import find_spec
from threading import Thread
thread = Thread(target=find_spec, args=("pandas",))
thread.start()
thread.join()
""",
    "a finder that asks the others": """
from importlib.util import find_spec
class Asks:
    asking = False
    def find_spec(self, name, path, target=None):
        if name != "pandas" or self.asking:
            return None
        self.asking = True
        try:
            return find_spec(name)
        finally:
            self.asking = False
sys.meta_path.append(Asks())
sys.meta_path.insert(0, Asks())
find_spec("pandas")
""",
}

FAILS_ONCE = """
import dateutil
sys.modules["dateutil"] = None  # What pandas needs first.
try:
    import pandas
except ImportError:
    sys.modules["dateutil"] = dateutil
else:
    sys.exit("the import was to fail")
"""


def _run(program: str, *options: str) -> None:
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("look", LOOKS)
def test_pandas_comes_when_it_is_used(look: str) -> None:
    """Not before; and from then on everything is as it would have been, whoever has looked for it without importing."""
    _run(BEGIN + LOOKS[look] + END)


@pytest.mark.slow
def test_an_import_that_fails_is_tried_again() -> None:
    """The second one tells Arrow."""
    _run(BEGIN + FAILS_ONCE + END)


@pytest.mark.slow
def test_arrow_is_told_without_assertions_too() -> None:
    """`python -O` leaves assertions out."""
    _run(BEGIN + END, "-O")


class Mine:
    """An object of the user's."""


@pytest.mark.parametrize(
    ("part", "ours"),
    [
        (KeyedAggregate, True),
        (partial(KeyedAggregate, ("k",), {"n": aggregates.count(), "sum": aggregates.sum("v")}), True),
        ((pa.table({"x": [1]}), pa.schema({"x": pa.int64()}), pc.field("x") > 1), True),
        (lambda batch: batch, False),
        (wraps(len)(lambda batch: batch), False),
        (cloudpickle.loads(cloudpickle.dumps(lambda batch: batch)), False),
        (eval("lambda batch: batch", {}), False),
        (Mine(), False),
        (Mine, False),
        (pytest, False),
        (partial(dict, n=Mine()), False),
        (iter(lambda: 1, 1), False),
        (Lock(), False),
    ],
)
def test_what_is_not_ours_is_found(part: object, ours: bool) -> None:
    """At any depth. What cannot be looked through counts as not ours."""
    assert is_all_ours([{"part": part}]) is ours


@pytest.mark.parametrize("with_function", [False, True])
def test_a_program_without_functions_is_all_ours(with_function: bool) -> None:
    """Of sources, operators and tables of ours. One function anywhere changes it."""
    with tg.StreamEnvironment.local() as env:
        rows = env.from_batches(pa.table({"k": [1], "x": [1]}))
        if with_function:
            rows = rows.map_batches(lambda batch: batch, schema=rows.schema)
        rows.key_by("k").aggregate(n=tg.count(), most=tg.max("x"), emit="final").to_table("memory://late/out")
        assert is_all_ours(translate(env._program.nodes)) is not with_function
