"""Names that the byte code of a function reads: globals, attributes and imports.

Input: a code object. Output: `CodeReads`, with the names of functions and classes inside it.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from types import CodeType

_READ_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READ_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})


_NAME = re.compile(r"[^\W\d]\w*")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")  # of `str.format`


@dataclass(frozen=True, slots=True)
class CodeReads:
    """Names that a code object reads.

    Args:
        global_names: globals and builtins.
        attributes: attributes, names after `from … import`, and texts that may name attributes.
        imports: level and name of each imported module, and the names that are imported from it.
    """

    global_names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    imports: frozenset[tuple[int, str, tuple[str, ...]]] = frozenset()

    def __or__(self, other: CodeReads) -> CodeReads:
        return CodeReads(
            self.global_names | other.global_names, self.attributes | other.attributes, self.imports | other.imports
        )


def reads_of(code: CodeType) -> CodeReads:
    """Return the names that a code object, and those inside it, read."""
    inner = (reads_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return reduce(CodeReads.__or__, inner, _own_reads(code))


def _own_reads(code: CodeType) -> CodeReads:
    """What a code object itself reads: attributes also by the texts among its constants, as `getattr` takes them."""
    instructions = list(dis.get_instructions(code))
    global_names = frozenset(x.argval for x in instructions if x.opname in _READ_GLOBAL)
    attributes = frozenset(x.argval for x in instructions if x.opname in _READ_ATTRIBUTE)
    attributes |= {name for x in code.co_consts if isinstance(x, str) for name in names_in(x)}
    # The two constants before it are the level of a relative import, and the names after `from … import`.
    imports = frozenset(
        (instructions[n - 2].argval, x.argval, instructions[n - 1].argval or ())
        for n, x in enumerate(instructions)
        if x.opname == "IMPORT_NAME"
    )
    return CodeReads(global_names, attributes, imports)


def names_in(text: str) -> Iterator[str]:
    """Yield the names by which a text may read attributes, as for `getattr` and `format`; sentences have none."""
    for part in _PLACEHOLDER.findall(text) if len(text.split()) > 1 else (text,):
        yield from _NAME.findall(part)
