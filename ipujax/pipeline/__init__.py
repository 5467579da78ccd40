"""`ipu.pipeline`: a function of a micro-batch, applied to all micro-batches of a batch.

Input: a function, most often `jax.value_and_grad(loss)`, and which of its arguments are split, folded or handed on.
Output: a function of whole batches whose results are reduced over the micro-batches: gradient accumulation.
Under plain JAX it is a `lax.scan`; `ipu.jit` compiles the same loop, or, where the function has stages (`ipu.stage`), a
pipeline in which the IPUs of the stages work on several micro-batches at once.

Limits: no derivative is taken through it, and it does not nest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from ipujax.calls import (
    argument_places,
    as_numbers,
    by_position,
    floating_dtype,
    function_name,
    tree_in_words,
    whole_number,
)
from ipujax.lowering.jax_compat import ClosedJaxpr, constants_as_inputs, is_float0, with_float0, without_float0
from ipujax.lowering.jaxpr import equations, named_stages, recompute_scope, stage_scope
from ipujax.lowering.pipelining import (
    REDUCTIONS,
    PipelineSpec,
    Reduce,
    Role,
    bind_pipeline,
    pipeline_p,
    staged_pipeline_p,
)
from ipujax.lowering.refs import discharged_body, refuse_refs
from ipujax.lowering.schedules import Schedule, as_schedule
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.options import check_recompute
from ipujax.runtime.signatures import checking_calls, described
from ipujax.runtime.target import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")
_REDUCIBLE = {"mean": jnp.inexact, "running_mean": jnp.inexact, "sum": jnp.number}
_OTHER_NAMES = {"avg": "mean", "average": "mean", "total": "sum", "final": "last"}  # of reductions
Path = tuple[Any, ...]  # keys and positions that lead to a part of a function's results


@checking_calls("ipu.pipeline")
def pipeline(
    fun: Callable[_P, _R],
    *,
    micro_batches: int,
    schedule: str | Schedule | None = None,
    stages: int | str | None = None,
    device_mapping: Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] = -1,
    rng_argnums: int | Sequence[int] = (),
    carry: Mapping[int, Any] | None = None,
    reduce: Any = "mean",
    accumulate_dtype: Any = None,
    recompute: str | None = None,
) -> Callable[_P, _R]:
    """Applies a function to a batch one micro-batch at a time, and reduces its results.

    Args:
        fun: function of pytrees of arrays, of one micro-batch.
        micro_batches: into how many equal parts the first axis of every array of the batch is split, in order.
        schedule: the order in which stages work, by name or as a `Schedule`. None takes the one that suits the
            machine: "grouped" where all IPUs meet at every exchange (`Target.global_exchange` "lockstep") and there are
            micro-batches enough for it, else "1f1b".
        stages: how many stages to find, or "auto" to find the number too; None for those that `ipu.stage` names. They
            are cut where the simulated pipeline takes least time and fits: not inside branches, and of loops between
            the iterations of a `lax.scan` over stacked parameters alone.
        device_mapping: the IPU of each stage; as the schedule has it when None, most often stage i on IPU i.
        batch_argnums: positional arguments that are split; the last one by default.
        rng_argnums: positional arguments of keys: micro-batch i gets each key folded with i (`jax.random.fold_in`).
        carry: state handed from one micro-batch to the next: for each positional argument the part of the results that
            is its next value, as a path of positions and keys: `{1: (0, "state")}`. That part of the results is as the
            last micro-batch leaves it, unless `reduce` names it.
        reduce: what becomes of the results of all micro-batches, for all of them or as a tree whose leaves each stand
            for a part of the results: "mean", "running_mean" (the same, of which no more than a mean is ever held),
            "sum", "stack" (one row a micro-batch) or "last". In a mean all micro-batches count alike: it is that of the
            whole batch if each result is a mean over as many elements, so not with masks.
        accumulate_dtype: dtype in which sums and means of floating-point results are accumulated and returned; their
            own when None.
        recompute: which values gradients compute again in place of keeping them, as `Options.recompute`, for this
            pipeline; what the options say when None.

    Returns:
        A function of the same arguments with whole batches.

    Raises:
        ArgumentError: for settings that make no sense; at a call for arguments that do not fit them, for a batch that
            cannot be split, for a pipeline inside, and for a derivative taken through the pipeline.
    """
    if not callable(fun):
        raise ArgumentTypeError("ipu.pipeline needs a function", expected="a callable", got=repr(fun))
    if recompute is not None:
        check_recompute("recompute of ipu.pipeline", recompute)
    settings = _Settings(
        whole_number("micro_batches of ipu.pipeline", micro_batches, 1, "a whole number of at least 1"),
        None if schedule is None else as_schedule(schedule),
        _checked_stages(stages),
        _checked_mapping(device_mapping),
        as_numbers("batch_argnums", batch_argnums, "ipu.pipeline"),
        as_numbers("rng_argnums", rng_argnums, "ipu.pipeline"),
        _checked_carry(carry),
        _checked_reductions(reduce),
        None if accumulate_dtype is None else floating_dtype("accumulate_dtype of ipu.pipeline", accumulate_dtype),
        recompute,
    )

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _Call(fun, settings, args, kwargs).run()

    call.__name__ = call.__qualname__ = f"pipeline_{function_name(fun)}"
    jitted = jax.jit(call)  # so that a pipeline called outside of a jitted function is traced once

    @functools.wraps(fun, updated=())
    def pipelined(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return jitted(*by_position(fun, args, kwargs))

    return pipelined


@contextmanager
def stage(number: int) -> Iterator[None]:
    """Makes all that is traced inside, and its gradients, a stage of the model, with an IPU of its own.

    Stages are numbered from 0; of nested stages the innermost counts. Operations in no stage run where their operands
    are; an optimiser's update of a parameter runs where the parameter is. Plain JAX ignores stages.

    Args:
        number: the stage's number.

    Raises:
        ArgumentError: for anything but a whole number from 0.
    """
    checked = whole_number("ipu.stage needs the number of a stage", number, 0)
    with jax.named_scope(stage_scope(checked)):
        yield


class _Settings(NamedTuple):
    """Checked settings of `pipeline`."""

    micro_batches: int
    schedule: Schedule | None
    stages: int | Literal["auto"] | None
    device_mapping: tuple[int, ...] | None
    batch: tuple[int, ...]
    keys: tuple[int, ...]
    carry: dict[int, Path]
    reduce: Any
    dtype: Any
    recompute: str | None


class _Operand(NamedTuple):
    """A leaf of a call's arguments."""

    argument: int | None  # its position; None for one given by name
    name: str
    value: Any
    role: Role


