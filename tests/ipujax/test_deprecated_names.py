"""Old public names are accepted with a `DeprecationWarning` that has the new name."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax import fit

RENAMED = {
    "byte_price": "byte_cost",
    "byte_prices": "byte_costs",
    "byte_price_cost_cycles": "byte_cost_added_cycles",
    "critical_ipu": "limiting_ipu",
}


@pytest.fixture(scope="module")
def profile() -> ipu.Profile:
    return ipu.jit(jnp.sin, device=ipu.IPUModel(tiles_per_ipu=4)).profile(jnp.ones(8))


def test_renamed_keyword_of_options_has_the_same_value() -> None:
    with pytest.warns(DeprecationWarning, match=r"ipu\.Options\(byte_price=\) is now ipu\.Options\(byte_cost=\)"):
        options = ipu.Options(byte_price=2)  # type: ignore[call-arg]
    assert options.byte_cost == 2
    with pytest.warns(DeprecationWarning, match=r"options\.byte_price is now options\.byte_cost"):
        assert options.byte_price == 2
    assert replace(options, io_tiles=1).byte_cost == 2  # and does not warn


def test_refuses_an_old_keyword_beside_the_new_one() -> None:
    with pytest.raises(ipu.ArgumentError, match="unexpected keyword argument 'byte_price'"):
        ipu.Options(byte_price=2, byte_cost=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_renamed_attribute_of_profiles_has_the_same_value(profile: ipu.Profile, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"profile\.{old} is now profile\.{new}"):
        assert getattr(profile, old) == getattr(profile, new)


def test_renamed_constant_of_fit() -> None:
    with pytest.warns(DeprecationWarning, match=r"ipujax\.fit\.BYTE_PRICES is now ipujax\.fit\.BYTE_COSTS"):
        assert fit.BYTE_PRICES is fit.BYTE_COSTS
