"""JAX's own tests with `ipu.jit` in the place of `jax.jit`.

    python benchmarks/jax_tests.py CHECKOUT
    python benchmarks/jax_tests.py CHECKOUT --only lax_test --sample 200 --seed 3

CHECKOUT is a checkout of JAX at the installed version, whose tests are used where they are. A seeded sample of the
tests of each file runs in a separate process; a test that kills it has failed, and the remaining ones run in a new
process. The default device is 8 chips of 64 tiles, so that lowering takes less time and meshes have IPUs. A row is a
file: how many tests passed, failed, were skipped by JAX itself and were excluded. After the rows come the last line of
each failure, each exclusion with its reason, see `jax_test_exclusions.py`, and how many calls gave arguments that
`ipu.jit` refuses by name and that were left to `jax.jit`. Exits with 1 where a test failed.

Errors of ipujax have other texts than those of JAX. A test that expects a text of JAX runs too, and is excluded only if
the error is of the expected class.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import random
import re
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax_test_texts
from jax_test_exclusions import WORDS, exclusion, refusal

import ipujax as ipu

FILES = (
    "api_test",
    "lax_test",
    "lax_numpy_test",
    "lax_control_flow_test",
    "lax_autodiff_test",
    "custom_api_test",
    "mutable_array_test",
    "random_lax_test",
    "batching_test",
    "checkify_test",
    "python_callback_test",
    "pjit_test",
    "shard_map_test",
    "shard_alike_test",
    "custom_partitioning_test",
    "state_test",
    "pallas/pallas_test",
    "pallas/indexing_test",
    "pallas/pallas_vmap_test",
    "pallas/tpu_pallas_interpret_test",
)
# Of these files the tests of classes that match; of others all. A CPU skips the other classes.
CLASSES = {
    "pallas/pallas_test": "*Interpret*",
    "pallas/indexing_test": "*Index*Test",
    "pallas/pallas_vmap_test": "*Interpret*",
}
# Files whose tests look at numbers and at the text of XLA together: the text counts for nothing.
WITH_TEXTS = frozenset({"pjit_test", "shard_map_test"})
# Arguments of `jax.jit`, deprecated there, that `ipu.jit` refuses: calls with a value for them are left to `jax.jit`.
REFUSED = frozenset({"device", "backend"})
IPUS = 8
TILES = 64
_MOST_CHARACTERS = 300  # characters of a line
OUTCOMES = ("passed", "failed", "skipped", "excluded")


# --- inside the process of a file -------------------------------------------------------------------------------------


class Replacement:
    """A stand-in for `jax.jit`: `ipu.jit` for tests and their utilities, `jax.jit` for JAX and ipujax themselves.

    Attributes:
        calls_of_jax: how many calls gave each argument that `ipu.jit` refuses.
    """

    def __init__(self) -> None:
        self._jax_jit: Callable[..., Any] = jax.jit
        self.left: Counter[str] = Counter()
        functools.update_wrapper(self, jax.jit)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] in ("jax", "jaxlib", "ipujax") and not caller.endswith(".test_util"):
            return self._jax_jit(*args, **kwargs)
        refused = [name for name in REFUSED if kwargs.get(name) is not None]
        self.left.update(refused)
        return self._jax_jit(*args, **kwargs) if refused else ipu.jit(*args, **kwargs)

    def install(self) -> None:
        """Takes the place of `jax.jit` in all modules that are imported already."""
        for module in list(sys.modules.values()):
            if getattr(module, "__name__", "").split(".")[0] == "jax" and vars(module).get("jit") is self._jax_jit:
                module.jit = self  # type: ignore[attr-defined]


class Recorded(unittest.TestResult):
    """Writes the outcome of each test as a line of JSON.

    Args:
        path: the file.
        replacement: of `jax.jit`.
    """

    def __init__(self, path: Path, replacement: Replacement) -> None:
        super().__init__()
        self._path = path
        self._replacement = replacement
        self._outcome: tuple[str, str] = "passed", ""

    def _write(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([short_name(test), outcome, text, self._replacement.left]) + "\n")
        self._replacement.left.clear()

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = "passed", ""
        self._write(test, "started")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._write(test, *self._outcome)

    def note_words(self, pattern: str, error: ipu.IpuError) -> None:
        """Excludes the running test: an error was of the class that it expects, and in words of ipujax."""
        if self._outcome[0] == "passed":
            self._outcome = "excluded", f"{WORDS}: /{pattern}/ is {error.what!r}"

    def _fail(self, error: Any) -> None:
        reason = refusal(str(error[1])) if isinstance(error[1], ipu.IpuError) else None
        text = "".join(traceback.format_exception(*error))
        self._outcome = ("failed", text) if reason is None else ("excluded", reason)

    def addError(self, test: Any, err: Any) -> None:
        self._fail(err)

    def addFailure(self, test: Any, err: Any) -> None:
        self._fail(err)

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._outcome = "failed", "the test was expected to fail"

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self._fail(err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        if self._outcome[0] == "passed":
            self._outcome = "skipped", reason


class Raising:
    """The context of `assertRaisesRegex`, in which errors of ipujax have words of their own.

    It can be left without being entered, as by `ExitStack.push`.

    Args:
        case: the running test.
        result: notes errors in words of ipujax.
        expected: class of the error.
        pattern: a regular expression for its text.
    """

    def __init__(self, case: unittest.TestCase, result: Recorded, expected: Any, pattern: Any) -> None:
        self._case = case
        self._result = result
        self._expression = re.compile(pattern)
        self._caught: Any = case.assertRaises(expected)

    def __enter__(self) -> Any:
        return self._caught.__enter__()

    def __exit__(self, *raised: Any) -> bool:
        if not self._caught.__exit__(*raised):
            return False
        error = self._caught.exception
        if self._expression.search(str(error)) is None:
            if not isinstance(error, ipu.IpuError):
                self._case.fail(f"/{self._expression.pattern}/ is not in {str(error)!r}")
            self._result.note_words(self._expression.pattern, error)
        return True


def with_words_of_ipujax(result: Recorded) -> Callable[..., Any]:
    """An `assertRaisesRegex` that takes errors of ipujax by their class."""

    def method(case: unittest.TestCase, expected: Any, pattern: Any, *call: Any, **kwargs: Any) -> Any:
        kwargs.pop("msg", None)
        context = Raising(case, result, expected, pattern)
        if not call:
            return context
        with context:
            return call[0](*call[1:], **kwargs)

    return method


def short_name(test: unittest.TestCase) -> str:
    """Class and name of a test."""
    return f"{type(test).__name__}.{test._testMethodName}"


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests of a suite, however deep."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from cases(test)
        else:
            yield test


def run_in_this_process(checkout: Path, file: str, names: Path, results: Path) -> None:
    """Lists the tests of a file as `names`, or runs those that `names` lists.

    Args:
        checkout: of JAX.
        file: a test file of it.
        names: a JSON list of tests; written if it does not exist.
        results: the file for outcomes.
    """
    sys.argv = [file]  # JAX's flags are read from it, when a test module is imported
    sys.path.insert(0, str(checkout / "tests"))
    importlib.import_module("jax._src.test_util")  # takes `jax.jit` itself as an attribute
    importlib.import_module("jax_test_modules").install()
    replacement = Replacement()
    replacement.install()
    module = importlib.import_module(file.replace("/", "."))
    tests = cases(unittest.defaultTestLoader.loadTestsFromModule(module))
    by_name = {short_name(test): test for test in tests if fnmatchcase(type(test).__name__, CLASSES.get(file, "*"))}
    if not names.exists():
        names.write_text(json.dumps(sorted(by_name)))
        return
    with ipu.default_device(ipu.IPUModel(IPUS, tiles_per_ipu=TILES)):
        result = Recorded(results, replacement)
        unittest.TestCase.assertRaisesRegex = with_words_of_ipujax(result)  # type: ignore[method-assign]
        if file in WITH_TEXTS:
            jax_test_texts.install()
        unittest.TestSuite(by_name[name] for name in json.loads(names.read_text())).run(result)


# --- around these processes -------------------------------------------------------------------------------------------


@dataclass
class Outcomes:
    """Outcomes of the tests of one file.

    Args:
        file: name of the file.
        tests: for each test its outcome and a text: the traceback of a failure, the reason of an exclusion.
        calls_of_jax: how many calls gave each argument that `ipu.jit` refuses.
    """

    file: str
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)
    calls_of_jax: Counter[str] = field(default_factory=Counter)

    def of(self, outcome: str) -> dict[str, str]:
        """The tests with one outcome, and their texts."""
        return {name: text for name, (got, text) in self.tests.items() if got == outcome}


def run_file(checkout: Path, file: str, choose: Callable[[list[str]], list[str]]) -> Outcomes:
    """Runs tests of a file.

    Args:
        checkout: of JAX.
        file: its name.
        choose: the tests to run, of all.
    """
    outcomes = Outcomes(file)
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder, "names.json")
        results = Path(folder, "results.jsonl")
        command = [sys.executable, __file__, str(checkout), "--only", file, "--inside", folder]
        subprocess.run(command, check=True)
        to_run = []
        for name in choose(json.loads(names.read_text())):
            reason = exclusion(file, name)
            if reason is None:
                to_run.append(name)
            else:
                outcomes.tests[name] = "excluded", reason
        while to_run:
            names.write_text(json.dumps(to_run))
            process = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for line in results.read_text().splitlines() if results.exists() else ():
                name, outcome, text, refused_arguments = json.loads(line)
                died = f"{process.stderr[-2000:]}\nthe process died, code {process.returncode}"
                outcomes.tests[name] = ("failed", died) if outcome == "started" else (outcome, text)
                outcomes.calls_of_jax.update(refused_arguments)
            results.unlink(missing_ok=True)
            remaining = [name for name in to_run if name not in outcomes.tests]
            if len(remaining) == len(to_run):
                raise RuntimeError(f"no test of {file} could be started:\n{process.stderr}")
            to_run = remaining
    return outcomes


def last_line(text: str) -> str:
    """The last line of a traceback that says something, shortened."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")[:_MOST_CHARACTERS]


