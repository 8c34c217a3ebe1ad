"""`tidegate run` on Ray: the program's file travels by value, and its processes have the runtime environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ray

import tidegate as tg
from tidegate.spark_bridge import RayDPSession

PROGRAM = """
import os
import polars as pl

OUT = {out!r}

def row_of(row):
    from only_there import twice

    return {{"a": twice(row["a"]), "said": os.environ["SAID"], "read": open("words.txt").read()}}

def main(env):
    rows = env.from_batches(pl.DataFrame({{"a": [1]}}))
    rows.map(row_of, schema={{"a": int, "said": str, "read": str}}).to_table(OUT)
"""


def test_processes_have_the_runtime_environment(raydp_session: RayDPSession, tmp_path: Path) -> None:
    """Variables, a module and a working directory; nobody there could import the file of the program."""
    program, out = tmp_path / "program_of_a_file.py", tmp_path / "out"
    program.write_text(PROGRAM.format(out=str(out)))
    (tmp_path / "only_there").mkdir()
    (tmp_path / "only_there" / "__init__.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "words.txt").write_text("words")
    wanted = {
        "env_vars": {"SAID": "by the option"},
        "py_modules": [str(tmp_path / "only_there")],
        "working_dir": str(tmp_path / "folder"),
    }
    settings = {
        "execution.target": "ray",
        "ray.address": ray.get_runtime_context().gcs_address,
        "state.checkpoints.dir": str(tmp_path / "checkpoints"),
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-c", "from tidegate.cli.main import main; main()", "run", f"{program}:main"]
    command += ["--runtime-env", json.dumps(wanted)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = {"a": 2, "said": "by the option", "read": "words"}
    assert tg.open_table(str(out)).to_arrow().to_pylist() == [expected]
