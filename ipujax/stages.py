"""The stages of a function on its way to the machine, mirroring `jax.stages`: Lowered, then Compiled.

ipu.jit(fun).lower(*args) → Lowered: jaxpr after each pass, graph, program
Lowered.compile()         → Compiled: callable, profile, analyses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import jax

from ipujax.arguments import has_tracer
from ipujax.lowering.jax_compat import ClosedJaxpr, with_weak_type
from ipujax.lowering.lower import LoweredProgram
from ipujax.runtime.compile import Executable, compile
from ipujax.runtime.engine import engine_function
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.graph import Graph
from ipujax.runtime.listing import listing
from ipujax.runtime.memory import MemoryReport
from ipujax.runtime.options import Options
from ipujax.runtime.profile import Profile
from ipujax.runtime.program import Program

Record = Callable[[Program, Any], None]


@dataclass(frozen=True, eq=False)
class Signature:
    """What a function was traced with: it fits later calls with equal trees, shapes and dtypes.

    Args:
        in_tree: tree of the arguments that are not static, as `(args, kwargs)`.
        in_avals: shape, dtype and weakness of each leaf.
        donated: for each leaf whether its buffer may be reused.
        out_tree: tree of the results.
        out_avals: shape, dtype and weakness of each leaf.
    """

    in_tree: Any
    in_avals: tuple[Any, ...]
    donated: tuple[bool, ...]
    out_tree: Any
    out_avals: tuple[Any, ...]


class Lowered:
    """A function as graph and program for one device and one signature.

    Made by `ipu.jit(fun).lower(*args)`.

    Attributes:
        jaxpr: the jaxpr after all passes.
        graph: variables, tile mappings and vertices.
        program: the control program of one call.
        timings: seconds spent in tracing, in each pass and in lowering.
    """

    def __init__(
        self,
        name: str,
        signature: Signature,
        jaxprs: Mapping[str, ClosedJaxpr],
        lowered: LoweredProgram,
        options: Options,
        timings: Mapping[str, float],
    ) -> None:
        self.name, self.signature, self._options = name, signature, options
        self._jaxprs, self._lowered = dict(jaxprs), lowered
        self.timings = MappingProxyType(dict(timings))

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return list(self._jaxprs.values())[-1]

    @property
    def graph(self) -> Graph:
        return self._lowered.graph

    @property
    def program(self) -> Program:
        return self._lowered.program

    @property
    def in_tree(self) -> Any:
        return self.signature.in_tree

    @property
    def out_tree(self) -> Any:
        return self.signature.out_tree

    def as_text(self, after: str | None = None) -> str:
        """The jaxpr after a pass, or the graph and program when no pass is named.

        Args:
            after: "trace" or the name of a pass.

        Raises:
            ArgumentError: for an unknown pass.
        """
        if after is None:
            return listing(self.graph, self.program)
        if after not in self._jaxprs:
            raise ArgumentError(f"no pass is called {after!r}", expected=f"one of {', '.join(self._jaxprs)}")
        return str(self._jaxprs[after])

    def evaluate(self, *leaves: Any, record: Record | None = None) -> Any:
        """The engine's computation on the leaves of the arguments, as JAX operations that can be traced.

        Args:
            leaves: arrays of the signature's shapes and dtypes, in order.
            record: told what data-dependent control does, see `engine_function`.
        """
        program, signature = self._lowered, self.signature
        run = engine_function(program.graph, program.program, exact_splits=self._options.exact_splits, record=record)
        outs = run(dict(zip(program.inputs, leaves, strict=True)))
        results = [
            with_weak_type(outs[stream], aval.weak_type)
            for stream, aval in zip(program.outputs, signature.out_avals, strict=True)
        ]
        return jax.tree.unflatten(signature.out_tree, results)

    @cached_property
    def _compiled(self) -> Compiled:
        return Compiled(self, compile(self.graph, self.program, options=self._options))

    def compile(self) -> Compiled:
        """Checks the graph, plans its exchanges and memory, and makes it callable.

        Raises:
            TileMemoryError: if the program does not fit, unless `Options(allow_out_of_memory=True)`.
            VerifyError: if a rule of the verifier is broken, which is a fault of ipujax.
        """
        return self._compiled

    def __repr__(self) -> str:
        return f"Lowered({self.name}: {len(self.jaxpr.eqns)} equations)"


class Compiled:
    """A function compiled for one device and one signature; call it, or read its profile."""

    def __init__(self, lowered: Lowered, executable: Executable) -> None:
        self._lowered, self.executable = lowered, executable

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds spent in each step from tracing to the executable; XLA's own compilation is not in it."""
        return MappingProxyType({**self._lowered.timings, **self.executable.timings})

    @cached_property
    def profile(self) -> Profile:
        """The static profile: cycles, phases and memory of one call."""
        return Profile(self.executable)

    def cost_analysis(self) -> dict[str, float]:
        """Machine costs of one call, as numbers by name; cycles of loops whose trip count is data need `Options`."""
        profile = self.profile
        phases = {f"{name}_cycles": float(cycles) for name, cycles in profile.phase_cycles.items()}
        return {"cycles": float(profile.cycles), "seconds": profile.seconds, **phases}

    def memory_analysis(self) -> MemoryReport:
        """Tile memory, by tile and by category."""
        return self.profile.memory

    @cached_property
    def _call(self) -> Callable[..., Any]:
        donated = tuple(n for n, given in enumerate(self._lowered.signature.donated) if given)

        def run(*leaves: Any) -> Any:
            return self._lowered.evaluate(*leaves)

        run.__name__ = self._lowered.name
        return jax.jit(run, donate_argnums=donated)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on arguments of the compiled signature; static arguments are left out, as in `jax.stages`.

        Raises:
            ArgumentError: for another tree, shape or dtype, or under a transformation of JAX.
        """
        return self._call(*self._check(args, kwargs))

    def profile_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        """Runs the function and returns its results with the profile of what really ran.

        Donated arguments are kept: this run does not reuse their buffers.

        Raises:
            ArgumentError: as a call.
        """
        recording: dict[Program, list[int]] = {}

        def record(node: Program, what: Any) -> None:
            recording.setdefault(node, []).append(int(what))

        leaves = self._check(args, kwargs)
        outs = jax.block_until_ready(jax.jit(partial(self._lowered.evaluate, record=record))(*leaves))
        jax.effects_barrier()
        return outs, Profile(self.executable, recording)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, if they are of the compiled signature."""
        signature, name = self._lowered.signature, self._lowered.name
        if has_tracer(args, kwargs):
            what = f"{name} is compiled: transformations of JAX cannot trace it any more"
            raise ArgumentError(what, hint="apply them to the ipu.jit function itself")
        leaves, tree = jax.tree.flatten((args, kwargs))
        hint = "call the ipu.jit function itself, which compiles anew for new shapes"
        if tree != signature.in_tree:
            what = f"{name} was compiled for arguments of another structure"
            hint = f"leave static arguments out, they are compiled in; or {hint}"
            raise ArgumentError(what, expected=signature.in_tree, got=tree, hint=hint)
        places = jax.tree_util.tree_leaves_with_path((args, kwargs))
        for (path, leaf), aval in zip(places, signature.in_avals, strict=True):
            found = _described(leaf)
            if found != aval.str_short():
                what = f"{name} was compiled for another shape or dtype of its argument {_place(path)}"
                raise ArgumentError(what, expected=aval.str_short(), got=found, hint=hint)
        return leaves

    def __repr__(self) -> str:
        return f"Compiled({self._lowered.name})"


def _described(leaf: Any) -> str:
    """Shape and dtype of an argument, or its type if it is no array."""
    try:
        return jax.typeof(leaf).str_short()
    except TypeError:
        return type(leaf).__name__


def _place(path: Sequence[Any]) -> str:
    """Where a leaf of `(args, kwargs)` is: `0['w']`, `scale`."""
    in_args, first, *rest = path
    return f"{first.idx if in_args.idx == 0 else first.key}{jax.tree_util.keystr(tuple(rest))}"
