"""Functions that pages tell a reader to open are where the page says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, files

PLACED = re.compile(r"`(\w+(?:\.\w+)*)`[\s,(]+`((?:\w+/)+\w+\.py)`")
"""A name and, right after it, the module that it is in: `name` (`path.py`), or (`name`, `path.py`)."""

ROW_NAMES = re.compile(r"`([\w./]+\.py)` \(((?:`\w+(?:\.\w+)*`(?:, )?)+)\)")
"""A module in the README of a folder, and the names to look for in it: `path.py` (`name`, `name`)."""

ROW_PATH = re.compile(r"`([\w./]+\.(?:py|html|css))`")
"""A file in the README of a folder: below the folder, or a path from the root."""

MEMBER = re.compile(r"`([A-Z]\w+\.[a-z_]\w*)(?:\(\))?`")
"""A class and a member of it, with or without a module."""

CODE = re.compile(r"`([A-Za-z_]\w*)`")
CODE_OR_MEMBER = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)?)`")
NOT_OURS = {"_metadata", "periodic"}
"""What a walk sets as code and is no name: a file, a timer."""

PAGES = [path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]
WALKS = re.compile(r"^## A walk: .*?(?=^## )", re.DOTALL | re.MULTILINE)
WALK_FILES_MAX = {"one batch through a task": 30, "one checkpoint": 40, "from a call to an operator": 35}
"""How many files a reader has to open to follow each walk of the architecture page."""
STEPS = re.compile(r"^(\d+)\. `(tidegate/[\w/]+\.py)`: (.*?)(?=^\d+\. |^[^\d\s]|^\n)", re.DOTALL | re.MULTILINE)
"""A step of a walk: its number, its file, and what to read there."""


def defined_in(tree: ast.Module) -> set[str]:
    """Functions, classes, constants, and members as `Class.member`, of one module."""
    found: set[str] = set()
    for node in tree.body:
        names = {name for part in ast.walk(node) for name in _bound(part)}
        found |= names
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in names}
    return found


def _bound(node: ast.AST) -> list[str]:
    """Names that a node gives to something: a definition, or an assignment to a name or to an attribute of `self`."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    return []


@dataclass(frozen=True)
class Module:
    """What one module defines, and the bases of its classes."""

    names: set[str]
    bases: dict[str, list[str]]


