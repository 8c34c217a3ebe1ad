"""The notebook of the tutorial has what its page has. The page itself is run in `test_examples_in_pages.py`."""

from __future__ import annotations

import json
import re

from tutorial_notebook import NOTEBOOK, PAGE, notebook, text_of

LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)\s#]+)")


def test_notebook_is_made_of_the_page() -> None:
    """If this fails, run `python scripts/tutorial_notebook.py`."""
    assert NOTEBOOK.read_text() == text_of(PAGE.read_text())


def test_code_of_the_page_is_all_there() -> None:
    """One block of Python is one cell, in the order of the page and without a change."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code"]
    assert code == blocks
    assert len(code) >= 16


def test_links_lead_to_files() -> None:
    """They are those of the page, from another folder."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    paths = [found["path"] for found in LINK.finditer(text)]
    assert [path for path in paths if not (NOTEBOOK.parent / path).exists()] == []
    assert len(paths) >= 16
    assert {path.split("/")[0] for path in paths} == {"..", "tutorial.ipynb"}


def test_output_and_comments_stay_in_the_page() -> None:
    """They are for readers and tests of the page."""
    code = "```python\nprint(1)\n```\n\n<!-- prints -->\n```\n1\n```\n"
    page = f"# A\n\n{code}\n<!-- runs:\nassert 1\n-->\n\nSee [b](b.md#c).\n"
    cells = notebook(page)["cells"]
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in cells] == [
        ("markdown", "# A"),
        ("code", "print(1)"),
        ("markdown", "See [b](../docs/b.md#c)."),
    ]
    assert [cell["outputs"] for cell in cells if cell["cell_type"] == "code"] == [[]]
