"""Random mutations of lines of the package, and those that no test of their room detects.

    python benchmarks/mutations.py --count N --seed S --limit-seconds T [--only ROOM]

A mutation changes one place of one line: it reverses a comparison, adds or subtracts 1 from an integer, swaps `min` and
`max`, `and` and `or`, drops a `not`, or moves a bound of a slice. It is made in a copy of the tree, in which tests run
until one fails: those that import the file or mirror its room, the ones that use most of its names first. Prints
counts, and the diff of each mutation that no test detects in time: a test is missing, or the mutated program is
equivalent.

Annotations and f-strings are left alone. Limits: tests of other rooms, and slow ones, might detect a survivor; the
tests are assumed to pass without a mutation.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("runtime", "lowering", "ipujax")
LINKS = ("ipujax/runtime", "ipujax/lowering")
# Of a checkout or of its tools; nothing that a test reads.
LEFT_OUT = (".git", ".venv", ".*_cache", "__pycache__", "_build", "build", "dist", "*.egg-info")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replacement of an expression by another.

    Args:
        path: file, relative to the tree.
        start, end: position of the expression, in bytes of the file.
        text: the other expression.
    """

    path: Path
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """Return the mutated source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.end :]).decode()

    def diff(self, source: str) -> str:
        """Return the change as a unified diff."""
        lines = (text.splitlines(keepends=True) for text in (source, self.applied(source)))
        return "".join(difflib.unified_diff(*lines, f"a/{self.path}", f"b/{self.path}", n=1))


def mutations(path: Path, source: str) -> Iterator[Mutation]:
    """Yield all mutations of a file."""
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    tree = ast.parse(source)
    skipped = {id(inner) for node in ast.walk(tree) for part in _skipped(node) for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.expr):
            continue
        for mutated in _mutated(node):
            start = offsets[node.lineno - 1] + node.col_offset
            end = offsets[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            text = ast.unparse(mutated)
            # Others in brackets, since the expression around may bind more closely.
            atom = isinstance(mutated, ast.Constant | ast.Name | ast.Subscript | ast.Call)
            yield Mutation(path, start, end, text if atom else f"({text})")


def _skipped(node: ast.AST) -> list[ast.AST]:
    """Return annotations, and texts with values, whose parts have no right position before Python 3.12."""
    parts = (getattr(node, name, None) for name in ("annotation", "returns"))
    return [part for part in parts if part is not None] + [node] * isinstance(node, ast.JoinedStr)


def _mutated(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the mutations of an expression itself, not of those inside it."""
    match node:
        case ast.Compare(left, ops, comparators):
            for number, op in enumerate(ops):
                turned = [*ops[:number], COMPARISONS[type(op)](), *ops[number + 1 :]]
                yield ast.Compare(left, turned, comparators)
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
            yield ast.UnaryOp(ast.USub(), ast.Constant(1)) if value == 0 else ast.Constant(value - 1)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.Name(name) if name in NAMES:
            yield ast.Name(NAMES[name])
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Subscript(value, ast.Slice(lower, upper, step), context):
            if lower is not None:
                later = ast.BinOp(lower, ast.Add(), ast.Constant(1))
                yield ast.Subscript(value, ast.Slice(later, upper, step), context)
            if upper is not None:
                earlier = ast.BinOp(upper, ast.Sub(), ast.Constant(1))
                yield ast.Subscript(value, ast.Slice(lower, earlier, step), context)


def product_files(only: str | None) -> list[Path]:
    """Files of the three floors relative to the tree, or of one room such as `runtime/page`."""
    files = (path.relative_to(ROOT) for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py")))
    behind_links = tuple(f"{link}/" for link in LINKS)
    unique = (path for path in files if not str(path).startswith(behind_links))
    return [path for path in unique if only is None or path.is_relative_to(only)]


def tests_of(path: Path) -> list[Path]:
    """Return the test files that import a file or mirror its room, those that use most of its names first."""
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__").removeprefix("ipujax.")
    imports = re.compile(rf"ipujax\.{re.escape(module)} import")
    folders = (Path("tests") / folder for folder in (path.parent, *path.parent.parents))
    room = next(folder for folder in folders if any((ROOT / folder).glob("test_*.py")))
    # The word of the file's name counts too: most tests reach a module through others.
    definitions = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    names = {path.stem} | {node.name for node in definitions if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    used_names: dict[Path, int] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if file.parent == ROOT / room or imports.search(text):
            words = {*re.findall(r"\w+", text), file.stem.removeprefix("test_")}
            used_names[file.relative_to(ROOT)] = len(names & words) + bool(imports.search(text))
    return sorted(used_names, key=lambda file: -used_names[file])


def outcome_of(tree: Path, tests: Sequence[Path], limit_seconds: float) -> str:
    """Return "noticed" if a test fails, "survived" if none does, "too long" if they do not end in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *map(str, tests)]
    # One cache of compiled programs for all mutations: most programs are the same.
    cache = tree.parent / "compiled"
    environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(cache)}
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        shutil.rmtree(cache, ignore_errors=True)  # an entry may be half written
        return "too long"  # a loop without an end, or tests that take longer anyway
    return "noticed" if run.returncode else "survived"


def main() -> None:
    """Try mutations, and print those that survive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10, help="mutations (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of mutations (default 0)")
    parser.add_argument("--limit-seconds", type=float, default=600, help="of the tests of one mutation (default 600)")
    parser.add_argument("--only", metavar="ROOM", help="mutate files of this folder only, such as runtime/page")
    args = parser.parse_args()
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path in product_files(args.only)}
    candidates = [mutation for path, source in sources.items() for mutation in mutations(path, source)]
    chosen = random.Random(args.seed).sample(candidates, min(args.count, len(candidates)))
    outcomes = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
        for mutation in chosen:
            source = sources[mutation.path]
            (tree / mutation.path).write_text(mutation.applied(source), encoding="utf-8")
            tests = tests_of(mutation.path)
            outcome = outcome_of(tree, tests, args.limit_seconds)
            (tree / mutation.path).write_text(source, encoding="utf-8")
            outcomes[outcome] += 1
            diff = mutation.diff(source) if outcome != "noticed" else ""
            print(f"{outcome}: {mutation.path}, {len(tests)} test files from {tests[0]}\n{diff}", flush=True)
    print(f"{len(candidates):,} mutations, {len(chosen)} tried: {dict(outcomes)}")


if __name__ == "__main__":
    main()
