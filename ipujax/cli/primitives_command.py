"""`ipujax primitives`: kinds of JAX's primitives and their lowering rules.

Input: the name of a primitive, or none. Output: text: all primitives by kind, or the kind and the rule of one.
"""

from __future__ import annotations

import argparse
import inspect
from collections import defaultdict
from textwrap import wrap

from ipujax.cli.command_parts import Commands, add_command, say
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

_WIDTH = 118
_HELP = """
Says which primitives of JAX run on all tiles, by a lowering rule, and which as one vertex. `ipu.jit(f).trace(*args)`
shows the primitives of a function; docs/primitives.md says how each is tested.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `primitives`."""
    summary = "show which primitives of JAX have a tile-parallel rule"
    parser = add_command(
        commands, "primitives", _run, summary=summary, description=_HELP, example="ipujax primitives dot_general"
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="one primitive; all of them if none is named")


def _run(args: argparse.Namespace) -> int:
    say(_list_all() if args.name is None else _describe(args.name))
    return 0


def _list_all() -> str:
    # The rules are imported here: other commands do without the compiler.
    from ipujax.lowering.rules.table import MEANINGS, Kind, primitive_kind, primitive_names

    of_kind: dict[Kind, list[str]] = defaultdict(list)
    for name in primitive_names():
        of_kind[primitive_kind(name)].append(name)
    parts = []
    for kind, meaning in MEANINGS.items():
        title = "others" if kind == "–" else kind
        lines = wrap("  ".join(of_kind[kind]), _WIDTH, break_long_words=False, break_on_hyphens=False)
        parts.append("\n".join([f"{len(of_kind[kind])} {title}: {meaning}", *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def _describe(name: str) -> str:
    """Return the kind of a primitive, and its lowering rule with the first line of its docstring."""
    from ipujax.lowering.rules import RULES
    from ipujax.lowering.rules.table import MEANINGS, OTHERS, primitive_kind, primitive_names

    names = primitive_names()
    if name not in names:
        expected = f"one of {len(names)}, which `ipujax primitives` lists"
        raise ArgumentError(
            f"no primitive is called {name!r}", expected=expected, got=repr(name), hint=nearest(name, names)
        )
    kind = primitive_kind(name)
    lines = [f"{name}: {'others' if kind == '–' else kind}", f"  {OTHERS.get(name, MEANINGS[kind])}"]
    if name in RULES:
        rule = inspect.unwrap(getattr(RULES[name], "func", RULES[name]))
        lines.append(f"  by {rule.__module__}.{rule.__qualname__}")
        lines += [f"  {line}" for line in (inspect.getdoc(rule) or "").splitlines()[:1]]
    return "\n".join(lines)
