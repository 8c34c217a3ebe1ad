"""The tests lie as the package does: the test of a module is found without searching."""

from __future__ import annotations

from pathlib import Path

from repository import PACKAGE, ROOT, package_files

TESTS = ROOT / "tests"

OF_ALL_ROOMS = {"cluster", "docs", "house", "support"}
"""Whole jobs on Ray and Spark, pages, the repository itself, and what tests of several folders share."""

PLACES = {
    "actors/ray": "runtimes",
    "actors/local": "runtimes",
    "state/kernels": "kernels",
    "state/key_index": "kernels",
    "testing": "simulation",
}
"""Folders of the package whose tests lie in a folder of another name."""


def folder_for(*parts: str) -> str:
    """Returns the folder of the tests of a module, which is named by its parts below the package."""
    place = "/".join(parts)
    for folder, tests in PLACES.items():
        if place.startswith(f"{folder}/"):
            return tests
    inner = parts[1:] if parts[0] == "actors" else parts
    return inner[0] if len(inner) > 1 else "api"


def room_of(module: Path) -> str:
    """Returns the folder of the tests of a module of the package."""
    return folder_for(*module.relative_to(PACKAGE).with_suffix("").parts)


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
        if not (PACKAGE / folder).is_dir()
        and not (PACKAGE / "actors" / folder).is_dir()
        and str(folder) not in PLACES.values()
    ]
    assert missing == []


def test_a_test_that_is_called_like_a_module_lies_where_it_does() -> None:
    """`tests/task/test_input_gate.py` tests `tidegate/actors/task/input_gate.py`, and nothing else is so
    called.
    """
    rooms: dict[str, set[str]] = {}
    for module in package_files():
        rooms.setdefault(f"test_{module.stem}", set()).add(room_of(module))
    misplaced = {
        str(file.relative_to(TESTS)): sorted(rooms[file.stem])
        for file in modules_of_rooms()
        if file.stem in rooms and file.relative_to(TESTS).parts[0] not in rooms[file.stem]
    }
    assert misplaced == {}
