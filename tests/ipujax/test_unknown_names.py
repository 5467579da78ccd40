"""Names that there are not, as typing mistakes are: each error has the given name and the nearest existing one."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax import lax

import ipujax as ipu

ROOT = Path(__file__).resolve().parents[2]
X = jnp.arange(4.0)


def loop(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 100, lambda c: c + 1, x)


def compiled(trip_counts: dict[str, int]) -> Any:
    return ipu.jit(loop, options=ipu.Options(trip_counts=trip_counts)).lower(X).compile()


MISTAKES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a device's number of IPUs": (lambda: ipu.IPUModel(num_ipu=4), "num_ipu=4", "'num_ipus'"),
    "a device's preset": (lambda: ipu.IPUModel(archi="mk2"), "archi='mk2'", "'arch'"),
    "a field of a device": (lambda: ipu.IPUModel(tiles_per_ipus=8), "tiles_per_ipus=8", "'tiles_per_ipu'"),
    "a preset": (lambda: ipu.IPUModel(arch="mk3"), "'mk3'", "'mk2'"),
    "a field of a target": (lambda: ipu.IPUModel().target.replace(clock=1), "clock=1", "'clock_hz'"),
    "a loop": (lambda: compiled({"whille[0]": 5}), "'whille[0]'", "'while[0]'"),
    "an option": (lambda: ipu.Options(exact_split=True), "exact_split=True", "'exact_splits'"),
    "a changed setting": (lambda: ipu.jit(loop).with_options(option=None), "option=NoneType", "'options'"),
    "a field of a plan": (lambda: ipu.Plan(micro_batch=4), "micro_batch=4", "'micro_batches'"),
    "a schedule of a plan": (lambda: ipu.Plan(stages=2, schedule="1f1"), "'1f1'", "'1f1b'"),
    "a setting": (lambda: ipu.jit(loop, replica=3), "replica=3", "'replicas'"),
    "a pass": (lambda: ipu.jit(loop).lower(X).as_text(after="outlin"), "'outlin'", "'outline'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_are_shown_beside_the_nearest(name: str) -> None:
    mistake, got, near = MISTAKES[name]
    with pytest.raises(ipu.IpuError) as error:
        mistake()
    assert got in str(error.value.got) and near in str(error.value.hint)
    assert f"got: {error.value.got}" in str(error.value) and "expected: " in str(error.value)


def test_a_trip_count_where_every_loop_has_one() -> None:
    with pytest.raises(ipu.IpuError, match=r"(?s)got: 'while\[0\]'.*try: leave trip_counts out"):
        ipu.jit(lambda x: x * 2, options=ipu.Options(trip_counts={"while[0]": 5})).lower(X).compile()


@pytest.mark.parametrize("call", [lambda: ipu.IPUModel(1, "mk2", 3), lambda: ipu.CPU(2), lambda: ipu.CPU(num_ipus=2)])
def test_devices_with_other_arguments(call: Callable[[], Any]) -> None:
    with pytest.raises(ipu.IpuError, match=r"(?s)cannot be called like this.*expected: ipu\.\w+\(.*got: ipu\.\w+\("):
        call()
    with pytest.raises(TypeError):
        call()


def raised_with_nearest(tree: ast.Module) -> Iterator[tuple[int, set[str | None]]]:
    """The line and the keywords of each error raised in a function that looks for the nearest name for its hint."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        if any(isinstance(call.func, ast.Name) and call.func.id == "nearest" for call in calls):
            for node in ast.walk(function):
                if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                    yield node.lineno, {keyword.arg for keyword in node.exc.keywords}


def test_all_errors_with_a_nearest_name_show_the_given_name() -> None:
    files = [path for room in ("ipujax", "lowering", "runtime") for path in (ROOT / room).rglob("*.py")]
    raised = [
        (f"{path.relative_to(ROOT)}:{line}", keywords)
        for path in files
        for line, keywords in raised_with_nearest(ast.parse(path.read_text()))
    ]
    assert len(raised) > 20
    assert [place for place, keywords in raised if "hint" in keywords and "got" not in keywords] == []
