"""Pipelined function: its settings, and the call that binds a pipeline while it is traced.

Input: the arguments of `ipu.pipeline`. Output: a function of whole batches, which binds one equation for all
micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from ipujax.arguments import argument_places, as_numbers, by_position, floating_dtype, function_name, whole_number
from ipujax.calls import PlainCalls, is_inside_function
from ipujax.calls.compiled_call import tree_in_words
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    constants_as_inputs,
    is_float0,
    with_float0,
    with_rows,
    without_float0,
)
from ipujax.lowering.jaxpr import equations, named_stages, recompute_scope
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
from ipujax.pipeline.changed_settings import PipelineChange, current_change
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.options import check_recompute
from ipujax.runtime.signatures import describe
from ipujax.runtime.target import nearest
from ipujax.runtime.tracebacks import showing_user_frames

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Narrowest kind of dtype by reduction; "stack" and "last" take any.
_REDUCIBLE = {"mean": jnp.inexact, "running_mean": jnp.inexact, "sum": jnp.number}
_SYNONYMS = {"avg": "mean", "average": "mean", "total": "sum", "final": "last"}  # of reductions, for hints
Path = tuple[Any, ...]  # keys and positions from a function's results to a part of them


def pipelined(
    fun: Callable[_P, _R],
    *,
    micro_batches: int,
    schedule: str | Schedule | None,
    stages: int | str | None,
    device_mapping: Sequence[int] | None,
    batch_argnums: int | Sequence[int],
    rng_argnums: int | Sequence[int],
    carry: Mapping[int, Any] | None,
    reduce: Any,
    accumulate_dtype: Any,
    recompute: str | None,
) -> Callable[_P, _R]:
    """Check the settings of `ipu.pipeline`, and return the function of whole batches."""
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
    plain_calls = PlainCalls(f"ipu.pipeline of {function_name(fun)} is called outside of ipu.jit: it runs as a loop")
    jitted = jax_jit(call)  # traced once, also where a pipeline is called outside of a jitted function

    @functools.wraps(fun, updated=())
    @showing_user_frames
    def of_batches(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        if not is_inside_function():
            plain_calls.notice()
        # Roles go by position: an argument passed by name has the role of its parameter.
        placed = by_position(fun, args, kwargs)
        change = current_change()
        return jitted(*placed) if change is None else _Call(fun, settings.changed(change), *placed).run()

    return of_batches


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

    def changed(self, change: PipelineChange) -> _Settings:
        return self._replace(
            micro_batches=change.micro_batches_of(self.micro_batches), schedule=change.schedule_of(self.schedule)
        )


class _Operand(NamedTuple):
    """A leaf of a call's arguments."""

    argument: int | None  # its position; None for a keyword argument
    name: str
    value: Any
    role: Role


