"""Names that the byte code of a function reads, and distributions that the modules of its code belong to.

Input: a code object. Output: `CodeReads`, with the names of functions and classes inside it.

A version of a distribution identifies the code of an installed module. Input: the name of a module. Output: name and
version of its distribution, or None for a module of the user's own, whose code has no version. A module of Python's
library is of the distribution `python`.
Limits: an editable installation is the user's own code.
"""

from __future__ import annotations

import dis
import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, reduce
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from types import CodeType

OURS = "ipujax"
PYTHON = "python"
_BUILT_IN = ("built-in", "frozen")  # origins of modules without a file
# Modules of Python's library whose functions depend on their arguments alone: no clock, file, or state of the process.
_PURE_MODULES = (
    r"abc|bisect|builtins|cmath|collections|contextlib|copy|dataclasses|enum|fractions|functools|heapq|itertools"
    r"|math|numbers|operator|re|statistics|string|struct|textwrap|types|typing"
)


def distribution_of(module: str) -> str | None:
    """Return name and version of the distribution of a module; None for a module of the user's own."""
    return _distribution_of_package(module.partition(".")[0])


def is_pure(module: str) -> bool:
    """Return whether values of a module of Python's library depend on their arguments alone."""
    return re.fullmatch(_PURE_MODULES, module.partition(".")[0].removeprefix("_")) is not None


@cache  # of the process: installed packages do not change while it runs
def _distribution_of_package(package: str) -> str | None:
    """Return name and version of the distribution that a package belongs to; None for code of the user's own.

    Of ipujax and of Python's own library the name alone. A package that is not imported counts as the user's.
    """
    if package == OURS:
        return OURS
    origin = _origin(package)
    if origin is None:
        return None
    if origin in _BUILT_IN or (_is_in(origin, ("stdlib", "platstdlib")) and not _is_installed(origin)):
        return PYTHON
    return _name_and_version(package) if _is_installed(origin) else None


def _origin(package: str) -> str | None:
    """Return the file or folder of a package that is imported, or "built-in"; None where it has none."""
    names = getattr(sys.modules.get(package), "__dict__", {})  # not by attributes, which a module may make
    spec = names.get("__spec__")
    origin: str | None = getattr(spec, "origin", None) or names.get("__file__")
    folders = list(names.get("__path__", ()))  # of a package without a file
    return origin or (folders[0] if folders else None)


def _is_installed(origin: str) -> bool:
    return _is_in(origin, ("purelib", "platlib"))


def _is_in(origin: str, schemes: tuple[str, ...]) -> bool:
    path = os.path.realpath(origin)
    return any(path.startswith(_folder(scheme)) for scheme in schemes)


@cache
def _folder(scheme: str) -> str:
    return os.path.join(os.path.realpath(sysconfig.get_path(scheme)), "")


def _name_and_version(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:  # the distribution has another name than its package
        distributions = sorted(set(packages_distributions().get(package, ())))
    return ", ".join(f"{name} {version(name)}" for name in distributions) or None


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
    """Names of globals, attributes and imported modules that a function's bytecode reads, without inner functions.

    Texts among its constants count as attributes too, as `getattr` takes them.
    """
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
