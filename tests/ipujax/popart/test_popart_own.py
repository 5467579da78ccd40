"""PopART's own tests of operators, run against `ipujax.popart` by aliasing the module.

They need a checkout of github:graphcore/popart and torch: the folder is that of IPUJAX_POPART_SOURCE. What fails is in
`popart_exclusions.py`, with a reason each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.ipujax.popart.popart_exclusions import EXCLUDED

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("IPUJAX_POPART_SOURCE", "")
FEWEST = 0.85  # of the cases that are not skipped
# Files that look at PopART's intermediate representation, or need packages that are not here.
_NOT_HERE = ("getIr", "_serializeIr", "json", "torch_scatter", "torch_spline_conv", "torchvision", "import pva")
_HUGE = ("gather_big_test.py", "gather_bigger_test.py")  # gibibytes of data


def files(source: Path) -> list[Path]:
    """Return the files with the fixture `op_tester` that never look at the intermediate representation."""
    found = []
    for path in sorted((source / "tests" / "integration").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        is_wanted = "op_tester" in text and not any(word in text for word in _NOT_HERE)
        found += [path] if is_wanted and path.name not in ("conftest.py", *_HUGE) else []
    return found


@pytest.mark.slow
@pytest.mark.skipif(not SOURCE, reason="IPUJAX_POPART_SOURCE names no checkout of PopART")
def test_popart_tests(tmp_path: Path) -> None:
    source = Path(SOURCE)
    report = tmp_path / "report.xml"
    folders = (ROOT, ROOT / "tests" / "ipujax" / "popart", source / "tests" / "integration")
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    plugins = ["-p", "popart_alias", "-p", "no:hypothesispytest", "-p", "no:warnings", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *plugins, "--import-mode=importlib"]
    command += [f"--rootdir={source}", "-o", "addopts=", f"--junitxml={report}", *map(str, files(source))]
    subprocess.run(command, cwd=source, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    ran = [case for case in cases if case.find("skipped") is None]
    failed = [case for case in ran if case.find("failure") is not None or case.find("error") is not None]
    names = {_function(case) for case in failed}
    assert len(failed) <= (1 - FEWEST) * len(ran), sorted(names)
    assert names <= set(EXCLUDED), sorted(names - set(EXCLUDED))


def _function(case: ElementTree.Element) -> str:
    """Return the file and the function of a case."""
    return f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '').partition('[')[0]}"
