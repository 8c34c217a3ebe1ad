"""The transcript for operators is one of the script as it stands, and of a run that was right to the end."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidegate as tg

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The names of the script."""
    return runpy.run_path(str(ROOT / "scripts" / "operator_transcript.py"))


def test_the_page_is_one_of_this_script(script: dict[str, Any]) -> None:
    """It has every command of the script, in order, and no other; and its words."""
    page = (ROOT / "docs" / "operator-transcript.md").read_text(encoding="utf-8")
    typed = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    assert typed == [command for step in script["STEPS"] for command in step.commands]
    assert [step.title for step in script["STEPS"] if f"## {step.title}\n\n{step.text}" not in page] == []
    assert script["HEAD"] in page


def test_the_page_is_of_a_run_with_an_exact_table() -> None:
    """A process was killed, the job went on, and each flight was counted once."""
    page = (ROOT / "docs" / "operator-transcript.md").read_text(encoding="utf-8")
    assert "killed by SIGKILL" in page
    assert "flights have landed, and each is counted once" in page.split("## ")[-1]


def test_texts_lose_what_is_the_machines_own(script: dict[str, Any]) -> None:
    """Folders get names that mean the same anywhere, and long outputs say that they are cut."""
    assert script["neutral"](f"/tmp/x/chk-1 {ROOT}/y  \n", Path("/tmp/x")) == "/data/chk-1 /app/y\n"
    lines = [str(number) for number in range(script["LINES_MAX"] + 2)]
    assert script["cut"]("\n".join(lines)).endswith(f"{script['LINES_MAX'] - 1}\n(2 lines more)")
    assert script["cut"]("a\nb\n") == "a\nb"


@pytest.mark.slow
def test_a_table_with_a_flight_too_many_is_found(tmp_path: Path) -> None:
    """The check at the end of the page can fail: on a count, and on a mean."""
    example = runpy.run_path(str(ROOT / "examples" / "live_flights.py"))
    first = example["landed"]().head(1_000).to_arrow().cast(example["FLIGHT"])
    for name, flights, fits in (("right", first, True), ("twice", pa.concat_tables([first, first.slice(0, 1)]), False)):
        with tg.StreamEnvironment.local() as env:
            rows = env.from_batches(flights, uid="flights").key_by(*example["KEYS"])
            table = rows.aggregate(
                emit="final", flights=tg.count(), mean_delay=tg.mean("delay"), worst_delay=tg.max("delay"), uid="sums"
            ).to_table(str(tmp_path / name), uid="table")
            assert env.execute(name, checkpoints=tg.CheckpointConfig(storage=str(tmp_path))).wait("4min") == "finished"
        if fits:
            assert example["checked"](table.url) == 1_000
        else:
            with pytest.raises(RuntimeError, match="does not hold the delays of the first 1,001 flights"):
                example["checked"](table.url)
