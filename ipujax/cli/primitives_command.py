"""`ipujax primitives`: what becomes of JAX's primitives.

Input: the name of one, or none. Output: text: all of them by kind, or the kind of one and the rule that lowers it.
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from textwrap import wrap

from ipujax.cli.command_parser import Commands, add_command
from ipujax.cli.terminal import say
from ipujax.lowering.rules import RULES
from ipujax.lowering.rules.coverage import MEANINGS, OTHERS, Kind, primitive_kind, primitive_names
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

_WIDTH = 118
_MORE = """
Says which primitives of JAX run on all tiles, by a lowering rule, and which as one vertex. `ipu.jit(f).trace(*args)`
shows the primitives of a function; docs/primitives.md says how each is tested.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `primitives`."""
    summary = "show which primitives of JAX have a tile-parallel rule"
    parser = add_command(
        commands, "primitives", _run, summary=summary, more=_MORE, example="ipujax primitives dot_general"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one primitive; all of them if none is named")


def _run(given: argparse.Namespace) -> int:
    say(_all() if given.name is None else _one(given.name))
    return 0


def _all() -> str:
    """All primitives by kind."""
    of_kind: dict[Kind, list[str]] = defaultdict(list)
    for name in primitive_names():
        of_kind[primitive_kind(name)].append(name)
    parts = []
    for kind, meaning in MEANINGS.items():
        title = "others" if kind == "–" else kind
        lines = wrap("  ".join(of_kind[kind]), _WIDTH, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join([f"{len(of_kind[kind])} {title}: {meaning}", *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def _one(name: str) -> str:
    """One primitive, with the rule that lowers it."""
    known = primitive_names()
    if name not in known:
        what, expected = f"no primitive is called {name!r}", f"one of {len(known)}, which `ipujax primitives` lists"
        raise ArgumentError(what, expected=expected, got=repr(name), hint=nearest(name, known))
    kind = primitive_kind(name)
    lines = [f"{name}: {'others' if kind == '–' else kind}", f"  {OTHERS.get(name, MEANINGS[kind])}"]
    if name in RULES:
        rule = inspect.unwrap(getattr(RULES[name], "func", RULES[name]))
        lines.append(f"  by {rule.__module__}.{rule.__qualname__}")
        lines += [f"  {line}" for line in (inspect.getdoc(rule) or "").splitlines()[:1]]
    return "\n".join(lines)
