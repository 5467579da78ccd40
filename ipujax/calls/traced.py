"""The first stage of a function: its jaxpr for one signature. Input: a trace of JAX, and the call. Output: `Traced`.

Of a call come the pytree of its arguments, and flags of donated leaves: `CallArguments`. A signature has the pytrees,
shapes and dtypes of arguments and results; compilation stages share its attributes with those of `jax.stages`.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax

from ipujax.arguments import donated_places
from ipujax.calls.memory_kinds import may_be_offloaded
from ipujax.lowering.jax_compat import argument_names, used_inputs
from ipujax.lowering.jaxpr import axes_around, has_64_bit_values, has_phases, results_in_memories
from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentAttributeError, DeletedArgumentError
from ipujax.runtime.not_copied import Shared
from ipujax.runtime.signatures import describe
from ipujax.runtime.tracebacks import showing_user_frames
from ipujax.sharding import NO_SHARDINGS, CallShardings, Partitioning

_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "input_formats": "lowered.tile_map(), which has the order of elements on tiles",
        "output_formats": "lowered.tile_map(), which has the order of elements on tiles",
        "compiler_ir": "lowered.jaxpr, lowered.graph and lowered.program, or lowered.to_json(path)",
        "lojax": "traced.jaxpr",
    }
)


@dataclass(frozen=True, eq=False)
class Signature:
    """Pytrees, shapes and dtypes that a function was traced with; calls of a compiled function must match them.

    Args:
        in_tree: pytree of the arguments that are not static, as `(args, kwargs)`.
        in_avals: shape, dtype and weakness of each leaf.
        donated: for each leaf whether its buffer may be reused.
        offloaded: for each leaf whether it is in streaming memory.
        used: for each leaf whether the function reads it; JAX neither passes nor donates others.
        out_tree: pytree of the results.
        out_avals: shape, dtype and weakness of each leaf.
        arguments: name of each positional argument that is not static.
        leaf_names: name of each leaf of the arguments, `params['w']`.
        for_xla: `keep_unused` and `compiler_options`, by the keywords of `jax.jit`, for the computation of a call.
    """

    in_tree: Any
    in_avals: tuple[Any, ...]
    donated: tuple[bool, ...]
    offloaded: tuple[bool, ...]
    used: tuple[bool, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]
    arguments: tuple[str, ...]
    leaf_names: tuple[str, ...]
    for_xla: Mapping[str, Any] = field(default_factory=dict)

    def with_state(self, closed_over: Sequence[jax.Ref]) -> Signature:
        """Return the signature of the program, in which Refs are donated arguments; those closed over come last."""
        avals = self.in_avals
        num_refs = len(closed_over)
        return replace(
            self,
            in_avals=(*avals, *map(jax.typeof, closed_over)),
            donated=(
                *(donated or is_ref(aval) for donated, aval in zip(self.donated, avals, strict=True)),
                *num_refs * [True],
            ),
            offloaded=(*self.offloaded, *num_refs * [False]),
            used=(*self.used, *num_refs * [True]),
            leaf_names=(*self.leaf_names, *(f"Ref {n} closed over" for n in range(num_refs))),
        )

    def check_donated(self, who: str, leaves: Sequence[Any]) -> None:
        """Refuse an array that is donated and passed twice."""
        first: dict[int, int] = {}  # number of the first leaf by identity of the array
        for n, (leaf, is_used) in enumerate(zip(leaves, self.used, strict=True)):
            other = first.setdefault(id(leaf), n) if is_used and isinstance(leaf, jax.Array) else n
            if other != n and (self.donated[n] or self.donated[other]):
                names = [f"{self.leaf_names[k]}{' (donated)' if self.donated[k] else ''}" for k in (other, n)]
                raise DeletedArgumentError(
                    f"{who} was given one array as {names[0]} and as {names[1]}",
                    expected="a donated array as one argument only: its buffer is reused",
                    got=describe(leaf),
                    hint="a copy, as jnp.copy makes; or leave it out of donate_argnums",
                )


class Stage(Shared):
    """Attributes that all stages of a function share with those of `jax.stages`."""

    COPY_HINT = "compiled.save(path), and ipu.load(path); or pickle the function of ipu.jit, which compiles again"

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """Pytrees, shapes and dtypes of arguments and results."""

    @property
    def partitioning(self) -> Partitioning | None:
        """How shardings partition the function; None if they do not."""
        return None

    @property
    def output_shardings(self) -> Any:
        """Sharding of each result, a `jax.sharding.NamedSharding`, in the pytree of results.

        Raises:
            ArgumentAttributeError: shardings do not partition the function.
        """
        shardings = self._partitioned("output_shardings").result_shardings(self.signature.out_avals)
        return jax.tree.unflatten(self.signature.out_tree, shardings)

    @property
    def input_shardings(self) -> Any:
        """Sharding of each argument, likewise, as `(args, kwargs)`."""
        shardings = self._partitioned("input_shardings").argument_shardings()
        return jax.tree.unflatten(self.signature.in_tree, shardings)

    def _partitioned(self, name: str) -> Partitioning:
        if self.partitioning is None:
            problem = f"{name} exists only for functions that shardings partition"
            raise ArgumentAttributeError(problem, hint="in_shardings= of ipu.jit, or arguments with shardings")
        return self.partitioning

    @property
    def in_tree(self) -> Any:
        """Pytree of the arguments that are not static, as `(args, kwargs)`."""
        return self.signature.in_tree

    @property
    def out_tree(self) -> Any:
        """Pytree of the results."""
        return self.signature.out_tree

    @property
    def args_info(self) -> Any:
        """Shape, dtype and donation of each argument, in the pytree of arguments."""
        signature = self.signature
        infos = map(jax.stages.ArgInfo, signature.in_avals, signature.donated)
        return jax.tree.unflatten(signature.in_tree, list(infos))

    @property
    def out_info(self) -> Any:
        """Shape and dtype of each result, in the pytree of results."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in self.signature.out_avals]
        return jax.tree.unflatten(self.out_tree, shapes)

    @property
    def in_avals(self) -> Any:
        """Abstract value of each argument, in the pytree of arguments."""
        return jax.tree.unflatten(self.in_tree, self.signature.in_avals)

    @property
    def out_avals(self) -> Any:
        """Abstract value of each result, in the pytree of results."""
        return jax.tree.unflatten(self.out_tree, self.signature.out_avals)

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Numbers of the donated leaves among all leaves of the arguments."""
        return tuple(n for n, donated in enumerate(self.signature.donated) if donated)

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):  # a property has raised an AttributeError: raise it again
            return object.__getattribute__(self, name)
        # Names of `jax.stages` alone have a remedy; others, as those that `copy` and IPython try, must fail plainly.
        kind = type(self).__name__
        if name.startswith("_") or not hasattr(getattr(jax.stages, kind), name):
            raise AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=self)
        problem = f"{name} of jax.stages.{kind} does not exist for programs of IPUs"
        raise ArgumentAttributeError(problem, hint=_INSTEAD.get(name))


@dataclass(frozen=True)
class CallArguments:
    """Structure of the arguments that a function is traced for, without the static ones.

    Args:
        tree: pytree of `(args, kwargs)`.
        counts: number of leaves of each positional argument, and of all keyword arguments together.
        donated: for each leaf whether its buffer may be reused.
    """

    tree: Any
    counts: tuple[int, ...]
    donated: tuple[bool, ...]

    @staticmethod
    def of_call(
        fun: Callable[..., Any],
        positional: Mapping[int, Any],
        named: Mapping[str, Any],
        args: Sequence[Any],
        donated: tuple[Sequence[int] | None, Sequence[str] | None],
    ) -> CallArguments:
        """Return the structure of a call.

        Args:
            fun: the function.
            positional: arguments that are not static, trees of arrays, by position.
            named: likewise by name.
            args: all positional arguments.
            donated: positions and names of donated arguments, each None to follow from the other.
        """
        # The trees are those of the call: JAX's `args_info` has no arrays, which users' pytree classes may refuse.
        donated_numbers, donated_names = donated_places(fun, args, *donated)
        operands = tuple(positional.values()), dict(named)
        counts = (*map(_num_leaves, operands[0]), _num_leaves(operands[1]))
        flags = tuple(n in donated_numbers for n in positional), {name: name in donated_names for name in named}
        leaves = jax.tree.map(lambda flag, part: [flag] * _num_leaves(part), flags, operands)
        return CallArguments(jax.tree.structure(operands), counts, tuple(jax.tree.leaves(leaves)))


def _num_leaves(tree: Any) -> int:
    structure: Any = jax.tree.structure(tree)
    return int(structure.num_leaves)


class Traced(Stage):
    """A function as a jaxpr for one signature, returned by `ipu.jit(fun).trace(*args)`.

    Its attributes are those of `jax.stages.Traced`; `lower` lowers for the IPU.

    Attributes:
        jaxpr: the jaxpr; that of a replicated function has one equation, for all replicas.
        fun_name: name of the function.
        timings: seconds of tracing.
        has_64_bits: whether it is lowered and computed with `jax_enable_x64`: as it was while it was traced, or because
            the function sets it for a part of its code.
    """

    def __init__(
        self,
        traced: jax.stages.Traced,
        arguments: tuple[str, ...],
        call: CallArguments,
        timings: Mapping[str, float],
        lower: Callable[[Traced], Any],
        offloaded: frozenset[int] = frozenset(),
        shardings: CallShardings = NO_SHARDINGS,
        for_xla: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.jaxpr = traced.jaxpr
        self.fun_name = traced.fun_name
        self.timings = timings
        self.has_64_bits: bool = jax.config.jax_enable_x64 or has_64_bit_values(traced.jaxpr)  # type: ignore[attr-defined]
        self._traced = traced
        self._call = call
        self._arguments = arguments
        self._lower = lower
        self._offloaded = offloaded
        self.shardings = shardings
        self._for_xla = for_xla

    @cached_property
    def result_shardings(self) -> tuple[Any, ...]:
        """Sharding of each leaf of the results, None where any will do."""
        return self.shardings.of_results(self.fun_name, self.out_info)

    @property
    def out_info(self) -> Any:
        """Shape and dtype of each result, in the pytree of results."""
        return self._traced.out_info

    @property
    def reads_transformation(self) -> bool:
        """Whether the function reads values or axes of a transformation of JAX around the call."""
        closes_over_tracers = len(self.jaxpr.in_avals) != self._call.tree.num_leaves  # JAX makes them inputs
        return closes_over_tracers or bool(axes_around(self.jaxpr.jaxpr))

    @property
    def arguments_on_chip(self) -> list[str]:
        """Names of the arguments of `offload_argnums` of which nothing is moved: no array is large enough, or read."""
        signature = self.signature
        are_loaded = map(operator.and_, signature.offloaded, signature.used)
        numbers = [n for n, count in enumerate(self._call.counts) for _ in range(count)]
        of_loaded = {number for number, is_loaded in zip(numbers, are_loaded, strict=True) if is_loaded}
        return [self._arguments[number] for number in sorted(self._offloaded - of_loaded)]

    @cached_property
    def signature(self) -> Signature:
        """Signature that the function was traced with."""
        in_avals = tuple(self.jaxpr.in_avals)
        in_phases = has_phases(self.jaxpr.jaxpr)
        numbers = [n for n, count in enumerate(self._call.counts) for _ in range(count)]
        offloaded = tuple(
            (n in self._offloaded or in_phases) and may_be_offloaded(aval)
            for n, aval in zip(numbers, in_avals, strict=True)
        )
        return Signature(
            self._call.tree,
            in_avals,
            self._call.donated,
            offloaded,
            len(in_avals) * (True,) if self._for_xla.get("keep_unused") else used_inputs(self.jaxpr.jaxpr),
            self._traced.out_tree,
            results_in_memories(self.jaxpr),
            self._arguments,
            tuple(argument_names(self.jaxpr)),
            self._for_xla,
        )

    @showing_user_frames
    def lower(self, **settings: Any) -> Any:
        """Lower the function for its device, once; raises as `ipu.jit(fun).lower`.

        Args:
            settings: those of `jax.stages.Traced.lower`, as `jax.export.export` passes them. With any of them the
                result is JAX's, `jax.stages.Lowered`, without a program for IPUs.
        """
        if settings:
            return self._traced.lower(**settings)
        with jax.enable_x64(self.has_64_bits):
            return self._lower(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile the function and run it on arguments of its signature, without the static ones."""
        return self.lower().compile()(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Traced({self.fun_name}: {len(self.jaxpr.eqns)} equations)"
