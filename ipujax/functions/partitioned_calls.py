"""Calls of a function that shardings partition, by JAX's dispatch.

The program of all IPUs is computed on one device of the host. A call moves its arrays there, runs the program, and puts
the results on the devices of the mesh. JAX finds the program by shapes and its settings, as for any jitted function;
what JAX does not see there, the shardings of arguments and the meshes that are set, are looked up here.

Input: the arguments of a call. Output: its results. Programs are compiled at the first call by shapes and shardings.
Limits: a program that is not partitioned after all, as for copies on all devices, is looked up by tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from ipujax.functions.function_compiler import FunctionCompiler
from ipujax.lowering.jax_compat import to_device, to_memory_of
from ipujax.lowering.partition import running_without_mesh
from ipujax.sharding import current_mesh, to_one_device
from ipujax.stages import Compiled, Lowered


@dataclass(frozen=True, eq=False)
class _Ending:
    """End of the calls of one program: results are put where they belong, and moved arguments that are donated deleted.

    Args:
        lowered: the program.
        dynamic: positions of the leaves that are not static among all leaves of the arguments.
        place: puts the results, a list, on the devices of the mesh.
    """

    lowered: Lowered
    dynamic: tuple[int, ...]
    place: Callable[[list[Any]], list[Any]]

    def results(self, outs: list[Any], leaves: list[Any], moved: Mapping[int, Any]) -> Any:
        """Return the pytree of results.

        Args:
            outs: results of the program on one device.
            leaves: all leaves of the arguments.
            moved: those that were moved, by position; they are deleted if they are donated.
        """
        signature = self.lowered.signature
        if self.lowered.calls is not None:
            from ipujax.runtime.host import wait_for_calls

            outs = wait_for_calls(outs, [self.lowered.calls])
        if any(signature.donated):
            signature.check_donated(self.lowered.name, [leaves[n] for n in self.dynamic])
            for n, donated in zip(self.dynamic, signature.donated, strict=True):
                if donated and n in moved:
                    leaves[n].delete()
        in_memories = [to_memory_of(x, aval) for x, aval in zip(outs, signature.out_avals, strict=True)]
        return jax.tree.unflatten(signature.out_tree, self.place(in_memories))


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Outcome:
    """Results of a traced call, with its end: JAX keeps it with the compiled computation as a part of the pytree."""

    outs: list[Any]
    ending: _Ending

    def tree_flatten(self) -> tuple[tuple[list[Any]], _Ending]:
        return (self.outs,), self.ending

    @classmethod
    def tree_unflatten(cls, ending: _Ending, children: tuple[list[Any]]) -> _Outcome:
        return cls(*children, ending)


class _NeedsProgramError(Exception):
    """A call of new shapes is traced, and its program is not compiled."""


# The program of the running call, which is traced for it; per context, as threads trace independently.
_PROGRAM: ContextVar[Compiled | None] = ContextVar("ipujax_partitioned_program", default=None)


class PartitionedCalls:
    """Calls of one function.

    Args:
        compiler: compiles the function for shapes and shardings.
    """

    def __init__(self, compiler: FunctionCompiler) -> None:
        self._compiler = compiler
        self._runners: dict[Hashable, Callable[..., _Outcome]] = {}

    def __call__(self, device: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function on a device."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        shardings = tuple([leaf.sharding if isinstance(leaf, jax.Array) else None for leaf in leaves])
        key = device, current_mesh(), jax.sharding.get_abstract_mesh(), shardings
        runner = self._runners.get(key)
        if runner is not None:
            with suppress(
                _NeedsProgramError
            ):  # then below: outside of the trace, and in the mesh that the user has set
                return self._run(runner, leaves, tree, args, kwargs)
        program = self._compiler.lower(args, kwargs).compile()
        if program.partitioning is None:
            positional, named = self._compiler.user.dynamic(args, kwargs)
            return program(*positional.values(), **named)
        # A function for each key: JAX would find the programs of another key by the same one.
        calls_python = program.lowered.calls is not None
        run = self._compiler.user.jitted
        jitted = run(lambda *args, **kwargs: self._traced(args, kwargs), donates=not calls_python)
        runner = self._runners.setdefault(key, jitted)
        token = _PROGRAM.set(program)
        try:
            return self._run(runner, leaves, tree, args, kwargs)
        finally:
            _PROGRAM.reset(token)

    def _run(
        self, runner: Callable[..., _Outcome], leaves: list[Any], tree: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        with running_without_mesh():
            local_leaves = {n: local for n, leaf in enumerate(leaves) if (local := _local(leaf)) is not leaf}
            if local_leaves:
                args, kwargs = jax.tree.unflatten(tree, [local_leaves.get(n, leaf) for n, leaf in enumerate(leaves)])
            outcome = runner(*args, **kwargs)
        return outcome.ending.results(outcome.outs, leaves, local_leaves)

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Outcome:
        """Evaluate the compiled program inside JAX's trace of a call; raise where that trace has no program."""
        program = _PROGRAM.get()
        if program is None or program.partitioning is None:
            raise _NeedsProgramError
        lowered = program.lowered
        positional, named = self._compiler.user.dynamic(args, kwargs)
        arguments = [*enumerate(args), *sorted(kwargs.items())]  # in the order of their leaves
        is_dynamic = [name in positional or name in named for name, x in arguments for _ in jax.tree.leaves(x)]
        dynamic = tuple(n for n, flag in enumerate(is_dynamic) if flag)
        leaves = jax.tree.leaves((args, kwargs))
        outs = jax.tree.leaves(lowered.evaluate(*(leaves[n] for n in dynamic)))
        place = program.partitioning.placing(lowered.signature.out_avals)
        return _Outcome(outs, _Ending(lowered, dynamic, place))


def _local(leaf: Any) -> Any:
    return to_device(to_one_device(leaf)) if isinstance(leaf, jax.Array) else leaf
