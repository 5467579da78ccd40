"""Training steps of whole networks on a Bow Pod16: cycles of an example in each replica, in the steady state.

What one more micro-batch takes is the difference of steps of many and of few, so that the optimiser, sums over replicas
and the ramps of pipelines are apart. Each is compiled at the lowest cost per byte at which it fits, if there is
one, and at the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from models import MODELS

import ipujax as ipu
from fidelity_cases.case import Family, Row

_CLOCK_HZ = 1.85e9  # of a Bow
_DEFAULT_BYTE_COST = 0.5  # cycles


@dataclass(frozen=True)
class Network:
    """A published training step.

    Args:
        title: what it is.
        model: its name in `benchmarks/models`.
        examples_per_second: published, of all replicas.
        replicas: that share the pod.
        micro_batch: examples.
        micro_batches: of the longer step, and of the shorter one.
        fits_at: lowest cost per byte at which it fits, in cycles; None where it fits at none.
        sizes: of the model, where they are not those it has.
    """

    title: str
    model: str
    examples_per_second: int
    replicas: int
    micro_batch: int
    micro_batches: tuple[int, int]
    fits_at: float | None
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)

    def rows(self) -> list[Row]:
        """Cycles of an example, against what was published, at each cost per byte."""
        measured, unit = round(_CLOCK_HZ * self.replicas / self.examples_per_second), "cycles"
        modes = {_DEFAULT_BYTE_COST: "planned as if there were more memory"}
        if self.fits_at is not None:
            modes = {self.fits_at: f"planned to fit, cost per byte {self.fits_at:g}"} | modes
        bars = dict.fromkeys(modes) | {next(iter(modes)): 0.15}
        return [
            Row(f"{self.title}: {how}", measured, self.example_cycles(byte_cost), bars[byte_cost], unit)
            for byte_cost, how in modes.items()
        ]

    def example_cycles(self, byte_cost: float) -> int:
        """Cycles of an example in each replica, in the steady state."""
        many, few = self.micro_batches
        more, less = (step(self, count, byte_cost)[0] for count in (many, few))
        return round((more - less) / (many - few) / self.micro_batch)


@cache
def step(network: Network, micro_batches: int, byte_cost: float) -> tuple[int, float]:
    """Cycles of a step without host exchange, and the share of its memory that the fullest tile needs."""
    model = MODELS[network.model](micro_batches=micro_batches, **network.sizes)
    options = {**model.options, "partials": "float16", "allow_out_of_memory": True, "byte_cost": byte_cost}
    chosen = ipu.Options(**options)
    fun = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=chosen, **model.jit)
    profile = fun.profile(*model.args)
    cycles = int(profile.cycles - profile.phase_cycles["host_exchange"])
    return cycles, profile.memory.max_tile_bytes / profile.target.bytes_per_tile


NETWORKS = (
    Network("BERT-Base, phase 1", "bert-base", 16_391, 4, 32, (24, 16), 4),
    Network("BERT-Large, phase 1", "bert-large", 5_179, 4, 8, (24, 16), 2),
    Network("ResNet-50 v1.5", "resnet-50", 42_029, 16, 20, (4, 2), None, {"micro_batch": 20}),
)


def family() -> Family:
    """Published throughputs."""
    rows = [row for network in NETWORKS for row in network.rows()]
    memory = "; ".join(_memory(network) for network in NETWORKS)
    source = (
        "Graphcore's published performance results for a Bow Pod16, of SDK 3.1 for BERT-Base, before SDK 2.5 for the "
        "others: "
        + ", ".join(f"{one.examples_per_second:,} examples a second ({one.title})" for one in NETWORKS)
        + ". Replicas and micro-batches as in Graphcore's examples: BERT on 4 IPUs a replica, with 0, 4, 4, 4 layers "
        "and 3, 7, 7, 7; ResNet-50 on one IPU."
    )
    how = (
        "Models of `benchmarks/models`, in half precision with half partials; each layer or residual block is computed "
        "again. The difference of steps of more and of fewer micro-batches, without host exchange, an example of each "
        f"replica. Memory of the fullest tile: {memory}."
    )
    return Family("Networks trained on a Bow Pod16", source, how, rows)


def _memory(network: Network) -> str:
    many = network.micro_batches[0]
    first = f"{step(network, many, _DEFAULT_BYTE_COST)[1]:.0%} at the default cost per byte"
    if network.fits_at is None:
        return f"{network.title} {first}; the published program fits, this one at no cost per byte"
    return f"{network.title} {step(network, many, network.fits_at)[1]:.0%} ({first})"
