"""`ipujax cache`: the cache of compiled programs. Input: its directory. Output: its programs, or none."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from ipujax.cli.command_parts import Commands, add_command, say
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.profile import text_table
from ipujax.storage import CACHE_BYTES, CACHE_DIR, PLAN, CacheFile, requested_directory

_HELP = f"""
Says how many programs and plans the cache on disk has, and their bytes; --clear removes them. The directory is that of
{CACHE_DIR} unless --dir names one; {CACHE_BYTES} bounds its bytes. See docs/caching.md.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `cache`."""
    summary = "show or clear the cache of compiled programs"
    parser = add_command(
        commands,
        "cache",
        _run,
        summary=summary,
        description=_HELP,
        example="ipujax cache --clear --dir ~/.cache/ipujax",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--info", action="store_true", help="show what the cache has; also without an option")
    choice.add_argument(
        "--clear", action="store_true", help="remove programs and plans; other files of the directory stay"
    )
    parser.add_argument(
        "--dir", metavar="FOLDER", help=f"directory of the cache, as Options(cache_dir=…); else {CACHE_DIR}"
    )


def _run(args: argparse.Namespace) -> int:
    directory = requested_directory(args.dir)
    if directory is None:
        problem = "ipujax cache needs a directory"
        raise ArgumentError(problem, expected=f"--dir FOLDER, or {CACHE_DIR} in the environment", got="neither")
    try:
        if args.clear:
            removed, unread = directory.clear()
            say("\n".join([f"{_amount(removed)} removed from {directory.path}", *(f"left: {text}" for text in unread)]))
            return 0
        files = directory.files()
        irregular = directory.irregular_entries()
    except OSError as error:
        raise ArgumentError(f"the cache {directory.path} cannot be used", got=error.strerror or error) from error
    rows = [("directory", str(directory.path)), ("files", _amount(files)), ("bound", f"{directory.max_bytes:,} bytes")]
    if files:
        rows += [("last use", f"{_day(files[0])} to {_day(files[-1])}")]
    if irregular:
        rows += [("no files", ", ".join(path.name for path in irregular))]
    say("\n".join(text_table(rows)))
    return 0


def _amount(files: Sequence[CacheFile]) -> str:
    plans = sum(file.kind == PLAN for file in files)
    programs = len({file.key for file in files if file.kind != PLAN})
    total_bytes = sum(file.size for file in files)
    return f"{programs:,} programs, {len(files):,} files, {plans:,} of them plans and costs, {total_bytes:,} bytes"


def _day(file: CacheFile) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(file.last_use))
