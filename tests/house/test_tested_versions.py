"""The table of versions on the page about installation shows what runs have recorded."""

from __future__ import annotations

import importlib.util
import json
import stat
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository import ROOT


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`scripts/test_versions.py` as a module."""
    spec = importlib.util.spec_from_file_location("run_versions", ROOT / "scripts" / "test_versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_versions", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table_of_what_was_recorded(script: ModuleType) -> None:
    """Each row, between the two marks."""
    known = json.loads(script.RECORD.read_text())
    assert script.table(known) in script.PAGE.read_text()
    assert known.keys() <= {script.ALL, *script.SETS}


def test_a_record_changes_the_page(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has passed adds its row; the rest of the page stays."""
    page, kept = tmp_path / "page.md", tmp_path / "kept.json"
    page.write_text("before\n<!-- tested versions -->\nold\n<!-- end of tested versions -->\nafter\n")
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(script, "RECORD", kept)
    script.record("3.13", "quick", sys.executable, 9242)
    text = page.read_text()
    assert text.startswith("before\n<!-- tested versions -->\n| run |")
    assert text.endswith("<!-- end of tested versions -->\nafter\n")
    version = ".".join(str(part) for part in sys.version_info[:3])
    assert f"| `make test-3.13` | quick | 9,242 | {version} |" in text


def test_a_python_is_found_on_the_path_or_in_pyenv(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest release of a version in pyenv stands in for one that is not on the PATH."""
    for release in ("3.12.9", "3.12.10", "3.13.1"):
        python = tmp_path / "versions" / release / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\nexit 0\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert script.python_of("3.12") == str(tmp_path / "versions" / "3.12.10" / "bin" / "python")
    assert script.python_of("3.11") is None
