"""Programs that fit on hardware, or are out of memory: the verdict of the memory model.

Each is compiled at the first cost per byte, for speed alone, which is the plan that PopLibs makes within the proportion
of memory that the published program sets; and, until one fits, at further costs of the list that `ipu.jit` tries
(`ipujax.fit`). Each row is printed to the standard error stream as soon as it is known, since networks take minutes.
Limits: attempts for smaller tiles, and with recomputation, are left out: with them a program may fit that is out of
memory here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from models import MODELS

import ipujax as ipu
from fidelity_cases.case import Bar
from fidelity_cases.networks import NETWORKS, Network

_KIB = 1024
_COSTS = 0.5, 2.0, 4.0  # cycles; of `ipujax.fit.BYTE_COSTS`


@dataclass(frozen=True)
class Published:
    """A published program.

    Args:
        name: the network and its batch.
        source: publication.
        fits: whether it ran on hardware.
        profile: its profile with these options.
        options: options of the program.
    """

    name: str
    source: str
    fits: bool
    profile: Callable[[ipu.Options], ipu.Profile]
    options: ipu.Options

    def at(self, byte_cost: float) -> Verdict:
        """Verdict at a cost per byte."""
        return _verdict_at(self.profile, replace(self.options, allow_out_of_memory=True, byte_cost=byte_cost))

    @property
    def first(self) -> Verdict:
        """Verdict of the first plan."""
        return self.at(_COSTS[0])

    @cached_property
    def best(self) -> Verdict:
        """Verdict at the first cost per byte at which it fits; if there is none, of the plan of fewest bytes."""
        verdicts = []
        for byte_cost in _COSTS:
            verdicts.append(self.at(byte_cost))
            if verdicts[-1].fits:
                return verdicts[-1]
        return min(verdicts, key=lambda verdict: verdict.max_tile_bytes)

    @cached_property
    def row(self) -> str:
        """Line of the table, also printed as soon as it is known."""
        first, best = self.first, self.best
        cells = [self.name, self.source, _word(self.fits), _word(first.fits), f"{first.max_tile_bytes / _KIB:,.0f}"]
        cells += [_word(best.fits), f"{best.byte_cost:g}", f"{best.max_tile_bytes / _KIB:,.0f}"]
        line = f"| {' | '.join([*cells, f'{best.cycles / first.cycles:.2f}'])} |"
        print(line, file=sys.stderr, flush=True)
        return line


@dataclass(frozen=True)
class Verdicts:
    """Section of the page: the programs, and how many verdicts agree."""

    title: str
    programs: Sequence[Published]
    rows: tuple[()] = ()

    @property
    def bars(self) -> list[Bar]:
        """Shares of the programs that agree."""
        agree = [program.first.fits == program.fits for program in self.programs]
        agree_chosen = [program.best.fits == program.fits for program in self.programs]
        return [
            Bar("programs that agree at the first plan", float(np.mean(agree)), 0.4, at_least=True),
            Bar("programs that agree at the best cost per byte", float(np.mean(agree_chosen)), 18 / 21, at_least=True),
        ]

    @property
    def is_met(self) -> bool:
        """True if both bars are met."""
        return all(bar.is_met for bar in self.bars)

    def markdown(self) -> str:
        """The section."""
        lines = [
            f"## {self.title}\n",
            "Fullest tile of 624 KiB. The first plan is for speed alone, within the proportion of memory that the "
            f"published program sets; the best one is at the first cost per byte of {', '.join(map(str, _COSTS))} at "
            "which it fits ([fitting.md](fitting.md)), else that of fewest bytes; cycles are relative to the first.\n",
            "| program | source | published | first plan | KiB | best plan | cost per byte | KiB | cycles |",
            "| --- | --- | --- | --- | ---: | --- | ---: | ---: | ---: |",
            *(program.row for program in self.programs),
            "",
        ]
        for bar in self.bars:
            met = "met" if bar.is_met else "**missed**"
            lines.append(f"- {bar.name}: {100 * bar.value:.0f} %, {met}: ≥ {100 * bar.bar:.0f} %")
        return "\n".join(lines) + "\n"


def family() -> Verdicts:
    """All programs."""
    published = "Graphcore's published performance results"
    convolutions = "published runs of ResNeXt-50 on Mk2"
    half = ipu.Options(partials="float16", progress=False)
    floats = ipu.Options(partials="float32", progress=False)
    programs = [
        Published("ResNet-50 inference, half, 90 images, one Bow", published, True, _inference("bow", 1, 90), half)
    ]
    for proportion, fits in ((0.35, True), (0.8, False)):
        name = f"ResNeXt-50 32×4d inference, float, 20 images, one Mk2, proportion {proportion}"
        options = replace(floats, available_memory_proportion=proportion)
        programs.append(Published(name, convolutions, fits, _inference("mk2", 32, 20), options))
    programs += [_of_network(network, published) for network in NETWORKS[:3]]
    return Verdicts("Does it fit?", programs)


def _of_network(network: Network, source: str) -> Published:
    count = network.accumulated or network.micro_batches[1]
    model = MODELS[network.model](micro_batches=count, **network.sizes)

    def profile(options: ipu.Options) -> ipu.Profile:
        fun = ipu.jit(
            model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit
        )
        return fun.profile(*model.args)

    options = ipu.Options(**{**model.options, "partials": "float16", "progress": False})
    return Published(f"{network.title}, training, micro-batch {network.micro_batch}", source, True, profile, options)


def _inference(arch: str, groups: int, images: int) -> Callable[[ipu.Options], ipu.Profile]:
    """Profiles of a residual network, normalisation folded into its weights: ResNet-50, or ResNeXt-50 of 32 groups."""
    dtype = np.float16 if groups == 1 else np.float32
    width = 64 if groups == 1 else 128

    def weights(*shape: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"w": jax.ShapeDtypeStruct(shape, dtype), "b": jax.ShapeDtypeStruct(shape[-1:], dtype)}

    blocks = []
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner, outer = width << stage, 256 << stage
        for number in range(count):
            p = {"reduce": weights(1, 1, channels, inner), "expand": weights(1, 1, inner, outer)}
            p["middle"] = weights(3, 3, inner // groups, inner)
            if number == 0:
                p["shortcut"] = weights(1, 1, channels, outer)
            blocks.append((p, 2 if stage and not number else 1))
            channels = outer

    def convolve(p: dict[str, jax.Array], x: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(
            x, p["w"], (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )
        return y + p["b"]

    @partial(jax.jit, static_argnums=2)
    def block(p: dict[str, Any], x: jax.Array, stride: int) -> jax.Array:
        y = jax.nn.relu(convolve(p["reduce"], x))
        y = convolve(p["expand"], jax.nn.relu(convolve(p["middle"], y, stride, groups)))
        return jax.nn.relu(y + (convolve(p["shortcut"], x, stride) if "shortcut" in p else x))

    def network(p: dict[str, Any], x: jax.Array) -> jax.Array:
        x = (x.astype(dtype) - dtype(0.5)) * dtype(2)
        x = jax.nn.relu(convolve(p["stem"], x, 2))
        x = lax.reduce_window(x, dtype(-np.inf), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for q, (_, stride) in zip(p["blocks"], blocks, strict=True):
            x = block(q, x, stride)
        return x.astype(jnp.float32).mean((1, 2)).astype(dtype) @ p["out"]["w"] + p["out"]["b"]

    params = {"stem": weights(7, 7, 3, 64), "blocks": [p for p, _ in blocks], "out": weights(2048, 1000)}
    pixels = jax.ShapeDtypeStruct((images, 224, 224, 3), np.uint8 if groups == 1 else dtype)
    return lambda options: ipu.jit(network, device=ipu.IPUModel(arch=arch), options=options).profile(params, pixels)


@dataclass(frozen=True)
class Verdict:
    """Whether a plan fits, the cost per byte it was made for, bytes of its fullest tile, and its cycles."""

    fits: bool
    byte_cost: float
    max_tile_bytes: int
    cycles: int


@cache
def _verdict_at(profile: Callable[[ipu.Options], ipu.Profile], options: ipu.Options) -> Verdict:
    """Verdict of a program with some options, which set a cost per byte; its profile is not kept."""
    planned = profile(options)
    assert options.byte_cost is not None
    fits = not planned.memory.lacking()
    return Verdict(fits, options.byte_cost, planned.memory.max_tile_bytes, int(planned.cycles))


def _word(fits: bool) -> str:
    return "fits" if fits else "out of memory"
