"""The house keeps its floors: rules about the source text of the package, checked on its syntax tree.

Imports go down only (ipujax → lowering → runtime), always by their full name; JAX is used through its public surface;
each file has a docstring and stays short. Every rule is also shown source that breaks it, so that a rule which checks
nothing fails.
"""

from __future__ import annotations

import ast
import graphlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("ipujax.runtime", "ipujax.lowering", "ipujax")  # lowest first; the last also holds all that the others do not
MAX_LINES = 500
COMPAT_MODULE = "ipujax.lowering.jax_compat"
COMPAT_ONLY = ("jax.extend", "jax.interpreters")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def package_files() -> dict[str, Path]:
    """Module name → file, for all of the package, each file once and under the name it is imported by."""
    folders = {"ipujax.runtime": ROOT / "runtime", "ipujax.lowering": ROOT / "lowering", "ipujax": ROOT / "ipujax"}
    links = {ROOT / "ipujax" / "runtime", ROOT / "ipujax" / "lowering"}
    return {
        ".".join((package, *path.relative_to(folder).with_suffix("").parts)): path
        for package, folder in folders.items()
        for path in sorted(folder.rglob("*.py"))
        if links.isdisjoint(path.parents)
    }


FILES = package_files()


def within(name: str, package: str) -> bool:
    """True if `name` is `package` or inside it."""
    return name == package or name.startswith(package + ".")


def floor(name: str) -> int:
    """Height of a module of ipujax in the order of imports."""
    return next(height for height, package in enumerate(FLOORS) if within(name, package))


