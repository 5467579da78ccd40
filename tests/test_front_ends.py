"""Front ends stand on the public names of `ipujax` and on `ipujax.front_end`; everything else stands without them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ipujax as ipu
from ipujax.runtime.names_at_import import FRONT_ENDS as NAMES_OF_FRONT_ENDS
from tests.test_layering import FILES, ROOT, imported, within
from tests.test_rooms import FRONT_ENDS

MAX_NAMES = 20
# Modules of the rest that import a front end, when a user asks for it: a command on a file that ends with .onnx.
DOORS = {"ipujax.cli.command_parts": "ipujax.onnx"}
NAMES = "|".join(NAMES_OF_FRONT_ENDS)
IMPORT_IN_TEXT = re.compile(rf"\b(import|from) ipujax\.({NAMES})\b|\bfrom ipujax import [\w, ]*\b({NAMES})\b")
TESTS = {
    f"tests.{'.'.join(path.relative_to(ROOT / 'tests').with_suffix('').parts)}": path
    for path in sorted((ROOT / "tests").rglob("*.py"))
}

# Run in a copy without front ends: all tests of the folders are collected, those of the files run.
FOLDERS = ["tests/runtime", "tests/lowering", "tests/ipujax"]
SMOKE = [
    f"tests/ipujax/{name}.py"
    for name in ("test_public_names", "test_jit", "test_copies", "test_option_dictionaries", "cli/test_profile_command")
]


def front_end_of(module: str) -> str | None:
    """The front end that a module, or a module of tests, belongs to."""
    return next((name for name in FRONT_ENDS if within(module, name) or within(module, f"tests.{name}")), None)


def public_uses(tree: ast.Module) -> set[str]:
    """Names that code reads from `import ipujax as ipu`, or by another name."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    packages = {alias.asname or alias.name for alias in aliases if alias.name == "ipujax"}
    pairs = ((node.value, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {name for value, name in pairs if isinstance(value, ast.Name) and value.id in packages}


def foreign_imports(source: str, module: str) -> set[str]:
    """Imports of a module of a front end that are neither public names, nor of `front_end` modules, nor its own."""
    front_end = front_end_of(module)
    assert front_end
    allowed = {"ipujax.front_end", *FRONT_ENDS[front_end]}
    return {
        name
        for _, name in imported(ast.parse(source), module)
        if within(name, "ipujax") and name != "ipujax" and not within(name, front_end)
        if name.rpartition(".")[0] not in allowed
    } | {f"ipu.{name}" for name in public_uses(ast.parse(source)) - set(dir(ipu))}


def front_end_imports(source: str, module: str) -> set[str]:
    """Front ends that code imports, and programs in its texts."""
    tree = ast.parse(source)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    names = {front_end_of(name) for _, name in imported(tree, module)}
    return {name for name in names if name} | {match[0] for text in texts for match in IMPORT_IN_TEXT.finditer(text)}


def front_end_modules() -> Iterator[tuple[str, str]]:
    """Module and text of the files of front ends."""
    return ((module, path.read_text(encoding="utf-8")) for module, path in FILES.items() if front_end_of(module))


def reexported(module: str) -> set[str]:
    """Names that a module imports under the same name for others."""
    tree = ast.parse(FILES[module].read_text(encoding="utf-8"))
    aliases = (alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names)
    return {alias.name for alias in aliases if alias.name == alias.asname}


def test_front_ends_import_public_names() -> None:
    foreign = {module: foreign_imports(source, module) for module, source in front_end_modules()}
    assert not {module: names for module, names in foreign.items() if names}


@pytest.mark.parametrize("module", ["ipujax.front_end", "ipujax.onnx.front_end"])
def test_names_for_front_ends_are_few_used_and_have_a_reason(module: str) -> None:
    names = reexported(module)
    assert 0 < len(names) <= MAX_NAMES
    reasons = ast.get_docstring(ast.parse(FILES[module].read_text(encoding="utf-8"))) or ""
    assert names <= set(re.findall(r"\w+", reasons))
    used = {name for other, source in front_end_modules() for _, name in imported(ast.parse(source), other)}
    assert not names - {name.removeprefix(f"{module}.") for name in used if within(name, module)}


def test_nothing_else_imports_a_front_end() -> None:
    others = {module: path for module, path in {**FILES, **TESTS}.items() if not front_end_of(module)}
    texts = ((module, path.read_text(encoding="utf-8")) for module, path in others.items())
    importing = {module: names for module, text in texts if (names := front_end_imports(text, module))}
    importing.pop(__name__, None)  # has such imports as examples
    assert importing == {module: {front_end} for module, front_end in DOORS.items()}


def test_the_compiler_knows_front_ends_by_name_alone() -> None:
    assert {f"ipujax.{name}" for name in NAMES_OF_FRONT_ENDS} == set(FRONT_ENDS)


def test_foreign_imports_are_found() -> None:
    module = "ipujax.keras.config"
    allowed = "import ipujax as ipu\nfrom ipujax.front_end import Log\nfrom ipujax.keras.utils import x\nipu.jit"
    assert not foreign_imports(allowed, module)
    assert foreign_imports("from ipujax import device", module) == {"ipujax.device"}
    assert foreign_imports("from ipujax.runtime.errors import IpuError", module) == {"ipujax.runtime.errors.IpuError"}
    assert foreign_imports("import ipujax as ipu\nipu.lowering", module) == {"ipu.lowering"}
    assert foreign_imports("import ipujax\nipujax.calls", module) == {"ipu.calls"}
    assert foreign_imports("from ipujax.onnx import load", module) == {"ipujax.onnx.load"}
    assert not foreign_imports("from ipujax.onnx.front_end import Node", "ipujax.popart.flow")
    assert foreign_imports("from ipujax.onnx.graphs import Node", "ipujax.popart.flow") == {"ipujax.onnx.graphs.Node"}


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    import ipujax.onnx as x",
        "from ipujax import jit, popart",
        "from ipujax.keras.config import IPUConfig",
        "from tests.ipujax.onnx.models import mlp",
        "SCRIPT = '''\nimport ipujax.keras as ipu\n'''",
        "SCRIPT = 'from ipujax import optim, onnx'",
    ],
)
def test_imports_of_a_front_end_are_found(source: str) -> None:
    assert front_end_imports(source, "tests.ipujax.test_jit")


