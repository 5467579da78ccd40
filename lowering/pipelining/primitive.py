"""The primitives of `ipu.pipeline`: a function of one micro-batch, and how micro-batches go through it.

    results = pipeline_p.bind(*operands, spec=…, loop=…)
    results = staged_pipeline_p.bind(*operands, spec=…, loop=…, micro_batch=…)

`loop` computes all micro-batches, one after the other, in a `lax.scan`, and is what the primitives mean: plain JAX
evaluates it, and `ipu.jit` compiles it where there are no stages. Else `micro_batch` computes one of them. Both were
traced together, so that names of axes that are bound around the pipeline are bound in them too.

Limits: no derivative; under `vmap` it is its loop, without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, jaxpr_as_fun, make_call_primitive
from ipujax.lowering.jaxpr import MICRO_BATCHES, PIPELINE, named_stages
from ipujax.lowering.schedules import Schedule
from ipujax.runtime.errors import ArgumentError

Role = Literal["same", "batch", "key", "carry"]
Reduce = Literal["mean", "running_mean", "sum", "stack", "last"]
REDUCTIONS: tuple[str, ...] = get_args(Reduce)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """How micro-batches go through a function.

    Args:
        name: the function's, for messages.
        micro_batches: how many there are.
        roles: of each operand: the same for all, split along its first axis, a key folded with the micro-batch's
            number, or state handed from one to the next.
        carries: (operand, result) pairs: the operand's next value is that result.
        reduce: the reduction of each result over micro-batches.
        accumulate_dtype: of sums and means of floating-point results; their own when None.
        schedule: the order in which stages work; the one that suits the machine when None.
        device_mapping: the IPU of each stage; as the schedule has it when None.
        stages: number of stages to find, or "auto"; when None, equations are named after their stages.
    """

    name: str
    micro_batches: int
    roles: tuple[Role, ...]
    carries: tuple[tuple[int, int], ...]
    reduce: tuple[Reduce, ...]
    accumulate_dtype: Any = None
    schedule: Schedule | None = None
    device_mapping: tuple[int, ...] | None = None
    stages: int | Literal["auto"] | None = None

    @property
    def states(self) -> dict[int, int]:
        """The operand of each result that is the next value of a state."""
        return {result: operand for operand, result in self.carries}

    def kind_of(self, number: int) -> str:
        """The reduction of a result, or "carry" for a state after the last micro-batch."""
        return "carry" if self.reduce[number] == "last" and number in self.states else self.reduce[number]

    def accumulator_dtype(self, aval: Any) -> Any:
        """The dtype in which the values of a result are summed."""
        wanted = self.accumulate_dtype
        return aval.dtype if wanted is None or not jnp.issubdtype(aval.dtype, jnp.floating) else wanted


def micro_batch_loop(jaxpr: ClosedJaxpr, spec: PipelineSpec) -> Callable[..., list[jax.Array]]:
    """A function of a pipeline's operands that computes its results, one micro-batch after the other.

    Args:
        jaxpr: computes one micro-batch.
        spec: how they go through it.
    """
    one = jaxpr_as_fun(jaxpr)
    carried = dict(spec.carries)
    kinds = ["none" if is_float0(aval) else spec.kind_of(n) for n, aval in enumerate(jaxpr.out_avals)]

    def loop(*operands: jax.Array) -> list[Any]:
        def iteration(state: Any, rows: dict[int, jax.Array]) -> Any:
            index, states, kept = state
            values = [
                rows[n] if role == "batch" else states[n] if role == "carry" else fold(x, index) if role == "key" else x
                for n, (role, x) in enumerate(zip(spec.roles, operands, strict=True))
            ]
            outs = one(*values)
            following = {n: lax.convert_element_type(outs[result], states[n].dtype) for n, result in carried.items()}
            reduced = {n: combine(kinds[n], held, outs[n], index) for n, held in kept.items()}
            return (index + 1, following, reduced), {n: outs[n] for n, kind in enumerate(kinds) if kind == "stack"}

        starts = {n: lax.convert_element_type(operands[n], jaxpr.in_avals[n].dtype) for n in carried}
        kept = {
            n: lax.full(aval.shape, 0, aval.dtype if kind == "last" else spec.accumulator_dtype(aval))
            for n, (kind, aval) in enumerate(zip(kinds, jaxpr.out_avals, strict=True))
            if kind in ("mean", "running_mean", "sum", "last")
        }
        batches = {n: split(operands[n], spec.micro_batches) for n, role in enumerate(spec.roles) if role == "batch"}
        with jax.named_scope(MICRO_BATCHES):
            (_, states, kept), stacks = lax.scan(iteration, (jnp.int32(0), starts, kept), batches, spec.micro_batches)
        results: list[Any] = []
        for n, kind in enumerate(kinds):
            if kind == "none":
                shape = jaxpr.out_avals[n].shape
                results.append(jnp.zeros((spec.micro_batches, *shape) if spec.reduce[n] == "stack" else shape, bool))
            elif kind == "carry":
                results.append(states[spec.states[n]])
            elif kind == "stack":
                results.append(stacks[n])
            else:
                results.append(kept[n] / jnp.asarray(spec.micro_batches, kept[n].dtype) if kind == "mean" else kept[n])
        return results

    return loop


def split(x: jax.Array, micro_batches: int) -> jax.Array:
    """The micro-batches of an array, one a row."""
    return x.reshape((micro_batches, x.shape[0] // micro_batches, *x.shape[1:]))


def fold(key: jax.Array, index: jax.Array) -> jax.Array:
    """The key of a micro-batch."""
    return jax.random.fold_in(key, index)


def combine(kind: str, held: jax.Array, value: jax.Array, index: jax.Array | int = 0) -> jax.Array:
    """The reduction of a result over micro-batches 0 … index."""
    value = lax.convert_element_type(value, held.dtype)
    if kind == "last":
        return value
    if kind == "running_mean":  # as PopART's, which never holds more than a mean; so half precision does not overflow
        before = lax.convert_element_type(index, jnp.float32)
        share = lax.convert_element_type(1 / (before + 1), held.dtype)
        return lax.convert_element_type(before / (before + 1), held.dtype) * held + share * value
    return held + value


def _refuse_derivative(*, spec: PipelineSpec, **params: Any) -> None:
    raise ArgumentError(
        f"a derivative is taken through the pipeline of {spec.name}",
        expected="a pipeline of a function that computes derivatives itself, one micro-batch at a time",
        got=f"jax.grad, jax.jvp or their like around ipu.pipeline({spec.name}, ...)",
        hint="differentiate inside: ipu.pipeline(jax.value_and_grad(loss), ...)",
    )


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The jaxpr of one micro-batch, equal only to itself; passes rewrite jaxprs that equations hold, but not this.

    Args:
        jaxpr: the jaxpr.
        is_ready: whether the passes that come before it is cut have been over it.
    """

    jaxpr: ClosedJaxpr
    is_ready: bool = False


pipeline_p = make_call_primitive("ipu_pipeline", "loop", _refuse_derivative)
staged_pipeline_p = make_call_primitive(PIPELINE, "loop", _refuse_derivative)


def bind_pipeline(jaxpr: ClosedJaxpr, spec: PipelineSpec, operands: Sequence[Any]) -> list[jax.Array]:
    """Binds one of the primitives, its loop traced where it is bound."""
    loop = jax.make_jaxpr(micro_batch_loop(jaxpr, spec))(*operands)
    assert not loop.consts, "a loop over a closed jaxpr has no constants of its own"
    if spec.stages is None and len(named_stages(jaxpr.jaxpr)) < 2:
        return list(pipeline_p.bind(*operands, spec=spec, loop=loop))
    return list(staged_pipeline_p.bind(*operands, spec=spec, loop=loop, micro_batch=MicroBatch(jaxpr)))
