"""Words of reports: no names of JAX's transformations, the IPUs of a mesh and what they wait for, names of slices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.views.time_view import trace_view

RAW = ("jvp(", "transpose(", "ipu_stage", "rematted", "ipu_layer", "ipu_phase")
Struct = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def block(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ w) @ w.T + x


def in_stages(ws: Any, x: jax.Array) -> jax.Array:
    for stage in range(2):
        with ipu.stage(stage), jax.named_scope(f"layer{stage}"):
            for w in ws[2 * stage : 2 * stage + 2]:
                x = block(x, w)
    return (x**2).mean()


def in_a_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jax.lax.scan(lambda x, w: (jax.checkpoint(block)(x, w), None), x, w)[0] ** 2).mean()


def pipelined() -> ipu.Profile:
    def training_step(ws: Any, x: jax.Array) -> Any:
        grads = ipu.pipeline(jax.grad(in_stages), micro_batches=8, schedule="1f1b")(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)]

    step = ipu.jit(training_step, device=ipu.IPUModel(num_ipus=2), donate_argnums=0)
    return step.profile([Struct((64, 128))] * 4, Struct((256, 64)))


def scanned() -> ipu.Profile:
    return ipu.jit(jax.grad(in_a_scan)).profile(Struct((4, 64, 128)), Struct((256, 64)))


@pytest.mark.parametrize("make", [pipelined, scanned])
def test_pages_have_no_names_of_transformations(make: Any, tmp_path: Path) -> None:
    profile = make()
    profile.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    text = profile.summary(operations=100, show_execution_steps=True, show_var_storage=True)
    own_words = Path(__file__).read_text(encoding="utf-8")  # the page lists this source
    for raw in RAW:
        in_names = page.count(raw) - page.count("ipu_staged_pipeline") * (raw == "ipu_stage")  # a primitive
        assert in_names <= own_words.count(raw) and raw not in text
    assert not any(raw in row.name for row in profile.step_costs for raw in RAW)


def test_names_of_slices_begin_with_what_tells_them_apart() -> None:
    view = trace_view(scanned())
    folded = [label for label in view.labels if "folded" in label]
    assert all(label.startswith(("loop in ", "loop of ")) for label in folded if "loop" in label)
    assert not any(label.startswith("the ") for label in view.labels)


def test_a_mesh_says_its_ipus_and_what_they_wait_for() -> None:
    mesh = ipu.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def struct(shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        return Struct(shape, sharding=NamedSharding(mesh, P(*spec)))

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)

    profile = ipu.jit(step, device=ipu.IPUModel(num_ipus=4)).profile(
        struct((64, 64), None, "model"), struct((256, 64), "data")
    )
    summary = profile.summary()
    assert [line.split() for line in summary.splitlines() if line.startswith("  IPUs:")] == [["IPUs:", "4"]]
    assert "Mesh:             data 2 × model 2" in summary and "There is one IPU" not in summary
    assert "Where does an IPU wait? The 4 IPUs run one program in step" in summary and "(<lambda>)" in summary


def test_replicas_say_all_ipus() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(x @ w, "replica")

    profile = ipu.jit(
        step, device=ipu.IPUModel(num_ipus=2), replicas=2, in_specs=(P(), P("replica")), out_specs=P()
    ).profile(Struct((64, 64)), Struct((256, 64)))
    summary = profile.summary()
    assert "IPUs:             2, 1 a replica" in summary and "2; figures are per replica" in summary