class _Call:
    """One call of a pipelined function, while it is traced; `names` are those of its positional arguments."""

    def __init__(
        self, fun: Callable[..., Any], settings: _Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.fun = fun
        self.settings = settings
        self.args = args
        self.kwargs = kwargs
        self.who = function_name(fun)
        self.names, _ = argument_places(fun, args, (), ())

    def run(self) -> Any:
        """Bind the pipeline and return its results."""
        settings = self.settings
        operands = self._operands()
        who = f"ipu.pipeline({self.who})"
        # Micro-batches overlap on the stages: writes to a Ref would come in another order than in plain JAX.
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
            error.add_note(f"ipu.pipeline({self.who}) was tracing a micro-batch: {self._batch_hint()}")
            raise
        _refuse_nesting(traced, self.who)
        if settings.stages is None and len(named_stages(traced.jaxpr)) < 2:
            self._refuse_settings_of_stages()
        # Constants become operands, as arrays that the function closes over may be tracers of the code around.
        jaxpr, consts = constants_as_inputs(discharged_body(traced, who))
        carries = self._carries(out, jaxpr, operands)
        same: Role = "same"
        roles = [*(same for _ in consts), *(operand.role for operand in operands)]
        reductions = self._reductions(out, jaxpr, {result for _, result in carries})
        self._check_accumulate_dtype(jaxpr, reductions)
        # float0 inputs and results have no data: the pipeline is bound without them, and they are added again below.
        with_data, in_positions = without_float0(jaxpr)
        is_empty = [is_float0(aval) for aval in jaxpr.out_avals]
        out_positions = [n for n, empty in enumerate(is_empty) if not empty]
        spec = PipelineSpec(
            self.who,
            settings.micro_batches,
            tuple(roles[n] for n in in_positions),
            tuple(
                (in_positions.index(operand + len(consts)), out_positions.index(result)) for operand, result in carries
            ),
            tuple(reductions[n] for n in out_positions),
            settings.dtype,
            settings.schedule,
            settings.device_mapping,
            settings.stages,
        )
        values = [*consts, *(operand.value for operand in operands)]
        results = bind_pipeline(with_data, spec, [values[n] for n in in_positions])
        stacked = [(settings.micro_batches,) if kind == "stack" else () for kind in reductions]
        out_shapes = [(*rows, *aval.shape) for rows, aval in zip(stacked, jaxpr.out_avals, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(out), with_float0(results, is_empty, out_shapes))

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
        """Return the role of each positional argument."""
        count = len(self.names)
        roles: list[Role] = ["same"] * count
        role_settings: tuple[tuple[str, Role, Any], ...] = (
            ("batch_argnums", "batch", self.settings.batch),
            ("rng_argnums", "key", self.settings.keys),
            ("carry", "carry", self.settings.carry),
        )
        for setting, role, numbers in role_settings:
            for number in numbers:
                if not -count <= number < count:
                    raise ArgumentValueError(
                        f"{setting} of ipu.pipeline({self.who}) names an argument that the call lacks",
                        expected=f"positions of {count} positional arguments: {', '.join(self.names)}",
                        got=number,
                    )
                if roles[number] != "same":
                    raise ArgumentValueError(
                        f"argument {self.names[number]} of ipu.pipeline({self.who}) has two roles",
                        expected="an argument that is split, or of keys, or carried",
                        got=f"{roles[number]} and {role}",
                        hint=f"leave {number} out of {setting}" + ("" if role == "batch" else ", or set batch_argnums"),
                    )
                roles[number] = role
        return roles

    def _refuse_settings_of_stages(self) -> None:
        """Refuse a schedule and a device mapping of a function without stages, which would have no effect."""
        schedule = self.settings.schedule
        mapping = self.settings.device_mapping
        # "1f1b" of one stage, forward and backward in turn, is gradient accumulation, which needs no stages.
        refused = [("schedule", schedule.name)] if schedule and schedule != as_schedule("1f1b") else []
        refused += [] if mapping is None else [("device_mapping", str(list(mapping)))]
        if refused:
            name, value = refused[0]
            raise ArgumentError(
                f"{name} of ipu.pipeline({self.who}) is for stages, and the function has fewer than two",
                expected="at least two stages",
                got=f"{name}={value}",
                hint="with ipu.stage(i): around the parts of the model, or stages=...",
            )

    def _check_accumulate_dtype(self, jaxpr: ClosedJaxpr, reductions: Sequence[Reduce]) -> None:
        """Refuse a dtype of accumulators where no floating-point result is a sum or a mean."""
        dtype = self.settings.dtype
        results = list(zip(reductions, jaxpr.out_avals, strict=True))
        if dtype is None or any(kind in _REDUCIBLE and jnp.issubdtype(x.dtype, jnp.floating) for kind, x in results):
            return
        raise ArgumentError(
            f"accumulate_dtype of ipu.pipeline({self.who}) has no effect",
            expected=f"a floating-point result with reduce={' or '.join(map(repr, _REDUCIBLE))}",
            got=", ".join(f"{aval.str_short()} with {kind!r}" for kind, aval in results) or "no result",
            hint="leave accumulate_dtype out",
        )

    def _micro_batch(self, operand: _Operand) -> Any:
        """Return the type of one micro-batch's part of an operand, with the mesh axes in the type of the operand."""
        aval: Any = jax.typeof(operand.value)
        role = operand.role
        count = self.settings.micro_batches
        who = f"{operand.name} of ipu.pipeline({self.who})"
        if role == "key":
            is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
            if not (is_key or (aval.dtype == jnp.uint32 and aval.ndim == 1)) or (is_key and aval.ndim):
                expected = "one key, as jax.random.key(0) makes"
                raise ArgumentTypeError(f"{who} is not a key", expected=expected, got=aval.str_short())
        if role == "batch":
            if not aval.ndim or aval.shape[0] % count or not aval.shape[0]:
                raise ArgumentValueError(
                    f"{who} cannot be split into {count} micro-batches",
                    expected=f"a first axis of a multiple of {count}, in each replica",
                    got=aval.str_short(),
                    hint=f"a whole batch of a multiple of {count} × replicas; {self._batch_hint()}",
                )
            return self._rows_of_micro_batch(aval, who)
        # Carried state is strongly typed, as a scan's carry is, and so must be the result that replaces it.
        weak = role == "same" and bool(getattr(aval, "weak_type", False))
        return aval.update(weak_type=weak)

    def _rows_of_micro_batch(self, aval: Any, who: str) -> Any:
        """Return the type of the rows of one micro-batch; `aval` is the type of those of the batch `who`."""
        count = self.settings.micro_batches
        try:
            return with_rows(aval, aval.shape[0] // count).update(weak_type=False)
        except ValueError as error:  # of the axes of a mesh in the type
            raise ArgumentValueError(
                f"{who} cannot be split into {count} micro-batches over the axes of its type",
                expected="as many rows in each micro-batch on each device",
                got=aval.str_short(),
                hint="fewer micro-batches, or a larger batch",
            ) from error

    def _check_batch(self, operands: Sequence[_Operand]) -> None:
        """Refuse arrays of a batch with different first axes, and a batch without arrays."""
        if self.settings.batch and not operands:
            raise ArgumentValueError(
                f"the batch of ipu.pipeline({self.who}) has no arrays",
                expected="arrays whose first axis is split into micro-batches",
                got=", ".join(f"{self.names[n]} {self.args[n]!r:.60}" for n in self.settings.batch),
                hint=self._batch_hint(),
            )
        if len({jnp.shape(x.value)[0] for x in operands}) > 1:
            raise ArgumentValueError(
                f"the batch of ipu.pipeline({self.who}) has first axes of unequal size",
                expected="equally many examples in each array",
                got=", ".join(f"{x.name} {describe(x.value)}" for x in operands),
                hint=self._batch_hint(),
            )

    def _batch_in_words(self) -> str:
        """Return the arguments that `batch_argnums` selects, in words."""
        numbers = self.settings.batch
        names = ", ".join(self.names[n] for n in numbers) or "nothing"
        return f"batch_argnums={numbers[0] if len(numbers) == 1 else numbers} takes {names} for the batch"

    def _batch_hint(self) -> str:
        """Return a hint with other arguments that could be the batch: those of most rows that can be split."""
        other_roles = {n for n, role in enumerate(self._roles()) if role in ("key", "carry")}
        by_rows: dict[int, list[int]] = {}
        for n, value in enumerate(self.args):
            rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(value)} if n not in other_roles else set()
            if len(rows) == 1 and rows != {()}:
                by_rows.setdefault(rows.pop()[0], []).append(n)
        # Weights have few rows, and a batch many: the largest number that can be split is the best guess.
        fitting = [rows for rows in by_rows if rows and rows % self.settings.micro_batches == 0]
        candidates = by_rows[max(fitting)] if fitting else []
        if not candidates or set(candidates) == {n % len(self.args) for n in self.settings.batch}:
            return self._batch_in_words()
        numbers = candidates[0] if len(candidates) == 1 else tuple(candidates)
        names = ", ".join(self.names[n] for n in candidates)
        return f"batch_argnums={numbers} if {names} is the batch; {self._batch_in_words()}"

    def _carries(self, out: Any, jaxpr: ClosedJaxpr, operands: Sequence[_Operand]) -> list[tuple[int, int]]:
        """Return (number of the operand, number of the result) of all carried state."""
        numbered = jax.tree.unflatten(jax.tree.structure(out), range(len(jaxpr.out_avals)))
        pairs: list[tuple[int, int]] = []
        for argument, path in self.settings.carry.items():
            number = argument % len(self.args)
            name = self.names[number]
            path_text = "".join(f"[{key!r}]" for key in path) or "all of it"
            results = _part(numbered, path, f"carry of ipu.pipeline({self.who}) for {name}")
            structure: Any = jax.tree.structure(self.args[number])
            if structure != jax.tree.structure(results):
                raise ArgumentTypeError(
                    f"the result carried to {name} of ipu.pipeline({self.who}) has another structure",
                    expected=tree_in_words(self.args[number]),
                    got=f"{tree_in_words(results)} at {path_text}",
                )
            carried = [n for n, operand in enumerate(operands) if operand.argument == number]
            # A scan would convert a carry of another dtype or fail far from the user's line: refused here, by name.
            for operand, result in zip(carried, jax.tree.leaves(results), strict=True):
                before: Any = jax.typeof(operands[operand].value).update(weak_type=False)
                after: Any = jaxpr.out_avals[result]
                if before != after.update(weak_type=False):
                    raise ArgumentTypeError(
                        f"the result carried to {name} of ipu.pipeline({self.who}) has another type",
                        expected=before.str_short(),
                        got=f"{after.str_short()} at {path_text}",
                        hint=_hint_for_axes(name, before, after),
                    )
                pairs.append((operand, result))
        return pairs

    def _reductions(self, out: Any, jaxpr: ClosedJaxpr, carried: set[int]) -> tuple[Reduce, ...]:
        """Return the reduction of each result."""
        reduce = self.settings.reduce
        try:
            tree = jax.tree.broadcast(reduce, out)
        except (ValueError, TypeError) as error:
            raise ArgumentTypeError(
                f"reduce of ipu.pipeline({self.who}) does not match its results",
                expected=f"one reduction, or a tree that {tree_in_words(out)} begins with",
                got=repr(reduce),
            ) from error
        kinds: list[Any] = []
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(out)]
        for n, (kind, aval, path) in enumerate(zip(jax.tree.leaves(tree), jaxpr.out_avals, paths, strict=True)):
            # One reduction for all is not meant for state; a tree names the reduction of carried results too.
            kind = "last" if isinstance(reduce, str) and n in carried else kind
            needed = _REDUCIBLE.get(kind)
            if needed is not None and not (jnp.issubdtype(aval.dtype, needed) or is_float0(aval)):
                raise ArgumentTypeError(
                    f"a result of ipu.pipeline({self.who}) has no {kind}",
                    expected="numbers" if kind == "sum" else "floating-point numbers",
                    got=f"result{jax.tree_util.keystr(path)} of {aval.str_short()}",
                    hint='reduce="stack", or a tree with "sum", "stack" or "last" for that result',
                )
            kinds.append(kind)
        return tuple(kinds)


def _hint_for_axes(name: str, before: Any, after: Any) -> str | None:
    """Hint for a state whose type differs from that of its next value by the axes of a mesh alone."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return None
    state_axes, result_axes = (aval.manual_axis_type.varying for aval in (before, after))
    if state_axes == result_axes:
        return f"jax.sharding.reshard, of {name} or of the result"
    value, axes = (name, result_axes - state_axes) if result_axes > state_axes else ("result", state_axes - result_axes)
    return f'jax.lax.pcast({value}, {tuple(sorted(axes))}, to="varying")'


def _part(tree: Any, path: Path, setting: str) -> Any:
    """Return the part of a tree at a path of attributes, keys and positions; refuses a path that has no end."""
    part = tree
    for key in path:
        try:
            # A string is a field of a named tuple or dataclass, else a key of a dict.
            part = getattr(part, key) if isinstance(key, str) and hasattr(part, key) else part[key]
        except (TypeError, KeyError, IndexError) as error:
            raise ArgumentValueError(
                f"{setting} names a result that does not exist",
                expected=f"a path in {tree_in_words(tree)}",
                got=path,
            ) from error
    return part


def _refuse_nesting(jaxpr: ClosedJaxpr, who: str) -> None:
    for eqn in equations(jaxpr.jaxpr):
        if eqn.primitive in (pipeline_p, staged_pipeline_p):
            raise ArgumentError(
                f"ipu.pipeline({eqn.params['spec'].name}) is inside of ipu.pipeline({who})",
                expected="one pipeline, whose function has no pipeline inside",
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
        expected = "the IPU of each stage, from 0"
        raise ArgumentValueError("device_mapping of ipu.pipeline", expected=expected, got=repr(mapping))
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
                "reduce of ipu.pipeline must be a reduction",
                expected=", ".join(REDUCTIONS),
                got=repr(kind),
                hint=nearest(_SYNONYMS.get(kind, kind), REDUCTIONS) if isinstance(kind, str) else None,
            )
    return reduce
