"""Shared by all tests: the environment JAX and Keras start in, and comparison with golden texts.

A golden text lies in `tests/golden/<module>/<test>.txt`, `<module>` being the path below `tests/` without `.py`.
`pytest --update-golden` writes the texts instead of comparing; without it, a text that is missing fails the test.
`tests/durations.py` says which tests are slow, and how `pytest --update-durations` records it.
"""

from __future__ import annotations

import difflib
import gc
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

# Read once, when jax and keras are first imported; this file is imported before any test module.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import hypothesis
import jax

from tests.durations import DurationRecorder, mark_slow
from tests.shared_programs import forget_shared_programs

TESTS = Path(__file__).resolve().parent
_CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"
_own_folders: list[str] = []
_modules = count(1)  # those that are done
_MODULES_IN_MEMORY = 8  # each takes about 20 MB
_NEW_OBJECTS = 50_000  # between two collections of the youngest generation

# A busy machine is no error of the code.
hypothesis.settings.register_profile(
    "any speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any speed")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-golden` and `--update-durations`."""
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ instead of comparing with it")
    parser.addoption("--update-durations", action="store_true", help="write how long slow tests take")


def pytest_configure(config: pytest.Config) -> None:
    """Shares compiled programs between tests, in folders of this run: the whole run takes a tenth less time.

    A folder for each worker: JAX writes an entry in place, so that another process may read half of it and warn.
    Garbage is looked for less often: the memory that JAX has of thousands of tests is walked through each time.
    """
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
    if _CACHE_DIR not in os.environ:  # workers, and what tests start, use that of the process that started them
        _own_folders.append(tempfile.mkdtemp(prefix="ipujax-tests-"))
        os.environ[_CACHE_DIR] = _own_folders[0]
    if hasattr(config, "workerinput"):
        os.environ[_CACHE_DIR] = str(Path(os.environ[_CACHE_DIR]) / config.workerinput["workerid"])
    options = {
        _CACHE_DIR: os.environ[_CACHE_DIR],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }
    for name, value in options.items():
        os.environ[name] = str(value)
        jax.config.update(name.lower(), value)
    if config.getoption("--update-durations"):
        config.pluginmanager.register(DurationRecorder())


def pytest_unconfigure() -> None:
    """Removes the compiled programs of this run."""
    for folder in _own_folders:
        shutil.rmtree(folder)


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks slow tests."""
    mark_slow(items)


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs() -> Iterator[None]:
    """Drops the programs that JAX compiled for some modules: those of all would fill several gigabytes."""
    yield
    if next(_modules) % _MODULES_IN_MEMORY == 0:
        jax.clear_caches()


@pytest.fixture(autouse=True)
def compile_each_test_anew() -> None:
    """Drops programs of other tests: a function of a module is compiled again, as in a process of its own."""
    forget_shared_programs()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[..., None]:
    """A function `golden(text, part="")` that compares text with the stored one; `part` names one of several."""
    module = request.path.relative_to(TESTS).with_suffix("")
    update = request.config.getoption("--update-golden")

    def compare(text: str, part: str = "") -> None:
        test = re.sub(r"[^\w.=-]+", "_", request.node.name).strip("_")
        path = TESTS / "golden" / module / f"{test}{'.' if part else ''}{part}.txt"
        got = text.rstrip("\n") + "\n"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        name = path.relative_to(TESTS.parent)
        if not path.exists():
            pytest.fail(f"{name} does not exist; `pytest --update-golden` writes it", pytrace=False)
        want = path.read_text(encoding="utf-8")
        if got != want:
            diff = difflib.unified_diff(want.splitlines(), got.splitlines(), str(name), "this run", lineterm="")
            rows = [*diff, "If the change is meant: pytest --update-golden, and read the diff."]
            pytest.fail("\n".join(rows), pytrace=False)

    return compare
