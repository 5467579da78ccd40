"""Propagation of specs from annotated values, forward and backward over a jaxpr, to a fixpoint.

A value is annotated by its explicit type, a constraint, or a sharding of an argument or a result. Others take over the
axes of factors of the equations that define and read them; axes are only ever added, so the sweeps end. Where values
of one equation suggest different axes for a factor, the estimated cycles of the equation decide (`assignments.decide`).
Idea: Shardy's propagation (openxla/shardy, docs/propagation.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import Atom, ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Var, jaxprs_in_params, shape_of
from ipujax.lowering.jaxpr import CONTROL_FLOW, PIPELINE, bodies, while_body, while_condition
from ipujax.lowering.partition.assignments import Decision, Values, axes_of, leading_axes_of, projected, ranked
from ipujax.lowering.partition.pipelines import kinds_of_results, micro_batch_jaxpr
from ipujax.lowering.partition.specs import (
    SPEC_STATEMENTS,
    Axes,
    MeshAxes,
    Spec,
    divides,
    explicit_axes,
    in_words,
    spec_of,
    typed_spec,
    whole,
)
from ipujax.lowering.partition.users_blocks import CUSTOM_PARTITIONING, check_mesh, custom_factors, shard_map_specs
from ipujax.lowering.primitives import Factors, elementwise, record_of
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentValueError
from ipujax.runtime.target import Target

# Each sweep takes an annotation through the whole program; more than a few only serve loops inside of loops.
_MAX_SWEEPS = 16


@dataclass(frozen=True, slots=True)
class Tie:
    """Two values with one spec, such as the state of a loop inside and outside.

    Args:
        outer: value outside, or another of the same body.
        inner: value inside.
        is_stack: True if `outer` stacks values like `inner` along a first dimension.
        is_batch: True if `outer` has the rows of several values like `inner`, which may be split where `outer` is not.
    """

    outer: Atom
    inner: Atom
    is_stack: bool = False
    is_batch: bool = False


@dataclass(frozen=True, slots=True)
class Propagation:
    """Specs of the values of a program.

    Args:
        mesh: the mesh.
        target: machine whose cycles decide.
        specs: spec of each value so far.
        open_dims: dimensions of each annotated value that may be split further; all of other values.
        typed_axes: explicit axes in the type of a value whose mesh has automatic ones too: they split only the
            dimensions that the type names.
        conflicts: text of each conflict that cycles have decided, by equation.
        user_mesh: mesh of the user's shardings; one without devices when None.
        settled: specs of the values of equations that changed no spec, by equation and direction of the sweep.
    """

    mesh: MeshAxes
    target: Target
    specs: dict[Var, Spec] = field(default_factory=dict)
    open_dims: dict[Var, frozenset[int]] = field(default_factory=dict)
    typed_axes: dict[Var, frozenset[str]] = field(default_factory=dict)
    conflicts: dict[int, str] = field(default_factory=dict)
    user_mesh: Mesh | AbstractMesh | None = None
    settled: dict[tuple[int, bool], tuple[Spec | None, ...]] = field(default_factory=dict)

    def annotate(
        self,
        var: Any,
        spec: Spec,
        open_dims: frozenset[int] = frozenset(),
        typed_axes: frozenset[str] = frozenset(),
    ) -> None:
        """Fix the spec of a value, but for open dimensions.

        Args:
            var: the value; nothing happens for a literal, or a result that is dropped.
            spec: its spec.
            open_dims: dimensions that may be split further.
            typed_axes: axes in its type, which split no further dimension.
        """
        if isinstance(var, Var) and not isinstance(var, DropVar):
            self.specs[var] = spec
            self.open_dims[var] = open_dims
            self.typed_axes[var] = typed_axes

    def is_annotated(self, var: Var) -> bool:
        """True if the spec of a value is fixed."""
        return var in self.open_dims

    def annotate_types(self, jaxpr: Jaxpr) -> None:
        """Fix the specs of values with explicit types, and of results of constraints."""
        for var in (*jaxpr.invars, *jaxpr.constvars):
            self._annotate_type(var)
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self._annotate_type(var)
            if eqn.primitive.name == "sharding_constraint":
                self._annotate_constraint(eqn)
            for inner in _inner_jaxprs(eqn):
                self.annotate_types(inner)

    def _annotate_type(self, var: Any) -> None:
        """Fix the spec of a value whose type has explicit axes; automatic axes may split its dimensions further."""
        spec = typed_spec(var.aval, self.mesh)
        if spec is not None:
            self.annotate(var, spec)
            return
        axes = explicit_axes(var.aval)
        if axes:
            dims = frozenset(range(len(shape_of(var))))
            self.annotate(var, spec_of(var.aval.sharding.spec, len(dims), self.mesh), dims, axes)

    def _annotate_constraint(self, eqn: JaxprEqn) -> None:
        """Fix the spec of a constraint's result, but for the dimensions that it leaves open.

        One over a mesh of a single device says nothing: its axes are not those of the program's mesh.
        """
        sharding = eqn.params["sharding"]
        if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
            (result,) = eqn.outvars
            rank = len(shape_of(result))
            open_dims = {d for d, part in enumerate(sharding.spec.partitions) if part is PartitionSpec.UNCONSTRAINED}
            open_dims |= set(eqn.params["unconstrained_dims"])
            spec = spec_of(sharding.spec, rank, self.mesh)
            _check_divides(eqn, spec, self.mesh)
            self.annotate(result, spec, frozenset(open_dims))

    def spread(self, jaxpr: ClosedJaxpr) -> None:
        """Sweep over a program until no spec changes."""
        for _ in range(_MAX_SWEEPS):
            changed_forward = self._sweep(jaxpr.jaxpr, is_forward=True)
            changed_backward = self._sweep(jaxpr.jaxpr, is_forward=False)
            if not (changed_forward or changed_backward):
                return

    # Methods from here on return whether they have changed a spec.

    def _sweep(self, jaxpr: Jaxpr, *, is_forward: bool) -> bool:
        eqns = jaxpr.eqns if is_forward else reversed(jaxpr.eqns)
        # A list, here and below: `any` of a generator would stop at the first change.
        return any([self._spread_over_equation(eqn, is_forward=is_forward) for eqn in eqns])

    def _spread_over_equation(self, eqn: JaxprEqn, *, is_forward: bool) -> bool:
        """Give the axes of values of an equation to others: to results going forward, to operands going backward."""
        if eqn.primitive.name in _TIES:
            changed = any([self._equalise(tie) for tie in _TIES[eqn.primitive.name](eqn)])
            inner = [self._sweep(body, is_forward=is_forward) for body in _inner_jaxprs(eqn)]
            return any([changed, *inner])
        if eqn.primitive.name == "shard_map":
            return self._extend_by_shard_map(eqn)
        # What an equation shares depends on the specs of its values alone; most have the same in the next sweep.
        specs = tuple(self.specs.get(atom) if isinstance(atom, Var) else None for atom in (*eqn.invars, *eqn.outvars))
        if self.settled.get((id(eqn), is_forward)) == specs:
            return False
        factors = self._factors_of(eqn)
        if factors is not None and self._share_axes(eqn, factors, is_forward=is_forward):
            return True
        self.settled[id(eqn), is_forward] = specs
        return False

    def _factors_of(self, eqn: JaxprEqn) -> Factors | None:
        """Factors of an equation, the indices that its operands and results share; None if they are not known."""
        if eqn.primitive.name == CUSTOM_PARTITIONING:
            return custom_factors(eqn, self.user_mesh or self.mesh.abstract())
        if eqn.primitive.name in SPEC_STATEMENTS:
            return elementwise(eqn)
        factors_of = record_of(eqn).factors
        return None if factors_of is None else factors_of(eqn)

    def _extend_by_shard_map(self, eqn: JaxprEqn) -> bool:
        """Give operands and results the axes that a user's `shard_map` names for them."""
        check_mesh(eqn, self.mesh)
        in_specs, out_specs = shard_map_specs(eqn, self.mesh)
        pairs = [*zip(eqn.invars, in_specs, strict=True), *zip(eqn.outvars, out_specs, strict=True)]
        return any([self._extend_spec(atom, spec.dims) for atom, spec in pairs])

    def _equalise(self, tie: Tie) -> bool:
        """Give each value of a tie, two values that have one spec such as a loop's state and operand, the other's axes.

        True if a spec has changed.
        """
        num_stacked_dims = 1 if tie.is_stack else 0
        outer = self._spec_so_far(tie.outer)
        inner = self._spec_so_far(tie.inner)
        stacked_dims = outer.dims[:num_stacked_dims]  # which the inner value has not
        # Rows of a micro-batch are split in it alone: the batch may be cut into micro-batches first.
        inner_dims = ((), *inner.dims[1:]) if tie.is_batch else inner.dims
        return any(
            [
                self._extend_spec(tie.inner, outer.dims[num_stacked_dims:]),
                self._extend_spec(tie.outer, (*stacked_dims, *inner_dims)),
            ]
        )

    def _spec_so_far(self, atom: Atom) -> Spec:
        rank = len(shape_of(atom))
        return self.specs.get(atom, whole(rank)) if isinstance(atom, Var) else whole(rank)

    def _share_axes(self, eqn: JaxprEqn, factors: Factors, *, is_forward: bool) -> bool:
        """Give mesh axes of an equation's factors (indices) to results going forward, to operands going backward.

        The axes are those that its operands and results suggest, as they are split so far. True if a spec has changed.
        """
        operands = list(zip(factors.operands, eqn.invars, strict=True))
        results = list(zip(factors.results, eqn.outvars, strict=True))
        suggestions = [
            projected(factors, labels, self._spec_so_far(atom), self.mesh) for labels, atom in (*operands, *results)
        ]
        if not any(any(suggestion.values()) for suggestion in suggestions):
            return False
        axes = self._axes_of_factors(eqn, factors, suggestions)
        return any(
            [
                self._extend_spec(atom, leading_axes_of(factors, labels, axes, self.mesh))
                for labels, atom in (results if is_forward else operands)
            ]
        )

    def _axes_of_factors(
        self, eqn: JaxprEqn, factors: Factors, suggestions: Sequence[Mapping[int, Axes]]
    ) -> Mapping[int, Axes]:
        """Mesh axes to split each factor (index) of an equation over, from how its operands and results are split.

        Where these agree, a factor has the most axes that one of them suggests; otherwise those of least cost.

        Args:
            eqn: the equation.
            factors: its index space.
            suggestions: for each operand and result, the axes of factors by which it is split.
        """
        axes_of_factor: dict[int, Axes] = {}
        for factor in factors.sizes:
            candidates = [suggestion[factor] for suggestion in suggestions if suggestion.get(factor)]
            longest = max(candidates, key=len, default=())
            agree = all(longest[: len(candidate)] == candidate for candidate in candidates)
            axes_of_factor[factor] = longest if agree else self._cheapest_axes(eqn, factors).get(factor, ())
        used = [axis for axes in axes_of_factor.values() for axis in axes]
        if len(set(used)) < len(used):  # two factors claim one axis
            decided = self._cheapest_axes(eqn, factors)
            return {factor: decided.get(factor, ()) for factor in axes_of_factor}
        return axes_of_factor

    def _cheapest_axes(self, eqn: JaxprEqn, factors: Factors) -> Mapping[int, Axes]:
        """Mesh axes of each factor (index) that cost least, where splits of values conflict; notes the conflict."""
        operands = [self._spec_so_far(atom) for atom in eqn.invars]
        results: list[Spec | None] = [self.specs.get(var) if isinstance(var, Var) else None for var in eqn.outvars]
        operand_avals: list[Any] = [atom.aval for atom in eqn.invars]
        values = Values(operand_avals, operands, [var.aval for var in eqn.outvars], results)
        decisions = ranked(factors, values, self.mesh, self.target)
        if not decisions:
            return {}
        self.conflicts[id(eqn)] = _conflict_in_words(eqn, factors, decisions)
        return decisions[0].assignment

    def _extend_spec(self, atom: Any, dims: Sequence[Axes]) -> bool:
        """Add axes to the dimensions of a value that may be split further; True if that changes its spec.

        A dimension takes all axes that `dims` has for it if they begin with those that it has, so that no axis is ever
        moved or dropped, and if no other dimension has one of them.
        """
        if not isinstance(atom, Var) or isinstance(atom, DropVar):
            return False
        spec = self._spec_so_far(atom)
        open_dims = self.open_dims.get(atom)
        merged = list(spec.dims)
        for dim, axes in enumerate(dims):
            current = merged[dim]
            is_open = open_dims is None or dim in open_dims
            used = {axis for other, names in enumerate(merged) if other != dim for axis in names}
            added = set(axes[len(current) :])
            if added & self.typed_axes.get(atom, frozenset()):
                continue
            if not is_open or len(axes) <= len(current) or axes[: len(current)] != current or used & set(axes):
                continue
            merged[dim] = tuple(axes)
        extended = replace(spec, dims=tuple(merged))
        if extended == spec or not divides(shape_of(atom), extended, self.mesh):
            return False
        self.specs[atom] = extended
        return True


