"""Examples in the pages run as pasted: those of a page one after the other, in one namespace and an empty folder.

Comments of a page say what a reader does not see:

    <!-- runs: CODE -->          what must have come out; examples do not see the names that it defines
    <!-- not run: REASON -->     the next example is a fragment, or needs Ray or S3; its names are checked all the same
    <!-- prints -->              the next block is what the example before it has printed

Lines of a block `console` that begin with `$ tidegate` are commands, which run in the same folder and must succeed. A
`$NAME` in them is a variable of the examples. What else such a block shows differs from run to run: it is not compared.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from command_line import CommandRunner

import tidegate as tg
from tidegate import testing
from tidegate.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PARTS = re.compile(
    r"<!-- (?P<comment>runs:|not run:|prints)(?P<text>.*?)-->|^(?P<fence> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """An example, what surrounds it, or what it prints."""

    kind: str
    text: str
    line: int


def parts(page: str) -> Iterator[Part]:
    """What a page has to say about examples, in order; `kind` is `python`, `fragment`, `runs` or `prints`."""
    said = ""
    for found in PARTS.finditer(page):
        line = page.count("\n", 0, found.start()) + 1
        if found["comment"] == "runs:":
            yield Part("runs", found["text"], line - 1)
        elif found["comment"] is not None:
            said = found["comment"]
            assert said == "prints" or found["text"].strip(), f"line {line} gives no reason"
        else:
            if found["language"] == "python":
                yield Part("fragment" if said == "not run:" else "python", found["code"], line)
            elif found["language"] == "console":
                yield Part("console", found["code"], line)
            elif said == "prints":
                yield Part("prints", found["code"], line)
            said = ""


PAGES = {
    str(path.relative_to(ROOT)): found
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (found := list(parts(path.read_text())))
}


def unknown_names(tree: ast.AST) -> list[str]:
    """Names of `tg` and `tidegate` that an example uses, and that are not public."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tg":
            found += [] if node.attr in tg.__all__ else [f"tg.{node.attr}"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in STATIC:
            found += [] if hasattr(STATIC[ast.unparse(node.value)], node.attr) else [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom) and node.module == "tidegate.testing":
            found += [name.name for name in node.names if name.name not in testing.__all__]
    return found


STATIC = {"tg.StreamEnvironment": tg.StreamEnvironment, "tg.RestartStrategy": tg.RestartStrategy}


def compiled(part: Part, page: str) -> tuple[ast.Module, list[str]]:
    """The program of a part with the lines of its page, and what it names in vain."""
    tree = ast.parse("\n" * part.line + part.text, page)
    return tree, unknown_names(tree)


def commands(part: Part) -> list[list[str]]:
    """The commands of a block, in words."""
    lines = [line.removeprefix("$ ") for line in part.text.splitlines() if line.startswith("$ ")]
    found = [shlex.split(line, comments=True) for line in lines]
    assert {words[0] for words in found} == {"tidegate"}, f"line {part.line} has no command of tidegate"
    return found


def run(words: list[str], namespace: Mapping[str, object]) -> str:
    """What a command prints. It must succeed."""
    values = [str(namespace[word[1:]]) if word.startswith("$") else word for word in words]
    result = CommandRunner().invoke(app, values[1:])
    assert result.exit_code == 0, f"{shlex.join(values)}: {result.output}"
    return result.output


LONG = {"docs/own-connectors.md", "docs/tutorial.md", "docs/windows.md"}
"""Pages whose examples take longest."""


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES])
def test_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a reader copies works, and prints what the page says."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    unseen: dict[str, object] = {"tg": tg, "pa": pa, "pl": pl}
    printed = ""
    for part in PAGES[page]:
        if part.kind == "prints":
            assert printed == part.text
            continue
        if part.kind == "console":
            printed = "".join(run(command, namespace) for command in commands(part))
            continue
        tree, unknown = compiled(part, page)
        assert unknown == []
        if part.kind == "python":
            exec(compile(tree, page, "exec", dont_inherit=True), namespace)
        elif part.kind == "runs":
            unseen.update(namespace)
            exec(compile(tree, page, "exec", dont_inherit=True), unseen)
        if part.kind == "python":
            printed = capsys.readouterr().out


def test_most_pages_with_examples_are_found() -> None:
    """The pattern finds what it looks for: every fence of Python in a page is an example."""
    fences = sum((ROOT / page).read_text().count("```python") for page in PAGES)
    examples = [part for found in PAGES.values() for part in found if part.kind in ("python", "fragment")]
    assert len(examples) == fences >= 16
    assert sum(part.kind == "python" for part in examples) > len(examples) // 2


def test_names_that_are_not_public_are_found() -> None:
    """The rule bites, also on examples that are not run."""
    (part,) = parts("<!-- not run: needs Ray -->\n```python\ntg.StreamEnvironment.flink(tg.counted)\n```\n")
    tree, unknown = compiled(part, "page")
    assert part.kind == "fragment"
    assert sorted(unknown) == ["tg.StreamEnvironment.flink", "tg.counted"]
    assert unknown_names(ast.parse("from tidegate.testing import simulated")) == ["simulated"]
    assert isinstance(tree, ast.Module)


def test_commands_of_a_console_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails is noticed, and so is a block without any."""
    monkeypatch.chdir(tmp_path)
    listed, wrong = parts("```console\n$ tidegate checkpoints list $ROOT\n```\n```console\n$ ls\n```\n")
    (words,) = commands(listed)
    assert "No completed checkpoint under nowhere" in run(words, {"ROOT": "nowhere"})
    with pytest.raises(AssertionError, match="has no command of tidegate"):
        commands(wrong)
    with pytest.raises(AssertionError, match=r"[Nn]o such option"):
        run([*words, "--jobs"], {"ROOT": "nowhere"})