def test_names_for_front_ends_bring_neither_compiler_nor_framework(tmp_path: Path) -> None:
    code = (
        "import sys, ipujax; before = set(sys.modules); import ipujax.front_end\n"
        "print(*sorted(set(sys.modules) - before), 'ipujax.front_end' in before)"
    )
    *modules, is_imported = run_python(["-c", code], tmp_path, ROOT).split()
    assert is_imported == "False"
    packages = {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names)
    assert packages == {"ipujax"} and not [name for name in modules if within(name, "ipujax.lowering")]


def run_python(arguments: list[str], cwd: Path, path: Path) -> str:
    """Run Python with the package of a folder; return its output."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_the_rest_works_without_front_ends(tmp_path: Path) -> None:
    """All its tests are collected, and some run; those of examples, documents and rooms describe the whole project."""
    for name in ("ipujax", "lowering", "runtime", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for front_end in FRONT_ENDS:
        folder = front_end.replace(".", os.sep)
        shutil.rmtree(tmp_path / folder)
        shutil.rmtree(tmp_path / "tests" / folder)
    pytest_of_copy = ["-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    run_python([*pytest_of_copy, "--collect-only", *FOLDERS], tmp_path, tmp_path)
    run_python([*pytest_of_copy, *SMOKE], tmp_path, tmp_path)
    where = run_python(["-c", "import ipujax; print(ipujax.__file__)"], tmp_path, tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
