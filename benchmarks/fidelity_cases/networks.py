"""Training steps of whole networks on Bow Pods: cycles of an example in each replica.

Where the published batch is hundreds of micro-batches a replica, the cycles of a micro-batch are the difference of a
longer and a shorter step, so that the optimiser, sums over replicas and the ramps of pipelines cancel. Where it is a
few micro-batches, the whole step is compared. Each is compiled at the lowest cost per byte at which it fits, if there
is one, and at the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from models import MODELS

import ipujax as ipu
from fidelity_cases.case import Ends, Family, Row, interval_of
from ipujax.runtime.timeline import PHASES

_CLOCK_HZ = 1.85e9  # of a Bow
_DEFAULT_BYTE_COST = 0.5  # cycles


@dataclass(frozen=True)
class Network:
    """A published training step.

    Args:
        title: name of the network and its pod.
        model: its name in `benchmarks/models`.
        examples_per_second: published rate of all replicas.
        replicas: replicas that share the pod.
        micro_batch: examples of a micro-batch.
        micro_batches: micro-batches of the longer step, and of the shorter one.
        fits_at: lowest cost per byte at which it fits, in cycles; None where it fits at none.
        software: SDK and framework of the published figure.
        partials: dtype of the partial results of the published program.
        sizes: sizes of the model that differ from its default.
        accumulated: micro-batches of a published step; None to compare one more micro-batch of a long step.
    """

    title: str
    model: str
    examples_per_second: int
    replicas: int
    micro_batch: int
    micro_batches: tuple[int, int]
    fits_at: float | None
    software: str
    partials: str = "half partials"
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    accumulated: int | None = None

    def rows(self) -> list[Row]:
        """Cycles of an example against the published ones, at each cost per byte."""
        measured = round(_CLOCK_HZ * self.replicas / self.examples_per_second)
        unit = "cycles"
        modes = {_DEFAULT_BYTE_COST: "planned as if there were more memory"}
        if self.fits_at is not None:
            modes = {self.fits_at: f"planned to fit, cost per byte {self.fits_at:g}"} | modes
        bars = dict.fromkeys(modes) | {next(iter(modes)): 0.15}
        return [
            Row(
                f"{self.title} ({self.software}, {self.partials}): {how}",
                measured,
                self.example_cycles(byte_cost),
                bars[byte_cost],
                unit,
                step(self, self.micro_batches[0], byte_cost)[2],
                is_of_measured_program=byte_cost == next(iter(modes)),
            )
            for byte_cost, how in modes.items()
        ]

    def example_cycles(self, byte_cost: float) -> int:
        """Cycles of an example in each replica, in the steady state."""
        if self.accumulated is not None:
            return round(step(self, self.accumulated, byte_cost)[0] / self.accumulated / self.micro_batch)
        long, short = self.micro_batches
        long_cycles, short_cycles = (step(self, count, byte_cost)[0] for count in (long, short))
        return round((long_cycles - short_cycles) / (long - short) / self.micro_batch)


@cache
def step(network: Network, micro_batches: int, byte_cost: float) -> tuple[int, float, Ends]:
    """Cycles of a step without host exchange, the share of memory on the fullest tile, and the cycles' interval."""
    model = MODELS[network.model](micro_batches=micro_batches, **network.sizes)
    options = {**model.options, "partials": "float16", "allow_out_of_memory": True, "byte_cost": byte_cost}
    chosen = ipu.Options(**options)
    fun = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=chosen, **model.jit)
    profile = fun.profile(*model.args)
    cycles = int(profile.cycles - profile.phase_cycles["host_exchange"])
    is_long = micro_batches == network.micro_batches[0]  # whose interval is that of the row
    interval = interval_of(profile, set(PHASES) - {"host_exchange"}) if is_long else (1.0, 1.0)
    return cycles, profile.memory.max_tile_bytes / profile.target.bytes_per_tile, interval


def _resnet(title: str, images_per_second: int, replicas: int, accumulated: int) -> Network:
    """Step with its all-reduce and update: batches of 1,920 on 16 and of 2,560 on 64 IPUs are micro-batches of 20."""
    sizes = {"micro_batch": 20, "replicas": replicas}
    counts = accumulated, accumulated
    software = "before SDK 2.5, TensorFlow 1"
    return Network(
        title,
        "resnet-50",
        images_per_second,
        replicas,
        20,
        counts,
        None,
        software,
        sizes=sizes,
        accumulated=accumulated,
    )


NETWORKS = (
    Network("BERT-Base, phase 1, Pod16", "bert-base", 16_391, 4, 32, (24, 16), 2, "SDK 3.1, PopART"),
    Network("BERT-Large, phase 1, Pod16", "bert-large", 5_179, 4, 8, (24, 16), 4, "before SDK 2.5, PopART"),
    _resnet("ResNet-50 v1.5, Pod16, whole steps of 6", 42_029, 16, 6),
    _resnet("ResNet-50 v1.5, Pod64, whole steps of 2", 145_287, 64, 2),
)


def family() -> Family:
    """Published throughputs."""
    rows = [row for network in NETWORKS for row in network.rows()]
    memory = "; ".join(_memory(network) for network in NETWORKS)
    source = (
        "Graphcore's published performance results for Bow Pods, with the SDK that each row names: "
        + ", ".join(f"{network.examples_per_second:,} examples a second ({network.title})" for network in NETWORKS)
        + ". Replicas and micro-batches are those of Graphcore's examples: a replica of BERT-Base and of BERT-Large "
        "has 4 IPUs, with 0, 4, 4, 4 and 3, 7, 7, 7 layers; one of ResNet-50 has one IPU."
    )
    how = (
        "Models of `benchmarks/models`, in half precision with half partials; each layer or residual block is "
        "recomputed. Figures are cycles of one example in each replica, without host exchange. For ResNet-50 they are "
        "the mean over a whole step, with its all-reduce and update, and with as many accumulated micro-batches as the "
        "published batch has (1,920 images on 16 IPUs, 2,560 on 64, micro-batches of 20); for BERT the difference of a "
        "step with more and one with fewer micro-batches, over the examples between. Memory of the fullest tile: "
        f"{memory}."
    )
    return Family("Networks trained on Bow Pods", source, how, rows)


def _memory(network: Network) -> str:
    many = network.micro_batches[0]
    first = f"{step(network, many, _DEFAULT_BYTE_COST)[1]:.0%} at the default cost per byte"
    if network.fits_at is None:
        return f"{network.title} {first} (the published program fits)"
    return f"{network.title} {step(network, many, network.fits_at)[1]:.0%} ({first})"
