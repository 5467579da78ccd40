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


def names_of(package: Path) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Names by module: those that a type checker imports, and those of `lazy_names`."""
    typed: dict[str, set[str]] = {}
    lazy: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.If):
            for statement in node.body:
                assert isinstance(statement, ast.ImportFrom) and statement.module is not None
                module = statement.module.rpartition(".")[2]
                typed.setdefault(module, set()).update(alias.asname or alias.name for alias in statement.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy_names":
            lazy = {module: set(words.split()) for module, words in ast.literal_eval(node.args[1]).items()}
    return typed, lazy


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_typed_names_are_those_found_at_run_time(package: Path) -> None:
    typed, lazy = names_of(package)
    assert lazy and typed == lazy
    module = import_module(f"ipujax.{'.'.join(package.parts)}")
    for submodule, names in lazy.items():
        source = import_module(f"{module.__name__}.{submodule}")
        assert all(getattr(module, name) is getattr(source, name) for name in names)


def test_refuses_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'ipujax\.runtime\.tensor' has no attribute 'Tensr'"):
        _ = import_module("ipujax.runtime.tensor").Tensr
