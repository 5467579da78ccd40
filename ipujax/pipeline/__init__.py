"""`ipu.pipeline`: a function of a micro-batch, applied to all micro-batches of a batch; `ipu.stage` and `ipu.phase`.

Input: a function, most often `jax.value_and_grad(loss)`, and the roles of its arguments: batch, keys, carried state.
Output: a function of whole batches whose results are reduced over the micro-batches: gradient accumulation.
Under plain JAX it is a `lax.scan`; `ipu.jit` compiles the same loop, or, where the function has stages (`ipu.stage`), a
pipeline in which the IPUs of the stages work on several micro-batches at once. `ipu.phase` instead has a
network too large for the chip run phase by phase, its weights in streaming memory:

    for i, layer in enumerate(layers):
        with ipu.phase(i):
            x = layer(x)

Limits: a pipeline cannot be differentiated or nested. The compiler is imported where it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import jax

from ipujax.arguments import whole_number
from ipujax.runtime.signatures import checking_calls

if TYPE_CHECKING:
    from ipujax.lowering.schedules import Schedule, ScheduleName
    from ipujax.runtime.options import Recompute

_P = ParamSpec("_P")
_R = TypeVar("_R")


class NameScope(ContextDecorator):
    """Context in which JAX adds a name to the stack of names of each equation.

    It can be entered again, nested in itself, copied and pickled. JAX's own is used once.

    Args:
        name: the name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        scope = jax.named_scope(self._name)
        scope.__enter__()
        self._entered.append(scope)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, traceback)

    def __reduce__(self) -> tuple[type[NameScope], tuple[str]]:
        return NameScope, (self._name,)


@checking_calls("ipu.pipeline")
def pipeline(
    fun: Callable[_P, _R],
    *,
    micro_batches: int,
    schedule: ScheduleName | Schedule | None = None,
    stages: int | Literal["auto"] | None = None,
    device_mapping: Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] = -1,
    rng_argnums: int | Sequence[int] = (),
    carry: Mapping[int, Any] | None = None,
    reduce: Any = "mean",
    accumulate_dtype: Any = None,
    recompute: Recompute | None = None,
) -> Callable[_P, _R]:
    """Apply a function to a batch one micro-batch at a time, and reduce its results.

    Args:
        fun: function of pytrees of arrays, of one micro-batch.
        micro_batches: number of equal parts into which the first axis of every array of the batch is split, in order.
        schedule: name of a schedule, or a `Schedule`. None is "grouped" where all IPUs sync at every copy between
            stages (`Target.global_exchange` "lockstep") and the micro-batches are enough for it, else "1f1b".
        stages: number of stages to cut the function into, or "auto" to choose it too; None for those of `ipu.stage`.
            Cuts minimise the simulated time of a pipeline that fits. They are never inside branches, and of loops only
            between iterations of a `lax.scan` over stacked parameters.
        device_mapping: IPU of each stage, by its number; that of the schedule when None, most often stage i on IPU i.
        batch_argnums: positional arguments that are split; the last one by default. One that the program has as an
            argument and reads nowhere else stays on the host, from where each stage loads its micro-batches.
        rng_argnums: positional arguments of keys: micro-batch i reads each key folded with i (`jax.random.fold_in`).
        carry: state from one micro-batch to the next: for each positional argument the path, of positions and keys, to
            the part of the results that is its next value: `{1: (0, "state")}`. The pipeline returns this part of the
            last micro-batch, unless `reduce` names it.
        reduce: reduction of results over micro-batches, one for all or a tree prefix of the results: "mean",
            "running_mean" (the same, with a mean as accumulator), "sum", "stack" (a row for each micro-batch) or
            "last". Means weight all micro-batches equally: they are those of the whole batch if each result is a mean
            over equally many elements, so not with masks.
        accumulate_dtype: dtype of accumulators and results of floating-point sums and means; that of the function's
            results when None.
        recompute: values that gradients of this pipeline compute again, see `Options.recompute`; that of the options
            when None.

    Returns:
        A function of the same arguments with whole batches.

    Raises:
        ArgumentError: invalid settings; at a call: arguments that do not match them, a batch that cannot be split, a
            pipeline inside, or a derivative through the pipeline.
    """
    from ipujax.pipeline.pipelined import pipelined

    return pipelined(
        fun,
        micro_batches=micro_batches,
        schedule=schedule,
        stages=stages,
        device_mapping=device_mapping,
        batch_argnums=batch_argnums,
        rng_argnums=rng_argnums,
        carry=carry,
        reduce=reduce,
        accumulate_dtype=accumulate_dtype,
        recompute=recompute,
    )


def stage(number: int) -> AbstractContextManager[None]:
    """Trace the code inside, and its gradients, as a stage of the model, with an IPU of its own.

    Stage i runs on IPU i of a replica, and numbers may be left out; of nested stages the innermost counts. Operations
    in no stage run on the IPU of their operands; so an optimiser's update of a parameter runs on the parameter's IPU.
    Plain JAX ignores stages.

    Args:
        number: the stage's number.

    Raises:
        ArgumentError: for anything but an integer from 0.
    """
    from ipujax.lowering.jaxpr import stage_scope

    index = whole_number("ipu.stage needs the number of a stage", number, 0)
    # A name scope: JAX copies it to gradients, through transformations and into jitted functions.
    return NameScope(stage_scope(index))


@checking_calls("ipu.phase")
def phase(number: int) -> AbstractContextManager[None]:
    """Trace the code inside as a phase of execution, which runs after those of lower numbers; gradients in reverse.

    In a program with phases all arguments are in streaming memory, as with `offload_argnums` of `ipu.jit`, and so are
    results of a phase that another than the next one reads. Each phase loads its operands. On two IPUs phases
    alternate: one loads while the other computes. Donate arguments that are updated: else their new values take memory
    of their own. Plain JAX ignores phases.

    Args:
        number: position of the phase in the order of execution, from 0.

    Raises:
        ArgumentError: for anything but an integer from 0.
    """
    from ipujax.lowering.jaxpr import phase_scope

    index = whole_number("ipu.phase needs the number of a phase", number, 0)
    # A name scope, as for `ipu.stage`: it reaches the gradients, and plain JAX ignores it.
    return NameScope(phase_scope(index))
