"""Makes docs/gallery.md: for each example a picture, a sentence, and a command with small settings.

    python benchmarks/gallery.py                     # runs every example, draws its output, writes the page
    python benchmarks/gallery.py digits tiled_qr     # draws only these
    python benchmarks/gallery.py --page              # writes the page alone

A picture is the output of the example, as SVG; a sentence is the first of its docstring.
`tests/examples/test_gallery.py` runs the commands.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"
MOST_LINES = 16
MOST_COLUMNS = 110
# pixels
_LINE = 16
_COLUMN = 7.25
_EDGE = 12
_SMALL_SECONDS = 1800  # that an example may take, on a busy machine; alone it takes some ten

# Options with which an example takes seconds.
OPTIONS = {
    "digits": "--epochs 2",
    "equinox_mlp": "--epochs 1 --width 16 --tiles 16",
    "flax_transformer": "--epochs 1 --steps 5 --context 16 --width 16 --layers 1 --sample 40 --tiles 8",
    "keras_digits": "--epochs 2 --tiles 16",
    "keras_pipeline": "--tiles 8 --width 24 --epochs 1 --batches 4",
    "mixture_of_experts": "--ipus 1 2 --experts 4 --groups 2 --tokens 16 --features 16 --steps 2 --tiles 8",
    "phased_execution": "--layers 6 --width 96 --batch 16 --steps 2",
    "pipelining": "--tiles 8 --batch 32 --micro-batches 8 --schedules gpipe 1f1b --steps 2",
    "recomputing": "--tiles 8 --width 32 --batch 256 --points 1 --steps 2",
    "replication": "--model mlp --replicas 1 2 --batch 16 --steps 2",
    "resume": "--folder spirals --epochs 2 --width 8 --tiles 8",
    "sharded_transformer": "--width 32 --heads 2 --length 8 --batch 8 --micro-batches 2 --steps 2 --tiles 8",
    "block_sparse/attention": "--tokens 64 --channels 16 --block 8 --windows 1 2 --tiles 16",
    "block_sparse/digits_classifier": "--hidden 64 --density 0.5 --epochs 4 --tiles 8",
    "block_sparse/matmul": "--size 128 --columns 16 --block 8 --densities 0.25 0.125 --tiles 16",
    "block_sparse/softmax": "--size 64 --block 8 --densities 0.25 0.125 --tiles 16",
    "popart/alexnet": "--batch-size 2 --batches 2 --width 0.03",
    "popart/callbacks": "--data-size 64 4096",
    "popart/custom_operators": "",
    "popart/distributed_training": "--epochs 2",
    "popart/kernel_benchmarks": "--kernel lstm --size 8 --steps 4",
    "popart/mnist": "--epochs 2",
    "popart/phased_execution": "--num-layers 6",
    "popart/pipelining": "",
    "popart/recomputing": "",
    "popart/sharding": "",
    "popart/simple_addition": "",
    "poplar/tut1_variables": "",
    "poplar/tut2_operations": "",
    "poplar/tut3_vertices": "",
    "poplar/tut4_profiling": "",
    "poplar/tut5_ml": "--epochs 2 --tiles 64",
    "poplar/tut6_matrix_vector": "40 50",
    "poplar/tut7_matrix_vector_opt": "1000 100",
    "studies/peak_rates": "--tiles 64 --sizes 64 512",
    "studies/sram_and_exchange": "--models perceptron convolution --tiles 8 --memory 40 624 --exchange 2 8",
    "studies/training_step": "--batch 16 --tiles 8 --no-host",
    "tile_level/jacobi_stencil": "--tiles 4 --rows 2 --columns 8 --iterations 5",
    "tile_level/n_body": "--tiles 4 --bodies 3 --steps 2",
    "tile_level/tiled_qr": "--tiles 4 --rows 4 --columns 3",
}


def examples() -> list[str]:
    """Names of all programs in `examples/`, without those that others only import."""
    files = sorted((ROOT / "examples").rglob("*.py"))
    programs = [path for path in files if "__main__" in path.read_text(encoding="utf-8")]
    return [path.relative_to(ROOT / "examples").with_suffix("").as_posix() for path in programs]


def command(name: str) -> list[str]:
    """Arguments of Python that run an example in small."""
    return [f"examples/{name}.py", *OPTIONS[name].split()]


def sentence(name: str) -> str:
    """The first sentence of the docstring of an example."""
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def printed(name: str) -> str:
    """Runs a copy of an example, and returns its output; an error if it leaves a file where no option says so."""
    script, *options = command(name)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / "tmp").mkdir()
        before = files_of(folder)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run(
            [sys.executable, script, *options],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": f"{folder}/tmp"},
            capture_output=True,
            text=True,
            timeout=_SMALL_SECONDS,
            check=False,
        )
        left = {path for path in files_of(folder) - before if path.parts[0] not in options}
    if run.returncode:
        raise RuntimeError(f"{name} failed:\n{run.stderr[-2000:]}")
    if left:
        raise RuntimeError(f"{name} left {', '.join(map(str, sorted(left)))}")
    return run.stdout or run.stderr


def files_of(folder: str) -> set[Path]:
    """Paths of all that is in a folder, relative to it."""
    return {path.relative_to(folder) for path in Path(folder).rglob("*")}


def picture(name: str, text: str) -> str:
    """First lines of an example's output, as SVG."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).expandtabs(4).rstrip() for line in text.splitlines()]
    lines = [line[: MOST_COLUMNS - 1] + "…" if len(line) > MOST_COLUMNS else line for line in lines if line]
    output = [f"$ python {' '.join(command(name))}"[:MOST_COLUMNS], *lines[:MOST_LINES]]
    if len(lines) > MOST_LINES:
        output.append(f"… {len(lines) - MOST_LINES} more lines")
    width = round(2 * _EDGE + _COLUMN * max(map(len, output)))
    height = 2 * _EDGE + _LINE * len(output)
    rows = (
        f'<text x="{_EDGE}" y="{_EDGE + _LINE * n + 12}" xml:space="preserve"'
        f' fill="{"#666666" if n == 0 else "#111111"}">{escape(line)}</text>'
        for n, line in enumerate(output)
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace"'
            ' font-size="12">',
            f'<rect width="{width}" height="{height}" rx="6" fill="#f6f8fa" stroke="#d0d7de"/>',
            *rows,
            "</svg>\n",
        )
    )


