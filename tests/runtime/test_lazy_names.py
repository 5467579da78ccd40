"""Packages whose names are imported at first use: names for type checkers are those of running code."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

from tests.test_layering import ROOT

PACKAGES = sorted(
    path.parent.relative_to(ROOT)
    for floor in ("runtime", "lowering")
    for path in (ROOT / floor).rglob("__init__.py")
    if "lazy_names(" in path.read_text(encoding="utf-8")
)


def typed_names(package: Path) -> dict[str, str]:
    """Module of each name that a type checker imports."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node.body for node in tree.body if isinstance(node, ast.If))
    assert all(isinstance(statement, ast.ImportFrom) for statement in block)
    imports = [statement for statement in block if isinstance(statement, ast.ImportFrom)]
    assert all(alias.asname == alias.name for statement in imports for alias in statement.names)
    return {alias.name: statement.module or "" for statement in imports for alias in statement.names}


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_typed_names_are_those_found_at_run_time(package: Path) -> None:
    module = import_module(f"ipujax.{'.'.join(package.parts)}")
    names = typed_names(package)
    assert names
    for name, source in names.items():
        assert getattr(module, name) is getattr(import_module(source), name)


def test_refuses_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'ipujax\.runtime\.tensor' has no attribute 'Tensr'"):
        _ = import_module("ipujax.runtime.tensor").Tensr
