"""Names that the byte code of a function reads: globals, attributes and imports.

Input: a code object. Output: `CodeReads`, with the names of functions and classes inside it.
"""

from __future__ import annotations

import dis
from dataclasses import dataclass
from functools import reduce
from types import CodeType

_READ_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READ_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"})


@dataclass(frozen=True, slots=True)
class CodeReads:
    """Names that a code object reads.

    Args:
        global_names: globals and builtins.
        attributes: attributes, and names after `from … import`.
        imports: level and name of each imported module.
    """

    global_names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    imports: frozenset[tuple[int, str]] = frozenset()

    def __or__(self, other: CodeReads) -> CodeReads:
        return CodeReads(
            self.global_names | other.global_names, self.attributes | other.attributes, self.imports | other.imports
        )


def reads_of(code: CodeType) -> CodeReads:
    """Return the names that a code object, and those inside it, read."""
    inner = (reads_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return reduce(CodeReads.__or__, inner, _own_reads(code))


def _own_reads(code: CodeType) -> CodeReads:
    instructions = list(dis.get_instructions(code))
    global_names = frozenset(x.argval for x in instructions if x.opname in _READ_GLOBAL)
    attributes = frozenset(x.argval for x in instructions if x.opname in _READ_ATTRIBUTE)
    # The level of a relative import is the first of the two constants before it.
    imports = frozenset(
        (instructions[n - 2].argval, x.argval) for n, x in enumerate(instructions) if x.opname == "IMPORT_NAME"
    )
    return CodeReads(global_names, attributes, imports)
