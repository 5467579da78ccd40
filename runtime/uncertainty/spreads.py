"""Spreads of the mechanisms of a run: how far hardware was from what they cost, before any network was compared.

Each is a 90 % interval of the hardware's cycles over those of the model, from figures of that mechanism alone: single
products, single codelets, copies and exchanges of one program. Where a source has fewer than twenty figures the
interval is their range. None is taken from a network, so that networks (docs/fidelity.md) can be held against
intervals.
Input: none. Output: `SPREADS`, by mechanism.
Limits: a spread is one factor for all steps of its mechanism in a program. Work that software does and the model lacks,
such as other plans, is in the spread of products alone. Block-sparse products have that of dense ones: no source but
the rows of docs/fidelity.md was found that compares their codelets with hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Spread:
    """A 90 % interval of a mechanism's cycles on hardware, over those of the model.

    Args:
        low: lower end, at most 1.
        high: upper end, at least 1.
        piece_cycles: cycles that each piece sent may take beyond that.
        source: where the figures come from.
    """

    low: float
    high: float
    source: str
    piece_cycles: int = 0


PRODUCT = "products"
VECTOR = "codelets in assembly"
COMPILED = "codelets in C++"
REARRANGEMENT = "rearrangement on tiles"
EXCHANGE = "exchange between tiles"
BETWEEN_IPUS = "exchange between IPUs"
PIECES = "pieces between IPUs"
HOST = "transfers of the host"
SLOW_PATHS = "slow paths of odd rows"

SPREADS: Mapping[str, Spread] = MappingProxyType(
    {
        PRODUCT: Spread(
            0.85,
            1.15,
            "published: of 74 dense products on a Bow 63 took a time within 15 % of a model by PopLibs' formulas "
            "without a fit, all those of 256 columns and more (reference 'What a first-principles model was found to "
            "need'; digitised to 2 %, B6)",
        ),
        VECTOR: Spread(
            7 / 15,
            1.1,
            "published: ReLU, ReLU behind a sum, its gradient and dropout together take 7 cycles a vector of 4 halves "
            "in PopLibs' own codelets (popnn PerformanceEstimation.hpp, poprandCycleEstimators.cpp), 15 by the "
            "instructions that are counted; PopLibs' tests accept cycles 10 % off an estimate (tests/popops/codelets/"
            "CodeletsTestsCommon.hpp, cycleCompareThreshold)",
        ),
        COMPILED: Spread(
            7.9 / 10.3,
            31 / 23,
            "derived: a published loop that sums π took 7.9 instructions an iteration where 10.3 are counted, unrolled "
            "by its author, and 15 where 12 are, as it was; the codelets of a blur up to 31 where 23 are (reference "
            "B5). One loop compiled three ways took 84, 57 and 47 thousand cycles: a factor of 1.79, this range has "
            "1.76",
        ),
        REARRANGEMENT: Spread(
            0.8,
            1.4,
            "measured: the twelve phases of copies of a blur on Mk1, to which the cost of a piece is fitted as their "
            "middle (reference B5)",
        ),
        EXCHANGE: Spread(
            0.9,
            1.24,
            "measured: the six exchanges of a blur on Mk1 (reference B5); longer ones are closer, 0.5 % in tut6 (B4) "
            "and 1.7 to 2.6 % of scheduled ones on IPU21 (1.4); full load adds 24 % to the latency of Mk1 (Citadel, "
            "second-hand, A2). The order of tiles alone once made 2.8 times (1.4), which is not in this range",
        ),
        BETWEEN_IPUS: Spread(
            0.5,
            1.65,
            "derived: libraries for the hardware run a second ring the other way, which halves a collective "
            "(docs/machine.md); steps of a blur on several Mk1 whose strips are rows took up to 2,400 cycles more than "
            "modelled, beside some 3,700 of exchange (reference B5)",
        ),
        PIECES: Spread(
            1.0,
            1.0,
            "measured: steps of a blur on several Mk1 whose strips are columns took 2 to 10 cycles more for each piece "
            "of a pixel that an IPU sends (reference B5); the model has no cost of a piece between IPUs",
            piece_cycles=10,
        ),
        HOST: Spread(
            1.0,
            4.4 / 1.4,
            "measured: to write 79 MB to an Mk1 took up to 57 ms, to read them back from 18 ms: 1.4 and 4.4 GB/s "
            "(reference A3); the model has one rate",
        ),
        SLOW_PATHS: Spread(
            0.0,
            1.0,
            "assumed: one-sided; a library whose code for odd rows is better, or that pads them, takes none of the "
            "cycles that a slow path adds",
        ),
    }
)
