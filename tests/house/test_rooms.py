"""The tests lie as the package does: the test of a module is found without searching."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from repository import PACKAGE, ROOT, package_files

TESTS = ROOT / "tests"

OF_ALL_ROOMS = {"cluster", "docs", "house", "support"}
"""Whole jobs on Ray and Spark, pages, the repository itself, and what tests of several folders share."""

PLACES = {"testing": "simulation"}
"""Where the folder of tests has another name."""


def room_of(module: Path) -> str:
    """The folder of the tests of a module of the package."""
    *folders, name = module.relative_to(PACKAGE).with_suffix("").parts
    rooms = folders[1:] if folders[:1] == ["actors"] else folders
    return PLACES.get(rooms[0], rooms[0]) if rooms else "api"


@cache
def imported_by(file: Path) -> frozenset[str]:
    """What a file names of tidegate, also in programs in strings, and the modules without a dot that it imports."""
    text = file.read_text()
    named = re.findall(r"\btidegate(?:\.\w+)+", text)
    for inner in re.findall(r"^ *from tidegate import (.+)$", text, re.MULTILINE):
        named += [f"tidegate.{name}" for name in re.findall(r"\w+", inner)]
    return frozenset([*named, *re.findall(r"^ *(?:from|import) (\w+)(?![\w.])", text, re.MULTILINE)])


def rooms_used(test: Path, helpers: dict[str, Path]) -> set[str]:
    """The rooms that a test imports something of, itself or through what tests share."""
    found: set[str] = set()
    seen, waiting = set[Path](), [test]
    while waiting:
        file = waiting.pop()
        seen.add(file)
        for name in imported_by(file):
            parts = name.split(".")
            if parts[0] == "tidegate":
                # The public face, of which a test says `tg`, is that of the api.
                inner = parts[2:] if parts[1:2] == ["actors"] else parts[1:]
                found.add(inner[0] if inner else "api")
                found |= {PLACES[part] for part in inner[:1] if part in PLACES}
            elif parts[0] in helpers and helpers[parts[0]] not in seen:
                waiting.append(helpers[parts[0]])
    return found


def modules_of_rooms() -> list[Path]:
    """Test modules of rooms."""
    found = sorted(TESTS.rglob("test_*.py"))
    return [file for file in found if file.relative_to(TESTS).parts[0] not in OF_ALL_ROOMS]


def test_folders_of_tests_are_rooms() -> None:
    """Each folder, also inside of another, is one of the package; those of the large room `actors` lie at the top."""
    folders = {file.parent.relative_to(TESTS) for file in modules_of_rooms()}
    missing = [
        str(folder)
        for folder in sorted(folders)
        if not (PACKAGE / folder).is_dir() and not (PACKAGE / "actors" / folder).is_dir()
    ]
    assert missing == []


def test_a_test_that_is_called_like_a_module_lies_where_it_does() -> None:
    """`tests/task/test_input_gate.py` tests `tidegate/actors/task/channels/input_gate.py`, and nothing else is so
    called.""" rooms: dict[str, set[str]] = {}
    for module in package_files():
        rooms.setdefault(f"test_{module.stem}", set()).add(room_of(module))
    misplaced = {
        str(file.relative_to(TESTS)): sorted(rooms[file.stem])
        for file in modules_of_rooms()
        if file.stem in rooms and file.relative_to(TESTS).parts[0] not in rooms[file.stem]
    }
    assert misplaced == {}


def test_tests_of_a_room_are_about_it() -> None:
    """Each imports something of the room in whose folder it lies, itself or through what tests share."""
    helpers = {file.stem: file for file in TESTS.rglob("*.py") if not file.stem.startswith("test_")}
    strangers = {
        str(file.relative_to(TESTS)): sorted(used)
        for file in modules_of_rooms()
        if file.relative_to(TESTS).parts[0] not in (used := rooms_used(file, helpers))
    }
    assert strangers == {}
