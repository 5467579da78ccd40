"""Peak rates of a chip, from whole numbers a cycle."""

from __future__ import annotations

from fidelity_cases.case import Family, Row
from ipujax.runtime.target.presets import PRESETS

# Tiles, clock in MHz, and a cycle and tile: fp16 flop, fp32 flop, bytes of SRAM, bytes of exchange (reference A1).
_PUBLISHED = {
    "mk1": (1216, 1600, 64, 16, 24, 4),
    "mk2": (1472, 1325, 128, 32, 24, 4),
    "bow": (1472, 1850, 128, 32, 24, 4),
}


def family() -> Family:
    """Every peak of every preset."""
    rows = []
    for name, (tiles, megahertz, *per_cycle) in _PUBLISHED.items():
        target = PRESETS[name]
        rates = (
            ("fp16 AMP", target.peak_fp16_flops, "flop/s"),
            ("fp32 AMP", target.peak_fp32_flops, "flop/s"),
            ("SRAM", target.sram_bytes_per_second, "B/s"),
            ("exchange", target.exchange_bytes_per_second, "B/s"),
        )
        for (rate, simulated, unit), number in zip(rates, per_cycle, strict=True):
            published = float(tiles * megahertz * 10**6 * number)
            rows.append(Row(f"{name}: {rate}, {number} a cycle and tile", published, simulated, 0, unit))
    source = "tut6, spmm-nb, tessellate, ipu21-rs, Citadel and wave for the whole numbers and clocks (reference A1)."
    how = "Tiles × clock × a whole number a cycle, compared with the properties of `Target`. No program is compiled."
    return Family("Peak rates of one chip", source, how, rows)
