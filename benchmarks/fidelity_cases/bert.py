"""BERT-Base, pre-training phase 1, on a Bow Pod16: cycles of a sequence in the steady state of the pipeline.

What one more micro-batch takes is the difference of steps of 24 and of 16, so that the optimiser and the ramps of the
pipeline are apart.
"""

from __future__ import annotations

from models import MODELS

import ipujax as ipu
from fidelity_cases.case import Family, Row

_SEQUENCES_PER_SECOND = 16_391  # published, of 4 replicas
_REPLICAS = 4
_MICRO_BATCH = 32
_CLOCK_HZ = 1.85e9  # of a Bow
_MEASURED_CYCLES = _CLOCK_HZ * _REPLICAS / _SEQUENCES_PER_SECOND


def step_cycles(micro_batches: int) -> int:
    """Cycles of a step of so many micro-batches, without host exchange."""
    model = MODELS["bert-base"](micro_batches=micro_batches)
    options = ipu.Options(allow_out_of_memory=True, **model.options)
    step = ipu.jit(model.step, device=model.device(), donate_argnums=model.donate_argnums, options=options, **model.jit)
    profile = step.lower(*model.args).compile().profile
    return int(profile.cycles - profile.phase_cycles["host_exchange"])


def family() -> Family:
    """The one figure."""
    few, many = 16, 24
    cycles = (step_cycles(many) - step_cycles(few)) / (many - few) / _MICRO_BATCH
    rows = [Row("BERT-Base, sequence length 128", round(_MEASURED_CYCLES), round(cycles), 0.15, "cycles a sequence")]
    source = (
        f"Graphcore's published performance results, BERT-Base phase 1 on a Bow Pod16: {_SEQUENCES_PER_SECOND:,} "
        "sequences a second of 4 replicas, each of 4 IPUs with 0, 4, 4 and 4 layers."
    )
    how = (
        "`benchmarks/models/bert.py`: half precision with half partials, a checkpoint a layer, micro-batches of "
        f"{_MICRO_BATCH}; the difference of steps of {many} and of {few} micro-batches, without host exchange. The "
        "program as it is planned needs more memory than tiles have: this is the time of a plan that would not fit."
    )
    return Family("A pipeline: BERT-Base on a Bow Pod16", source, how, rows)
