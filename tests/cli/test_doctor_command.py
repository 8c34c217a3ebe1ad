"""`tidegate doctor` and `tidegate --version`."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata

import pytest
from command_line import CommandRunner

import tidegate as tg
from tidegate.cli.main import app


def test_the_version_is_that_of_the_package() -> None:
    """In Python, in the command, and in the metadata of the installation."""
    done = CommandRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.output.strip() == f"tidegate {tg.__version__}"
    assert tg.__version__ == metadata.version("tidegate")


def test_the_doctor_names_what_works_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra that is not installed comes with the command that installs it, and is not an error."""
    monkeypatch.setitem(sys.modules, "sqlglot", None)
    done = CommandRunner().invoke(app, ["doctor", "--json"])
    found = {finding["what"]: finding for finding in json.loads(done.output)}
    assert done.exit_code == (1 if any(each["state"] == "wrong" for each in found.values()) else 0)
    assert found["pyarrow"]["found"] == metadata.version("pyarrow")
    assert found["[sql]"] == {
        "what": "[sql]",
        "state": "optional",
        "found": "not installed",
        "advice": "pip install 'tidegate[sql]'",
    }
    assert found["port 8081"]["state"] in ("ok", "optional")


def test_a_full_disk_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with 1, and prints what to do."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20}))
    done = CommandRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "!!  temporary files" in done.output
    assert "less than 1 GiB" in done.output
