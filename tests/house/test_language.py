"""Docstrings, comments, error texts and pages are plain English: subject, verb, object.

The rules are a net, not the aim: a text that breaks none can still be a riddle.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterable, Iterator
from io import BytesIO

import pytest
from repository import PACKAGE, ROOT, statements

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
    "passed over, handed over, stands for, asks for, in charge, anew": re.compile(
        r"(?<![`\"])\b(?:passe[sd] over|hand(?:s|ed) over|stands? for|asks?|asked|in charge|anew|hence|gives? way"
        r"|holds? up(?! to))\b",
        re.I,
    ),
    "leave ... out, longer than nothing": re.compile(
        r"\bleave (?:the |a )?\S+ out\b|\bleft out\b|than nothing\b", re.I
    ),
}
"""The first rule looks at the beginning of docstrings alone, the others at whole texts."""

KINDS = ("docstrings", "errors", "comments", "pages")


def texts() -> dict[str, list[tuple[str, str]]]:
    """Returns the texts of each kind, each with the place where it stands."""
    found: dict[str, list[tuple[str, str]]] = {kind: [] for kind in KINDS}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        source = path.read_bytes()
        nodes = list(statements(ast.parse(source)))
        found["docstrings"] += [(f"{place}:{line}", text) for line, text in docstrings(nodes)]
        found["errors"] += [(f"{place}:{line}", text) for line, text in error_texts(nodes)]
        found["comments"] += [(f"{place}:{line}", text) for line, text in comments(source)]
    for path in sorted((ROOT / "docs").glob("*.md")):
        lines = re.sub(r"^```.*?^```|^    .*?$|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        found["pages"] += [(path.name, line) for line in lines.splitlines()]
    found["pages"] += [("README.md", line) for line in (ROOT / "README.md").read_text().splitlines()]
    return found


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the docstrings of a module, of what it defines, and of attributes."""
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def error_texts(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields the string constants below each `raise`."""
    for node in nodes:
        if isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield node.lineno, part.value


def comments(source: bytes) -> Iterator[tuple[int, str]]:
    """Yields the comments of a module."""
    if b"#" in source:
        for token in tokenize.tokenize(BytesIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")


@pytest.fixture(scope="module")
def offences() -> dict[tuple[str, str], list[str]]:
    """Returns the places that break each rule in each kind of text.

    A fixture of the module, so that one process reads all files, once.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for kind, places in texts().items():
        for rule, pattern in RULES.items():
            if rule.startswith("a first word") and kind != "docstrings":
                continue
            found[rule, kind] = [f"{place}: {text.strip()[:100]!r}" for place, text in places if pattern.search(text)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_no_text_breaks_a_rule(rule: str, kind: str, offences: dict[tuple[str, str], list[str]]) -> None:
    """The message lists the places."""
    assert offences.get((rule, kind), []) == []


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
        ("Change it, or leave timestamp= out.", "leave ... out"),
        ("A damaged checkpoint is passed over.", "passed over"),
        ("None stands for all columns.", "passed over"),
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
