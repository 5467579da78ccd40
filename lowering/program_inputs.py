"""Memories of the inputs of a program, and the results that take their places.

Input: flags of inputs. Output: `ProgramInputs`; pairs of donated inputs and results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ipujax.lowering.jax_compat import is_on_host
from ipujax.lowering.replicas import Replicated, Split


@dataclass(frozen=True, slots=True)
class ProgramInputs:
    """Names and memories of the inputs of a program; an empty list stands for the default of all of them.

    Args:
        names: debug name of each input, `arg0` and so on by default.
        donated: True for each input whose buffer may be reused; all False by default.
        aliases: for each output the donated input whose place it takes, or None; paired by shape, dtype and split when
            None.
        offloaded: True for each input in streaming memory, as the jaxpr has it already; all False by default.
        streamed: True for each input that is loaded from the host's memory in the same way; all False by default.
        batches: for each input off chip that pipelines load by micro-batches, as the jaxpr has it already, the number
            of these; None for others, all None by default.
    """

    names: Sequence[str] = ()
    donated: Sequence[bool] = ()
    aliases: tuple[int | None, ...] | None = None
    offloaded: Sequence[bool] = ()
    streamed: Sequence[bool] = ()
    batches: Sequence[int | None] = ()

    def of_function(self, function: Replicated) -> ProgramInputs:
        """Return the names and memories of a function's inputs, those not given by default: named arg0, …, on chip."""
        num_inputs = len(function.jaxpr.in_avals)
        nowhere = [False] * num_inputs
        donated = self.donated or nowhere
        return ProgramInputs(
            self.names or [f"arg{n}" for n in range(num_inputs)],
            donated,
            donated_aliases(function, donated) if self.aliases is None else self.aliases,
            self.offloaded or nowhere,
            self.streamed or nowhere,
            self.batches or [None] * num_inputs,
        )

    @property
    def whole_off_chip(self) -> tuple[bool, ...]:
        """True for inputs that are off chip and stay whole."""
        flags = zip(self.offloaded, self.streamed, self.batches, strict=True)
        return tuple((is_offloaded or is_streamed) and count is None for is_offloaded, is_streamed, count in flags)


NO_MEMORIES = ProgramInputs()


def donated_aliases(function: Replicated, donated: Sequence[bool]) -> tuple[int | None, ...]:
    """For each output the number of the donated input whose buffer it takes, or None.

    It is the first free one of its shape, dtype, memory and split over replicas. In order and first fit, as XLA does:
    other pairings would copy buffers that JAX reuses.
    """
    free_inputs = [n for n, is_donated in enumerate(donated) if is_donated]
    jaxpr = function.jaxpr
    in_dims = function.in_dims
    aliases: list[int | None] = []
    for aval, dim in zip(jaxpr.out_avals, function.out_dims, strict=True):
        key = _buffer_key(aval, dim)
        match = next((n for n in free_inputs if _buffer_key(jaxpr.in_avals[n], in_dims[n]) == key), None)
        if match is not None:
            free_inputs.remove(match)
        aliases.append(match)
    return tuple(aliases)


def _buffer_key(aval: Any, dim: Split) -> tuple[Any, ...]:
    """Features of a buffer; one of equal features can be reused."""
    return aval.shape, aval.dtype, dim, is_on_host(aval)
