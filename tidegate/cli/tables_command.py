"""The command `tidegate vacuum` for output tables."""

from __future__ import annotations

from typing import Annotated

import typer

from tidegate.cli.terminal import JsonOption, explained, print_json

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="The table: a folder or s3://bucket/prefix.")]
RetainOption = Annotated[
    str, typer.Option("--retain", metavar="TIME", help="Keep everything the table showed within this time.")
]
CommitsOption = Annotated[int, typer.Option("--retain-commits", metavar="N", help="Keep the newest N commits.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Delete nothing; print what would be deleted.")]


def vacuum_command(
    url: UrlArgument,
    retain: RetainOption = "7d",
    retain_commits: CommitsOption = 1,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete files of an output table that it has not shown for long. Older commits cannot be read then."""
    # Imported here, so that `--help` is fast.
    from tidegate.api.tables.output_tables import vacuum_table
    from tidegate.storage.files.file_system_store import open_store

    with explained():
        done = vacuum_table(url, open_store, retain, retain_commits, dry_run)
    if as_json:
        print_json(
            {
                "files": done.files,
                "bytes": done.bytes,
                "paths": list(done.paths),
                "readable_from": done.readable_from,
                "dry_run": dry_run,
            }
        )
        return
    for path in done.paths if dry_run else ():
        print(path)
    what = "would be deleted" if dry_run else "were deleted"
    print(f"{done.files} files with {done.bytes:,} bytes {what}; commits from {done.readable_from} on can be read")
