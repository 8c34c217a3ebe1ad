"""What the page brings along from others is what it says, and nothing comes from elsewhere."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import tidegate.web.page

STATIC = Path(tidegate.web.page.__file__).parent / "static"
VENDORED = (STATIC / "VENDORED.md").read_text(encoding="utf-8")


def test_what_is_vendored_is_what_its_list_says() -> None:
    """Name, version, licence and digest of each file that somebody else has written."""
    rows = re.findall(r"^\| `([\w.]+)` \| ([\w.]+) (\S+) \| ([^|]+) \| `(\w{64})` \|$", VENDORED, re.MULTILINE)
    assert [row[0] for row in rows] == sorted(path.name for path in STATIC.glob("*.min.js"))
    for name, _, version, _, digest in rows:
        content = (STATIC / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest
        assert f'version="{version}"'.encode() in content
        assert (STATIC / f"{name.removesuffix('.min.js')}.LICENSE.txt").is_file()


def test_styles_and_scripts_of_ours_ask_nobody_else() -> None:
    """No font, picture or script from another server."""
    for name in ("page.css", "page.js"):
        text = (STATIC / name).read_text(encoding="utf-8")
        assert re.findall(r"https?:|//[\w.]+\.\w+/|@import|url\(", text) == []
