"""Write the pages of docs/reference from the docstrings, so that they can be read in the repository as it stands.

    python scripts/reference_pages.py

A page is written by hand down to its first mark, `<!-- reference: tidegate.Stream -->`. After each mark comes what is
public of that name: the signature and the docstring, of a class also those of its methods, properties and fields. The
text between marks is made anew. `tests/house/test_reference_pages.py` fails if a page is not what this script makes.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
MARK = re.compile(r"^<!-- reference: (?P<name>\S+) -->$", re.MULTILINE)

MADE_BY_OTHERS = {
    "Aggregate",
    "BatchContext",
    "BroadcastContext",
    "BroadcastState",
    "CollectedRows",
    "CommitContext",
    "CommittingContext",
    "ConnectedStreams",
    "Job",
    "KeyGroups",
    "KeyedStream",
    "OperatorListState",
    "OutputTable",
    "ProcessBatchContext",
    "ProcessContext",
    "ProcessWindowContext",
    "SinkContext",
    "SinkFiles",
    "Stream",
    "StreamEnvironment",
    "TimerService",
    "WindowedStream",
}
"""Classes that a program gets and does not make: their constructors are not shown."""

_LINE_MAX = 100
_PACKAGE = "tidegate"
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def page(text: str) -> str:
    """Returns a page with everything below its marks made anew."""
    first = MARK.search(text)
    if first is None:
        return text
    return text[: first.start()] + "\n".join(entry(found["name"]) for found in MARK.finditer(text))


def entry(name: str) -> str:
    """Returns the mark of a public name and what is shown of it, as Markdown."""
    module, _, attribute = name.rpartition(".")
    value = getattr(import_module(module), attribute)
    lines = [f"<!-- reference: {name} -->", f"## {attribute}", ""]
    if inspect.isclass(value):
        lines += _class_entry(value)
    elif callable(value):
        lines += _code(_signature(_definition(value), attribute)) + _text(value.__doc__)
    else:
        lines += _code(f"{attribute} = {value!r}") + _text(_doc_of_constant(attribute, value))
    return "\n".join(lines).rstrip("\n") + "\n"


def _class_entry(kind: type) -> list[str]:
    node = _definition(kind)
    made = next(
        (base.__dict__["__init__"] for base in kind.__mro__ if _is_ours(base) and "__init__" in vars(base)), None
    )
    is_generated = made is not None and made.__code__.co_filename.startswith("<")  # a dataclass
    if made is None or is_generated or kind.__name__ in MADE_BY_OTHERS or issubclass(kind, BaseException):
        lines = _code(f"class {kind.__name__}")
    else:
        lines = _code(_signature(_definition(made), kind.__name__, returns=False))
    lines += _text(kind.__doc__ if node is not None else None)
    if fields := [_field(name, annotation, doc) for name, annotation, doc in _fields(kind)]:
        lines += [*fields, ""]
    for name, value in _members(kind):
        function: Any = value.fget if isinstance(value, property) else _plain(value)
        shown = inspect.unwrap(function)
        definition = _definition(shown)
        if definition is None:
            continue
        lines += [f"### {kind.__name__}.{name}", ""]
        if isinstance(value, property):
            returns = "" if definition.returns is None else f": {ast.unparse(definition.returns)}"
            lines += _code(f"{name}{returns}")
        else:
            lines += _code(_signature(definition, name))
        lines += _text(shown.__doc__)
    return lines


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class and of those of our own that it derives from, in their order."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not _is_ours(base):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(value, property) or inspect.isroutine(_plain(value)):
                yield name, value


def _fields(kind: type) -> Iterator[tuple[str, str, str | None]]:
    """Public fields of a class and of those of our own that it derives from: name, type, docstring."""
    seen: set[str] = set()
    for base in kind.__mro__:
        node = _definition(base) if _is_ours(base) else None
        if not isinstance(node, ast.ClassDef):
            continue
        for line, following in zip(node.body, [*node.body[1:], None], strict=True):
            doc = _string(following)
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                name, shown = line.target.id, ast.unparse(line.annotation)
                value = line.value
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "setting":
                    declared = {each.arg: each.value for each in value.keywords}
                    value, doc = declared["default"], str(ast.literal_eval(declared["doc"]))
                if value is not None:
                    shown += f" = {ast.unparse(value)}"
            elif isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name) and doc is not None:
                name, shown = line.targets[0].id, ast.unparse(line.value)
            else:
                continue
            if not name.startswith("_") and name not in seen and "ClassVar" not in shown:
                seen.add(name)
                yield name, shown, doc


def _field(name: str, shown: str, doc: str | None) -> str:
    return f"- `{name}: {shown}`" + ("" if doc is None else f"  \n  {' '.join(inspect.cleandoc(doc).split())}")


def _signature(node: _Definition | None, name: str, *, returns: bool = True) -> str:
    """Returns the signature of a function as its source has it, without `self`; an argument a line if it is long."""
    if node is None or isinstance(node, ast.ClassDef):
        return f"{name}(...)"
    arguments = list(_arguments(node.args))
    after = f" -> {ast.unparse(node.returns)}" if returns and node.returns is not None else ""
    before = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    short = f"{before}{name}({', '.join(arguments)}){after}"
    if len(short) <= _LINE_MAX:
        return short
    return f"{before}{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){after}"


def _arguments(found: ast.arguments) -> Iterator[str]:
    plain = [*found.posonlyargs, *found.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(found.defaults)) + list(found.defaults)
    for number, (argument, default) in enumerate(zip(plain, defaults, strict=True)):
        if not (number == 0 and argument.arg in ("self", "cls")):
            yield _argument(argument, default)
        if found.posonlyargs and number == len(found.posonlyargs) - 1 and number > 0:
            yield "/"
    if found.vararg is not None:
        yield "*" + _argument(found.vararg, None)
    elif found.kwonlyargs:
        yield "*"
    for argument, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        yield _argument(argument, default)
    if found.kwarg is not None:
        yield "**" + _argument(found.kwarg, None)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    shown = argument.arg if argument.annotation is None else f"{argument.arg}: {ast.unparse(argument.annotation)}"
    if default is None:
        return shown
    return f"{shown} = {ast.unparse(default)}" if argument.annotation is not None else f"{shown}={ast.unparse(default)}"


def _text(doc: str | None) -> list[str]:
    return [] if not doc else [inspect.cleandoc(doc), ""]


def _code(text: str) -> list[str]:
    return ["```", text, "```", ""]


def _plain(value: Any) -> Any:
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == _PACKAGE


def _definition(value: Any) -> Any:
    """The syntax tree of a class or function of ours. None for one that has no source."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        return None
    node = ast.parse(source).body[0]
    return node if isinstance(node, _Definition) else None


def _doc_of_constant(name: str, value: object) -> str | None:
    """The string below the assignment of a constant, in the module of ours that has it."""
    for module in [each for key, each in sys.modules.items() if key.split(".")[0] == _PACKAGE]:
        if getattr(module, name, None) is not value:
            continue
        body = _body(module)
        for line, following in itertools.pairwise(body):
            target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
            if isinstance(target, ast.Name) and target.id == name:
                return _string(following)
    return None


@cache
def _body(module: ModuleType) -> list[ast.stmt]:
    return ast.parse(inspect.getsource(module)).body


def _string(line: ast.stmt | None) -> str | None:
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and isinstance(line.value.value, str):
        return line.value.value
    return None


def main() -> None:
    """Write each page."""
    for path in sorted(FOLDER.glob("*.md")):
        path.write_text(page(path.read_text()))


if __name__ == "__main__":
    main()
