"""Spark's own Delta on tables that jobs write, with its jars from Maven; skipped where these cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from story import WAIT_S

JARS = Path(__file__).parents[2] / ".jars" / "delta-spark-3.3.2"
"""They stay there; git ignores the folder."""
_POM = """<project><modelVersion>4.0.0</modelVersion><groupId>t</groupId><artifactId>t</artifactId><version>1</version>
<dependencies><dependency><groupId>io.delta</groupId><artifactId>delta-spark_2.12</artifactId><version>3.3.2</version>
</dependency></dependencies></project>
"""


@pytest.fixture(scope="module")
def delta_jars(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The jars of delta-spark, as Spark's setting takes them."""
    if not JARS.is_dir():
        maven = shutil.which("mvn")
        if maven is None:
            pytest.skip("delta-spark is a jar, and there is no Maven (mvn) to get it with")
        folder = tmp_path_factory.mktemp("maven")
        (folder / "pom.xml").write_text(_POM)
        got = [maven, "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={folder / 'jars'}"]
        try:
            done = subprocess.run(got, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("delta-spark is a jar, and Maven has not got it within 4 minutes")
        if done.returncode:
            pytest.skip(f"delta-spark is a jar, and Maven cannot get it: {(done.stdout or done.stderr)[:200]!r}")
        JARS.parent.mkdir(exist_ok=True)
        shutil.copytree(folder / "jars", JARS)
    # Spark has Scala itself.
    return ",".join(str(jar) for jar in sorted(JARS.glob("*.jar")) if not jar.name.startswith("scala-library"))


@pytest.mark.slow
def test_spark_and_a_job_share_a_delta_table(delta_jars: str, tmp_path: Path) -> None:
    """Rows that Spark has deleted stay so, and tables whose features tidegate does not write are refused by name."""
    program = Path(__file__).with_name("delta_spark_program.py")
    env = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, str(program), delta_jars, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    left = [n for n in range(100) if n not in (3, 14)]
    assert found["compacted"] == 1
    assert found["after compact"] == found["after vacuum"] == left
    assert found["after another append"] == [*left, *range(100, 110)]
    assert len(found["blind appends"]) > 3
    assert all(found["blind appends"])
    for name, text in {
        "mapped": "column mapping (delta.columnMapping.mode = name)",
        "clustered": "the writer feature clustering",
        "tracked": "rowTracking",
        "timed": "inCommitTimestamp",
        "defaults": "allowColumnDefaults",
        "checked": "the CHECK constraint small (id < 1000)",
    }.items():
        assert text in found[name], name
    assert found["plain"] == "finished"
    assert found["rows of plain"] == [1]
    assert found["merge"] == found["second merge"] == "finished"
    assert found["rows of merged"] == [[2, "B", "2026-01-02"], [3, "c", "2026-01-02"], [100, "d", "None"]]
    assert found["ids of merged"] == [0, *range(2, 14), *range(15, 20), 100]
    assert found["feed of merged"] == [
        [1, "update_postimage"],
        [1, "update_preimage"],
        [2, "update_postimage"],
        [2, "update_preimage"],
        [3, "insert"],
        [100, "insert"],
    ]
