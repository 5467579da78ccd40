"""Changes of passes add up: from the trace to any pass they are the difference of its equations."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp

import ipujax as ipu
from ipujax.runtime.profile.program_costs import pass_changes

ADD = ("add", "f32[4] f32[4] → f32[4]", "model.py:3")
MUL = ("mul", "f32[4] f32[4] → f32[4]", "model.py:4")
NEG = ("neg", "f32[4] → f32[4]", "")


def test_changes_are_those_of_the_counts():
    same = [(ADD, 0), (MUL, 0), (ADD, 1), (ADD, 1)]
    changes = pass_changes({"trace": same, "inline": same, "fuse": [(ADD, 0), (NEG, 0)]})
    assert [(each.name, each.num_equations) for each in changes] == [("trace", 4), ("inline", 4), ("fuse", 2)]
    assert [dict(each.changes) for each in changes] == [{ADD: 3, MUL: 1}, {}, {ADD: -2, MUL: -1, NEG: 1}]
    assert changes[2].changes[0] == (ADD, -2)  # most first


def test_a_compiled_function_has_the_changes_of_its_passes(tmp_path):
    def f(x):
        unused = jnp.exp(x)
        return jnp.sin(x) + jnp.sin(x), 0 * jnp.cos(x)[:0], unused[:0]

    profile = ipu.jit(f, device=ipu.IPUModel(tiles_per_ipu=4)).profile(jax.ShapeDtypeStruct((8,), "float32"))
    changes = {each.name: {kind[0]: n for kind, n in each.changes} for each in profile.pass_changes}
    traced = Counter(eqn.primitive.name for eqn in jax.make_jaxpr(f)(jnp.ones(8)).eqns)
    assert changes["trace"]["sin"] == traced["sin"] == 2 and changes["cse"] == {"sin": -1}
    profile.save(tmp_path / "saved")
    assert ipu.Profile.load(tmp_path / "saved").pass_changes == ()
