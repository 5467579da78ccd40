"""The layer of each equation, as one path of names: scopes, or the functions of the call stack, numbered in loops.

Input: the equations of a jaxpr after inlining, in the order of tracing, with the frames each was traced in. Output: a
path for each, `encoder/block[3]/dense`.

A path has the scopes of the name stack; an equation without scopes has the user's functions, outermost first, then
those of a library. A function that is called in a Python loop, or on several lines of one function, is numbered. Where
there are scopes too, it is added between those scopes that all equations of a call have in common. Forward equations
are in the order of tracing, see `function_runs`. Equations of a gradient, and those that a checkpoint recomputes, have
the frames of the forward equations that they derive from. They belong to forward equations of the same functions with a
common operand or result; without one the order decides, which is the reverse in a gradient.
Limits: where neither decides, a function has no number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import maxsize
from typing import NamedTuple

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr.function_runs import Frames, FunctionRun, Place, RunStates, Traced, run_states_of_equations
from ipujax.lowering.jaxpr.gradient_bodies import GradientBody
from ipujax.lowering.jaxpr.layer_paths import LayerPath, LayerPaths, Step
from ipujax.lowering.jaxpr.stage_names import is_transposed, read_name
from ipujax.lowering.layer_notes import scopes_of
from ipujax.lowering.source_info import name_stack

_MAX_READERS = 64  # a value with more distinguishes no iterations: a mask of all layers, a constant
_NUMBER = re.compile(r"(\[\d+\])+$")


@dataclass(frozen=True, slots=True)
class Repetition:
    """Call in a gradient that recomputes values which a checkpoint did not store.

    Args:
        number: number of the call.
        depth: number of frames around it.
    """

    number: int
    depth: int


@dataclass(frozen=True, slots=True)
class TracedEquation:
    """Equation with the frames that it was traced in.

    Args:
        eqn: the equation, inlined.
        frames: frames of the call stack.
        repetition: innermost recomputing call around it; None without one.
    """

    eqn: JaxprEqn
    frames: Frames
    repetition: Repetition | None = None

    @property
    def variables(self) -> Iterable[Var]:
        """Operands and results that are not literals."""
        return (x for x in (*self.eqn.invars, *self.eqn.outvars) if isinstance(x, Var))


@dataclass(eq=False, slots=True)
class _ForwardGroup:
    """Forward equations of one place in one iteration.

    Args:
        layer: path of their layer.
        order: number of the last of them, among forward equations.
        states: states of the function runs that it was traced in, outermost first.
    """

    layer: str
    order: int
    states: RunStates

    @property
    def innermost_run(self) -> FunctionRun | None:
        """Run of the innermost function; None without frames."""
        return self.states[-1].run if self.states else None


class _Location(NamedTuple):
    """Place in the source that an equation was traced at: equal for forward equations and those derived from them.

    Args:
        places: code and place of each call around it, outermost first.
        scopes: scopes around it.
    """

    places: tuple[Place, ...]
    scopes: tuple[str, ...]


class _Member(NamedTuple):
    """An equation of a group, also one that derives from its equations: its location, and the group."""

    location: _Location
    group: _ForwardGroup


class _ForwardEquation(NamedTuple):
    number: int
    states: RunStates
    path: LayerPath


_NO_INPUTS: Mapping[Var, tuple[Hashable, ...]] = {}


class LayerNames:
    """Layers of the equations of one jaxpr.

    Args:
        equations: all equations of the jaxpr, in order.
        gradient: forward bodies that a body of a gradient derives from, as it has no forward equations itself.
        inputs: names of the inputs of the jaxpr, each as a path: `ps[3]["w"]` is `("ps", "[3]", "['w']")`.
    """

    def __init__(
        self,
        equations: Sequence[TracedEquation],
        gradient: GradientBody[LayerNames] | None = None,
        inputs: Mapping[Var, tuple[Hashable, ...]] = _NO_INPUTS,
    ) -> None:
        """Find the layer of each equation, `layers`.

        Forward equations are named first, in groups of those of one place and iteration; the equations of gradients
        are then matched with these groups.
        """
        self._equations = equations
        self._inputs = dict(inputs)
        self._scopes = [_scopes_of(x) for x in equations]
        self._groups: dict[_Location, dict[str, _ForwardGroup]] = defaultdict(dict)
        self._users: dict[Var, list[_Member]] = defaultdict(list)
        self._producers: dict[Var, _Member] = {}  # of results of recomputed and backward equations
        self._forward_equations: list[_ForwardEquation] = []
        self._recomputed_runs: dict[Repetition, FunctionRun] = {}  # run of the function that a call recomputes
        self.layers = [""] * len(equations)
        # The order of the steps counts: each matches its equations with the groups that those before it have added.
        forward, recomputed, backward = self._split_parts(is_gradient=gradient is not None)
        # Constants, which JAX traces again where a gradient needs them, are not in the order of the others: their layer
        # is that of a group at the same place, as of recomputed equations.
        in_order, constants = self._split_constants(forward)
        self._name_forward(in_order)
        self._sources = gradient.forward if gradient is not None else ()
        if gradient is not None:
            self._copy_forward_groups(gradient)
        self._name_by_forward(constants, is_reversed=False)
        self._find_recomputed_runs([*chain(*recomputed), *backward])
        for numbers in recomputed:
            self._name_by_forward(numbers, is_reversed=False)
        for var, producer in self._producers.items():  # a gradient reads recomputed values like forward ones
            self._users[var].append(producer)
        self._name_by_forward(backward, is_reversed=True)

    def _copy_forward_groups(self, gradient: GradientBody[LayerNames]) -> None:
        """Take over groups of forward bodies; users of a value there become those of the input that has it here."""
        for source in gradient.forward:
            self._groups.update((location, dict(groups)) for location, groups in source._groups.items())
        for var, values in gradient.values.items():
            self._users[var] = [user for source, inside in values for user in source._users.get(inside, ())]

    def _split_parts(self, *, is_gradient: bool) -> tuple[list[int], list[list[int]], list[int]]:
        """Return the numbers of forward equations, of those of each call that recomputes, and of backward ones.

        Args:
            is_gradient: whether the jaxpr is a body of a gradient, which has no forward equations.
        """
        forward = list[int]()
        recomputed = dict[Repetition | None, list[int]]()
        backward = list[int]()
        for n, item in enumerate(self._equations):
            stack = name_stack(item.eqn)
            if read_name(stack).is_recomputed and not is_transposed(stack):
                recomputed.setdefault(item.repetition, []).append(n)
            elif is_gradient or is_transposed(stack):
                backward.append(n)
            else:
                forward.append(n)
        return forward, list(recomputed.values()), backward

    def _split_constants(self, forward: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split off equations that read no value, at places of others: JAX traces zeros where a gradient needs them."""
        reads = {n: any(isinstance(x, Var) for x in self._equations[n].eqn.invars) for n in forward}
        ordered = {self._location_of(n) for n in forward if reads[n]}
        constants = [n for n in forward if not reads[n] and self._location_of(n) in ordered]
        return sorted({*forward}.difference(constants)), constants

    def _location_of(self, number: int) -> _Location:
        return _Location(self._equations[number].frames.places, self._scopes[number])

    # --- forward ---

    def _name_forward(self, numbers: Sequence[int]) -> None:
        """Name the layers of forward equations by the functions and scopes that they were traced in.

        They are added to groups, which equations of gradients are matched with.

        Args:
            numbers: numbers of the forward equations, in the order of tracing.
        """
        items = [self._equations[n] for n in numbers]
        all_states = run_states_of_equations([self._with_input_names(item) for item in items])
        pairs = [(states, self._scopes[n]) for n, states in zip(numbers, all_states, strict=True)]
        paths = LayerPaths({pair: item.frames.codes for pair, item in zip(pairs, items, strict=True)})
        # Most equations of a layer have equal states and scopes: their path is computed once.
        of_pair: dict[tuple[RunStates, tuple[str, ...]], tuple[LayerPath, str]] = {}
        for order, (n, pair) in enumerate(zip(numbers, pairs, strict=True)):
            if pair not in of_pair:
                path = paths.of(*pair, items[order].frames.codes)
                of_pair[pair] = path, path.text()
            path, self.layers[n] = of_pair[pair]
            self._forward_equations.append(_ForwardEquation(n, pair[0], path))
            self._add_forward(self._location_of(n), self.layers[n], n, order)

    def _with_input_names(self, item: TracedEquation) -> Traced:
        """Return an equation with the names of inputs that it reads; a result may be noted under such a name."""
        operands = dict.fromkeys(x for x in item.eqn.invars if isinstance(x, Var))
        names = tuple(self._inputs[x] for x in operands if x in self._inputs)
        if len(operands) == len(names) == 1:  # a cast of a weight, or a view, stands for the weight
            self._inputs.update((var, names[0]) for var in item.eqn.outvars)
        return Traced(item.frames, read_name(name_stack(item.eqn)).stage, _operation_of(item.eqn), names)

    def _add_forward(self, location: _Location, layer: str, number: int, order: int) -> None:
        """Add a forward equation to its group: equation `number`, which is number `order` of the forward ones."""
        group = self._groups[location].setdefault(layer, _ForwardGroup(layer, order, ()))
        group.order = order
        group.states = self._forward_equations[order].states
        for var in self._equations[number].variables:
            self._users[var].append(_Member(location, group))

    def _add_inner_groups(self, location: _Location) -> None:
        """Add to a location without forward equations, as by `custom_vjp`, groups of those in functions called there.

        Equations of a gradient at that location derive from one of these.

        Args:
            location: frames and scopes of equations.
        """
        for source in self._sources:
            source._add_inner_groups(location)
            self._groups[location].update(source._groups.get(location, {}))
        count = len(location.places)
        # Of forward equations with the location's frames and more, by their order: the layer of the location's frames,
        # and the equation's own.
        layers_inside = dict[int, tuple[str, str]]()
        for order, (n, _, path) in enumerate(self._forward_equations):
            if self._scopes[n] == location.scopes and self._equations[n].frames.places[:count] == location.places:
                layers_inside[order] = path.text(count), self.layers[n]
        if not layers_inside:
            self._add_last_before(location)
        inner: dict[str, set[str]] = defaultdict(set)
        for outer, layer in layers_inside.values():
            inner[outer].add(layer)
        # A group has the layer inside if that is the only one in the location's; else the location's own.
        for order, (outer, layer) in layers_inside.items():
            name = layer if len(inner[outer]) == 1 else outer
            self._add_forward(location, name, self._forward_equations[order].number, order)

    def _add_last_before(self, location: _Location) -> None:
        """Add to a location the last forward equation before its place, in each run of its function.

        A `custom_vjp` that computes nothing in the forward pass has such a location, without any equation: its gradient
        belongs to the layer that was traced last before it.

        Args:
            location: frames and scopes of equations.
        """
        *outside, (code, offset) = location.places or ((None, 0),)  # no equation matches one without frames
        depth = len(outside)  # calls around the function `code`
        # Last forward equation before `offset`, by its order, for each run of that function: each has a layer.
        last_of_layer = dict[str, int]()
        for order, forward in enumerate(self._forward_equations):
            places = self._equations[forward.number].frames.places
            is_around = self._scopes[forward.number] == location.scopes and list(places[:depth]) == outside
            if is_around and len(places) > depth and places[depth][0] is code and places[depth][1] < offset:
                last_of_layer[forward.path.text(depth + 1)] = order
        for layer, order in last_of_layer.items():
            self._add_forward(location, layer, self._forward_equations[order].number, order)

    # --- recomputed and backward equations ---

    def _find_recomputed_runs(self, numbers: Sequence[int]) -> None:
        """Find which run of a checkpointed function each call in the gradient recomputes.

        Each equation in the call has a vote, if the forward groups that share a value with it are of one run.

        Args:
            numbers: numbers of the recomputed and backward equations.
        """
        # First: equations are matched with groups of their location, and these may have none yet.
        for location in {self._location_of(n) for n in numbers}.difference(self._groups):
            self._add_inner_groups(location)
        votes: dict[Repetition, Counter[FunctionRun]] = defaultdict(Counter)
        for n in numbers:
            repetition = self._equations[n].repetition
            if repetition is not None:
                groups = self._groups_with_common_value(n).values()
                runs = {run for x in groups if (run := _run_of_repetition(x, repetition)) is not None}
                votes[repetition].update(runs if len(runs) == 1 else ())
        self._recomputed_runs = {repetition: runs.most_common(1)[0][0] for repetition, runs in votes.items() if runs}

    def _filter_by_run(self, number: int, options: list[_ForwardGroup]) -> list[_ForwardGroup]:
        """Filter groups to those in the run of the function that the equation recomputes."""
        repetition = self._equations[number].repetition
        run = self._recomputed_runs.get(repetition) if repetition is not None else None
        if repetition is None or run is None:
            return options
        return [x for x in options if _run_of_repetition(x, repetition) is run] or options

    def _name_by_forward(self, numbers: Sequence[int], *, is_reversed: bool) -> None:
        """Name the layers of recomputed or backward equations by the forward equations that each derives from.

        A group is the forward equations of one place in one iteration; its order is the number of its last one. The
        candidates are the groups of the same frames and scopes, first those that share a value with the equation.
        Several are narrowed by the run of the function, the layer of the gradients that are added, the orders of the
        neighbours with one candidate, and the equations that compute the operands, in this order. An equation that
        keeps several candidates gets what their paths have in common.

        Args:
            numbers: numbers of the equations, in order; the results of those with one group get it in `_producers`.
            is_reversed: True for backward equations, whose groups are in falling order; False for recomputed ones.
        """
        all_matches = [self._groups_with_common_value(n) for n in numbers]
        limits = _orders_of_next(all_matches, end=-1 if is_reversed else maxsize)
        last = maxsize if is_reversed else -1  # order of the last equation with one match
        # Each rule applies only while several groups remain, and never removes all of them.
        for n, matches, limit in zip(numbers, all_matches, limits, strict=True):
            options = list((matches or self._groups.get(self._location_of(n), {})).values())
            options = self._filter_by_run(n, options)
            # A sum of gradients belongs to the layer whose gradients it adds.
            if len(options) > 1 and self._equations[n].eqn.primitive.name == "add_any":
                summed = {x.group.layer for x in self._operand_producers(n)}.intersection(x.layer for x in options)
                options = [x for x in options if x.layer in summed] if len(summed) == 1 else options
            if len(options) > 1:
                options = [x for x in options if min(last, limit) <= x.order <= max(last, limit)] or options
            if len(options) > 1:
                options = self._filter_by_producers(n, options, is_reversed=is_reversed)
            if len(options) == 1:
                last = options[0].order
                producer = _Member(self._location_of(n), options[0])
                self._producers.update(dict.fromkeys(self._equations[n].eqn.outvars, producer))
            self.layers[n] = _common_path([x.layer for x in options]) if options else self._unnumbered_path(n)

    def _filter_by_producers(
        self, number: int, options: list[_ForwardGroup], *, is_reversed: bool
    ) -> list[_ForwardGroup]:
        """Filter groups that an equation may derive from, by the equations that compute its operands.

        A backward equation belongs to the same group as the producer traced at its location; a recomputed one to the
        group in the same run of its innermost function. Returns the only group that remains, or all of them if none
        remains, or several.

        Args:
            number: number of the equation.
            options: groups of forward equations that it may derive from.
            is_reversed: True for a backward equation, False for a recomputed one.
        """
        producers = list(self._operand_producers(number))
        if is_reversed:
            location = self._location_of(number)
            groups_there = [producer.group for producer in producers if producer.location == location]
            same = [group for group in options if group in groups_there]
        else:
            runs = {producer.group.innermost_run for producer in producers} - {None}
            same = [group for group in options if group.innermost_run in runs]
        return same if len(same) == 1 else options

    def _operand_producers(self, number: int) -> Iterable[_Member]:
        operands = (x for x in self._equations[number].eqn.invars if isinstance(x, Var))
        return (self._producers[x] for x in operands if x in self._producers)

    def _groups_with_common_value(self, number: int) -> dict[str, _ForwardGroup]:
        """Return by layer the groups of forward equations at an equation's location that share a value with it.

        A value is an operand or result; an equation of a gradient reads those of the forward equation it derives from.
        """
        location = self._location_of(number)
        matches = dict[str, _ForwardGroup]()
        for var in self._equations[number].variables:
            users = self._users.get(var, ())
            if len(users) > _MAX_READERS:
                continue
            by_layer = {user.group.layer: user.group for user in users if user.location == location}
            # Each value narrows the matches; one that contradicts the others is ignored.
            common = {layer: group for layer, group in by_layer.items() if layer in matches}
            matches = common or matches or by_layer
        return matches

    def _unnumbered_path(self, number: int) -> str:
        steps = tuple(map(Step, self._equations[number].frames.codes))
        return LayerPath(steps, self._scopes[number]).text()


