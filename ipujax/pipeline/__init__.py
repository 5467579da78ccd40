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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.calls import argument_places, as_numbers, by_position, described, function_name, knowing_keywords
from ipujax.lowering.jax_compat import ClosedJaxpr, constants_as_inputs, is_float0, jaxprs_in_params
from ipujax.lowering.jaxpr import named_stages, stage_scope
from ipujax.lowering.pipelining import (
    REDUCTIONS,
    PipelineSpec,
    Reduce,
    Role,
    bind_pipeline,
    pipeline_p,
    staged_pipeline_p,
)
from ipujax.lowering.schedules import Schedule, as_schedule
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.target import nearest

_P = ParamSpec("_P")
_R = TypeVar("_R")
Path = tuple[Any, ...]  # keys and positions that lead to a part of a function's results


@knowing_keywords
def pipeline(
    fun: Callable[_P, _R],
    *,
    micro_batches: int,
    schedule: str | Schedule = "1f1b",
    stages: int | str | None = None,
    device_mapping: Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] = -1,
    rng_argnums: int | Sequence[int] = (),
    carry: Mapping[int, Any] | None = None,
    reduce: Any = "mean",
    accumulate_dtype: Any = None,
) -> Callable[_P, _R]:
    """Applies a function to a batch one micro-batch at a time, and reduces its results.

    Args:
        fun: function of pytrees of arrays, of one micro-batch.
        micro_batches: into how many equal parts the first axis of every array of the batch is split, in order.
        schedule: the order in which stages work, by name or as a `Schedule`; the default without stages.
        stages: how many stages to find, or "auto" to find the number too; None for those that `ipu.stage` names. They
            are cut where the simulated pipeline takes least time and fits: not inside branches, and of loops between
            the turns of a `lax.scan` over stacked parameters alone.
        device_mapping: the IPU of each stage; as the schedule has it when None, most often stage i on IPU i.
        batch_argnums: positional arguments that are split; the last one by default.
        rng_argnums: positional arguments of keys: micro-batch i gets each key folded with i (`jax.random.fold_in`).
        carry: state handed from one micro-batch to the next: for each positional argument the part of the results that
            is its next value, as a path of positions and keys: `{1: (0, "state")}`. That part of the results is as the
            last micro-batch leaves it, unless `reduce` names it.
        reduce: what becomes of the results of all micro-batches, for all of them or as a tree whose leaves each stand
            for a part of the results: "mean", "running_mean" (the same, of which no more than a mean is ever held),
            "sum", "stack" (one row a micro-batch) or "last".
        accumulate_dtype: dtype in which sums and means of floating-point results are accumulated and returned; their
            own when None.

    Returns:
        A function of the same arguments with whole batches.

    Raises:
        ArgumentError: for settings that make no sense; at a call for arguments that do not fit them, for a batch that
            cannot be split, for a pipeline inside, and for a derivative taken through the pipeline.
    """
    if not callable(fun):
        raise ArgumentTypeError("ipu.pipeline needs a function", expected="a callable", got=repr(fun))
    count = _checked_count(micro_batches)
    order = _Order(as_schedule(schedule), _checked_mapping(device_mapping), _checked_stages(stages))
    numbers = _Numbers(
        as_numbers("batch_argnums", batch_argnums, "ipu.pipeline"),
        as_numbers("rng_argnums", rng_argnums, "ipu.pipeline"),
        _checked_carry(carry),
    )
    _check_reductions(reduce)
    dtype = _checked_dtype(accumulate_dtype)

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _Call(fun, count, order, numbers, reduce, dtype, args, kwargs).run()

    call.__name__ = call.__qualname__ = f"pipeline_{function_name(fun)}"
    jitted = jax.jit(call)  # so that a pipeline called outside of a jitted function is traced once

    @functools.wraps(fun, updated=())
    def pipelined(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        return jitted(*by_position(fun, args, kwargs))

    return pipelined


@contextmanager
def stage(number: int) -> Iterator[None]:
    """Makes all that is traced inside, and its gradients, a stage of the model, with an IPU of its own.

    Stages are numbered from 0; of stages inside one another the innermost counts. What is in no stage is done where its
    operands are; an optimiser's update of a parameter where the parameter is. Plain JAX ignores stages.

    Args:
        number: the stage's number.

    Raises:
        ArgumentError: for what is no number of a stage.
    """
    if isinstance(number, bool) or not hasattr(number, "__index__") or number.__index__() < 0:
        what = "ipu.stage needs the number of a stage"
        raise ArgumentValueError(what, expected="a whole number from 0", got=repr(number))
    with jax.named_scope(stage_scope(number.__index__())):
        yield


@dataclass(frozen=True, slots=True)
class _Order:
    """Who works when, and where."""

    schedule: Schedule
    device_mapping: tuple[int, ...] | None
    stages: int | Literal["auto"] | None

    def refuse_without_stages(self, who: str) -> None:
        """Refuses what only stages can have.

        Raises:
            ArgumentError: naming the setting.
        """
        given = {"schedule": self.schedule.name} if self.schedule != as_schedule("1f1b") else {}
        given |= {} if self.device_mapping is None else {"device_mapping": str(list(self.device_mapping))}
        for name, value in given.items():
            raise ArgumentError(
                f"{name} of ipu.pipeline({who}) is for stages, and the function has none",
                expected="at least two stages",
                got=f"{name}={value}",
                hint="with ipu.stage(i): around the parts of the model, or stages=...",
            )


class _Numbers:
    """Which positional arguments are what."""

    def __init__(self, batch: tuple[int, ...], keys: tuple[int, ...], carry: dict[int, Path]) -> None:
        self.batch, self.keys, self.carry = batch, keys, carry

    def roles(self, fun: Callable[..., Any], names: Sequence[str]) -> list[Role]:
        """The role of each argument of a call.

        Raises:
            ArgumentValueError: for a position the call lacks, or an argument that would be two things.
        """
        count = len(names)
        roles: list[Role] = ["same"] * count
        given: tuple[tuple[str, Role, Any], ...] = (
            ("batch_argnums", "batch", self.batch),
            ("rng_argnums", "key", self.keys),
            ("carry", "carry", self.carry),
        )
        for setting, role, numbers in given:
            for number in numbers:
                if not -count <= number < count:
                    raise ArgumentValueError(
                        f"{setting} of ipu.pipeline({function_name(fun)}) names an argument that the call lacks",
                        expected=f"positions of {count} positional arguments: {', '.join(names)}",
                        got=number,
                    )
                if roles[number] != "same":
                    raise ArgumentValueError(
                        f"argument {names[number]} of ipu.pipeline({function_name(fun)}) is given two roles",
                        expected="an argument that is split, or of keys, or carried",
                        got=f"{roles[number]} and {role}",
                        hint=f"leave {number} out of {setting}" + ("" if role == "batch" else ", or set batch_argnums"),
                    )
                roles[number] = role
        return roles


class _Call:
    """One call of a pipelined function, while it is traced."""

    def __init__(
        self,
        fun: Callable[..., Any],
        count: int,
        order: _Order,
        numbers: _Numbers,
        reduce: Any,
        dtype: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.fun, self.count, self.order = fun, count, order
        self.numbers, self.reduce, self.dtype = numbers, reduce, dtype
        self.args, self.kwargs = args, kwargs
        self.who = function_name(fun)
        self.names, _ = argument_places(fun, args, (), ())

    def run(self) -> Any:
        """Binds the pipeline and returns its results."""
        places, operands, roles = self._operands()
        shapes = [self._micro_batch(*each) for each in zip(places, operands, roles, strict=True)]
        self._check_batch(
            [(name, x) for (_, name), x, role in zip(places, operands, roles, strict=True) if role == "batch"]
        )
        structure = jax.tree.structure((self.args, self.kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = jax.tree.unflatten(structure, leaves)
            return self.fun(*args, **kwargs)

        try:
            traced, out = jax.make_jaxpr(flat, return_shape=True)(*shapes)
        except (TypeError, ValueError) as error:
            error.add_note(f"ipu.pipeline({self.who}) was tracing a micro-batch: {self._what_is_split()}")
            raise
        _refuse_nesting(traced, self.who)
        if self.order.stages is None and len(named_stages(traced.jaxpr)) < 2:
            self.order.refuse_without_stages(self.who)
        jaxpr, consts = constants_as_inputs(traced)
        carries = self._carries(out, [name for name, _ in places])
        same: Role = "same"
        spec = PipelineSpec(
            self.who,
            self.count,
            (*(same for _ in consts), *roles),
            tuple((operand + len(consts), result) for operand, result in carries),
            self._reductions(out, jaxpr, {result for _, result in carries}),
            self.dtype,
            self.order.schedule,
            self.order.device_mapping,
            self.order.stages,
        )
        results = bind_pipeline(jaxpr, spec, [*consts, *operands])
        done = [
            np.zeros(x.shape, aval.dtype) if is_float0(aval) else x
            for x, aval in zip(results, jaxpr.out_avals, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(out), done)

    def _operands(self) -> tuple[list[tuple[int | None, str]], list[Any], list[Role]]:
        """For each leaf of the arguments: the position of its argument and its name, itself, and its role."""
        of_argument = self.numbers.roles(self.fun, self.names)
        places: list[tuple[int | None, str]] = []
        operands, roles = [], []
        for number, (name, value) in enumerate(zip(self.names, self.args, strict=True)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                places.append((number, f"{name}{jax.tree_util.keystr(path)}"))
                operands.append(leaf)
                roles.append(of_argument[number])
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.kwargs):
            places.append((None, jax.tree_util.keystr(path)))
            operands.append(leaf)
            roles.append("same")
        return places, operands, roles

    def _micro_batch(self, place: tuple[int | None, str], operand: Any, role: Role) -> jax.ShapeDtypeStruct:
        """What the function gets of an operand.

        Raises:
            ArgumentError: for a batch that cannot be split, or a key that is none.
        """
        aval, (_, name) = jax.typeof(operand), place
        what = f"{name} of ipu.pipeline({self.who})"
        if role == "key":
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            if not (is_key or (aval.dtype == jnp.uint32 and aval.ndim == 1)) or (is_key and aval.ndim):
                expected = "one key, as jax.random.key(0) makes"
                raise ArgumentTypeError(f"{what} is no key", expected=expected, got=aval.str_short())
        if role == "batch":
            if not aval.ndim or aval.shape[0] % self.count or not aval.shape[0]:
                raise ArgumentValueError(
                    f"{what} cannot be split into {self.count} micro-batches",
                    expected=f"a first axis of a multiple of {self.count}, in each replica",
                    got=aval.str_short(),
                    hint=f"a whole batch of a multiple of {self.count} × replicas; {self._what_is_split()}",
                )
            return jax.ShapeDtypeStruct((aval.shape[0] // self.count, *aval.shape[1:]), aval.dtype)
        weak = role == "same" and bool(getattr(aval, "weak_type", False))
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)

    def _check_batch(self, leaves: Sequence[tuple[str, Any]]) -> None:
        """Refuses arrays of a batch that are not of one size.

        Raises:
            ArgumentValueError: naming the arrays.
        """
        if len({jnp.shape(x)[0] for _, x in leaves}) > 1:
            raise ArgumentValueError(
                f"the batch of ipu.pipeline({self.who}) has first axes of unequal size",
                expected="as many examples in each array",
                got=", ".join(f"{name} {described(x)}" for name, x in leaves),
                hint=self._what_is_split(),
            )

    def _what_is_split(self) -> str:
        """What `batch_argnums` takes for the batch, in words."""
        numbers, names = self.numbers.batch, ", ".join(self.names[n] for n in self.numbers.batch) or "nothing"
        return f"batch_argnums={numbers[0] if len(numbers) == 1 else numbers} takes {names} for the batch"

    def _carries(self, out: Any, places: Sequence[int | None]) -> list[tuple[int, int]]:
        """(operand, result) of all state that is handed on."""
        numbered = jax.tree.unflatten(jax.tree.structure(out), range(len(jax.tree.leaves(out))))
        pairs: list[tuple[int, int]] = []
        for argument, path in self.numbers.carry.items():
            number = argument % len(self.args)
            name, shown = self.names[number], "".join(f"[{key!r}]" for key in path) or "all of it"
            results = _part(numbered, path, f"carry of ipu.pipeline({self.who}) for {name}")
            expected, got = str(jax.tree.structure(self.args[number])), str(jax.tree.structure(results))
            if got != expected:
                raise ArgumentTypeError(
                    f"the result carried to {name} of ipu.pipeline({self.who}) has another structure",
                    expected=expected,
                    got=f"{got} at {shown}",
                )
            operands = [n for n, of in enumerate(places) if of == number]
            leaves = jax.tree.leaves(out)
            for operand, result in zip(operands, jax.tree.leaves(results), strict=True):
                before, after = jax.typeof(jax.tree.leaves((self.args, self.kwargs))[operand]), leaves[result]
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
        one_for_all = isinstance(self.reduce, str)
        try:
            tree = jax.tree.map(lambda kind, part: jax.tree.map(lambda _: kind, part), self.reduce, out)
        except (ValueError, TypeError) as error:
            raise ArgumentTypeError(
                f"reduce of ipu.pipeline({self.who}) does not fit its results",
                expected=f"one reduction, or a tree that {jax.tree.structure(out)} begins with",
                got=repr(self.reduce),
            ) from error
        kinds: list[Any] = []
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        for n, (kind, aval, path) in enumerate(zip(jax.tree.leaves(tree), jaxpr.out_avals, paths, strict=True)):
            kind = "last" if one_for_all and n in carried else kind
            averaged = kind in ("mean", "running_mean")
            needed = jnp.inexact if averaged else jnp.number if kind == "sum" else None
            if needed is not None and not (jnp.issubdtype(aval.dtype, needed) or is_float0(aval)):
                raise ArgumentTypeError(
                    f"the {kind} of a result of ipu.pipeline({self.who}) is asked for, which has none",
                    expected="floating-point numbers" if averaged else "numbers",
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
                expected=f"a path in {jax.tree.structure(tree)}",
                got=path,
            ) from error
    return found


def _refuse_nesting(jaxpr: ClosedJaxpr, who: str) -> None:
    found = [jaxpr.jaxpr]
    while found:
        inner = found.pop()
        for eqn in inner.eqns:
            if eqn.primitive in (pipeline_p, staged_pipeline_p):
                raise ArgumentError(
                    f"ipu.pipeline({eqn.params['spec'].name}) is inside of ipu.pipeline({who})",
                    expected="one pipeline around what is not pipelined",
                    got=f"{eqn.params['spec'].micro_batches} micro-batches inside",
                    hint="one ipu.pipeline with the product of both numbers of micro-batches",
                )
            found.extend(getattr(j, "jaxpr", j) for j in jaxprs_in_params(eqn.params))


# --- settings ---------------------------------------------------------------------------------------------------------


def _checked_count(micro_batches: Any) -> int:
    is_whole = hasattr(micro_batches, "__index__") and not isinstance(micro_batches, bool)
    if not is_whole or micro_batches.__index__() < 1:
        expected = "a whole number of at least 1"
        raise ArgumentValueError("micro_batches of ipu.pipeline", expected=expected, got=repr(micro_batches))
    return int(micro_batches)


def _checked_stages(stages: Any) -> int | Literal["auto"] | None:
    if stages is None or stages == "auto":
        return stages
    is_whole = hasattr(stages, "__index__") and not isinstance(stages, bool)
    if not is_whole or stages.__index__() < 2:
        expected = 'a whole number of at least 2, "auto", or None'
        raise ArgumentValueError("stages of ipu.pipeline", expected=expected, got=repr(stages))
    return int(stages)


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
    (*numbers,) = as_numbers("the keys of carry", tuple(carry), "ipu.pipeline")
    return {
        number: path if isinstance(path, tuple) else (path,)
        for number, path in zip(numbers, carry.values(), strict=True)
    }


def _check_reductions(reduce: Any) -> None:
    for kind in [None] if reduce is None else jax.tree.leaves(reduce):
        if kind not in REDUCTIONS:
            raise ArgumentValueError(
                "reduce of ipu.pipeline names no reduction",
                expected=", ".join(REDUCTIONS),
                got=repr(kind),
                hint=nearest(kind, REDUCTIONS) if isinstance(kind, str) else None,
            )


def _checked_dtype(dtype: Any) -> Any:
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        what = "accumulate_dtype of ipu.pipeline"
        raise ArgumentTypeError(what, expected="a floating-point dtype, as jnp.float32", got=repr(dtype))
    return found
