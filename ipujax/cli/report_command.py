"""`ipujax report` and `ipujax compare`: saved profiles as text, pages and timelines.

Input: files that `profile.save` or `ipujax profile --save` wrote, or an ONNX model, which is called once.
Output: text, or files.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ipujax.cli.command_parts import (
    Commands,
    add_command,
    add_onnx_arguments,
    check_no_onnx_arguments,
    has_colours,
    is_onnx_file,
    onnx_profile,
    say,
)
from ipujax.runtime.errors import ArgumentError

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_REPORT = """
Shows a saved profile: where cycles and bytes go. `profile.save(path)` and `ipujax profile --save` write such files.
An ONNX model in its place is called once on random data.
"""
_NUM_LINES = 5
_COMPARE = """
Shows what changed from one saved profile to another, by layer, operation and source line; of three or more a table.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the commands `report` and `compare`."""
    report = add_command(
        commands,
        "report",
        _report,
        summary="show a saved profile",
        description=_REPORT,
        example="ipujax report step.profile --operations 10",
    )
    report.add_argument("file", metavar="FILE", help="a saved profile, or an ONNX model")
    help_operations = f"show it as text with so many of the most expensive source lines (default {_NUM_LINES})"
    report.add_argument("--html", metavar="PATH", help="write it as a page to look at in a browser")
    report.add_argument("--perfetto", metavar="PATH", help="write its timeline for https://ui.perfetto.dev")
    report.add_argument("--summary", action="store_true", help="show it as text, also if a file is written")
    help_memory = "show it as text with all that is in memory at the peak, by variable, role, category and line"
    report.add_argument("--memory", action="store_true", help=help_memory)
    report.add_argument("--operations", type=int, metavar="N", help=help_operations)
    add_onnx_arguments(report)
    difference = add_command(
        commands,
        "compare",
        _compare,
        summary="show what changed from one saved profile to another",
        description=_COMPARE,
        example="ipujax compare before.profile after.profile",
    )
    difference.add_argument("first", metavar="A", help="a saved profile")
    difference.add_argument("others", metavar="B", nargs="+", help="another; of three or more a table is shown")
    difference.add_argument("--html", metavar="PATH", help="also write it as a page to look at in a browser")


def _report(args: argparse.Namespace) -> int:
    profile = _profile(args)
    if args.html is not None:
        profile.to_html(args.html)
        say(f"wrote {args.html}")
    if args.perfetto is not None:
        profile.to_perfetto(args.perfetto)
        say(f"wrote {args.perfetto}")
    num_lines = _NUM_LINES if args.operations is None else args.operations
    asks_for_text = args.summary or args.memory or args.operations is not None
    if asks_for_text or (args.html is None and args.perfetto is None):
        text = profile.summary(num_lines, show_memory_breakdown=args.memory, colours=has_colours())
        print(text, end="")
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    if is_onnx_file(args.file):
        return onnx_profile(args.file, args)
    check_no_onnx_arguments(args)
    # Reports are imported here: other commands do without.
    from ipujax.runtime.report import Profile

    return Profile.load(args.file)


def _compare(args: argparse.Namespace) -> int:
    from ipujax.runtime.report import Profile, compare, runs_table

    paths = [args.first, *args.others]
    profiles = [Profile.load(path) for path in paths]
    if len(profiles) > 2:
        if args.html is not None:
            hint = "name two files, or leave --html out"
            raise ArgumentError("a page compares two profiles", expected="A B", got=" ".join(paths), hint=hint)
        say(runs_table(list(zip(map(_label, paths), profiles, strict=True))))
        return 0
    comparison = compare(*profiles)
    say(str(comparison))
    if args.html is not None:
        comparison.to_html(args.html)
        say(f"wrote {args.html}")
    return 0


def _label(path: str) -> str:
    return Path(path).stem
