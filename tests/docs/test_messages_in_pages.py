"""Messages that pages quote are those that the code prints: whoever searches for one finds it.

A block behind the comment `<!-- messages -->` has one message a line. `…` in it stands for what the code fills in. A
message may be a part of what is printed, as long as one string of the code has it.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tidegate"
BLOCK = re.compile(r"<!-- messages -->\n```\n(?P<messages>.*?)^```$", re.DOTALL | re.MULTILINE)
FILLED = "\0"
FORMATS = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[sdrgf]|\{[^{}]*\}|…")
WORD = re.compile(r"\w{4,}")


def messages(page: str) -> list[str]:
    """The messages that a page quotes."""
    return [line for found in BLOCK.finditer(page) for line in found["messages"].splitlines()]


def filled(text: str) -> str:
    """A text with one mark for each thing that is filled in."""
    return FORMATS.sub(FILLED, text)


@cache
def sources() -> dict[Path, str]:
    """The modules of the package."""
    return {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@cache
def strings(path: Path) -> tuple[str, ...]:
    """All strings of a module, with marks for what is filled in. Docstrings are none."""
    found = []
    tree = ast.parse(sources()[path])
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {id(node.body[0].value) for node in ast.walk(tree) if _has_docstring(node, documented)}  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else FILLED for part in node.values]
            found.append("".join(filled(part) if part != FILLED else part for part in map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.append(filled(node.value))
    return tuple(found)


def _has_docstring(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    if not isinstance(node, kinds):
        return False
    body: list[ast.stmt] = node.body  # type: ignore[attr-defined]
    return bool(body) and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)


def is_printed(message: str) -> bool:
    """Whether a string of the code has the message."""
    wanted, words = filled(message), WORD.findall(message)
    # Strings are written in several pieces; a module that lacks a word of the message need not be parsed.
    likely = (path for path, text in sources().items() if all(word in text for word in words))
    return any(wanted in string for path in likely for string in strings(path))


PAGES = {
    str(path.relative_to(ROOT)): found
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if (found := messages(path.read_text(encoding="utf-8")))
}


LONG = "docs/troubleshooting.md"
"""It has so many messages that most modules are parsed for it."""


@pytest.mark.parametrize("page", [pytest.param(p, marks=pytest.mark.slow) if p == LONG else p for p in PAGES])
def test_messages_are_those_of_the_code(page: str) -> None:
    """Each message of a page is in a string of the package."""
    assert [message for message in PAGES[page] if not is_printed(message)] == []


def test_messages_are_found() -> None:
    """The pattern finds what it looks for: each comment has its block, and the page of symptoms has dozens."""
    for page, found in PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("<!-- messages -->") == len(BLOCK.findall(text)), page
        assert all(WORD.search(message) for message in found), page
    assert len(PAGES[LONG]) > 40


@pytest.mark.slow
def test_what_no_code_prints_is_found() -> None:
    """The rule bites: on words, on what is filled in where it is not, and the other way round."""
    assert is_printed("it expired before it was complete")
    assert is_printed("the job waits for …")
    assert not is_printed("it expired before it was completed")
    assert not is_printed("the job … waits for …")
    assert not is_printed("the job waits for room")
