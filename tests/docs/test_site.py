"""Links of the repository become links of the site, and faults of a site are seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> Iterator[Any]:
    """The module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield import_module("site_hooks")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def checks() -> Iterator[Any]:
    """The module."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield import_module("check_site")
    sys.path.remove(str(ROOT / "scripts"))


@pytest.mark.parametrize(
    ("page", "link", "place"),
    [
        ("index.md", "docs/state-as-data.md", "state-as-data.md"),
        ("index.md", "LICENSE", "repository/LICENSE"),
        ("contributing.md", "docs/decisions", "decisions/README.md"),
        ("state.md", "../benchmarks/README.md#figures", "benchmarks.md#figures"),
        ("topologies.md", "../examples/topology.py", "repository/examples/topology.py"),
        ("decisions/0011-a-savepoint-is-a-checkpoint-and-a-copy.md", "../savepoints.md", "../savepoints.md"),
        ("recovery.md", "#spark-is-lost", "#spark-is-lost"),
        ("delta.md", "https://delta.io", "https://delta.io"),
        ("state.md", "../nowhere/attic.md", "../nowhere/attic.md"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(hooks: Any, page: str, link: str, place: str) -> None:
    """Pages, files, folders; what leads out of it or nowhere is left to the build."""
    assert hooks.for_site(f"See [it]({link}).", page) == f"See [it]({place})."


def test_code_is_left_alone_and_comments_go(hooks: Any) -> None:
    """An index of a list and a link look alike."""
    text = "<!-- runs:\nx = 1\n-->\n```python\na[0](LICENSE)\n```\n[x](LICENSE)\n"
    assert hooks.for_site(text, "index.md") == "```python\na[0](LICENSE)\n```\n[x](repository/LICENSE)\n"


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Spark on Ray (RayDP)", "spark-on-ray-raydp"),
        ("A walk: one batch, from source to table", "a-walk-one-batch-from-source-to-table"),
        ("What `diff` says & does", "what-diff-says--does"),
        ("snake_case stays", "snake_case-stays"),
    ],
)
def test_anchors_are_those_of_the_repositorys_hosts(hooks: Any, heading: str, anchor: str) -> None:
    """A link with an anchor works in both places."""
    assert hooks.anchor_of(heading) == anchor


GOOD = '<a href="b/#there">b</a><a href="https://delta.io">d</a><img src="a.svg"><script>1</script>'


def site(folder: Path, page: str = GOOD, css: str = "a {}") -> Path:
    """A site of two pages."""
    (folder / "b").mkdir()
    (folder / "a.svg").write_text("")
    (folder / "index.html").write_text(f'<h1 id="top">{page}')
    (folder / "b" / "index.html").write_text('<p id="there"><a href="..">up</a><a href="../#top">top</a>')
    (folder / "style.css").write_text(css)
    return folder


def test_a_site_without_faults_has_none(checks: Any, tmp_path: Path) -> None:
    """Links to other hosts are free."""
    assert checks.faults(site(tmp_path)) == []


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ('<a href="c/">', "index.html: c/: there is no such file"),
        ('<a href="b/#here">', "index.html: b/#here: there is no such anchor"),
        ('<a href="#here">', "index.html: #here: there is no such anchor"),
        ('<img src="b.svg">', "index.html: b.svg: there is no such file"),
        ('<script src="//cdn.x/a.js"></script>', "index.html: loads //cdn.x/a.js from another host"),
        ('<link rel="preconnect" href="https://x.y">', "index.html: loads https://x.y from another host"),
        ('<p style="background: url(https://x.y/z.png)">', "index.html: loads https://x.y/z.png from another host"),
        ('<pre class="mermaid">', "index.html: a diagram (mermaid) is drawn by a script from another host"),
    ],
)
def test_faults_are_seen(checks: Any, tmp_path: Path, page: str, fault: str) -> None:
    """Each is told with its page."""
    assert checks.faults(site(tmp_path, page)) == [fault]


def test_styles_that_load_from_elsewhere_are_seen(checks: Any, tmp_path: Path) -> None:
    """Fonts are the usual ones."""
    css = "@import 'https://x.y/a.css'; @font-face { src: url(\"//x.y/f.woff\") }"
    assert checks.faults(site(tmp_path, css=css)) == [
        "style.css: loads //x.y/f.woff from another host",
        "style.css: loads https://x.y/a.css from another host",
    ]


def test_a_site_without_pages_is_a_fault(checks: Any, tmp_path: Path) -> None:
    """Nothing was built."""
    assert checks.faults(tmp_path) == [f"{tmp_path}: there is no page"]