def imported(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import, wherever it stands; relatives resolved; `from a import b` is a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # An __init__ is named ipujax.x.__init__ here, so dropping `level` parts is right for it too.
            base = ".".join(module.split(".")[: -node.level]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def jax_names(tree: ast.Module, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every use of something in jax: imported, reached as an attribute, or spelt in a string."""
    yield from imported(tree, module)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Constant):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else str(node.value)
            if re.fullmatch(r"jax(\.\w+)+", name):
                yield node.lineno, name


def upward_imports(source: str, module: str) -> list[str]:
    """Imports of a higher floor than the module's own."""
    return [
        f"line {line}: {module} may not import {name}"
        for line, name in imported(ast.parse(source), module)
        if within(name, "ipujax") and floor(name) > floor(module)
    ]


def bare_imports(source: str, module: str) -> list[str]:
    """Imports of `runtime` or `lowering` by the names that exist only in the checkout."""
    return [
        f"line {line}: {name} must be ipujax.{name}"
        for line, name in imported(ast.parse(source), module)
        if within(name, "runtime") or within(name, "lowering")
    ]


def private_jax(source: str, module: str) -> list[str]:
    """Uses of jax._src anywhere, and of JAX's less stable surface outside the one module for it."""
    banned = ("jax._src",) if module == COMPAT_MODULE else ("jax._src", *COMPAT_ONLY)
    return [
        f"line {line}: {name}"
        for line, name in jax_names(ast.parse(source), module)
        if any(within(name, package) for package in banned)
    ]


def no_docstring(source: str, module: str) -> list[str]:
    """A module without a docstring."""
    return [] if ast.get_docstring(ast.parse(source)) else [f"{module} has no docstring"]


def too_long(source: str, module: str) -> list[str]:
    """A file that holds two ideas."""
    lines = len(source.splitlines())
    return [f"{module} has {lines} lines, at most {MAX_LINES}"] if lines > MAX_LINES else []


def unfinished(source: str, module: str) -> list[str]:
    """Notes in comments or strings that work is left to do."""
    return [
        f"line {token.start[0]}: {match}"
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in (tokenize.COMMENT, tokenize.STRING)
        for match in UNFINISHED.findall(token.string)
    ]


RULES = (upward_imports, bare_imports, private_jax, no_docstring, too_long, unfinished)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule):
    broken = [
        f"{path.relative_to(ROOT)}: {fault}"
        for module, path in FILES.items()
        for fault in rule(path.read_text(encoding="utf-8"), module)
    ]
    assert not broken, "\n".join(broken)


def test_every_floor_is_checked():
    assert {floor(module) for module in FILES} == {0, 1, 2}
    assert len({path.resolve() for path in FILES.values()}) == len(FILES)


BREAKS = (
    (upward_imports, "ipujax.runtime.engine", "from ipujax.lowering.rules import table"),
    (upward_imports, "ipujax.runtime.engine", "from ipujax import lowering"),
    (upward_imports, "ipujax.runtime.engine", "from ..lowering import rules"),
    (upward_imports, "ipujax.runtime.__init__", "from .. import jit"),
    (upward_imports, "ipujax.runtime.engine", "def f():\n    import ipujax.lowering.rules"),
    (upward_imports, "ipujax.lowering.rules", "import ipujax"),
    (upward_imports, "ipujax.lowering.rules", "from ipujax.api import jit"),
    (bare_imports, "ipujax.api", "import runtime"),
    (bare_imports, "ipujax.api", "from lowering.rules import table"),
    (private_jax, COMPAT_MODULE, "from jax._src import core"),
    (private_jax, COMPAT_MODULE, "from jax import _src"),
    (private_jax, COMPAT_MODULE, "import jax\ncore = jax._src.core"),
    (private_jax, "ipujax.api", "import importlib\nimportlib.import_module('jax._src.core')"),
    (private_jax, "ipujax.api", "from jax.extend import core"),
    (private_jax, "ipujax.api", "from jax import extend"),
    (private_jax, "ipujax.lowering.rules", "import jax\nmlir = jax.interpreters.mlir"),
    (no_docstring, "ipujax.api", "# a comment is not enough\nx = 1"),
    (too_long, "ipujax.api", "x = 1\n" * (MAX_LINES + 1)),
    (unfinished, "ipujax.api", "x = 1  # TO" + "DO later"),
    (unfinished, "ipujax.api", '"""FIX' + 'ME."""'),
)


@pytest.mark.parametrize(("rule", "module", "source"), BREAKS)
def test_rule_finds(rule, module, source):
    assert rule(source, module)


ALLOWED = (
    (upward_imports, "ipujax.api", "from ipujax.lowering import rules\nfrom ipujax.runtime import engine"),
    (upward_imports, "ipujax.lowering.rules", "from ipujax.runtime.engine import run\nfrom . import passes"),
    (upward_imports, "ipujax.runtime.__init__", "from . import engine\nfrom .engine import run"),
    (bare_imports, "ipujax.api", "from ipujax.runtime import engine\nimport runtime_of_somebody_else"),
    (private_jax, COMPAT_MODULE, "from jax.extend import core\nfrom jax.interpreters import mlir"),
    (private_jax, "ipujax.api", "import jax\njax.extended = 1\nfrom jax import numpy"),
    (unfinished, "ipujax.api", "TO" + "DO = 1"),
)


@pytest.mark.parametrize(("rule", "module", "source"), ALLOWED)
def test_rule_allows(rule, module, source):
    assert not rule(source, module)


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that import one another in a circle, wherever the imports stand; none is the right answer."""
    imports = {
        module: {
            other
            for _, name in imported(ast.parse(source), module)
            for other in sources
            if other != module and within(name, other)
        }
        for module, source in sources.items()
    }
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_the_poplar_layer_has_no_import_circle():
    assert circle({m: f.read_text(encoding="utf-8") for m, f in FILES.items() if within(m, "ipujax.poplar")}) == []


def test_a_circle_of_late_imports_is_found():
    sources = {"a.x": "from a.y import b", "a.y": "def f():\n    from a import x", "a.z": "import a.x"}
    assert set(circle(sources)) == {"a.x", "a.y"}
