"""Where examples run: each value of their variable leads to the environment that `docs/topologies.md` says it does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tidegate as tg

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
Calls = list[tuple[str, tuple[object, ...]]]


@pytest.fixture
def topology() -> ModuleType:
    """The module that the examples share."""
    spec = importlib.util.spec_from_file_location("topology_of_a_test", EXAMPLES / "topology.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("chosen", "calls"),
    [
        ("raydp", [("raydp", (3, 1, "1024m", 2))]),
        ("local-cluster", [("spark", ("local-cluster[3,3,1024]", 3, 3, 1024)), ("on_spark", (3, 2))]),
        ("local-cluster[2,1,512]", [("spark", ("local-cluster[2,1,512]", 2, 1, 512)), ("on_spark", (None, None))]),
        ("spark://host:7077", [("spark", ("spark://host:7077", 3, 3, 1024)), ("on_spark", (3, 2))]),
    ],
)
def test_a_topology_is_chosen_by_the_variable(
    topology: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: str, calls: Calls
) -> None:
    """With the executors and slots that the example asks for, and a core of each executor left to Spark."""
    made: Calls = []

    @contextmanager
    def spark_on(*arguments: Any) -> Iterator[str]:
        made.append(("spark", arguments[:4]))
        yield "the session"

    @contextmanager
    def on_spark(spark: object, *arguments: Any, **_: Any) -> Iterator[str]:
        made.append(("on_spark", arguments))
        yield "an environment"

    @contextmanager
    def raydp(**settings: Any) -> Iterator[str]:
        names = ("executors", "executor_cores", "executor_memory", "slots_per_executor")
        made.append(("raydp", tuple(settings[name] for name in names)))
        yield "an environment"

    monkeypatch.setenv("TIDEGATE_TOPOLOGY", chosen)
    monkeypatch.setattr(topology, "spark_on", spark_on)
    monkeypatch.setattr(topology, "ensure_java", lambda: None)
    monkeypatch.setattr(tg.StreamEnvironment, "on_spark", on_spark)
    monkeypatch.setattr(tg.StreamEnvironment, "raydp", raydp)
    with topology.environment(executors=3) as env:
        assert env == "an environment"
    assert made == calls


@pytest.mark.parametrize("is_there", [True, False])
def test_an_example_takes_the_topology_that_works_here(
    topology: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_there: bool
) -> None:
    """RayDP, unless it is not installed, which one line reports."""
    monkeypatch.setattr(topology.importlib.util, "find_spec", lambda name: object() if is_there else None)
    assert topology.default_topology() == ("raydp" if is_there else "local-cluster")
    assert capsys.readouterr().out.startswith("" if is_there else "RayDP is not installed: ")


def test_what_is_no_topology_is_said(topology: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that there are."""
    monkeypatch.setenv("TIDEGATE_TOPOLOGY", "yarn")
    monkeypatch.setattr(topology, "ensure_java", lambda: None)
    with pytest.raises(SystemExit, match="raydp, local-cluster, standalone"), topology.environment():
        pass


def test_every_example_with_spark_is_in_the_page() -> None:
    """The table of `docs/topologies.md` has those that take a topology, and no others."""
    take_one = {path.name for path in EXAMPLES.glob("*.py") if "from topology import" in path.read_text()}
    page = (ROOT / "docs" / "topologies.md").read_text()
    assert take_one
    assert set(re.findall(r"^\| `(\w+\.py)` \|", page, re.MULTILINE)) == take_one
