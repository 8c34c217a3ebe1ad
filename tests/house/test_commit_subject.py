"""The hook on subjects of commits accepts the form that CONTRIBUTING.md asks for, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commit_subject import problem
from repository import ROOT

SCRIPT = ROOT / "scripts" / "commit_subject.py"


@pytest.mark.parametrize(
    "subject",
    [
        "rocksdb: write one SST file per snapshot",
        "docs: re-measure word count",
        "coordinator, task: pass the cause of an event",
        "tests: feed rows in order",
        "Merge branch 'main'",
        "fixup! docs: re-measure word count",
    ],
)
def test_a_subject_in_the_form_is_accepted(subject: str) -> None:
    """An area, a colon, a verb in the imperative."""
    assert problem(subject) is None


@pytest.mark.parametrize(
    ("subject", "text"),
    [
        ("write one SST file", "needs the form"),
        ("What counts of words cost", "needs the form"),
        ("docs: " + "x" * 80, "86 characters"),
        ("docs: re-measure word count.", "full stop"),
        ("docs: measured word count", "imperative"),
        ("docs: the word count", "imperative"),
    ],
)
def test_another_subject_is_refused(subject: str, text: str) -> None:
    """The reason says what is wrong."""
    assert text in (problem(subject) or "")


def test_the_hook_reads_the_first_line_that_is_no_comment(tmp_path: Path) -> None:
    """Git writes comments into the message, and the body may have any form."""
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("# a comment\ntests: follow the move\n\nWhatever comes here.\n")
    assert subprocess.run([sys.executable, SCRIPT, message], check=False).returncode == 0
    message.write_text("Followed the move\n")
    run = subprocess.run([sys.executable, SCRIPT, message], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "needs the form" in run.stderr
