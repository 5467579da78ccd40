"""Failing scripts under `ipujax profile` have the tracebacks, the output and the exit code of `python`."""

from __future__ import annotations

import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.ipujax.cli.failing_scripts import ARCHIVE, ARGUMENTS, COMPILED, LINK, SCRIPTS

ROOT = str(Path(__file__).resolve().parents[3])
_TABLES = re.compile(
    r"Programs of .*?:\n  none: JAX ran nothing.*\n|(Functions of JAX, compiled|JAX, one operation at)(.|\n)*"
)
_PROFILE = "-m", "ipujax", "profile"

# One process for many kinds: each is shown as a script shows it that goes on.
_CAUGHT = """
import logging, sys, threading, traceback
import jax, jax.numpy as jnp
x = jnp.ones(3)

@jax.jit
def product(x):
    return x @ jnp.ones(5)

@jax.jit
def key(x):
    raise KeyError("inside")

def body(c, x):
    return c, product(x)

def host(x):
    raise ValueError("in a callback")

def called_back(x):
    return jax.pure_callback(host, jax.ShapeDtypeStruct((3,), jnp.float32), x)

def cause():
    try:
        product(x)
    except TypeError as error:
        raise ValueError("second") from error

def group():
    errors = []
    for fun in (key, product, missing):
        try:
            fun(x)
        except Exception as error:
            errors.append(error)
    raise ExceptionGroup("several", errors)

def missing(x=None):
    import no_such_module

def noted():
    try:
        key(x)
    except KeyError as error:
        error.add_note("a note")
        raise

actions = dict(
    product=lambda: product(x), key=lambda: key(x), cause=cause, group=group, missing=missing, noted=noted,
    scan=lambda: jax.lax.scan(body, 0.0, jnp.ones((2, 3))), scanned=lambda: jax.jit(jax.lax.scan)(body, 0.0, x),
    map=lambda: jax.lax.map(product, jnp.ones((2, 3))), grad=lambda: jax.grad(product)(x),
    vmap=lambda: jax.vmap(product)(x[None]), callback=lambda: jax.jit(called_back)(x),
    setting=lambda: jax.jit(lambda x: x, nothing=1), number=lambda: jax.jit(3), lower=lambda: product.lower(x),
    stage=lambda: jax.jit(lambda x: x + 1).lower(x).compile()(x[:2]), attribute=lambda: key.nothing,
    missing_sub=lambda: __import__("jax.no_such_part"),
)
for name, action in actions.items():
    print(name, file=sys.stderr)
    try:
        action()
    except Exception:
        logging.exception("it failed") if name == "grad" else traceback.print_exc()
thread = threading.Thread(target=lambda: product(x), name="thread")
thread.start()
thread.join()
product(x)
"""


def _written(folder: Path, script: str | bytes | dict[str, str]) -> list[str]:
    """Write the files of a script, and return its command line."""
    files = script if isinstance(script, dict) else {"script.py": script}
    for name, text in files.items():
        if name == ARCHIVE:
            with zipfile.ZipFile(folder / "app.zip", "w") as archive:
                archive.writestr("__main__.py", text)
        elif name == LINK:
            (folder / "link.py").symlink_to(text)
        elif name == COMPILED:
            (folder / "source.py").write_text(text)
            py_compile.compile(str(folder / "source.py"), cfile=str(folder / "script.pyc"))
        elif name != ARGUMENTS:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(files.get(ARGUMENTS, "script.py")).split()


def _run(folder: Path, *command: str) -> tuple[int, str, list[str]]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ROOT}
    run = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
        check=False,
    )
    error = re.sub(r"0x[0-9a-f]+|line repeated \d+ more", "…", _TABLES.sub("", run.stderr))
    return run.returncode, run.stdout, error.splitlines()


def test_tracebacks_that_a_script_shows_itself(tmp_path: Path) -> None:
    command = _written(tmp_path, _CAUGHT)
    profiled = _run(tmp_path, *_PROFILE, *command)
    assert profiled == _run(tmp_path, *command)
    assert profiled[2].count("Traceback (most recent call last):") > 20


@pytest.mark.parametrize("name", SCRIPTS)
def test_failing_scripts_show_the_tracebacks_of_python(name: str, tmp_path: Path) -> None:
    command = _written(tmp_path, SCRIPTS[name])
    assert _run(tmp_path, *_PROFILE, *command) == _run(tmp_path, *command)
