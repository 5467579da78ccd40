"""The diffs of `docs/adding/`: each applies to this tree, is small, and its own tests pass where it is applied."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.doc_pages import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
FOLDER = ROOT / "docs" / "adding"
KINDS = (
    "primitive",
    "codelet",
    "pass",
    "schedule",
    "program_node",
    "preset",
    "constant",
    "figure",
    "field",
    "metric",
    "command",
)
MOST_LINES = 50  # of product code; promised under "Examples" of the page
MOST_FILES = 4
FEW = {"constant": 2, "figure": 1, "field": 1}  # files of what is added most often
# Of a checkout or of its tools; nothing that a test reads.
LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "_build", "build", "dist", "*.egg-info")

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git_apply(tree: Path, diff: str, *options: str) -> str:
    """Output of `git apply` in a tree, which is taken for no part of a repository around it."""
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", *options, "-"]
    applied = subprocess.run(command, cwd=tree, env=environment, input=diff, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr
    return applied.stdout


def example(kind: str) -> tuple[str, str]:
    """The diff of an example with the text above it, which git skips, and the command that tests what it adds."""
    text = (FOLDER / f"{kind}.diff").read_text(encoding="utf-8")
    (command,) = re.findall(r"^Test: (.+)$", text, re.MULTILINE)
    return text, command


def test_the_page_links_to_every_example() -> None:
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{kind}.diff" for kind in KINDS)
    assert re.findall(r"\(docs/adding/(\w+)\.diff\)", PAGE.read_text(encoding="utf-8")) == list(KINDS)


@needs_git
@pytest.mark.parametrize("kind", KINDS)
def test_diffs_apply_and_are_small(kind: str) -> None:
    diff, _ = example(kind)
    git_apply(ROOT, diff, "--check")
    rows = [line.split("\t") for line in git_apply(ROOT, diff, "--numstat").splitlines()]
    product = {path: int(added) for added, _, path in rows if path.split("/")[0] in ("runtime", "lowering", "ipujax")}
    assert 0 < sum(product.values()) <= MOST_LINES and len(product) <= FEW.get(kind, MOST_FILES)
    assert any(path.startswith("tests/") for _, _, path in rows)


@needs_git
@pytest.mark.parametrize("kind", KINDS)
def test_tests_pass_where_diffs_are_applied(kind: str, tmp_path: Path) -> None:
    diff, command = example(kind)
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    git_apply(tree, diff)
    python, *words = shlex.split(command)
    assert python == "python"
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    run = [sys.executable, *words, "-n", "0", "-p", "no:cacheprovider"]
    tested = subprocess.run(run, cwd=tree, env=environment, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout[-4000:] + tested.stderr
    assert re.search(r"\d+ passed", tested.stdout)
