"""Rules that every file of the repository keeps."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from repository import ROOT, files

# Places of one machine, and where its packages come from: both are that machine's own affair.
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|Users|home/(?!ray\b)\w+|opt/(pypi|wheels)|var/folders)\b/?")
REGISTRY = re.compile(r"pypi\.(org|python)|pythonhosted\.|--(extra-)?index-url|--find-links|repo\.maven", re.IGNORECASE)


def offences(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    """`file:line: text` of each line that matches."""
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    return found


def test_names_of_test_modules_are_unique() -> None:
    """Tests lie in folders that are no packages, so pytest cannot import two modules of one name."""
    names = Counter(path.name for path in files() if path.suffix == ".py" and path.is_relative_to(ROOT / "tests"))
    assert {name: count for name, count in names.items() if count > 1 and name != "conftest.py"} == {}


@pytest.mark.slow
def test_no_file_names_a_machine_or_a_registry() -> None:
    """Nothing that is committed depends on where it was written."""
    others = [path for path in files() if path != Path(__file__).resolve()]
    assert offences(MACHINE_PATH, others) == []
    assert offences(REGISTRY, others) == []


@pytest.mark.parametrize("line", ["cd /work/x", "'/root/.pyenv'", "file:///home/ann/x", "/opt/wheels"])
def test_machine_paths_are_recognised(line: str) -> None:
    """The rule bites."""
    assert MACHINE_PATH.search(line)


@pytest.mark.parametrize("line", ["/home/ray/app", "/tmp/x", "a/work/b", "s3://bucket/root", "docs/home/x"])
def test_other_paths_are_free(line: str) -> None:
    """Container paths, relative paths and URLs are nobody's machine."""
    assert not MACHINE_PATH.search(line)


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-newest.txt", "constraints-lowest.txt"])
def test_constraints_pin_versions_by_name_alone(name: str) -> None:
    """Every line is `name==version`, in order, each name once."""
    lines = (ROOT / name).read_text().splitlines()
    pins = [re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+]+)", line) for line in lines]
    assert [line for line, pin in zip(lines, pins, strict=True) if pin is None] == []
    names = [pin[1].lower() for pin in pins if pin is not None]
    assert len(names) == len(set(names))


def test_documented_commands_exist() -> None:
    """Each `make` target that a page names is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md", ".ci/run"))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", pages, re.MULTILINE))
    assert {"demo", "test", "check"} <= named
    assert named - targets == set()
