"""`import ipujax` as a user has it: installed, in a folder whose own files have unlucky names, and at little cost.

Everything runs in subprocesses: imports of this process say nothing about a fresh one.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_IMPORT_SECONDS = 0.15  # of the processor, over `import jax`; assumed: what nobody notices beside JAX (about 1 s)

# Imports every module of the package, then prints where the package was found.
IMPORT_ALL = """
import importlib, pkgutil
import ipujax
for module in pkgutil.walk_packages(ipujax.__path__, "ipujax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
import ipujax.lowering, ipujax.runtime
print(ipujax.__file__)
"""


def run_python(code: str, cwd: Path, *path: Path) -> str:
    """Runs `python -c code` in `cwd`, which `-c` puts first on sys.path, with `path` next; returns its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path:
        env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose `runtime` and `lowering` raise when imported."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    for name in ("runtime", "lowering"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the user\\'s own {name}.py was imported')\n")
    return folder


def test_hostile_folder_is_hostile(hostile: Path):
    for name in ("runtime", "lowering"):
        run_python(f"try: import {name}\nexcept RuntimeError: pass\nelse: raise SystemExit('harmless')", hostile)


def test_import_in_hostile_folder(hostile: Path):
    actual = Path(run_python(IMPORT_ALL, hostile))
    assert actual.name == "__init__.py" and not actual.is_relative_to(hostile)


# Prints what `import ipujax` and settings of functions import, beside what JAX does.
IMPORTED = """
import sys
import tarfile
import jax
before = set(sys.modules)
import ipujax as ipu
@ipu.jit(device=ipu.IPUModel(num_ipus=2), options=ipu.Options(recompute="auto"), donate_argnums=0)
def step(x): return x + 1
ipu.jit(lambda key, x: x, static_argnames="key", offload_argnums=1), ipu.CPU(), ipu.make_mesh((2,), ("x",)), dir(ipu)
print(*sorted(name for name in sys.modules if name not in before), ipu.__file__)
"""
LIGHT_ROOMS = {
    *("arguments", "device", "functions", "jit", "pipeline", "public"),
    *(
        f"runtime.{room}"
        for room in (
            "cache",
            "errors",
            "garbage",
            "lazy_names",
            "not_copied",
            "options",
            "signatures",
            "target",
        )
    ),
    "runtime.names_at_import",
    "runtime.tracebacks",
}


def test_import_and_decorating_bring_neither_compiler_nor_framework(tmp_path: Path):
    *modules, file = run_python(IMPORTED, tmp_path, ROOT).split()
    assert file == str(ROOT / "ipujax" / "__init__.py")
    packages = {name.partition(".")[0] for name in modules}
    assert packages <= {"ipujax", "numpy"}, "neither frameworks nor parts of JAX that JAX imports at need"
    rooms = {name.removeprefix("ipujax.") for name in modules if name.startswith("ipujax.")} - {"runtime"}
    assert {room for room in rooms if not any(f"{room}.".startswith(f"{light}.") for light in LIGHT_ROOMS)} == set()


def test_array_semantics_of_collectives_bring_no_costs(tmp_path: Path):
    """A call of a stored program computes by them, and must not wait for imports of the compiler."""
    code = "import sys, ipujax.lowering.gcl.stacked; print(*sys.modules)"
    rooms = {f"ipujax.runtime.{room}" for room in ("cost", "exchange", "graph")}
    assert not rooms & set(run_python(code, tmp_path, ROOT).split())


def test_the_compiler_may_be_imported_while_jax_traces(tmp_path: Path):
    code = (
        "import jax, ipujax as ipu\n"
        "with jax.checking_leaks():\n"
        "    print(jax.jit(jax.grad(ipu.jit(lambda x: x * x)))(3.0))\n"
        "print(ipu.jit(lambda x: x * x)(3.0))"
    )
    assert run_python(code, tmp_path, ROOT).split() == ["6.0", "9.0"]


def source_modules() -> set[str]:
    """The files a wheel must hold, apart from its metadata, by their path in it."""
    folders = {"ipujax": ROOT / "ipujax", "ipujax/lowering": ROOT / "lowering", "ipujax/runtime": ROOT / "runtime"}
    links = {ROOT / "ipujax" / "runtime", ROOT / "ipujax" / "lowering"}
    modules = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in folders.items()
        for path in folder.rglob("*.py")
        if links.isdisjoint(path.parents)
    }
    assets = (path for path in (ROOT / "runtime" / "page").iterdir() if path.suffix in (".css", ".js", ".LICENSE"))
    page = {f"ipujax/runtime/page/{path.name}" for path in assets}
    return modules | page | {"ipujax/py.typed"}


# Of an sdist, beside the package and what setuptools writes.
PAGES = ("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md")
FOLDERS = ("docs", "examples")
IGNORED = shutil.ignore_patterns("__pycache__", "_build")


def files_of_sdist(checkout: Path) -> set[str]:
    """The files of a release, without those that setuptools writes."""
    files = (path for folder in FOLDERS for path in (checkout / folder).rglob("*") if path.is_file())
    pages = {str(path.relative_to(checkout)) for path in files}
    return source_modules() | pages | {*PAGES, "pyproject.toml", "MANIFEST.in"}


def copy_of_checkout(tmp_path: Path) -> Path:
    """The sources of the package, without files of earlier builds."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("pyproject.toml", "MANIFEST.in", *PAGES):
        shutil.copy(ROOT / name, checkout)
    for name in ("ipujax", "lowering", "runtime", *FOLDERS):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True, ignore=IGNORED)
    return checkout


def test_editable_install_is_a_path_that_type_checkers_follow(tmp_path: Path):
    checkout = copy_of_checkout(tmp_path)
    build = f"import setuptools.build_meta as build; build.build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if ".dist-info/" not in name)
        assert path.endswith(".pth") and Path(archive.read(path).decode().strip()).samefile(checkout)


def test_wheel_of_sdist_holds_the_package_and_imports(hostile: Path, tmp_path: Path):
    checkout = copy_of_checkout(tmp_path)
    dist = tmp_path / "dist"
    site = tmp_path / "site"
    released = files_of_sdist(checkout)
    for stray in ("docs/_build/index.html", "examples/__pycache__/digits.cpython-311.pyc", "tests/test_rooms.py"):
        (checkout / stray).parent.mkdir(parents=True)
        (checkout / stray).touch()

    # Without --wheel or --sdist, `build` makes the sdist, unpacks it, and makes the wheel from that.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(checkout)]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    written = {"PKG-INFO", "setup.cfg"} | {name for name in packed if name.startswith("ipujax.egg-info/")}
    assert packed - written == released
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == source_modules()

    install = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(site), str(wheel)]
    done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(run_python(IMPORT_ALL, hostile, site)).is_relative_to(site)


def test_import_costs_little_over_jax(tmp_path: Path):
    code = "import time; start = time.process_time(); import {}; print(time.process_time() - start)"
    seconds: dict[str, list[float]] = {"jax": [], "jax, ipujax": []}
    for _ in range(9):  # interleaved, so that a busy machine slows both
        for label, samples in seconds.items():
            samples.append(float(run_python(code.format(label), tmp_path, ROOT)))
    base, ours = (statistics.median(samples) for samples in seconds.values())
    assert ours - base < MAX_IMPORT_SECONDS, f"import ipujax took {ours:.3f} s, import jax {base:.3f} s"
