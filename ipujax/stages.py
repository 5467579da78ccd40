"""The stages of a function on its way to the machine, mirroring `jax.stages`: Lowered, then Compiled.

    ipu.jit(fun).lower(*args) → Lowered: jaxpr after each pass, graph, program
    Lowered.compile()         → Compiled: callable, profile, analyses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, Protocol

import jax

from ipujax.lowering.jax_compat import ClosedJaxpr
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


class Traceable(Protocol):
    """What a stage needs of the `ipu.jit` function it comes from."""

    __name__: str
    line: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def dynamic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that are arrays."""


@dataclass(frozen=True, eq=False)
class Signature:
    """What a function was traced with: it fits later calls with equal trees, shapes, dtypes and static values.

    Args:
        in_tree: tree of the dynamic arguments, as `(args, kwargs)`.
        in_avals: shape, dtype and weakness of each leaf.
        out_tree: tree of the results.
    """

    in_tree: Any
    in_avals: tuple[Any, ...]
    out_tree: Any


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
        function: Traceable,
        signature: Signature,
        jaxprs: Mapping[str, ClosedJaxpr],
        lowered: LoweredProgram,
        options: Options,
        timings: Mapping[str, float],
    ) -> None:
        self._function, self._signature, self._options = function, signature, options
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
        return self._signature.in_tree

    @property
    def out_tree(self) -> Any:
        return self._signature.out_tree

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

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The engine's computation on arguments of the signature, as JAX operations that can be traced."""
        return self._evaluate(jax.tree.leaves(self._function.dynamic(args, kwargs)))

    def _evaluate(self, leaves: list[Any], record: Record | None = None) -> Any:
        program = self._lowered
        run = engine_function(
            program.graph, program.program, exact_splits=self._options.exact_splits, record=record
        )
        outs = run(dict(zip(program.inputs, leaves, strict=True)))
        return jax.tree.unflatten(self.out_tree, [outs[stream] for stream in program.outputs])

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
        return f"Lowered({self._function.__name__}: {len(self.jaxpr.eqns)} equations)"


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function on arguments of the compiled signature.

        Raises:
            ArgumentError: for another tree, shape or dtype.
        """
        self._check(args, kwargs)
        return self._lowered._function(*args, **kwargs)

    def profile_call(self, *args: Any, **kwargs: Any) -> tuple[Any, Profile]:
        """Runs the function and returns its results with the profile of what really ran.

        Donated arguments are kept: this run does not reuse their buffers.
        """
        recording: dict[Program, list[int]] = {}

        def record(node: Program, what: Any) -> None:
            recording.setdefault(node, []).append(int(what))

        leaves = self._check(args, kwargs)
        outs = jax.block_until_ready(jax.jit(partial(self._lowered._evaluate, record=record))(leaves))
        jax.effects_barrier()
        return outs, Profile(self.executable, recording)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call, if they are of the compiled signature."""
        function, signature = self._lowered._function, self._lowered._signature
        leaves, tree = jax.tree.flatten(function.dynamic(args, kwargs))
        name, line = function.__name__, function.line
        hint = "call the ipu.jit function itself, which compiles anew for new shapes"
        if tree != signature.in_tree:
            what = f"{name} was compiled for arguments of another structure"
            raise ArgumentError(what, where=line, expected=signature.in_tree, got=tree, hint=hint)
        for number, (leaf, aval) in enumerate(zip(leaves, signature.in_avals, strict=True)):
            found = jax.typeof(leaf)
            if found.shape != aval.shape or found.dtype != aval.dtype:
                what = f"{name} was compiled for another shape or dtype of its argument leaf {number}"
                raise ArgumentError(what, where=line, expected=aval.str_short(), got=found.str_short(), hint=hint)
        return leaves

    def __repr__(self) -> str:
        return f"Compiled({self._lowered._function.__name__})"
