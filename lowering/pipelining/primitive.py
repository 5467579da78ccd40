"""The primitives of `ipu.pipeline`: a function of one micro-batch, and how micro-batches go through it.

    results = pipeline_p.bind(*operands, spec=…, loop=…)
    results = staged_pipeline_p.bind(*operands, spec=…, loop=…, micro_batch=…)

`loop` computes all micro-batches, one after the other, in a `lax.scan`, and defines the primitives: plain JAX evaluates
it, and `ipu.jit` compiles it for a function without stages. With stages, `micro_batch` computes one micro-batch. Both
are traced together, so that names of axes that are bound around the pipeline are bound in them too.

Limits: no derivative; `vmap` of it is `vmap` of its loop, without stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, jaxpr_as_fun, make_call_primitive
from ipujax.lowering.jaxpr import MICRO_BATCHES, PIPELINE, named_stages
from ipujax.lowering.passes.inline import inline
from ipujax.lowering.schedules import Schedule
from ipujax.runtime.errors import ArgumentError

Role = Literal["same", "batch", "key", "carry"]
Reduce = Literal["mean", "running_mean", "sum", "stack", "last"]
REDUCTIONS: tuple[str, ...] = get_args(Reduce)


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """Parameters of a pipeline: micro-batches, the role of each operand, reductions of results.

    Args:
        name: name of the function, for messages.
        micro_batches: number of micro-batches.
        roles: of each operand: the same for all micro-batches, a batch split along its first axis, a key folded with
            the index of the micro-batch, or a state carried from one to the next.
        carries: (operand, result) pairs: the result is the next value of the operand, a state.
        reduce: reduction of each result over micro-batches.
        accumulate_dtype: dtype of sums and means of floating-point results; that of the result when None.
        schedule: order in which stages work; the one that suits the target when None.
        device_mapping: IPU of each stage; that of the schedule when None.
        stages: number of stages to search, or "auto"; when None, equations are named after their stages.
        streamed: for each operand whether it is a batch off chip, loaded by micro-batches; none when empty.
        sent: for each result whether it is a stack off chip, stored by rows; none when empty.
        cuts: first segment of each automatic stage but the first, as an earlier search found them; searched when empty.
        rows_in_any_order: whether results are the same for any assignment of the batch's rows to micro-batches.
        shards_stored_rows: whether of a row that a loop stores for another each device of a mesh stores a part.
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
    streamed: tuple[bool, ...] = ()
    sent: tuple[bool, ...] = ()
    rows_in_any_order: bool = False
    cuts: tuple[int, ...] = ()
    shards_stored_rows: bool = False

    @property
    def states(self) -> dict[int, int]:
        """The operand of each result that is the next value of a state."""
        return {result: operand for operand, result in self.carries}

    def kind_of(self, number: int) -> str:
        """The reduction of a result, or "carry" for a state after the last micro-batch."""
        return "carry" if self.reduce[number] == "last" and number in self.states else self.reduce[number]

    def accumulator_dtype(self, aval: Any) -> Any:
        """The dtype in which a result of type `aval` is summed."""
        dtype = self.accumulate_dtype
        return aval.dtype if dtype is None or not jnp.issubdtype(aval.dtype, jnp.floating) else dtype


def micro_batch_loop(jaxpr: ClosedJaxpr, spec: PipelineSpec) -> Callable[..., list[jax.Array]]:
    """Function from a pipeline's operands to its results that runs `jaxpr` for one micro-batch after the other.

    Args:
        jaxpr: computes the results of one micro-batch.
        spec: which operands are split into micro-batches or carried, and how results are reduced over them.
    """
    micro_batch_fun = jaxpr_as_fun(jaxpr)
    next_result = dict(spec.carries)  # by each operand that is a state, the result that is its next value
    kinds = ["none" if is_float0(aval) else spec.kind_of(n) for n, aval in enumerate(jaxpr.out_avals)]

    def loop(*operands: jax.Array) -> list[Any]:
        """Runs a scan over the micro-batches, then divides means; values below are by number of operand or result."""

        def iteration(state: Any, rows: dict[int, jax.Array]) -> Any:
            index, states, accumulated = state
            keys = {n: jax.random.fold_in(operands[n], index) for n, role in enumerate(spec.roles) if role == "key"}
            varying = {**rows, **states, **keys}
            outs = micro_batch_fun(*(varying.get(n, x) for n, x in enumerate(operands)))
            next_states = {
                n: lax.convert_element_type(outs[result], states[n].dtype) for n, result in next_result.items()
            }
            reduced = {n: combine(kinds[n], accumulator, outs[n], index) for n, accumulator in accumulated.items()}
            return (index + 1, next_states, reduced), {n: outs[n] for n, kind in enumerate(kinds) if kind == "stack"}

        initial_states = {n: lax.convert_element_type(operands[n], jaxpr.in_avals[n].dtype) for n in next_result}
        accumulated = {
            n: _accumulator(aval, aval.dtype if kind == "last" else spec.accumulator_dtype(aval))
            for n, (kind, aval) in enumerate(zip(kinds, jaxpr.out_avals, strict=True))
            if kind in ("mean", "running_mean", "sum", "last")
        }
        batches = {n: split(operands[n], spec.micro_batches) for n, role in enumerate(spec.roles) if role == "batch"}
        with jax.named_scope(MICRO_BATCHES):
            (_, states, accumulated), stacks = lax.scan(
                iteration, (jnp.int32(0), initial_states, accumulated), batches, spec.micro_batches
            )
        means = {n: x / jnp.asarray(spec.micro_batches, x.dtype) for n, x in accumulated.items() if kinds[n] == "mean"}
        # Results that return a state after the last micro-batch; others of `next_result` are reduced, as any result.
        last_states = {result: states[n] for n, result in next_result.items() if kinds[result] == "carry"}
        computed = {**accumulated, **means, **stacks, **last_states}
        # Those of kind "none" have no values to compute.
        return [computed[n] if n in computed else _zeros(jaxpr, spec, n) for n in range(len(kinds))]

    return loop


