"""`docs/pipelines.md`: its code trains, and its table of schedules gives the micro-batches that each one keeps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering.schedules import SCHEDULES, schedule_plan
from tests.examples.doc_pages import ROOT, blocks, run

PAGE = "docs/pipelines.md"


def test_the_code_trains() -> None:
    _, names = run(PAGE)
    rng = np.random.default_rng(0)
    params = {"w0": rng.normal(size=(6, 5)).astype(np.float32), "w1": rng.normal(size=(5, 3)).astype(np.float32)}
    batch = {"x": rng.normal(size=(16, 6)).astype(np.float32), "y": np.zeros((16, 3), np.float32)}
    expected, grads = jax.value_and_grad(names["loss"])(params, batch)
    state = names["optimizer"].init(params)
    got, _, value = names["step"](jax.tree.map(jnp.asarray, params), state, batch)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(got[name], params[name] - 0.1 * grads[name], rtol=1e-4, atol=1e-5)


def test_sums_of_masked_losses_have_the_gradient_of_the_whole_batch() -> None:
    _, names = run(PAGE)
    rng = np.random.default_rng(0)
    w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((5,), (8, 5), (8,)))
    mask = np.array([1, 1, 1, 1, 1, 0, 0, 1], np.float32)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum((x @ w - y) ** 2 * mask) / jnp.sum(mask)

    got = names["masked"](jnp.asarray(w), {"x": x, "y": y, "mask": mask})
    np.testing.assert_allclose(got, jax.grad(loss)(w), rtol=1e-5)


def test_a_loop_over_layers_is_cut() -> None:
    (_, names) = run(PAGE)
    rng = np.random.default_rng(0)
    params = {"layers": {"w": rng.normal(size=(6, 5, 5)).astype(np.float32) / 4}}
    batch = {"x": rng.normal(size=(16, 5)).astype(np.float32), "y": np.zeros((16, 5), np.float32)}
    scanned = ipu.jit(names["scanned"], device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4))
    assert scanned.lower(params, batch).pipelines[0].plan.num_stages == 2
    (got, grads) = scanned(params, batch)
    (value, expected) = jax.value_and_grad(names["scanned_loss"])(params, batch)
    np.testing.assert_allclose(got, value, rtol=1e-5)
    np.testing.assert_allclose(grads["layers"]["w"], expected["layers"]["w"], rtol=1e-4, atol=1e-6)


def test_the_script_of_several_processes_runs_in_them(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(PAGE) if "ipu.distributed.init()" in block.code)
    (tmp_path / "train.py").write_text(block.code, encoding="utf-8")
    (command,) = re.findall(r"```sh\n(ipujax run .*)\n```", (ROOT / PAGE).read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-m", *command.split()], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    w = jnp.ones(4)
    for _ in range(3):
        value, grad = jax.value_and_grad(lambda w: jnp.mean((jnp.eye(8, 4) @ w) ** 2))(w)
        w -= 0.1 * grad
    assert not done.returncode and f"4 replicas, loss {value:.4f}\n" in done.stdout, done.stderr


KEEPS = {
    "1": lambda stages, count, s: 1,
    "all": lambda stages, count, s: count,
    "S − s": lambda stages, count, s: stages - s,
    "min(S/2, S − s)": lambda stages, count, s: min(stages // 2, stages - s),
    "2(S − 1 − s) + 1": lambda stages, count, s: 2 * (stages - 1 - s) + 1,
}


def rows() -> dict[str, str]:
    """Schedule → micro-batches kept, as the table of the page has it."""
    actual = {}
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for names, keeps in re.findall(r"^\| (`.*?`) \| .*? \| (.*?) \|$", text, re.MULTILINE):
        listed = re.findall(r"`(.*?)`", names)
        several = keeps.split(", ") if len(listed) > 1 else [keeps]
        actual.update(zip(listed, several, strict=True))
    return actual


def test_every_schedule_is_in_the_table() -> None:
    assert list(rows()) == list(SCHEDULES)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "looped-1f1b"])
def test_the_table_has_the_stashes_of_schedules(schedule: str) -> None:
    plan = schedule_plan(SCHEDULES[schedule], 4, 16)
    keeps = KEEPS[rows()[schedule]]
    assert [plan.in_flight(s) for s in range(4)] == [keeps(4, 16, s) for s in range(4)]
