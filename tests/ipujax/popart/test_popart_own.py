"""PopART's own tests of operators, run against `ipujax.popart` by aliasing the module.

They need a checkout of github:graphcore/popart and torch: the folder is that of IPUJAX_POPART_SOURCE. Failing
tests are in `popart_exclusions.py`, with a reason each.

The selection is a rule: files of PopART's `tests/integration` with the fixture `op_tester` that neither look at its
intermediate representation nor need a package that is not here. Those whose names pytest collects by itself are counted
once more: they are the tests of one operator each.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import pytest

from tests.ipujax.popart.popart_exclusions import EXCLUDED

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("IPUJAX_POPART_SOURCE", "")
FEWEST = 0.85  # of the cases that are not skipped
FIXTURE = "op_tester"
REPRESENTATION = "_serializeIr"
COLLECTED_NAMES = ("test_*.py", "*_test.py")  # pytest's own
# Package → words of a file that needs it; the tests of one operator import theirs from a neighbour.
_PACKAGES = {
    "torch_scatter": ("torch_scatter", "scatterreduce_test_basic", "scatterreduce_bcast_test_basic"),
    "torch_spline_conv": ("torch_spline_conv",),
    "torchvision": ("torchvision",),
    "pva": ("import pva",),
}
# Files that other ones import from, and one case each with gibibytes of data.
_NOT_TESTS = ("conftest.py", "gather_big_test.py", "gather_bigger_test.py")


def files(source: Path) -> list[Path]:
    """Return the files of the selection."""
    folder = source / "tests" / "integration"
    return [path for path in sorted(folder.rglob("*.py")) if path.name not in _NOT_TESTS and _is_selected(path)]


def _is_selected(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    needed = [package for package, words in _PACKAGES.items() if any(word in text for word in words)]
    return FIXTURE in text and REPRESENTATION not in text and all(find_spec(name) for name in needed)


def _environment(folder: Path, source: Path) -> dict[str, str]:
    # A file of `tests/integration` imports `operators_test.conftest`, one of `operators_test` its neighbours: there is
    # a module `operators_test` in the latter, so it is on the path for its own files alone.
    integration = source / "tests" / "integration"
    folders = dict.fromkeys((ROOT, ROOT / "tests" / "ipujax" / "popart", integration, folder))
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "IPUJAX_POPART_LOG_LEVEL": "OFF"}


def _cases(source: Path, tmp_path: Path) -> list[ElementTree.Element]:
    """Run the selection, a process for each folder; return the cases."""
    cases: list[ElementTree.Element] = []
    for folder, paths in groupby(sorted(files(source), key=lambda path: path.parent), key=lambda path: path.parent):
        report = tmp_path / f"{folder.name}.xml"
        plugins = ["-p", "popart_alias", "-p", "no:hypothesispytest", "-p", "no:warnings", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *plugins, "--import-mode=importlib"]
        command += ["--continue-on-collection-errors", f"--rootdir={source}", "-o", "addopts=", f"--junitxml={report}"]
        command += list(map(str, paths))
        subprocess.run(command, cwd=tmp_path, env=_environment(folder, source), capture_output=True, check=False)
        cases += ElementTree.parse(report).getroot().iter("testcase")
    return cases


@pytest.mark.skipif(not SOURCE, reason="IPUJAX_POPART_SOURCE names no checkout of PopART")
def test_popart_tests(tmp_path: Path) -> None:
    ran = [case for case in _cases(Path(SOURCE), tmp_path) if case.find("skipped") is None]
    failed = [case for case in ran if case.find("failure") is not None or case.find("error") is not None]
    names = {_function(case) for case in failed}
    for is_counted in (_is_collected_by_name, lambda case: True):
        counted = [case for case in ran if is_counted(case)]
        passed = len(counted) - sum(case in failed for case in counted)
        print(f"{passed} of {len(counted)} cases pass")
        assert passed >= FEWEST * len(counted), sorted(names)
    assert names <= set(EXCLUDED), sorted(names - set(EXCLUDED))


def _is_collected_by_name(case: ElementTree.Element) -> bool:
    name = f"{case.get('classname', '').rpartition('.')[2]}.py"
    return any(fnmatch.fnmatch(name, pattern) for pattern in COLLECTED_NAMES)


def _function(case: ElementTree.Element) -> str:
    """Return the file and the function of a case."""
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