def _orders_of_next(all_matches: Sequence[Mapping[str, _ForwardGroup]], end: int) -> list[int]:
    """Return for each equation the order of the group of the next one that has a single match; `end` if none follows.

    Args:
        all_matches: for each equation the groups that it may derive from, by layer.
        end: order for those after which no equation has a single match.
    """
    orders = list[int]()
    order = end
    for matches in reversed(all_matches):
        orders.append(order)
        order = next(iter(matches.values())).order if len(matches) == 1 else order
    return orders[::-1]


def _run_of_repetition(group: _ForwardGroup, repetition: Repetition) -> FunctionRun | None:
    # The frame after those around the call is the function that it calls.
    return group.states[repetition.depth].run if repetition.depth < len(group.states) else None


def _operation_of(eqn: JaxprEqn) -> tuple[Hashable, ...]:  # equal for the same equation of different iterations
    return eqn.primitive.name, *(var.aval for var in eqn.outvars)


def _scopes_of(item: TracedEquation) -> tuple[str, ...]:
    """Return the scopes of an equation, once: recomputed ones may have those around the call twice, as in Flax."""
    scopes = scopes_of(item.eqn)
    if item.repetition is None:
        return scopes
    twice = (n for n in range(len(scopes) // 2, 0, -1) if scopes[:n] == scopes[n : 2 * n])
    return scopes[next(twice, 0) :]


def _common_path(layers: Sequence[str]) -> str:
    """Return the path common to several candidate layers, without the numbers in which they differ."""
    paths = [layer.split("/") for layer in layers]
    if len({len(path) for path in paths}) > 1:
        return "/".join(_NUMBER.sub("", name) for name in min(paths, key=len))
    places = zip(*paths, strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else _NUMBER.sub("", names[0]) for names in places)
