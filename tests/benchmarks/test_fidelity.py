"""The published cases: their programs are right, bars name misses, and quick cases are met."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

import ipujax as ipu
from ipujax import poplar
from ipujax.poplar.engine.copies import with_ipu_copies
from tests.ipujax.poplar.helpers import run_both

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "fidelity.md"
Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def case() -> Iterator[Load]:
    """Loads modules of `benchmarks/fidelity_cases/`, as the script beside them does."""
    sys.path.insert(0, str(BENCHMARKS))
    yield lambda name: importlib.import_module(f"fidelity_cases.{name}")
    sys.path.remove(str(BENCHMARKS))
    for name in [name for name in sys.modules if name.split(".")[0] in ("fidelity_cases", "models")]:
        del sys.modules[name]


# --- what a bar says --------------------------------------------------------------------------------------------------


def test_rows_and_bars_name_missed_bars(case):
    parts = case("case")
    rows = [parts.Row("low", 100, 96, 0.05), parts.Row("high", 100, 106, 0.05), parts.Row("free", 2.5, 5, unit="%")]
    assert [row.is_met for row in rows] == [True, False, True]
    assert [round(row.error, 3) for row in rows] == [-0.04, 0.06, 1.0]
    bars = [parts.Bar("mean", 0.07, 0.06), parts.Bar("share", 0.7, 2 / 3, at_least=True)]
    assert [bar.is_met for bar in bars] == [False, True]
    family = parts.Family("Title", "a source", "how", rows, bars)
    text = family.markdown()
    assert not family.is_met and parts.Family("Title", "a source", "how", [rows[0]], [bars[1]]).is_met
    assert "| low | 100 | 96 | -4.0 % |  |  | met: ± 5 % |" in text
    assert "| high | 100 | 106 | +6.0 % |  |  | **missed**: ± 5 % |" in text
    assert "| free | 2.5 % | 5 % | +100.0 % |  |  |  |" in text
    assert "| **mean** | | | 7.00 % | | | **missed**: ≤ 6 % |" in text and "met: ≥ 66.7 % |" in text
    assert "exact" in parts.Family("T", "s", "h", [parts.Row("x", 3, 3, 0)]).markdown()


def test_a_row_has_the_error_of_the_earlier_commit(case):
    parts = case("case")
    section, row = "Dense matrix multiplication on Bow", "float32 4096 × 4096 × 4, created"
    text = parts.Family(section, "a source", "how", [parts.Row(row, 35_043, 35_037)]).markdown()
    assert f"| {row} | 35,043 | 35,037 | -0.0 % | -49.4 % |  |" in text
    assert "error at 3bd7578" in text


def test_every_row_of_an_earlier_error_is_on_the_page(case):
    page = PAGE.read_text(encoding="utf-8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    for section, name in case("case")._earlier():
        assert f"\n| {name} |" in sections[section]


def test_the_picture_shows_the_rows_of_the_page(case):
    pytest.importorskip("matplotlib")
    plot = case("plot")
    rows = plot.points(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == len(re.findall(r"^\| [^*|]+ \| [\d,.]+.*[+-][\d.]+ %", PAGE.read_text("utf-8"), re.MULTILINE))
    places = re.compile(r'<use xlink:href="#m\w+" x="([\d.]+)" y="([\d.]+)"')
    drawn, displayed = (
        [[float(number) for number in place] for place in places.findall(text)]
        for text in (plot.picture(rows), (PAGE.parent / "images" / "fidelity.svg").read_text(encoding="utf-8"))
    )
    hint = "run: python benchmarks/fidelity.py --plot"
    assert len(drawn) >= len(rows) + sum(row.is_cycles for row in rows)
    np.testing.assert_allclose(displayed, drawn, atol=1, err_msg=hint)


def test_a_case_nobody_knows_is_refused():
    script = [sys.executable, str(BENCHMARKS / "fidelity.py"), "amp", "blurr"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2 and "no case is called blurr; known: peaks, amp" in done.stderr


# --- the cases --------------------------------------------------------------------------------------------------------


# static_sparse and blur_scaling take eight and fifteen minutes, and are on the page
CASES = ("peaks", "fused", "amp", "triad", "tutorial7", "blur", "gemm", "popsparse", "networks")


# The page says so, see docs/decisions.md and docs/poplar.md.
MISSED = {
    "tutorial7": ["ipu1: simulated, all cycles"],
    "gemm": ["n < 256, created: worst error"],
    "popsparse": ["half, static block 4 by 1024 columns"],
}


@pytest.mark.parametrize("name", CASES)
def test_bars_are_met(case, name):
    family = case(name).family()
    missed = [one.name for one in (*family.rows, *family.bars) if not one.is_met]
    assert missed == MISSED.get(name, []), family.markdown()


@pytest.mark.parametrize(("rows", "measured"), [(16, 402.00), (512, 2381.3), (2048, 8525.3)])
def test_amp_as_measured(case, rows, measured):
    # 9 to 14 cycles more than measured at every size, in the supervisor's estimated part of a call
    assert 8 < case("amp").compute_cycles(rows) - measured < 15


def test_triad_uses_the_port_as_measured(case):
    assert abs(case("triad").share(tiles=8)[0] - 0.991) < 0.02


@pytest.mark.parametrize(("dtype", "n", "measured"), [("float16", 256, 11123), ("float32", 128, 17003)])
def test_a_matrix_multiplication_as_measured(case, dtype, n, measured):
    assert abs(case("gemm").cycles(dtype, 1024, 1024, n)[0] / measured - 1) < 0.15


def test_the_readme_has_the_errors_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    errors = [float(error) for error in re.findall(r"^\| \*\*n .*error\*\* \| \| \| ([\d.]+) %", page, re.MULTILINE)]
    output = re.search(r"([\d.]+) %\s+on average and (\d+) %\s+at worst, narrower ones ([\d.]+) and (\d+) %", readme)
    assert output and [round(error, number) for error, number in zip(errors, (1, 0, 1, 0), strict=True)] == [
        float(text) for text in output.groups()
    ]
    networks = page[page.index("## Networks trained") :]
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| [^|]+ \| ([+-][\d.]+) %", networks, re.MULTILINE)
    worst = max(abs(float(error)) for error in rows)
    (bound,) = re.findall(r"BERT-Large and\s+ResNet-50 within (\d+) %", readme)
    assert worst <= float(bound) < worst + 1


def test_the_page_equals_the_output_of_the_script():
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "fidelity.py")], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout == PAGE.read_text(encoding="utf-8"), "run: python benchmarks/fidelity.py > docs/fidelity.md"


# --- the blur ---------------------------------------------------------------------------------------------------------


def convolved(image: np.ndarray) -> np.ndarray:
    """The blur by shifts of a padded picture, in double precision."""
    padded = np.pad(image.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
    height, width, _ = image.shape
    shifts = [(dy, dx, (2 - abs(dy - 1)) * (2 - abs(dx - 1)) / 16) for dy in range(3) for dx in range(3)]
    return sum(weight * padded[dy : dy + height, dx : dx + width] for dy, dx, weight in shifts)


@pytest.mark.parametrize("name", ["half4", "float2"])
def test_the_blur_blurs(case, name):
    target = poplar.IPUModel("ipu1", tiles_per_ipu=2).create_device().get_target()
    graph, picture, result, program = case("blur").blur(target, 7, 13, name)
    image = np.random.default_rng(0).integers(0, 64, picture.shape).astype(picture.dtype)
    (got,) = run_both(graph, program, {picture: image}, [result])
    np.testing.assert_array_equal(got.astype(np.float64), convolved(image))  # small whole numbers: no rounding


@pytest.mark.parametrize(("height", "width"), [(7, 13), (12, 11)])
def test_the_blur_blurs_on_several_ipus(case, height, width):
    """Strips cut by rows and by columns; the engine adds the copies between IPUs."""
    blur = case("blur")
    target = poplar.IPUModel("ipu1", num_ipus=4, tiles_per_ipu=3).create_device().get_target()
    graph, picture, result, program = blur.blur(target, height, width, "float2", 1)
    is_cut_by_rows = len({strip.left for strip in blur.strips_of(height, width, 4)}) == 1
    assert is_cut_by_rows == (height == 12)
    image = np.random.default_rng(0).integers(0, 64, picture.shape).astype(picture.dtype)
    local, (program,) = with_ipu_copies(graph, [program])
    (got,) = run_both(local, program, {picture: image}, [result])
    np.testing.assert_array_equal(got.astype(np.float64), convolved(image))


@pytest.mark.parametrize(("height", "width", "tiles"), [(1122, 2200, 1176), (70, 2200, 1176), (14, 19, 6), (5, 3, 1)])
def test_rectangles_cover_the_picture_once(case, height, width, tiles):
    """The source reports 1,176 of 1,216 tiles, for one IPU and for each of 16."""
    blur = case("blur")
    recorded = np.zeros((height, width), np.int64)
    rectangles = list(blur.tiles_of(height, width, 6 if tiles < 100 else 1216))
    assert len(rectangles) == tiles
    for rectangle in rectangles:
        parts = list(rectangle.workers(6))
        assert 1 <= len(parts) <= 6
        for part in parts:
            recorded[part.top : part.top + part.height, part.left : part.left + part.width] += 1
    assert np.all(recorded == 1)


def test_neighbours_of_a_rectangle(case):
    blur = case("blur")
    middle = blur.Rectangle(10, 20, 3, 4)
    around = {name: middle.around(name) for name in ("n", "s", "w", "e", "nw", "se")}
    assert around["n"] == blur.Rectangle(9, 20, 1, 4) and around["s"] == blur.Rectangle(13, 20, 1, 4)
    assert around["w"] == blur.Rectangle(10, 19, 3, 1) and around["e"] == blur.Rectangle(10, 24, 3, 1)
    assert around["nw"] == blur.Rectangle(9, 19, 1, 1) and around["se"] == blur.Rectangle(13, 24, 1, 1)


# --- the other programs -----------------------------------------------------------------------------------------------


def test_the_dot_product_multiplies(case):
    tutorial = case("tutorial7")
    device = poplar.IPUModel("ipu2", tiles_per_ipu=4).create_device()
    graph = poplar.Graph(device)
    graph.add_codelets([tutorial.DotProductVertex, tutorial.ReduceVertex])
    matrix, vector, out = (graph.add_variable(poplar.FLOAT, shape, "x") for shape in ([6, 5], [5], [6]))
    program = tutorial._tutorial().build_multiply_program(graph, matrix, vector, out, 2)
    a = np.arange(30, dtype=np.float32).reshape(6, 5)
    x = np.arange(5, dtype=np.float32)
    (got,) = run_both(graph, program, {matrix: a, vector: x}, [out])
    np.testing.assert_array_equal(got, a @ x)


def test_fused_expressions_equal_their_names(case):
    """One vertex each, which gives the numbers of plain NumPy; another is refused."""
    fused = case("fused")
    # Multiples of a quarter, whose products and sums are exact: where XLA contracts them, nothing rounds otherwise.
    x, y = (np.arange(low, low + 8, dtype=np.float16) / 4 for low in (-5, -2))
    expected = {
        "relu": ((x,), np.maximum(x, 0)),
        "relu_of_sum": ((x, y), np.maximum(x + y, 0)),
        "relu_grad": ((x, y), np.where(x > 0, y, 0)),
        "dropout": ((x, y > 0), np.where(y > 0, 2 * x, 0)),
        "scaled_add": ((x, y, np.float16(3)), 3 * x + y),
    }
    for name, (args, values) in expected.items():
        np.testing.assert_array_equal(ipu.jit(getattr(fused, name))(*args), values, name)
    with pytest.raises(ValueError, match="softmax is not one vertex"):
        fused.cycles_per_vector(jax.nn.softmax, np.float16)


def test_a_short_scaled_addition_as_measured(case):
    assert abs(case("fused").scaled_add_cycles(64)[0] / 375 - 1) < 0.15


def test_the_triad_adds(case):
    triad = case("triad")
    device = poplar.IPUModel("ipu2", tiles_per_ipu=2).create_device()
    graph, arrays, program = triad.program(device.get_target(), 12)
    b, c = (np.arange(24, dtype=np.float32).reshape(2, 6, 2) + n for n in range(2))
    (got,) = run_both(graph, program, {arrays["b"]: b, arrays["c"]: c}, [arrays["a"]])
    np.testing.assert_array_equal(got, b + 3 * c)
