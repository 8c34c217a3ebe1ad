"""What pages, comments and programs in strings name is there: no import or compiler looks at them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT, files

MODULE = re.compile(
    r"(?:from|import) (tidegate(?:\.\w+)+)|python -m (tidegate(?:\.\w+)+)|[`\"'](tidegate(?:\.\w+)+)[`\"':]"
)
NOT_MODULES = {"tidegate.serializer"}
"""A key in the metadata of Arrow schemas."""

PAGE_PATH = re.compile(r"`([\w./*-]*[\w*]\.(?:py|md|toml|yaml|txt)|[\w.-]+/[\w./-]*)`")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)(?:#[^)]*)?\)")
NAMES = {path.name for path in files()}
OTHERS = re.compile(r"build/|dist/|\.venv/|\.bench/|(?:.*/)?x\.py$|orders\.py$")
"""What is generated, what stands for any name, and what a user is told to write."""


def exists(module: str) -> bool:
    """Whether a module, or a name of one, is in the package."""
    place = PACKAGE
    for part in module.split(".")[1:]:
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            return True
        else:
            return re.search(rf"\b{part}\b", (place / "__init__.py").read_text()) is not None
    return True


def missing_modules(text: str) -> list[str]:
    """Modules of ours that a text names, and that are not there."""
    named = {found[1] or found[2] or found[3] for found in MODULE.finditer(text)}
    return sorted(name for name in named - NOT_MODULES if not exists(name))


def missing_paths(text: str, folder: Path) -> Iterator[str]:
    """Files of the repository that a page names, and that are not there: from the root, or from the page's folder."""
    for link in LINK.findall(text):
        if not (folder / link).exists():
            yield link
    for path in PAGE_PATH.findall(text):
        if OTHERS.match(path):
            continue
        places = [place for place in (ROOT, folder) if "/" in path and (place / path.split("/")[0]).exists()]
        found = any(any(place.glob(path.rstrip("/"))) for place in places) if places else "/" in path or path in NAMES
        if not found:
            yield path


PAGES = [path for path in files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_files_that_exist(page: Path) -> None:
    """A path in backticks that begins with a folder of the repository, a file's name, and a link lead somewhere."""
    assert list(missing_paths(page.read_text(), page.parent)) == []


@pytest.mark.slow
def test_modules_that_are_named_in_texts_exist() -> None:
    """Programs in strings and names of modules in pages move with the modules."""
    texts = [path for path in files() if path.suffix in {".py", ".md", ".toml", ".yaml"} and path != Path(__file__)]
    found = {str(path.relative_to(ROOT)): missing_modules(path.read_text()) for path in texts}
    assert {name: missing for name, missing in found.items() if missing} == {}


IN_CODE = re.compile(r"`([\w/]+\.py)`")
OF_USERS = {"orders.py"}
"""Scripts that a user writes, in examples."""


def test_modules_that_docstrings_name_exist() -> None:
    """A module that is moved or merged is also moved where docstrings and comments send a reader to it."""
    places = [f"/{path.relative_to(ROOT)}" for path in files() if path.suffix == ".py"]
    gone = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in IN_CODE.findall(path.read_text())
        if name not in OF_USERS and not any(place.endswith(f"/{name}") for place in places)
    ]
    assert gone == []


def test_what_is_not_there_is_recognised() -> None:
    """The rules bite."""
    assert list(missing_paths("`docs/attic.md`, `storage/attic.py`, `attic.py`, [x](attic.md)", ROOT / "docs")) == [
        "attic.md",
        "docs/attic.md",
        "storage/attic.py",
        "attic.py",
    ]
    assert missing_modules("from tidegate.storage.attic import x\n`tidegate.attic`") == [
        "tidegate.attic",
        "tidegate.storage.attic",
    ]


def test_what_is_there_or_elsewhere_is_free() -> None:
    """Links of the root, patterns, places of users, names of the public face."""
    text = "`tidegate/storage/errors.py`, `tests/house/`, `docs/dec*/README.md`, `out/failed`, [x](docs/sql.md#y)"
    assert list(missing_paths(text, ROOT)) == []
    assert missing_modules("`tidegate.recovery.list_checkpoints`, 'tidegate.serializer'") == []


def test_decisions_have_numbers_of_their_own_and_are_in_the_list() -> None:
    """Two that are made at the same time must not share one; a page that no list names is not found."""
    folder = ROOT / "docs" / "decisions"
    pages = sorted(path.name for path in files() if path.parent == folder and path.name != "README.md")
    assert [name[:5] for name in pages] == [f"{number:04d}-" for number in range(1, len(pages) + 1)]
    index = (folder / "README.md").read_text(encoding="utf-8")
    assert [name for name in pages if f"[{name[:4]} " not in index or f"]({name})" not in index] == []
    assert [
        name for name in pages if not (folder / name).read_text(encoding="utf-8").startswith(f"# {name[:4]} ")
    ] == []
