"""`tidegate simulate` and `make simulate`: the output and the exit code for a range of seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command_line import CommandRunner
from random_jobs.__main__ import main

from tidegate.cli.main import app
from tidegate.cli.seed_runs import parse_range
from tidegate.storage.errors import ConfigurationError

PROGRAM = """
import pyarrow as pa

import tidegate as tg


def build(env):
    rows = env.from_batches(pa.record_batch({"k": [1, 2, 3] * 20}))
    rows.key_by("k").aggregate(n=tg.count(), emit="final").to_table("sim://out")


def race(env):
    left, right = (pa.record_batch({"k": [*range(12)], "of": [name] * 12}) for name in ("left", "right"))
    both = env.from_batches(left).union(env.from_batches(right))
    both.key_by("k").deduplicate(uid="race").to_table("sim://out")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A file with two pipelines, of which one depends on the order of its rows."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


def test_the_command_runs_a_pipeline_of_a_file(program: Path) -> None:
    """It ends with the table of effects and the totals, and with exit code 0."""
    found = CommandRunner().invoke(app, ["simulate", f"{program}:build", "--seeds", "0..3"])
    assert found.exit_code == 0, found.output
    assert "a task finished" in found.output
    assert "4 seeds, 0 violations; " in found.output


def test_output_that_depends_on_order_has_exit_code_1(program: Path) -> None:
    """The first such seed is shown, and the number of all of them."""
    found = CommandRunner().invoke(app, ["simulate", f"{program}:race", "--seeds", "0..5", "--delay", "0ms..2s"])
    assert found.exit_code == 1, found.output
    shown = " ".join(found.output.split())
    assert "YOUR OUTPUT DEPENDS ON THE ORDER OF ROWS" in shown
    assert "because the output of the pipeline depends on the order of rows" in shown


def test_the_command_needs_a_pipeline() -> None:
    """Random jobs are not part of the command."""
    assert CommandRunner().invoke(app, ["simulate", "--seeds", "0..3"]).exit_code == 2


def test_make_simulate_runs_random_jobs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the same as the command."""
    monkeypatch.setattr(sys, "argv", ["make simulate", "--seeds", "0..1"])
    assert main() == 0
    shown = capsys.readouterr().out
    assert "a task finished" in shown
    assert "2 seeds, 0 violations; " in shown


@pytest.mark.parametrize(("text", "seeds"), [("7", range(7, 8)), ("3..5", range(3, 6))])
def test_a_range_is_one_seed_or_several(text: str, seeds: range) -> None:
    """Both ends are included."""
    assert parse_range(text) == seeds


@pytest.mark.parametrize("text", ["", "5..3", "a..b", "1-3"])
def test_a_wrong_range_is_refused(text: str) -> None:
    """The error shows the range."""
    with pytest.raises(ConfigurationError, match="--seeds"):
        parse_range(text)
