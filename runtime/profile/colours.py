"""Colours of text in a terminal: whether to use them, and which part of a profile's text gets which.

Input: the text of a summary, whose sections begin with a line that is not indented. Output: the same with ANSI escape
codes. The environment goes before what a caller asks for: `CLICOLOR_FORCE=1` means always, else `CLICOLOR=0` never.
Source: Poplar & PopLibs user guide, "Profile summary output".
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

BOLD, CYAN, GREEN, RED = "1", "36", "32", "31"
_NAMED = re.compile(r"^( +)([^:*]*:)( )")  # a row's label
_BAR = re.compile(r"\*{1,}")
_ALARM = re.compile(r"^ *(Out of memory|Overflowed):")


def wants_colours(asked: bool | None, *, is_terminal: bool, environment: Mapping[str, str] | None = None) -> bool:
    """Whether output is to be coloured.

    Args:
        asked: what the caller says; when None only a terminal gets colours.
        is_terminal: whether the output goes to one.
        environment: variables; those of this process when None.
    """
    environment = os.environ if environment is None else environment
    if environment.get("CLICOLOR_FORCE", "") not in ("", "0"):
        return True
    if environment.get("CLICOLOR") == "0":
        return False
    supports = is_terminal and environment.get("TERM") != "dumb"
    return supports if asked is None else asked


def coloured(text: str) -> str:
    """A summary with its headings, labels, bars and alarms in colours."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    if _ALARM.match(line):
        return _in(line, RED)
    if line and not line.startswith(" "):
        return _in(line, f"{BOLD};{CYAN}")
    if "*" in line:
        return _BAR.sub(lambda bar: _in(bar[0], GREEN), line)
    return _NAMED.sub(lambda label: label[1] + _in(label[2], BOLD) + label[3], line)


def _in(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"
