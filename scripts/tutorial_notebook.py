"""Makes examples/tutorial.ipynb of docs/tutorial.md: `python scripts/tutorial_notebook.py`.

Rules:

- A block of Python is a cell of code, and the text between two blocks is a cell of text.
- What a block prints, and comments, are left out: a notebook shows its own output.
- Links of the page become links from the folder of the notebook. Code stays as it is.

A test compares the notebook with what this makes of the page.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"

_PRINTED = re.compile(r"<!-- prints -->\n```\n.*?^```\n", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_CODE = re.compile(r"^```python\n(?P<code>.*?)^```\n", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)\s#]+)")


def notebook(page: str) -> dict[str, Any]:
    """The notebook of a page, as its JSON."""
    cells: list[dict[str, Any]] = [
        {"cell_type": kind, "id": f"cell-{number:02}", "metadata": {}, "source": text.splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, text) in enumerate(_parts(page), 1)
    ]
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_of(page: str) -> str:
    """The notebook of a page, as its file has it."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


def _parts(page: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each cell, in order."""
    left = _COMMENT.sub("", _PRINTED.sub("", page))
    end = 0
    for found in _CODE.finditer(left):
        yield from _text(left[end : found.start()])
        yield "code", found["code"].strip("\n")
        end = found.end()
    yield from _text(left[end:])


def _text(part: str) -> Iterator[tuple[str, str]]:
    """A cell of text; none if nothing stands between two blocks."""
    text = re.sub(r"\n{3,}", "\n\n", part.strip("\n"))
    if text:
        yield "markdown", _LINK.sub(lambda found: f"]({_from_notebook(found['path'])}", text)


def _from_notebook(path: str) -> str:
    """A link of the page, from the folder of the notebook."""
    place = posixpath.normpath(posixpath.join(PAGE.parent.name, path))
    return posixpath.relpath(place, NOTEBOOK.parent.name)


if __name__ == "__main__":
    NOTEBOOK.write_text(text_of(PAGE.read_text()))
