"""Checks the subjects of commits: `area: imperative summary`, in at most 72 characters.

    python scripts/commit_subject.py .git/COMMIT_EDITMSG          the hook of the repository, for one message
    git log --format=%s main.. | python scripts/commit_subject.py  subjects, one a line

Exits with 1 and prints what is wrong if a subject does not fit. Comments and everything after the first line are
ignored; so are merges, reverts and `fixup!`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SUBJECT_CHARACTERS_MAX = 72
PATTERN = re.compile(r"[a-z0-9][\w ,./+-]*: \S")
GENERATED = ("Merge ", "Revert ", "fixup! ", "squash! ")
NOT_IMPERATIVE = re.compile(
    r"(\w+ed|\w+ing|adds|fixes|makes|removes|renames|the|a|an|it|this|what|when|where|who)$", re.IGNORECASE
)
IMPERATIVE = {"embed", "feed", "need", "proceed", "seed", "shed", "speed", "bring", "ping", "ring", "string", "swing"}


def problem(subject: str) -> str | None:
    """Returns what is wrong with a subject, or None."""
    if subject.startswith(GENERATED):
        return None
    if len(subject) > SUBJECT_CHARACTERS_MAX:
        return f"has {len(subject)} characters; {SUBJECT_CHARACTERS_MAX} are the limit"
    if not PATTERN.match(subject):
        return "needs the form `area: imperative summary`, such as `rocksdb: write one SST file per snapshot`"
    if subject.endswith("."):
        return "ends with a full stop; remove it"
    verb = subject.partition(": ")[2].split()[0]
    if verb.lower() not in IMPERATIVE and NOT_IMPERATIVE.match(verb):
        return f"must continue with a verb in the imperative, and begins with {verb!r}"
    return None


def main() -> int:
    """Checks a message from a file, or subjects from standard input."""
    if len(sys.argv) > 1:
        lines = [line for line in Path(sys.argv[1]).read_text().splitlines() if not line.startswith("#")]
        subjects = lines[:1]
    else:
        subjects = [line for line in sys.stdin.read().splitlines() if line]
    wrong = [(subject, found) for subject in subjects if (found := problem(subject)) is not None]
    for subject, found in wrong:
        print(f"{subject!r} {found}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
