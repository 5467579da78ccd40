"""Lines of code of the package, in each room and in total.

    python benchmarks/count_code.py [CHECKOUT] [--json FILE]

A line of code has a token that is no comment, and belongs neither to a docstring nor to an import statement. A line of
a docstring is any line of its string, a comment line has nothing but a comment. The two symbolic links in `ipujax/` are
not followed, so each file counts once.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FLOORS = ("runtime", "lowering", "ipujax")
KINDS = ("code", "docstring", "comment", "import", "blank")
LONG_LINES = 500  # a file beyond holds two ideas
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def product_files(root: Path) -> Iterator[Path]:
    """Python files of the three floors, in order."""
    links = {root / "ipujax" / "runtime", root / "ipujax" / "lowering"}
    for floor in FLOORS:
        yield from (path for path in sorted((root / floor).rglob("*.py")) if links.isdisjoint(path.parents))


def _lines(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _docstring(node: ast.AST) -> ast.stmt | None:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
        return None
    first = node.body[0]
    constant = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.value.value
    return first if isinstance(constant, str) else None


def count(source: str) -> Counter[str]:
    """Lines of a module by kind."""
    tree = ast.parse(source)
    docstrings = set[int]()
    imports = set[int]()
    for node in ast.walk(tree):
        if docstring := _docstring(node):
            docstrings.update(_lines(docstring))
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(_lines(node))
    kinds: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        for line in range(token.start[0], token.end[0] + 1):
            if token.type == tokenize.COMMENT:
                kinds.setdefault(line, "comment")
            elif token.type not in LAYOUT:
                kinds[line] = "code"
    kinds |= dict.fromkeys(docstrings, "docstring") | dict.fromkeys(imports, "import")
    return Counter(kinds.get(line, "blank") for line in range(1, len(source.splitlines()) + 1))


def measure(root: Path) -> tuple[dict[str, Counter[str]], dict[str, int]]:
    """Room → lines by kind and `files`, and long files → their lines; paths relative to `root`."""
    rooms: dict[str, Counter[str]] = {}
    long_files: dict[str, int] = {}
    for path in product_files(root):
        lines = count(path.read_text(encoding="utf-8"))
        rooms.setdefault(str(path.parent.relative_to(root)), Counter()).update(lines + Counter(files=1))
        if lines.total() > LONG_LINES:
            long_files[str(path.relative_to(root))] = lines.total()
    return rooms, long_files


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    rooms, long_files = measure(arguments.checkout.resolve())
    columns = ("files", *KINDS)
    rows = dict(rooms)
    for floor in FLOORS:
        rows[f"all of {floor}/"] = sum((n for room, n in rooms.items() if room.split("/")[0] == floor), Counter())
    rows["total"] = sum(rooms.values(), Counter())
    print(f"{'':<24}" + "".join(f"{kind:>10}" for kind in columns))
    for name, lines in rows.items():
        print(f"{name:<24}" + "".join(f"{lines[kind]:>10,}" for kind in columns))
    print(
        f"\nfiles over {LONG_LINES} lines: {len(long_files)}",
        *(f"  {n} {path}" for path, n in long_files.items()),
        sep="\n",
    )
    if arguments.json:
        figures = {name: {kind: lines[kind] for kind in columns} for name, lines in rows.items()}
        arguments.json.write_text(json.dumps({"rooms": figures, "long_files": long_files}, indent=1) + "\n")


if __name__ == "__main__":
    main()