class _Call:
    """One call of a pipelined function, while it is traced."""

    def __init__(
        self, fun: Callable[..., Any], settings: _Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.fun, self.settings, self.args, self.kwargs = fun, settings, args, kwargs
        self.who = function_name(fun)
        self.names, _ = argument_places(fun, args, (), ())

    def run(self) -> Any:
        """Binds the pipeline and returns its results."""
        settings, operands = self.settings, self._operands()
        who = f"ipu.pipeline({self.who})"
        refuse_refs(who, "is given", [operand.value for operand in operands])
        shapes = [self._micro_batch(operand) for operand in operands]
        self._check_batch([operand for operand in operands if operand.role == "batch"])
        structure = jax.tree.structure((self.args, self.kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            mode = settings.recompute
            with jax.named_scope(recompute_scope(mode)) if mode else nullcontext():
                return self.fun(*args, **kwargs)

        try:
            traced, out = jax.make_jaxpr(flat, return_shape=True)(*shapes)
        except (TypeError, ValueError) as error:
            error.add_note(f"ipu.pipeline({self.who}) was tracing a micro-batch: {self._what_to_split()}")
            raise
        _refuse_nesting(traced, self.who)
        if settings.stages is None and len(named_stages(traced.jaxpr)) < 2:
            self._refuse_settings_of_stages()
        jaxpr, consts = constants_as_inputs(discharged_body(traced, who))
        carries = self._carries(out, operands)
        same: Role = "same"
        roles = [*(same for _ in consts), *(operand.role for operand in operands)]
        reductions = self._reductions(out, jaxpr, {result for _, result in carries})
        with_data, kept = without_float0(jaxpr)
        is_empty = [is_float0(aval) for aval in jaxpr.out_avals]
        given = [n for n, empty in enumerate(is_empty) if not empty]
        spec = PipelineSpec(
            self.who,
            settings.micro_batches,
            tuple(roles[n] for n in kept),
            tuple((kept.index(operand + len(consts)), given.index(result)) for operand, result in carries),
            tuple(reductions[n] for n in given),
            settings.dtype,
            settings.schedule,
            settings.device_mapping,
            settings.stages,
        )
        values = [*consts, *(operand.value for operand in operands)]
        results = bind_pipeline(with_data, spec, [values[n] for n in kept])
        stacked = [(settings.micro_batches,) if kind == "stack" else () for kind in reductions]
        whole_shapes = [(*rows, *aval.shape) for rows, aval in zip(stacked, jaxpr.out_avals, strict=True)]
        whole = with_float0(results, is_empty, whole_shapes)
        return jax.tree.unflatten(jax.tree.structure(out), whole)

    def _operands(self) -> list[_Operand]:
        groups: list[tuple[int | None, str, Any, Role]] = [
            *zip(range(len(self.args)), self.names, self.args, self._roles(), strict=True),
            (None, "", self.kwargs, "same"),
        ]
        return [
            _Operand(number, f"{name}{jax.tree_util.keystr(path)}", leaf, role)
            for number, name, value, role in groups
            for path, leaf in jax.tree_util.tree_leaves_with_path(value)
        ]

    def _roles(self) -> list[Role]:
        """The role of each positional argument."""
        count, settings = len(self.names), self.settings
        roles: list[Role] = ["same"] * count
        given: tuple[tuple[str, Role, Any], ...] = (
            ("batch_argnums", "batch", settings.batch),
            ("rng_argnums", "key", settings.keys),
            ("carry", "carry", settings.carry),
        )
        for setting, role, numbers in given:
            for number in numbers:
                if not -count <= number < count:
                    raise ArgumentValueError(
                        f"{setting} of ipu.pipeline({self.who}) names an argument that the call lacks",
                        expected=f"positions of {count} positional arguments: {', '.join(self.names)}",
                        got=number,
                    )
                if roles[number] != "same":
                    raise ArgumentValueError(
                        f"argument {self.names[number]} of ipu.pipeline({self.who}) is given two roles",
                        expected="an argument that is split, or of keys, or carried",
                        got=f"{roles[number]} and {role}",
                        hint=f"leave {number} out of {setting}" + ("" if role == "batch" else ", or set batch_argnums"),
                    )
                roles[number] = role
        return roles

    def _refuse_settings_of_stages(self) -> None:
        schedule, mapping = self.settings.schedule, self.settings.device_mapping
        # Forward and backward in turn on one stage is accumulation: "1f1b" says what happens.
        given = [("schedule", schedule.name)] if schedule and schedule != as_schedule("1f1b") else []
        given += [] if mapping is None else [("device_mapping", str(list(mapping)))]
        if given:
            name, value = given[0]
            raise ArgumentError(
                f"{name} of ipu.pipeline({self.who}) is for stages, and the function has none",
                expected="at least two stages",
                got=f"{name}={value}",
                hint="with ipu.stage(i): around the parts of the model, or stages=...",
            )

    def _micro_batch(self, operand: _Operand) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one micro-batch's part of an operand."""
        aval, role, count = jax.typeof(operand.value), operand.role, self.settings.micro_batches
        what = f"{operand.name} of ipu.pipeline({self.who})"
        if role == "key":
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            if not (is_key or (aval.dtype == jnp.uint32 and aval.ndim == 1)) or (is_key and aval.ndim):
                expected = "one key, as jax.random.key(0) makes"
                raise ArgumentTypeError(f"{what} is no key", expected=expected, got=aval.str_short())
        if role == "batch":
            if not aval.ndim or aval.shape[0] % count or not aval.shape[0]:
                raise ArgumentValueError(
                    f"{what} cannot be split into {count} micro-batches",
                    expected=f"a first axis of a multiple of {count}, in each replica",
                    got=aval.str_short(),
                    hint=f"a whole batch of a multiple of {count} × replicas; {self._what_to_split()}",
                )
            return jax.ShapeDtypeStruct((aval.shape[0] // count, *aval.shape[1:]), aval.dtype)
        weak = role == "same" and bool(getattr(aval, "weak_type", False))
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)

    def _check_batch(self, operands: Sequence[_Operand]) -> None:
        """Refuses arrays of a batch that are not of one size, and a batch without arrays."""
        if self.settings.batch and not operands:
            raise ArgumentValueError(
                f"the batch of ipu.pipeline({self.who}) has no arrays",
                expected="arrays whose first axis is split into micro-batches",
                got=", ".join(f"{self.names[n]} {self.args[n]!r:.60}" for n in self.settings.batch),
                hint=self._what_to_split(),
            )
        if len({jnp.shape(x.value)[0] for x in operands}) > 1:
            raise ArgumentValueError(
                f"the batch of ipu.pipeline({self.who}) has first axes of unequal size",
                expected="as many examples in each array",
                got=", ".join(f"{x.name} {described(x.value)}" for x in operands),
                hint=self._what_to_split(),
            )

    def _what_is_split(self) -> str:
        """The arguments that `batch_argnums` selects, in words."""
        numbers = self.settings.batch
        names = ", ".join(self.names[n] for n in numbers) or "nothing"
        return f"batch_argnums={numbers[0] if len(numbers) == 1 else numbers} takes {names} for the batch"

    def _what_to_split(self) -> str:
        """What `batch_argnums` selects, and which arguments could be the batch: those of most rows."""
        taken = {n for n, role in enumerate(self._roles()) if role in ("key", "carry")}
        by_rows: dict[int, list[int]] = {}
        for n, value in enumerate(self.args):
            rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(value)} if n not in taken else set()
            if len(rows) == 1 and rows != {()}:
                by_rows.setdefault(rows.pop()[0], []).append(n)
        fitting = [rows for rows in by_rows if rows and rows % self.settings.micro_batches == 0]
        found = by_rows[max(fitting)] if fitting else []
        if not found or set(found) == {n % len(self.args) for n in self.settings.batch}:
            return self._what_is_split()
        wanted, names = found[0] if len(found) == 1 else tuple(found), ", ".join(self.names[n] for n in found)
        return f"batch_argnums={wanted} if {names} is the batch; {self._what_is_split()}"

    def _carries(self, out: Any, operands: Sequence[_Operand]) -> list[tuple[int, int]]:
        """(operand, result) of all carried state."""
        leaves, tree = jax.tree.flatten(out)
        numbered = jax.tree.unflatten(tree, range(len(leaves)))
        pairs: list[tuple[int, int]] = []
        for argument, path in self.settings.carry.items():
            number = argument % len(self.args)
            name, shown = self.names[number], "".join(f"[{key!r}]" for key in path) or "all of it"
            results = _part(numbered, path, f"carry of ipu.pipeline({self.who}) for {name}")
            expected, got = tree_in_words(self.args[number]), tree_in_words(results)
            if got != expected:
                raise ArgumentTypeError(
                    f"the result carried to {name} of ipu.pipeline({self.who}) has another structure",
                    expected=expected,
                    got=f"{got} at {shown}",
                )
            carried = [n for n, operand in enumerate(operands) if operand.argument == number]
            for operand, result in zip(carried, jax.tree.leaves(results), strict=True):
                before, after = jax.typeof(operands[operand].value), leaves[result]
                if (before.shape, before.dtype) != (after.shape, after.dtype):
                    raise ArgumentTypeError(
                        f"the result carried to {name} of ipu.pipeline({self.who}) has another shape or dtype",
                        expected=before.str_short(),
                        got=f"{after.dtype}{list(after.shape)} at {shown}",
                    )
                pairs.append((operand, result))
        return pairs

    def _reductions(self, out: Any, jaxpr: ClosedJaxpr, carried: set[int]) -> tuple[Reduce, ...]:
        """How each result is reduced."""
        reduce = self.settings.reduce
        try:
            tree = jax.tree.broadcast(reduce, out)
        except (ValueError, TypeError) as error:
            raise ArgumentTypeError(
                f"reduce of ipu.pipeline({self.who}) does not fit its results",
                expected=f"one reduction, or a tree that {tree_in_words(out)} begins with",
                got=repr(reduce),
            ) from error
        kinds: list[Any] = []
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        for n, (kind, aval, path) in enumerate(zip(jax.tree.leaves(tree), jaxpr.out_avals, paths, strict=True)):
            kind = "last" if isinstance(reduce, str) and n in carried else kind
            needed = _REDUCIBLE.get(kind)
            if needed is not None and not (jnp.issubdtype(aval.dtype, needed) or is_float0(aval)):
                raise ArgumentTypeError(
                    f"the {kind} of a result of ipu.pipeline({self.who}) is asked for, which has none",
                    expected="numbers" if kind == "sum" else "floating-point numbers",
                    got=f"result{jax.tree_util.keystr(path)} of {aval.str_short()}",
                    hint='reduce="stack", or a tree with "sum", "stack" or "last" for that result',
                )
            kinds.append(kind)
        return tuple(kinds)


def _part(tree: Any, path: Path, what: str) -> Any:
    """The part of a tree at a path.

    Raises:
        ArgumentValueError: if there is none.
    """
    found = tree
    for key in path:
        try:
            found = getattr(found, key) if isinstance(key, str) and hasattr(found, key) else found[key]
        except (TypeError, KeyError, IndexError) as error:
            raise ArgumentValueError(
                f"{what} names a result that is not there",
                expected=f"a path in {tree_in_words(tree)}",
                got=path,
            ) from error
    return found


def _refuse_nesting(jaxpr: ClosedJaxpr, who: str) -> None:
    for eqn in equations(jaxpr.jaxpr):
        if eqn.primitive in (pipeline_p, staged_pipeline_p):
            raise ArgumentError(
                f"ipu.pipeline({eqn.params['spec'].name}) is inside of ipu.pipeline({who})",
                expected="one pipeline around what is not pipelined",
                got=f"{eqn.params['spec'].micro_batches} micro-batches inside",
                hint="one ipu.pipeline with the product of both numbers of micro-batches",
            )


# --- settings ---------------------------------------------------------------------------------------------------------


def _checked_stages(stages: Any) -> int | Literal["auto"] | None:
    if stages is None:
        return None
    if isinstance(stages, str) and stages == "auto":
        return "auto"
    return whole_number("stages of ipu.pipeline", stages, 2, 'a whole number of at least 2, "auto", or None')


def _checked_mapping(mapping: Any) -> tuple[int, ...] | None:
    if mapping is None:
        return None
    numbers = as_numbers("device_mapping", mapping, "ipu.pipeline", of="IPUs of stages")
    if not numbers or min(numbers) < 0:
        what = "device_mapping of ipu.pipeline"
        raise ArgumentValueError(what, expected="the IPU of each stage, from 0", got=repr(mapping))
    return numbers


def _checked_carry(carry: Any) -> dict[int, Path]:
    if carry is None:
        return {}
    if not isinstance(carry, Mapping):
        expected = "{position of an argument: path of a result}"
        raise ArgumentTypeError("carry of ipu.pipeline", expected=expected, got=repr(carry))
    numbers = as_numbers("the keys of carry", tuple(carry), "ipu.pipeline")
    paths = (path if isinstance(path, tuple) else (path,) for path in carry.values())
    return dict(zip(numbers, paths, strict=True))


def _checked_reductions(reduce: Any) -> Any:
    for kind in [None] if reduce is None else jax.tree.leaves(reduce):
        if not isinstance(kind, str) or kind not in REDUCTIONS:
            raise ArgumentValueError(
                "reduce of ipu.pipeline names no reduction",
                expected=", ".join(REDUCTIONS),
                got=repr(kind),
                hint=nearest(_OTHER_NAMES.get(kind, kind), REDUCTIONS) if isinstance(kind, str) else None,
            )
    return reduce
