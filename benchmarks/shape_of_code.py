"""Shape of the product's code: state of classes, complexity of functions, short files, imports.

    python benchmarks/shape_of_code.py [CHECKOUT] [--rows 15]

The attributes of a class are those that its constructor sets on `self` (`__init__`, `__post_init__`), and the fields of
a dataclass that is not frozen. The complexity of a function is McCabe's, as rule C901 of ruff counts it: one, and one
for each branch, loop, handler, case and nested function.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from count_code import count, product_files

SHORT_LINES = 60  # a file below is often read with another one
CONSTRUCTORS = ("__init__", "__post_init__")


def attributes(node: ast.ClassDef) -> set[str]:
    """Names of the mutable state that a constructor of a class sets."""
    names = set[str]()
    for constructor in node.body:
        if isinstance(constructor, ast.FunctionDef) and constructor.name in CONSTRUCTORS:
            names.update(_set_on_self(constructor))
    if _is_mutable_dataclass(node):
        fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
        names.update(target.id for target in fields if isinstance(target, ast.Name))
    return names


def _set_on_self(constructor: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(constructor):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _is_mutable_dataclass(node: ast.ClassDef) -> bool:
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(text.split("(")[0].endswith("dataclass") and "frozen=True" not in text for text in decorators)


def complexity(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """McCabe complexity of a function."""
    total = 0
    for node in ast.walk(function):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.If() | ast.For() | ast.AsyncFor() | ast.While():
                total += 1
            case ast.Try(handlers=handlers, orelse=orelse):
                total += len(handlers) + bool(orelse)
            case ast.Match(cases=cases):
                total += len(cases) - any(_is_default(case) for case in cases)
    return total


def _is_default(case: ast.match_case) -> bool:
    return case.guard is None and isinstance(case.pattern, ast.MatchAs) and case.pattern.pattern is None


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--rows", type=int, default=15, help="length of each list")
    arguments = parser.parse_args()
    root = arguments.checkout.resolve()
    classes: list[tuple[int, str]] = []
    functions: list[tuple[int, str]] = []
    short_files = Counter[str]()
    lines = Counter[str]()
    for path in product_files(root):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(root)
        lines += count(source)
        short_files[str(name.parent)] += len(source.splitlines()) < SHORT_LINES
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.append((len(attributes(node)), f"{name} {node.name}"))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((complexity(node), f"{name} {node.name}"))
    _print("attributes set in a constructor", classes, arguments.rows)
    _print("McCabe complexity", functions, arguments.rows)
    _print(f"files under {SHORT_LINES} lines", [(n, room) for room, n in short_files.items()], arguments.rows)
    print(f"{short_files.total():>6}  in all")
    print(f"\nimports: {lines['import'] / lines.total():.1%} of all lines")


def _print(title: str, rows: list[tuple[int, str]], most: int) -> None:
    print(f"\n{title}")
    for number, name in sorted(rows, key=lambda row: (-row[0], row[1]))[:most]:
        print(f"{number:>6}  {name}")


if __name__ == "__main__":
    main()