def _check_divides(eqn: JaxprEqn, spec: Spec, mesh: MeshAxes) -> None:
    """Refuse a constraint whose blocks would not have one size.

    Raises:
        ArgumentValueError: in the words in which JAX refuses such arguments, with its line.
    """
    shape = shape_of(eqn.outvars[0])
    for dim, (size, axes) in enumerate(zip(shape, spec.dims, strict=True)):
        blocks = mesh.size(axes)
        if size % blocks:
            raise ArgumentValueError(
                f"an array was given the sharding {in_words(spec)} by a constraint, which implies that the global size"
                f" of its dimension {dim} should be divisible by {blocks}, but it is equal to {size}"
                f" (full shape: {tuple(shape)})",
                where=source_line(eqn) or None,
                hint="IPUs have blocks of one size: jnp.pad, or leave the dimension whole",
            )


def _conflict_in_words(eqn: JaxprEqn, factors: Factors, decisions: Sequence[Decision]) -> str:
    """The decision of a conflict in words: the results of the assignments of least cost, and their cycles."""
    cycles: dict[str, float] = {}
    for decision in decisions:
        axes = frozenset(decision.reduced_axes(factors))
        spec = Spec(axes_of(factors.results[0], decision.assignment), axes)
        cycles.setdefault(in_words(spec), decision.cycles)
    texts = [f"{text} costs {count:,.0f} cycles" for text, count in cycles.items() if count < float("inf")]
    line = source_line(eqn)
    place = f" at {line}" if line else ""
    return f"conflict in {eqn.primitive.name}{place}: its result as {', '.join(texts[:3])}"


