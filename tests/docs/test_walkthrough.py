"""The walk through recovery does what its steps say. It checks its own results, after each of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "recovery_walkthrough.py"


@pytest.mark.slow
def test_each_step_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed driver, a restore, a changed program, repaired state, and a job that is attached to."""
    runpy.run_path(str(EXAMPLE))["main"](tmp_path)
    told = capsys.readouterr().out
    assert [line[0] for line in told.splitlines() if not line.startswith(" ")] == list("12345")
    assert "refused: 2 things in the program do not fit checkpoint" in told
    assert "counts, aggregate: KeyChanges(added=0, removed=1, changed=0, same=6)" in told


def test_the_check_of_the_steps_can_fail() -> None:
    """Counts of which one is too high or too low are not those of the first clicks."""
    checked = runpy.run_path(str(EXAMPLE))["checked"]
    right = {f"user-{user}": 3 for user in range(7)}
    assert checked(Shown(right)) == 21
    assert checked(Shown({**right, "user-6": 1}), forgotten="user-6") == 21
    for wrong in ({**right, "user-3": 2}, {**right, "user-3": 4}):
        with pytest.raises(RuntimeError, match="are not the counts of the first"):
            checked(Shown(wrong))


class Shown:
    """Stands for a table of counts."""

    def __init__(self, counts: dict[str, int]) -> None:
        self._rows = [{"user": user, "n": n} for user, n in counts.items()]

    def to_arrow(self) -> Shown:
        """As a table does."""
        return self

    def to_pylist(self) -> list[dict[str, object]]:
        """As an Arrow table does."""
        return self._rows
