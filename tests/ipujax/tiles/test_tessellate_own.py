"""The tests of TessellateIPU of tile_map, tile_put, tile arrays and their like, run in place by aliasing its modules.

They need a checkout of github:graphcore-research/tessellate-ipu, whose folder is IPUJAX_TESSELLATE_SOURCE, and chex.
`tessellate_exclusions.py` lists each that is excepted, or fails, with its reason.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.ipujax.tiles.tessellate_exclusions import EXCEPTED, EXCEPTED_FILES, FAILING

ROOT = Path(__file__).resolve().parents[3]
SOURCE = os.environ.get("IPUJAX_TESSELLATE_SOURCE", "")
FEWEST = 0.9  # of the cases that are not excepted


@pytest.mark.skipif(not SOURCE, reason="IPUJAX_TESSELLATE_SOURCE names no checkout of TessellateIPU")
def test_tile_map_and_tile_put_pass_the_tests_of_tessellate_ipu(tmp_path: Path) -> None:
    pytest.importorskip("chex", reason="the tests of TessellateIPU need chex")
    tests = Path(SOURCE) / "tests"
    files = [path for path in sorted(tests.glob("*/test_*.py")) if f"{path.relative_to(tests)}" not in EXCEPTED_FILES]
    report = tmp_path / "report.xml"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "ipujax" / "tiles"), os.environ.get("PYTHONPATH", "")])
    plugins = ["-p", "tessellate_alias", "-p", "no:warnings", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *plugins, f"--rootdir={SOURCE}", "-o", "addopts="]
    command += [f"--junitxml={report}", *map(str, files)]
    subprocess.run(command, cwd=SOURCE, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False)
    cases = [case for case in ElementTree.parse(report).getroot().iter("testcase") if _function(case) not in EXCEPTED]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    names = {_function(case) for case in failed}
    print(f"{len(cases) - len(failed)} of {len(cases)} cases pass")
    assert cases and len(failed) <= (1 - FEWEST) * len(cases), sorted(names)
    assert names <= set(FAILING), sorted(names - set(FAILING))


def _function(case: ElementTree.Element) -> str:
    """Return the file and the function of a case, without the number of its parameters."""
    module = next(part for part in case.get("classname", "").split(".") if part.startswith("test_"))
    return f"{module}::{case.get('name', '').partition('[')[0].rstrip('0123456789')}"
