"""Docstrings, comments, error texts and pages are plain English: subject, verb, object.

Each rule has a budget for each kind of text: the number of places that still break it. A budget may only fall. When a
change removes places, lower the budget to the number that the test reports.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from repository import PACKAGE, ROOT

RULES = {
    "a first word that hides the subject": re.compile(
        r"^(?:Of|Those|That|What|Where|Who|Whether|The same|As|So|All|It)\b", re.ASCII
    ),
    "code that says, tells, asks, hears, knows, wants, owes or lets go": re.compile(
        r"\b(?:say|says|said|tell|tells|told|hear|hears|heard|know|knows|want|wants|owe|owes|let go|lets go)\b", re.I
    ),
    "a pronoun for a noun": re.compile(
        r"\b(?:that of|those of|those that|those which|what is left|the others)\b", re.I
    ),
    "nobody and somebody": re.compile(r"\b(?:nobody|somebody|whoever|no row is|none: nothing)\b", re.I),
    "so many, so much, so long": re.compile(r"\bso (?:many|much|long)\b(?! as)", re.I),
    "goes on, lies, comes to, beside, takes in": re.compile(
        r"\b(?:goes on|go on|went on|lies|lie in|lay in|comes to|beside|takes in)\b", re.I
    ),
    "leave ... out, longer than nothing": re.compile(
        r"\bleave (?:it|them|\w+) out\b|\bleft out\b|than nothing\b", re.I
    ),
}
"""The first rule looks at the beginning of docstrings alone, the others at whole texts."""

BUDGETS = {
    ("a first word that hides the subject", "docstrings"): 1175,
    ("a pronoun for a noun", "comments"): 30,
    ("a pronoun for a noun", "docstrings"): 402,
    ("a pronoun for a noun", "errors"): 16,
    ("a pronoun for a noun", "pages"): 164,
    ("code that says, tells, asks, hears, knows, wants, owes or lets go", "comments"): 54,
    ("code that says, tells, asks, hears, knows, wants, owes or lets go", "docstrings"): 511,
    ("code that says, tells, asks, hears, knows, wants, owes or lets go", "errors"): 63,
    ("code that says, tells, asks, hears, knows, wants, owes or lets go", "pages"): 318,
    ("goes on, lies, comes to, beside, takes in", "comments"): 11,
    ("goes on, lies, comes to, beside, takes in", "docstrings"): 134,
    ("goes on, lies, comes to, beside, takes in", "errors"): 7,
    ("goes on, lies, comes to, beside, takes in", "pages"): 175,
    ("leave ... out, longer than nothing", "comments"): 2,
    ("leave ... out, longer than nothing", "docstrings"): 25,
    ("leave ... out, longer than nothing", "errors"): 5,
    ("leave ... out, longer than nothing", "pages"): 27,
    ("nobody and somebody", "comments"): 36,
    ("nobody and somebody", "docstrings"): 168,
    ("nobody and somebody", "errors"): 12,
    ("nobody and somebody", "pages"): 98,
    ("so many, so much, so long", "comments"): 0,
    ("so many, so much, so long", "docstrings"): 105,
    ("so many, so much, so long", "errors"): 0,
    ("so many, so much, so long", "pages"): 14,
}


@cache
def texts() -> dict[str, list[tuple[str, str]]]:
    """Returns the texts of each kind, each with the place where it stands."""
    found: dict[str, list[tuple[str, str]]] = {"docstrings": [], "errors": [], "comments": [], "pages": []}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        found["docstrings"] += [(f"{place}:{line}", text) for line, text in docstrings(tree)]
        found["errors"] += [(f"{place}:{line}", text) for line, text in error_texts(tree)]
        found["comments"] += [(f"{place}:{line}", text) for line, text in comments(path)]
    for path in sorted((ROOT / "docs").glob("*.md")):
        lines = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        found["pages"] += [(path.name, line) for line in lines.splitlines()]
    found["pages"] += [("README.md", line) for line in (ROOT / "README.md").read_text().splitlines()]
    return found


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module, of what it defines, and of attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def error_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields the string constants below each `raise`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield node.lineno, part.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the comments of a module."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


@cache
def offences() -> dict[tuple[str, str], list[str]]:
    """Returns the places that break each rule in each kind of text."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, places in texts().items():
        for rule, pattern in RULES.items():
            if rule.startswith("a first word") and kind != "docstrings":
                continue
            found[rule, kind] = [f"{place}: {text.strip()[:100]!r}" for place, text in places if pattern.search(text)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "kind"), sorted(BUDGETS))
def test_no_more_places_break_a_rule(rule: str, kind: str) -> None:
    """A new text keeps the rules; an old one may break them until its budget is gone."""
    found, budget = offences()[rule, kind], BUDGETS[rule, kind]
    files = Counter(place.split(":")[0] for place in found)
    assert len(found) <= budget, f"{len(found)} places, {budget} allowed; by file: {files.most_common(20)}"


@pytest.mark.slow
def test_every_rule_has_a_budget() -> None:
    """No rule is forgotten for a kind of text."""
    assert offences().keys() == BUDGETS.keys()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Of a task: its files.", "a first word that hides the subject"),
        ("The coordinator says which tasks it waits for.", "code that says, tells"),
        ("The rows are those of the checkpoint.", "a pronoun for a noun"),
        ("Nobody reads the file.", "nobody and somebody"),
        ("It waits for so many rows.", "so many, so much, so long"),
        ("The job goes on beside it.", "goes on, lies, comes to"),
        ("must be longer than nothing", "leave ... out"),
    ],
)
def test_a_broken_rule_is_found(text: str, rule: str) -> None:
    """Each pattern matches what style asks to avoid."""
    (pattern,) = (pattern for name, pattern in RULES.items() if name.startswith(rule))
    assert pattern.search(text)


def test_plain_english_passes() -> None:
    """A docstring in the form that style asks for breaks no rule."""
    text = "Returns the rows of a checkpoint. Raises StorageError if a file is missing."
    assert [rule for rule, pattern in RULES.items() if pattern.search(text)] == []
