"""Signatures of traced functions, and the attributes that compilation stages share with those of `jax.stages`.

Input: a traced function. Output: pytrees, shapes and dtypes of arguments and results.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax

from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentAttributeError, DeletedArgumentError
from ipujax.runtime.not_copied import Shared
from ipujax.runtime.signatures import describe
from ipujax.sharding import Partitioning

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
