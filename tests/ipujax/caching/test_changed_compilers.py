"""Programs and plans of a changed compiler, and of primitives of the user's own, are never those of another."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
import ipujax.lowering.passes as passes
import ipujax.lowering.poplin.product_plan as product_plan
import ipujax.lowering.rules.table as rule_table
from ipujax.lowering.digests import NoDigestError
from ipujax.lowering.jax_compat import Primitive, mlir
from ipujax.runtime.names_at_import import replaced_names
from ipujax.storage import versions
from tests.shared_programs import forget_shared_programs

X = jnp.ones((32, 32), jnp.float32)


def dense(x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ x) * 2 + 1


def compiled(fun: Any = dense, folder: Path | str = "", **settings: Any) -> ipu.Compiled:
    device = settings.pop("device", ipu.IPUModel(tiles_per_ipu=16))
    forget_shared_programs()
    return ipu.jit(fun, device=device, options=ipu.Options(cache_dir=folder), **settings).lower(X).compile()


def is_hit(program: ipu.Compiled) -> bool:
    return program.lowered.call_program.is_stored


def without_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", tuple(each for each in passes.PASSES if each[0] != "fuse"))


def with_an_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, ("same", lambda jaxpr: jaxpr)))


def with_an_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = rule_table.RULES["tanh"]
    monkeypatch.setitem(rule_table.RULES, "tanh", lambda *args, **params: rule(*args, **params))


def with_an_own_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_step = product_plan._plan_step
    monkeypatch.setattr(product_plan, "_plan_step", lambda *args, **kwargs: plan_step(*args, **kwargs))


def with_another_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ipujax.lowering.rules.base.fallback._CODE_BYTES", 5000)


def with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def round_cycles(target: Any) -> int:
        return 50

    monkeypatch.setattr("ipujax.runtime.target.issue_round_cycles.__code__", round_cycles.__code__)


CHANGES = [
    with_other_code,
    without_fusion,
    with_an_own_pass,
    with_an_own_rule,
    with_an_own_planner,
    with_another_constant,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_compiler_has_programs_of_its_own(tmp_path, monkeypatch, change):
    unchanged = replaced_names()
    compiled(folder=tmp_path)
    with monkeypatch.context() as patch:
        change(patch)
        assert len(replaced_names()) > len(unchanged)
        changed = compiled(folder=tmp_path)
        again = compiled(folder=tmp_path)
        right = compiled()
    assert not is_hit(changed) and is_hit(again)
    assert changed.profile.cycles == again.profile.cycles == right.profile.cycles
    assert replaced_names() == unchanged and is_hit(compiled(folder=tmp_path))


def test_plans_in_memory_are_of_the_planner_of_that_time(monkeypatch):
    before = compiled().profile.cycles
    plan_step = product_plan._plan_step
    calls = []
    monkeypatch.setattr(product_plan, "_plan_step", lambda *args: calls.append(args) or plan_step(*args))
    assert compiled().profile.cycles == before and calls


def test_a_compiler_that_cannot_be_read_is_not_cached(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ipujax.cache")
    lines = open(__file__)  # noqa: SIM115  # the value that has no digest
    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES, ("same", lambda jaxpr: lines and jaxpr)))
    compiled(folder=tmp_path)
    lines.close()
    reasons = [line for line in caplog.messages if "_io.TextIOWrapper cannot be read" in line]
    assert any("is not cached" in line for line in reasons) and any("plans are not stored" in line for line in reasons)
    assert not list(tmp_path.iterdir())


def test_a_file_changed_after_the_import_has_no_state(tmp_path, monkeypatch):
    (tmp_path / "module.py").write_text("")
    monkeypatch.setattr(versions, "_PACKAGE", tmp_path)
    os.utime(tmp_path / "module.py")
    with pytest.raises(NoDigestError, match=r"the file /module.py of ipujax was changed after"):
        versions.source_state.__wrapped__()
    os.utime(tmp_path / "module.py", (0, time.time() + 9e6))  # a clock that is wrong
    assert versions.source_state.__wrapped__()


def scaled(factor: float, *, by_impl: bool) -> Primitive:
    """Return a primitive that multiplies by a number, which only its implementation knows."""
    primitive = Primitive("scaled")
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(lambda x: x * factor)
    if not by_impl:
        mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * factor, multiple_results=False))
    return primitive


def test_primitives_of_the_user_count_by_their_lowering(tmp_path):
    settings = {"device": ipu.IPUModel(2, tiles_per_ipu=16), "replicas": 2, "in_specs": P("replica"), "out_specs": P()}
    hits = []
    for factor in (2.0, 9.0, 2.0):
        primitive = scaled(factor, by_impl=False)
        program = compiled(lambda x, p=primitive: jax.lax.psum(p.bind(x), "replica"), tmp_path, **settings)
        hits.append(is_hit(program))
        np.testing.assert_array_equal(program(X), factor * (X[:16] + X[16:]))
    assert hits == [False, False, True]


def test_a_replaced_lowering_of_jax_counts(tmp_path):
    settings = {"device": ipu.IPUModel(2, tiles_per_ipu=16), "replicas": 2, "in_specs": P("replica"), "out_specs": P()}

    def program() -> ipu.Compiled:
        return compiled(lambda x: jax.lax.psum(jax.lax.clamp(0.0, x, 3.0), "replica"), tmp_path, **settings)

    program()
    clamp_p = jax.lax.clamp_p
    rule = mlir._lowerings[clamp_p]
    try:
        mlir.register_lowering(clamp_p, mlir.lower_fun(lambda low, x, high: x + 7, multiple_results=False))
        changed = program()
    finally:
        mlir._lowerings[clamp_p] = rule
    assert not is_hit(changed) and is_hit(program())