def _accumulator(aval: Any, dtype: Any) -> jax.Array:
    """Zeros for a result of a type: over explicit axes of a mesh split as it is, and varying over the same axes."""
    zeros = lax.full(aval.shape, 0, dtype, sharding=aval.sharding)
    axes = tuple(sorted(aval.manual_axis_type.varying))
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _zeros(jaxpr: ClosedJaxpr, spec: PipelineSpec, number: int) -> jax.Array:
    """Flags in the place of a result of dtype float0, which has no values."""
    shape = jaxpr.out_avals[number].shape
    return jnp.zeros((spec.micro_batches, *shape) if spec.reduce[number] == "stack" else shape, bool)


def split(x: jax.Array, micro_batches: int) -> jax.Array:
    """The micro-batches of an array, one a row; over explicit axes of a mesh each is split as the array is."""
    sharding = jax.typeof(x).sharding
    shape = (micro_batches, x.shape[0] // micro_batches, *x.shape[1:])
    return x.reshape(shape, out_sharding=sharding.update(spec=PartitionSpec(None, *sharding.spec)))


def combine(kind: str, accumulator: jax.Array, value: jax.Array, index: jax.Array | int = 0) -> jax.Array:
    """The reduction of a result over micro-batches 0 … index, from that over 0 … index − 1."""
    value = lax.convert_element_type(value, accumulator.dtype)
    if kind == "last":
        return value
    if kind == "running_mean":  # as in PopART: a mean, unlike a sum, does not overflow in half precision
        count = lax.convert_element_type(index, jnp.float32)
        share = lax.convert_element_type(1 / (count + 1), accumulator.dtype)
        return lax.convert_element_type(count / (count + 1), accumulator.dtype) * accumulator + share * value
    return accumulator + value


def _refuse_derivative(*, spec: PipelineSpec, **params: Any) -> None:
    raise ArgumentError(
        f"a derivative is taken through the pipeline of {spec.name}",
        expected="a pipeline of a function that computes derivatives itself, one micro-batch at a time",
        got=f"jax.grad, jax.jvp or their like around ipu.pipeline({spec.name}, ...)",
        hint="differentiate inside: ipu.pipeline(jax.value_and_grad(loss), ...)",
    )


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The jaxpr of one micro-batch, equal only to itself; passes rewrite jaxprs of equations, but not this one."""

    jaxpr: ClosedJaxpr
    is_ready: bool = False  # whether the passes that precede the cut into stages have run on it

    def inlined(self) -> MicroBatch:
        """This pipeline without calls."""
        return replace(self, jaxpr=inline(self.jaxpr))

    def bind(self, jaxpr: ClosedJaxpr, spec: PipelineSpec, operands: Sequence[Any]) -> list[jax.Array]:
        """Results of a pipeline of another jaxpr, such as that of one device of a mesh."""
        return bind_pipeline(jaxpr, spec, operands)


pipeline_p = make_call_primitive("ipu_pipeline", "loop", _refuse_derivative)
staged_pipeline_p = make_call_primitive(PIPELINE, "loop", _refuse_derivative)


def bind_pipeline(jaxpr: ClosedJaxpr, spec: PipelineSpec, operands: Sequence[Any]) -> list[jax.Array]:
    """Adds a pipeline to the traced program: a primitive whose meaning is its loop over micro-batches, `loop`.

    `pipeline_p` is the loop alone, gradient accumulation; `staged_pipeline_p` has stages, and the jaxpr of one
    micro-batch, which is cut into them. `operands` are arrays or tracers.
    """
    loop = jax.make_jaxpr(micro_batch_loop(jaxpr, spec))(*operands)
    assert not loop.consts, "a loop over a closed jaxpr has no further constants"
    # A mesh gives each device rows of every micro-batch, which the loop cannot say: one stage is a pipeline too.
    if spec.stages is None and len(named_stages(jaxpr.jaxpr)) < 2 and not spec.rows_in_any_order:
        return list(pipeline_p.bind(*operands, spec=spec, loop=loop))
    return list(staged_pipeline_p.bind(*operands, spec=spec, loop=loop, micro_batch=MicroBatch(jaxpr)))
