"""`ipu.sensitivities`: elasticities against differences of whole programs, and their parts."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from tests.ipujax.studies.program_kinds import KINDS, Case
from tests.ipujax.studies.swept_functions import ARGS, layer

TILES = 16


def sensitivities_of(case: Case, **settings: Any) -> ipu.Sensitivities:
    device = ipu.IPUModel(case.num_ipus, "mk2", tiles_per_ipu=TILES, **case.machine)
    return ipu.sensitivities(ipu.jit(case.fun, device=device, **case.settings), *case.args, **settings)


def test_elasticities_to_constants_that_add_cycles() -> None:
    found = ipu.sensitivities(layer, *ARGS)
    profile = layer.profile(*ARGS)
    assert found.cycles == profile.cycles == pytest.approx(found.cycles_at(), rel=0.01)
    # Syncs are the only cycles that this constant adds, and each adds it once.
    assert found["internal_sync_cycles"] == pytest.approx(profile.phase_cycles["sync"] / found.cycles_at(), rel=1e-6)
    (row,) = [row for row in found.rows if row["constant"] == "internal_sync_cycles"]
    syncs = profile.phase_cycles["sync"] / profile.target.internal_sync_cycles
    assert row["cycles_per_unit"] == pytest.approx(syncs, rel=1e-6)
    # Seconds of the host are cycles in proportion to the clock.
    host = found["host_latency_seconds"] - found["host_bytes_per_second"]
    assert found["clock_hz"] == pytest.approx(host, rel=1e-3)
    assert host == pytest.approx(profile.phase_cycles["host_exchange"] / found.cycles_at(), rel=1e-3)
    assert found["streaming_bytes_per_second"] == 0


@pytest.mark.parametrize("name", ["operations", "pipeline", "replicas", "offloaded", "branches", "function on tiles"])
def test_elasticities_against_differences(name: str) -> None:
    found = sensitivities_of(KINDS[name])
    for row in found.rows:
        constant, value = row["constant"], row["value"]
        up, down = (found.cycles_at(**{constant: value * factor}) for factor in (1.001, 0.999))
        base = found.cycles_at()
        sides = [(up - down) / 0.002, (up - base) / 0.001, (base - down) / 0.001]
        assert any(abs(row["elasticity"] * base - side) <= 0.02 * abs(side) + 0.001 * base for side in sides), constant


def test_elasticities_against_whole_programs() -> None:
    """A tenth more, or less, of a constant on the real machine, whose figures are rounded."""
    found = sensitivities_of(KINDS["operations"])
    compiled = KINDS["operations"].compiled()
    for constant in ("exchange_bytes_per_cycle", "memcpy_bytes_per_cycle", "clock_hz", "host_bytes_per_second"):
        value = getattr(compiled.profile.target, constant)
        changed = [
            compiled.on(ipu.IPUModel(1, "mk2", tiles_per_ipu=TILES, **{constant: value * factor})).profile.cycles
            for factor in (1.1, 1 / 1.1)
        ]
        difference = (changed[0] - changed[1]) / (0.19 * found.cycles)
        assert found[constant] == pytest.approx(difference, rel=0.1, abs=2e-3)


@pytest.mark.parametrize("name", ["operations", "branches", "offloaded", "codelet of a user"])
def test_lines_and_layers_add_up(name: str) -> None:
    found = sensitivities_of(KINDS[name])
    for row in found.rows:
        for parts in (found.by_line, found.by_layer):
            total = sum(part["elasticities"][row["constant"]] for part in parts)
            assert total == pytest.approx(row["elasticity"], abs=1e-6)
    assert sum(part["cycles"] for part in found.by_line) == pytest.approx(found.cycles_at(), rel=1e-6)


def test_lines_are_named() -> None:
    def two(x: Any, w: Any) -> Any:
        with jax.named_scope("first"):
            y = x @ w
        with jax.named_scope("second"):
            return jnp.sort(y, 0)

    fun = ipu.jit(two, device=ipu.IPUModel(tiles_per_ipu=TILES))
    found = ipu.sensitivities(fun, jnp.ones((32, 64)), jnp.ones((64, 48)))
    by_layer = {row["layer"]: row["elasticities"] for row in found.by_layer}
    assert abs(by_layer["first"]["fp32_amp_macs_per_cycle"]) > 0
    assert by_layer["second"]["fp32_amp_macs_per_cycle"] == 0
    assert any("test_sensitivities.py" in row["line"] for row in found.by_line)


def test_constants_that_are_compiled_again() -> None:
    found = ipu.sensitivities(layer, *ARGS, recompile=["tiles_per_ipu", "ipus_per_pod"])
    tiles, pod = found.recompiled
    assert tiles["other"] == 18
    device = ipu.IPUModel(tiles_per_ipu=18)
    assert tiles["other_cycles"] == layer.with_options(device=device).profile(*ARGS).cycles
    assert found["ipus_per_pod"] == pod["elasticity"] == 0
    for name in ("clock_hz", "native_dtypes", "tiles"):
        with pytest.raises(ipu.TargetError, match="cannot compile again"):
            ipu.sensitivities(layer, *ARGS, recompile=[name])
    for names in ("tiles_per_ipu", None):
        with pytest.raises(ipu.ArgumentError, match="is no list"):
            ipu.sensitivities(layer, *ARGS, recompile=names)  # type: ignore[arg-type]


def test_tables() -> None:
    found = ipu.sensitivities("tests.ipujax.studies.swept_functions:layer", *ARGS)
    assert "internal_sync_cycles" in str(found) and "internal_sync_cycles" in found._repr_html_()
    pickled = pickle.loads(pickle.dumps(found))
    assert pickled == found
    with pytest.raises(ipu.ArgumentError, match="was pickled"):
        pickled.cycles_at(clock_hz=1e9)
    with pytest.raises(ipu.ArgumentError, match=r"(?s)no elasticity to 'clock'.*clock_hz"):
        found["clock"]
    with pytest.raises(ipu.ArgumentError, match="costs machines"):
        ipu.sensitivities(layer.with_options(device=ipu.CPU()), *ARGS)