def show(all_outcomes: Sequence[Outcomes], with_tracebacks: bool) -> None:
    """Prints failures, exclusions and calls left to `jax.jit`."""
    for outcome in ("failed", "excluded"):
        rows = [(o.file, name, text) for o in all_outcomes for name, text in sorted(o.of(outcome).items())]
        print(f"\n{outcome}: {len(rows)}")
        for file, name, text in rows:
            print(f"  {file} {name}\n    {last_line(text)}")
            if with_tracebacks and outcome == "failed":
                print(text)
    calls_of_jax: Counter[str] = sum((outcomes.calls_of_jax for outcomes in all_outcomes), Counter())
    print(f"\ncalls left to jax.jit, by argument: {dict(calls_of_jax.most_common()) or 'none'}")


def main() -> int:
    """Runs the tests that the command line chooses."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of JAX at the installed version")
    parser.add_argument("--only", action="append", metavar="FILE", help="a test file; several times for several")
    parser.add_argument("--sample", type=int, default=60, help="tests of each file")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", metavar="PATTERN", help="a regular expression: all tests that match, no sample")
    parser.add_argument("--tracebacks", action="store_true", help="whole tracebacks of failures")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        (file,) = args.only
        run_in_this_process(args.checkout, file, args.inside / "names.json", args.inside / "results.jsonl")
        return 0
    version = (args.checkout / "jax" / "version.py").read_text() if (args.checkout / "jax").exists() else ""
    if version and f'_version = "{jax.__version__}"' not in version:
        parser.error(f"{args.checkout} is not of jax {jax.__version__}, which is installed")
    files = [name.removesuffix(".py") for name in args.only or FILES]

    def choose(file: str, names: list[str]) -> list[str]:
        if args.tests:
            return [name for name in names if re.search(args.tests, name)]
        return random.Random(f"{args.seed} {file}").sample(names, min(args.sample, len(names)))

    print(f"{'file':24}" + "".join(f"{name:>10}" for name in OUTCOMES))
    all_outcomes = []
    for file in files:
        outcomes = run_file(args.checkout, file, functools.partial(choose, file))
        print(f"{file:24}" + "".join(f"{len(outcomes.of(name)):10}" for name in OUTCOMES), flush=True)
        all_outcomes.append(outcomes)
    show(all_outcomes, args.tracebacks)
    return int(any(outcomes.of("failed") for outcomes in all_outcomes))


if __name__ == "__main__":
    sys.exit(main())