@cache
def modules() -> dict[Path, Module]:
    """The package's modules. Each is parsed once: to parse them all is what these tests cost."""
    return {path: _read(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}


def _read(tree: ast.Module) -> Module:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    bases = {each.name: [base.id for base in each.bases if isinstance(base, ast.Name)] for each in classes}
    return Module(defined_in(tree), bases)


@cache
def everything() -> frozenset[str]:
    """What any module defines, and members that a class has from one of its bases."""
    found = set().union(*(module.names for module in modules().values()))
    bases = {name: each for module in modules().values() for name, each in module.bases.items()}
    members: dict[str, set[str]] = {name: set() for name in bases}
    for name in found:
        owner, _, member = name.partition(".")
        if member and owner in members:
            members[owner].add(member)
    for name in bases:
        for base in _ancestors(name, bases):
            found |= {f"{name}.{member}" for member in members.get(base, ())}
    return frozenset(found)


@pytest.fixture(scope="module", autouse=True)
def read_once() -> None:
    """Tests of a module with a fixture of its own stay in one process: the package is read in no other one."""
    everything()


@cache
def classes() -> frozenset[str]:
    """Classes that have members."""
    return frozenset(name.split(".")[0] for name in everything() if "." in name)


def _ancestors(name: str, bases: dict[str, list[str]]) -> list[str]:
    return [each for base in bases.get(name, ()) for each in (base, *_ancestors(base, bases))]


def lost(page: str) -> list[str]:
    """Names that are not in the module beside them, and members that no class of ours has."""
    found = []
    for name, path in PLACED.findall(page):
        module = (ROOT / path).resolve()
        if module.is_relative_to(PACKAGE) and (module not in modules() or name not in modules()[module].names):
            found.append(f"{name} in {path}")
    members = (name for name in MEMBER.findall(page) if name.split(".")[0] in classes())
    return found + [name for name in members if name not in everything()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_functions_are_where_pages_say(page: Path) -> None:
    """A reader opens the module that stands beside a name, and finds it there."""
    assert lost(page.read_text()) == []


def test_every_name_of_the_walks_is_one_of_ours() -> None:
    """The walks of the architecture page name functions to open in order: each can be looked for."""
    walks = WALKS.findall(_architecture())
    assert len(walks) == len(WALK_FILES_MAX)
    names = {name for walk in walks for name in CODE.findall(walk)}
    assert len(names) > 30
    assert sorted(names - everything() - NOT_OURS) == []


@pytest.mark.parametrize("name", WALK_FILES_MAX)
def test_walks_are_short_lists_of_files(name: str) -> None:
    """Each step is one file that exists; steps are numbered, and the text names how many there are."""
    (walk,) = re.findall(rf"^## A walk: {name}\n(.*?)(?=^## )", _architecture(), re.DOTALL | re.MULTILINE)
    steps = STEPS.findall(walk)
    assert [int(number) for number, _, _ in steps] == list(range(1, len(steps) + 1))
    assert [path for _, path, _ in steps if not (ROOT / path).is_file()] == []
    assert len({path for _, path, _ in steps}) == len(steps) <= WALK_FILES_MAX[name]
    assert re.search(rf"\b{len(steps)}\sfiles", walk)


@pytest.mark.parametrize("name", WALK_FILES_MAX)
def test_the_first_name_of_a_step_is_in_its_file(name: str) -> None:
    """A reader who opens the file finds what the step begins with."""
    (walk,) = re.findall(rf"^## A walk: {name}\n(.*?)(?=^## )", _architecture(), re.DOTALL | re.MULTILINE)
    first = [(path, CODE_OR_MEMBER.search(text)) for _, path, text in STEPS.findall(walk)]
    named = [(path, found[1]) for path, found in first if found is not None and found[1] not in NOT_OURS]
    assert len(named) > len(first) * 3 // 4
    assert [(path, member) for path, member in named if member not in modules()[ROOT / path].names] == []


READMES = sorted(PACKAGE.rglob("README.md"))
NEED_NO_ROW = {"__init__.py", "__main__.py", "lazy_names.py"}


def place(readme: Path, path: str) -> Path:
    """The file that a README names: from the root of the repository, or else below the folder of the README."""
    return ROOT / path if path.startswith(("tidegate/", "tests/")) else readme.parent / path


def wrong_rows(readme: Path, text: str) -> list[str]:
    """Files that a README names and that are not there, and names that are not in the module before them."""
    found = [path for path in ROW_PATH.findall(text) if "/" in path and not place(readme, path).is_file()]
    for path, names in ROW_NAMES.findall(text):
        module = modules().get(place(readme, path))
        known = set() if module is None else module.names
        found += [f"{name} in {path}" for name in CODE_OR_MEMBER.findall(names) if name not in known]
    return found


@pytest.mark.parametrize("readme", READMES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_rows_of_folders_name_files_and_functions_that_exist(readme: Path) -> None:
    """A reader who is sent to a function of a module finds it there."""
    assert wrong_rows(readme, readme.read_text()) == []


def test_every_module_is_in_the_readme_of_its_folder() -> None:
    """A module that no row names is not found by a reader who has never seen the code."""
    named = {place(readme, path) for readme in READMES for path in ROW_PATH.findall(readme.read_text())}
    assert sorted(str(path.relative_to(ROOT)) for path in {*modules()} - named if path.name not in NEED_NO_ROW) == []


def test_contributing_leads_to_every_readme() -> None:
    """The index of folders is complete."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [str(readme.relative_to(ROOT)) for readme in READMES if f"({readme.relative_to(ROOT)})" not in page] == []


def test_a_wrong_row_is_found() -> None:
    """The rules bite: a file that went, a name that is in another module."""
    readme = PACKAGE / "storage/README.md"
    assert wrong_rows(
        readme, "| x | `files/attic.py` |\n| y | `codec.py` (`encode`, `attic`), `ids.py` (`JobId`) |"
    ) == [
        "files/attic.py",
        "attic in codec.py",
    ]


def _architecture() -> str:
    return (ROOT / "docs/architecture.md").read_text()


def test_what_is_lost_is_found() -> None:
    """The rule bites: a name in another module, one that is nowhere, a member that went."""
    assert lost(
        "`StoreFile` (`tidegate/storage/ids.py`), (`attic`,\n`tidegate/storage/codec.py`), `TaskMachine.attic`"
    ) == [
        "StoreFile in tidegate/storage/ids.py",
        "attic in tidegate/storage/codec.py",
        "TaskMachine.attic",
    ]
    assert (
        lost("`JobId` (`tidegate/storage/ids.py`), `attic` in words, `TaskMachine.handle`, `read` (`docs/x.py`)") == []
    )
