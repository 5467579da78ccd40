"""Distributions that modules belong to: a version identifies the code of an installed module.

Input: the name of a module. Output: name and version of its distribution, or None for a module of the user's own, whose
code has no version. A module of Python's library is of the distribution `python`.
Limits: an editable installation is the user's own code.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version

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