def _inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Jaxprs inside of control flow and pipelines, whose values have specs of their own."""
    if eqn.primitive.name == PIPELINE:
        yield micro_batch_jaxpr(eqn).jaxpr
    elif eqn.primitive.name in CONTROL_FLOW:
        yield from jaxprs_in_params(eqn.params)


def _ties_of_bodies(eqn: JaxprEqn) -> Iterator[Tie]:
    """Pairs of values with one spec: outside and inside of a scan or of branches, and carries around an iteration."""
    for body in bodies(eqn):
        jaxpr = body.jaxpr.jaxpr
        operands = body.of_operands(eqn.invars)
        for outer, inner, is_stack in zip(operands, jaxpr.invars, body.inputs.are_stacks(), strict=True):
            yield Tie(outer, inner, is_stack=is_stack)
        for outer_result, result, is_stack in zip(eqn.outvars, jaxpr.outvars, body.results.are_stacks(), strict=True):
            yield Tie(outer_result, result, is_stack=is_stack)
        for before, after in zip(jaxpr.invars[body.inputs.carries], jaxpr.outvars[body.results.carries], strict=True):
            yield Tie(before, after)


def _while_ties(eqn: JaxprEqn) -> Iterator[Tie]:
    """Pairs of values with one spec, of a tested loop: operands with arguments of condition and body, and carries.

    Carries have one spec before and after an iteration, and as results.
    """
    condition = while_condition(eqn.params)
    body = while_body(eqn.params)
    tested_constants, tested_carries, _ = (condition.jaxpr.jaxpr.invars[places] for places in condition.inputs)
    jaxpr = body.jaxpr.jaxpr
    carries = jaxpr.invars[body.inputs.carries]
    for outer, inner in zip(body.of_operands(eqn.invars), jaxpr.invars, strict=True):
        yield Tie(outer, inner)
    for outer, tested in zip(eqn.invars[condition.operands.constants], tested_constants, strict=True):
        yield Tie(outer, tested)
    for carry, tested in zip(carries, tested_carries, strict=True):
        yield Tie(carry, tested)
    for before, after, result in zip(carries, jaxpr.outvars, eqn.outvars, strict=True):
        yield Tie(before, after)
        yield Tie(result, after)


def _pipeline_ties(eqn: JaxprEqn) -> Iterator[Tie]:
    """Pairs of values that have one spec: operands and results of a pipeline with those of one of its micro-batches."""
    spec = eqn.params["spec"]
    body = micro_batch_jaxpr(eqn).jaxpr
    for outer, inner, role in zip(eqn.invars, body.invars, spec.roles, strict=True):
        yield Tie(outer, inner, is_batch=role == "batch")
    for outer_result, result, kind in zip(eqn.outvars, body.outvars, kinds_of_results(eqn), strict=True):
        yield Tie(outer_result, result, is_stack=kind == "stack")
    for operand, number in spec.carries:
        yield Tie(body.invars[operand], body.outvars[number])


_TIES = {"scan": _ties_of_bodies, "while": _while_ties, "cond": _ties_of_bodies, PIPELINE: _pipeline_ties}
