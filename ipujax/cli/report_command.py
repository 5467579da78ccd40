"""`ipujax report` and `ipujax compare`: saved profiles as text, pages and timelines.

Input: files that `profile.save` or `ipujax profile --save` wrote. Output: text, or files.
"""

from __future__ import annotations

import argparse

from ipujax.cli.command_parser import Commands, add_command
from ipujax.cli.terminal import has_colours, say
from ipujax.runtime.report import Profile, compare

_REPORT = """
Shows a saved profile: where cycles and bytes go. `profile.save(path)` and `ipujax profile --save` write such files.
"""
_COMPARE = """
Shows what changed from one saved profile to another, by operation and source line.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds the commands `report` and `compare`."""
    report = add_command(
        commands,
        "report",
        _report,
        summary="show a saved profile",
        more=_REPORT,
        example="ipujax report step.profile --operations 10",
    )
    report.add_argument("file", metavar="FILE", help="a saved profile")
    help_operations = "how many of the costliest source lines to list (default 5)"
    report.add_argument("--html", metavar="PATH", help="write it as a page to look at in a browser")
    report.add_argument("--perfetto", metavar="PATH", help="write its timeline for https://ui.perfetto.dev")
    report.add_argument("--summary", action="store_true", help="show it as text, also if a file is written")
    report.add_argument("--operations", type=int, default=5, metavar="N", help=help_operations)
    difference = add_command(
        commands,
        "compare",
        _compare,
        summary="show what changed from one saved profile to another",
        more=_COMPARE,
        example="ipujax compare before.profile after.profile",
    )
    difference.add_argument("before", metavar="A", help="a saved profile")
    difference.add_argument("after", metavar="B", help="another")
    difference.add_argument("--html", metavar="PATH", help="write it as a page to look at in a browser, not as text")


def _report(given: argparse.Namespace) -> int:
    profile = Profile.load(given.file)
    if given.html is not None:
        profile.to_html(given.html)
        say(f"wrote {given.html}")
    if given.perfetto is not None:
        profile.to_perfetto(given.perfetto)
        say(f"wrote {given.perfetto}")
    if given.summary or (given.html is None and given.perfetto is None):
        print(profile.summary(given.operations, colours=has_colours()), end="")
    return 0


def _compare(given: argparse.Namespace) -> int:
    comparison = compare(Profile.load(given.before), Profile.load(given.after))
    if given.html is None:
        say(str(comparison))
        return 0
    comparison.to_html(given.html)
    say(f"wrote {given.html}")
    return 0
