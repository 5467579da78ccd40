"""`dir` and completion show the public names alone, and all of them exist."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import ipujax as ipu

MODULES = ["", ".distributed", ".optim", ".poplar", ".poplar.program", ".poplin", ".popnn", ".popops"]
MODULES += [".poprand", ".popsolver", ".popsparse", ".poputil", ".schedules"]
SUBMODULES = {
    "ipujax": {
        *("distributed", "optim", "poplar", "schedules"),
        *("poplin", "popnn", "popops", "poprand", "popsolver", "popsparse", "poputil"),
    },
    "ipujax.poplar": {"program"},
    "ipujax.popnn": {"ctc_loss", "gru", "lstm"},
    "ipujax.popops": {"expr"},
}
SOME = {
    "ipujax": {"jit", "IPUModel", "Profile", "Traced", "codelet_call", "__version__"},
    "ipujax.poplar": {"Graph", "FLOAT", "Engine", "concat"},
    "ipujax.popops": {"add", "add_in_place", "reduce", "add_codelets"},
    "ipujax.poplar.program": {"Sequence", "Repeat", "RepeatWhile"},
}


@pytest.mark.parametrize("name", [f"ipujax{name}" for name in MODULES])
def test_dir_shows_public_names(name: str) -> None:
    module = importlib.import_module(name)
    displayed = {attribute: getattr(module, attribute) for attribute in dir(module)}
    assert SOME.get(name, set()) <= set(displayed)
    assert not [key for key in displayed if key.startswith("_") and key != "__version__"]
    assert {key for key, x in displayed.items() if isinstance(x, ModuleType)} == SUBMODULES.get(name, set())
    foreign = {key for key, x in displayed.items() if not getattr(x, "__module__", "ipujax").startswith("ipujax")}
    assert not {key for key in foreign if getattr(displayed[key], "__name__", "") == key}  # names of one's own are ours


@pytest.mark.parametrize("name", [f"ipujax{name}" for name in MODULES])
def test_names_of_a_module_are_public_or_private(name: str) -> None:
    module = importlib.import_module(name)
    streams = {"PrintStream", "AbortStream"}  # of `poplar.program`, which makes them itself
    defined = {key for key, x in vars(module).items() if getattr(x, "__module__", None) == name and key[0] != "_"}
    assert {key for key in defined if getattr(vars(module)[key], "__name__", key) == key} - streams <= set(dir(module))


def test_libraries_are_imported_when_they_are_asked_for(tmp_path: Path) -> None:
    code = (
        "import sys, ipujax as ipu\n"
        "assert not {'ipujax.poplar', 'ipujax.popops', 'ipujax.schedules'} & set(sys.modules)\n"
        "assert callable(ipu.popops.add) and ipu.poplar.Graph and ipu.schedules.GPipe\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    with pytest.raises(AttributeError, match="has no attribute 'popsparse_'"):
        ipu.popsparse_  # noqa: B018


def test_names_that_are_imported_late_are_those_of_their_modules() -> None:
    tree = ast.parse(Path(ipu.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    late = {alias.asname: node.module for node in imports for alias in node.names}
    assert {"Lowered", "popops"} <= set(late) <= set(dir(ipu))
    for name, module in late.items():
        expected = importlib.import_module(f"ipujax.{name}" if module == "ipujax" else module)
        assert getattr(ipu, name) is (expected if module == "ipujax" else getattr(expected, name))


def test_the_reference_has_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api" / "ipujax.md").read_text(encoding="utf-8")
    names = {name for name in dir(ipu) if not isinstance(getattr(ipu, name), ModuleType)} - {"__version__"}
    assert set(re.findall(r"^\.\. auto(?:function|class|exception):: ipujax\.(\w+)$", page, re.MULTILINE)) == names
    assert re.findall(r"^\.\. auto\w+:: (.+)$", page, re.MULTILINE)[0] == "ipujax.jit"


def test_versions_agree() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert ipu.__version__ == importlib.metadata.version("ipujax") == project["version"]
