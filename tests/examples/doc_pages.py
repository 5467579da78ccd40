"""Pages of documentation as tests see them: their Python code, which runs as pasted, and the output pasted after it.

A page is one program, `train.py`: its ```python blocks run in order and share their names. A ```text block after one is
its output: the same lines, `…` for lines left out, figures to the digit but for times and for what JAX computed.
A ```sh block that a ```text block follows at once is a command of `ipujax`, whose output that is, errors included.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ipujax.cli import main

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"```(python|sh(?=(?:(?!```).)*```\n+```text\n)|text)\n(.*?)```\n", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# A time, or a decimal number that has no unit, as a loss. Cycles and bytes are whole, shares and KiB have their unit.
_LOOSE = re.compile(r"\d[\d,]*+(?:\.\d++)?(?= ?[mµ]?s\b)|(?<![\d.])\d[\d,]*+\.\d++(?! ?(?:%|[KMG]iB|GHz)|\.\d)")
LEFT_OUT = "…"


@dataclass
class Block:
    """Some code or a command of a page, and its output: as pasted if there is any, and as printed."""

    code: str
    is_command: bool = False
    pasted: str | None = None
    printed: str = ""


def blocks(page: str) -> list[Block]:
    """The code of a page in the repository."""
    actual: list[Block] = []
    for kind, text in _FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if kind != "text":
            actual.append(Block(text, is_command=kind == "sh"))
        elif actual and actual[-1].pasted is None:
            actual[-1].pasted = text
    return actual


@cache
def run(page: str) -> tuple[list[Block], dict[str, Any]]:
    """Runs all code of a page; its blocks with their output, and the names they defined."""
    with patch("ipujax.runtime.compile.today", lambda: "2026-11-25"):  # titles have the day of a compilation
        return _run(blocks(page))


def _run(ran: list[Block]) -> tuple[list[Block], dict[str, Any]]:
    lines = 0
    space = dict[str, Any]({"__name__": "page"})
    for number, block in enumerate(ran):
        if block.is_command:
            Path("train.py").write_text("".join(b.code for b in ran[:number] if not b.is_command), encoding="utf-8")
            block.printed = command_output(block.code)
            continue
        code = compile("\n" * lines + block.code, "train.py", "exec", dont_inherit=True)
        lines += block.code.count("\n")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, space)
        block.printed = printed.getvalue()
    return ran, space


def command_output(command: str) -> str:
    """Output of a command of `ipujax`."""
    program, *arguments = shlex.split(command)
    assert program == "ipujax"
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        main(arguments)
    return printed.getvalue()


def excerpt(pasted: str, printed: str) -> str:
    """The printed lines that pasted ones stand for, which must agree but for their numbers."""
    left = iter(printed.splitlines())
    lines = []
    skips = False
    for line in pasted.splitlines():
        if line == LEFT_OUT:
            lines.append(line)
        else:
            actual = next((p for p in left if words(p) == words(line)), None) if skips else next(left, None)
            assert actual is not None and words(actual) == words(line), f"pasted: {line!r}, printed: {actual!r}"
            lines.append(actual)
        skips = line == LEFT_OUT
    assert skips or not list(left), "there is more output than is pasted"
    return "".join(f"{line}\n" for line in lines)


def words(line: str) -> str:
    """A line without its numbers and without the width of its spaces."""
    return " ".join(_NUMBER.sub("#", line).split())


def assert_figures(pasted: str, printed: str, hint: str) -> None:
    """Compares texts of equal words: loose figures within a fifth, the others to the digit."""
    assert " ".join(_LOOSE.sub("#", pasted).split()) == " ".join(_LOOSE.sub("#", printed).split()), hint
    for pair in zip(_LOOSE.findall(pasted), _LOOSE.findall(printed), strict=True):
        old, new = (float(number.replace(",", "")) for number in pair)
        assert abs(old - new) <= 0.2 * abs(new), hint


def write(page: str, ran: list[Block]) -> None:
    """Replaces the pasted output by the printed one."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    for block in ran:
        if block.pasted:
            text = text.replace(f"```text\n{block.pasted}```", f"```text\n{excerpt(block.pasted, block.printed)}```", 1)
    path.write_text(text, encoding="utf-8")