def page() -> str:
    """The page."""
    titles = {
        "": "JAX, Flax, Equinox, Keras",
        "block_sparse": "Block sparsity",
        "popart": "PopART",
        "poplar": "Poplar",
        "studies": "Studies of machines",
        "tile_level": "Tiles",
    }
    lines = [
        "# Gallery\n",
        "Every program of `examples/`, with its output for small settings. The pictures are made by",
        "`python benchmarks/gallery.py`; options for larger sizes are in the docstring of each program.",
    ]
    for folder, title in titles.items():
        lines.append(f"\n## {title}\n")
        for name in (example for example in examples() if example.rpartition("/")[0] == folder):
            lines += [
                f"### `{name.rpartition('/')[2]}`\n",
                f"{sentence(name)}\n",
                f"```text\npython {' '.join(command(name))}\n```\n",
                f"![What {name} prints](images/gallery/{name.replace('/', '_')}.svg)\n",
            ]
    lines.append("\n## Notebooks\n")
    for path in sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")):
        lines.append(f"- [{path.stem}](../examples/notebooks/{path.name}): {introduction(path)}")
    return "\n".join(lines).rstrip() + "\n"


def introduction(notebook: Path) -> str:
    """The text below the heading of a notebook."""
    first = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]
    return " ".join("".join(first["source"][1:]).split())


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws examples, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples to draw; all when none is named")
    parser.add_argument("--page", action="store_true", help="the page alone")
    args = parser.parse_args(arguments)
    all_examples = examples()
    unknown = [
        name
        for name in args.names
        if not any(name in (example, example.rpartition("/")[2]) for example in all_examples)
    ]
    if unknown:
        parser.error(f"no example is called {', '.join(unknown)}; there are {', '.join(all_examples)}")
    PAGE.write_text(page(), encoding="utf-8")
    if args.page:
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in all_examples:
        if args.names and not {name, name.rpartition("/")[2]} & {*args.names}:
            continue
        file = PICTURES / f"{name.replace('/', '_')}.svg"
        file.write_text(picture(name, printed(name)), encoding="utf-8")
        print(f"{name}: {file.stat().st_size:,} B", flush=True)


if __name__ == "__main__":
    main()
