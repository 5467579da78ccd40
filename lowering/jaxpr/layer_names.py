"""The layer of each equation, as one path of names: scopes, or the functions of the call stack, numbered in loops.

Input: the equations of a jaxpr after inlining, in the order of tracing, with the frames each was traced in. Output: a
path for each, `encoder/block[3]/dense`.

A path has the scopes of the name stack; without any the user's functions, outermost first, then a library's. Functions
that a Python loop or several lines of a function call are numbered, and named where there are scopes too, at the group
among them that all equations of a call agree on. Forward equations are in the order of tracing, see `activations`.
Those of a gradient, and those that a checkpoint recomputes, have the frames of the forward equations that they derive
from: they belong to equations with a common operand or result at the same group; without one the order decides, which
is the reverse in a gradient.
Limits: where neither decides, a function has no number.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from sys import maxsize
from types import CodeType
from typing import Any, NamedTuple

from ipujax.lowering.jax_compat import JaxprEqn, Var
from ipujax.lowering.jaxpr.activations import Activation, Call, Frames, Moments, Place, moments_of_equations
from ipujax.lowering.jaxpr.gradient_bodies import GradientBody
from ipujax.lowering.jaxpr.loops_of_code import Loop
from ipujax.lowering.jaxpr.stage_names import is_transposed, read_name
from ipujax.lowering.source_info import name_stack, scopes_of
from ipujax.runtime.cache import remembered_small
from ipujax.runtime.errors import is_installed

_MAX_READERS = 64  # a value with more distinguishes no iterations: a mask of all layers, a constant
_UPDATE = re.compile(r"\.<locals>\.update\w*$")  # update function of an optimiser, nested in its constructor
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
        """Operands and results that are no literals."""
        return (x for x in (*self.eqn.invars, *self.eqn.outvars) if isinstance(x, Var))


@dataclass(eq=False, slots=True)
class _ForwardGroup:
    """Forward equations of one place in one iteration.

    Args:
        layer: path of their layer.
        order: number of the last of them, among forward equations.
        moments: runs of functions that it was traced in.
    """

    layer: str
    order: int
    moments: Moments


class _ForwardEquation(NamedTuple):
    number: int
    moments: Moments
    indices: list[tuple[int, ...]]  # of its frames, see `_path`
    depths: list[int]


_Key = tuple[tuple[Place, ...], tuple[str, ...]]  # frames and scopes: equal for forward and backward equations


class LayerNames:
    """Layers of the equations of one jaxpr.

    Args:
        equations: all equations of the jaxpr, in order.
        gradient: forward bodies that a body of a gradient derives from, as it has no forward equations itself.
    """

    def __init__(self, equations: Sequence[TracedEquation], gradient: GradientBody[LayerNames] | None = None) -> None:
        self._equations = equations
        self._scopes = [_scopes_of(x) for x in equations]
        self._groups: dict[_Key, dict[str, _ForwardGroup]] = defaultdict(dict)
        self._users: dict[Var, list[tuple[_Key, _ForwardGroup]]] = defaultdict(list)
        self._producers: dict[Var, tuple[_Key, _ForwardGroup]] = {}  # of results of recomputed and backward equations
        self._forward_equations: list[_ForwardEquation] = []
        self._recomputed_runs: dict[Repetition, Activation] = {}  # run of the function that a call recomputes
        self.layers = [""] * len(equations)
        forward, recomputed, backward = self._split_parts(gradient is not None)
        self._name_forward(forward)
        self._sources = gradient.forward if gradient is not None else ()
        if gradient is not None:
            self._copy_forward_groups(gradient)
        self._find_recomputed_runs([*chain(*recomputed), *backward])
        for numbers in recomputed:
            self._name_by_forward(numbers, is_reversed=False)
        for var, producer in self._producers.items():  # a gradient reads recomputed values like forward ones
            self._users[var].append(producer)
        self._name_by_forward(backward, is_reversed=True)

    def _copy_forward_groups(self, gradient: GradientBody[LayerNames]) -> None:
        # The users of a forward value become users of the input that has it in this body.
        for source in gradient.forward:
            self._groups.update((key, dict(groups)) for key, groups in source._groups.items())
        for var, values in gradient.values.items():
            self._users[var] = [user for source, inside in values for user in source._users.get(inside, ())]

    def _split_parts(self, is_gradient: bool) -> tuple[list[int], list[list[int]], list[int]]:
        """Return the numbers of forward equations, of recomputed ones by recomputing call, and of backward ones."""
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

    def _key(self, number: int) -> _Key:
        return self._equations[number].frames.places, self._scopes[number]

    # --- forward ---

    def _name_forward(self, numbers: Sequence[int]) -> None:
        items = [self._equations[n] for n in numbers]
        stages = [read_name(name_stack(item.eqn)).stage for item in items]
        all_moments = moments_of_equations([x.frames for x in items], stages, lambda n: _operation(items[n].eqn))
        pairs = [(moments, self._scopes[n]) for n, moments in zip(numbers, all_moments, strict=True)]
        common = _CommonScopes({pair: item.frames.codes for pair, item in zip(pairs, items, strict=True)})
        # Most equations of a layer have equal moments and scopes: their path is computed once.
        paths: dict[tuple[Moments, tuple[str, ...]], tuple[str, list[tuple[int, ...]], list[int]]] = {}
        for order, (n, pair) in enumerate(zip(numbers, pairs, strict=True)):
            if pair not in paths:
                indices, depths = common.of(pair[0], items[order].frames.codes)
                paths[pair] = _path(items[order].frames.calls, indices, depths, pair[1]), indices, depths
            self.layers[n], indices, depths = paths[pair]
            self._forward_equations.append(_ForwardEquation(n, pair[0], indices, depths))
            self._add_forward(self._key(n), self.layers[n], n, order)

    def _add_forward(self, key: _Key, layer: str, number: int, order: int) -> None:
        group = self._groups[key].setdefault(layer, _ForwardGroup(layer, order, ()))
        group.order = order
        group.moments = self._forward_equations[order].moments
        for var in self._equations[number].variables:
            self._users[var].append((key, group))

    def _add_inner_groups(self, key: _Key) -> None:
        """Add to a key without forward equations, as by `custom_vjp`, those that have more frames inside of it."""
        for source in self._sources:
            source._add_inner_groups(key)
            self._groups[key].update(source._groups.get(key, {}))
        calls, scopes = key
        count = len(calls)
        around = dict[int, tuple[str, str]]()
        for order, (n, _, indices, depths) in enumerate(self._forward_equations):
            if self._scopes[n] == scopes and self._equations[n].frames.places[:count] == calls:
                outer = _path(self._equations[n].frames.calls[:count], indices[:count], depths[:count], scopes)
                around[order] = outer, self.layers[n]
        if not around:
            self._add_groups_before(key)
        inner: dict[str, set[str]] = defaultdict(set)
        for outer, layer in around.values():
            inner[outer].add(layer)
        # The layer inside names the key if it is the only one; else only the frames of the key do.
        for order, (outer, layer) in around.items():
            path = layer if len(inner[outer]) == 1 else outer
            self._add_forward(key, path, self._forward_equations[order].number, order)

    def _add_groups_before(self, key: _Key) -> None:
        """Add to a key without any forward equation the last equation before its place in each run of its function."""
        # As of a `custom_vjp` that computes nothing in the forward pass.
        *outside, (code, place) = key[0] or ((None, 0),)
        last = dict[str, int]()
        for order, (n, _, indices, depths) in enumerate(self._forward_equations):
            places = self._equations[n].frames.places
            count = len(outside)
            if self._scopes[n] != key[1] or len(places) <= count or list(places[:count]) != outside:
                continue
            if places[count][0] is code and places[count][1] < place:
                calls = self._equations[n].frames.calls[: count + 1]
                last[_path(calls, indices[: count + 1], depths[: count + 1], key[1])] = order
        for path, order in last.items():
            self._add_forward(key, path, self._forward_equations[order].number, order)

    # --- recomputed and backward equations ---

    def _find_recomputed_runs(self, numbers: Sequence[int]) -> None:
        """Find the runs of functions that calls recompute, by a vote of the equations in a call that match one run."""
        for key in {self._key(n) for n in numbers}.difference(self._groups):
            self._add_inner_groups(key)
        votes: dict[Repetition, Counter[Activation]] = defaultdict(Counter)
        for n in numbers:
            repetition = self._equations[n].repetition
            if repetition is not None:
                runs = {run for x in self._match_by_values(n).values() if (run := _run(x, repetition)) is not None}
                votes[repetition].update(runs if len(runs) == 1 else ())
        self._recomputed_runs = {repetition: runs.most_common(1)[0][0] for repetition, runs in votes.items() if runs}

    def _filter_by_run(self, number: int, options: list[_ForwardGroup]) -> list[_ForwardGroup]:
        """Filter groups to those in the run of the function that the equation recomputes."""
        repetition = self._equations[number].repetition
        run = self._recomputed_runs.get(repetition) if repetition is not None else None
        if repetition is None or run is None:
            return options
        return [x for x in options if _run(x, repetition) is run] or options

    def _name_by_forward(self, numbers: Sequence[int], is_reversed: bool) -> None:
        """Name recomputed equations, in the order of the forward ones, or backward equations, in reverse order."""
        users = [self._match_by_values(n) for n in numbers]
        limit = -1 if is_reversed else maxsize
        following = list[int]()  # order of the next equation with one match
        for matches in reversed(users):
            following.append(limit)
            limit = next(iter(matches.values())).order if len(matches) == 1 else limit
        last = maxsize if is_reversed else -1  # order of the last equation with one match
        # Each rule applies only while several groups remain, and never removes all of them.
        for n, matches, limit in zip(numbers, users, reversed(following), strict=True):
            options = list((matches or self._groups.get(self._key(n), {})).values())
            options = self._filter_by_run(n, options)
            # A sum of gradients belongs to the layer whose gradients it adds.
            if len(options) > 1 and self._equations[n].eqn.primitive.name == "add_any":
                summed = {group.layer for _, group in self._operand_producers(n)}.intersection(x.layer for x in options)
                options = [x for x in options if x.layer in summed] if len(summed) == 1 else options
            if len(options) > 1:
                options = [x for x in options if min(last, limit) <= x.order <= max(last, limit)] or options
            if len(options) > 1:
                options = self._filter_by_producers(n, options, is_reversed)
            if len(options) == 1:
                last = options[0].order
                self._producers.update((var, (self._key(n), options[0])) for var in self._equations[n].eqn.outvars)
            self.layers[n] = _common_path([x.layer for x in options]) if options else self._unnumbered(n)

    def _filter_by_producers(self, number: int, options: list[_ForwardGroup], is_reversed: bool) -> list[_ForwardGroup]:
        """Filter groups to that of an operand's producer; for recomputed equations to that of its run of a function."""
        producers = list(self._operand_producers(number))
        if is_reversed:
            same = [x for x in options if any(group is x for key, group in producers if key == self._key(number))]
        else:
            runs = {group.moments[-1].activation for _, group in producers if group.moments}
            same = [x for x in options if x.moments and x.moments[-1].activation in runs]
        return same if len(same) == 1 else options

    def _operand_producers(self, number: int) -> Iterable[tuple[_Key, _ForwardGroup]]:
        operands = (x for x in self._equations[number].eqn.invars if isinstance(x, Var))
        return (self._producers[x] for x in operands if x in self._producers)

    def _match_by_values(self, number: int) -> dict[str, _ForwardGroup]:
        """Return by layer the forward groups of an equation's key that share an operand or result with it."""
        key = self._key(number)
        matches = dict[str, _ForwardGroup]()
        for var in self._equations[number].variables:
            users = self._users.get(var, ())
            if len(users) > _MAX_READERS:
                continue
            by_layer = {group.layer: group for other, group in users if other == key}
            # Each value narrows the matches; one that contradicts the others is ignored.
            common = {layer: group for layer, group in by_layer.items() if layer in matches}
            matches = common or matches or by_layer
        return matches

    def _unnumbered(self, number: int) -> str:
        calls = self._equations[number].frames.calls
        return _path(calls, [()] * len(calls), [0] * len(calls), self._scopes[number])


def _run(group: _ForwardGroup, repetition: Repetition) -> Activation | None:
    # The frame after those around the call is the function that it calls.
    return group.moments[repetition.depth].activation if repetition.depth < len(group.moments) else None


def _operation(eqn: JaxprEqn) -> Hashable:  # equal for the same equation of different iterations
    return eqn.primitive.name, *(var.aval for var in eqn.outvars)


def _scopes_of(item: TracedEquation) -> tuple[str, ...]:
    """Return the scopes of an equation, once: recomputed ones may have those around the call twice, as in Flax."""
    scopes = scopes_of(item.eqn)
    if item.repetition is None:
        return scopes
    twice = (n for n in range(len(scopes) // 2, 0, -1) if scopes[:n] == scopes[n : 2 * n])
    return scopes[next(twice, 0) :]


class _CommonScopes:
    """Scopes around runs of functions and around iterations: the longest prefix common to all equations in them."""

    def __init__(self, pairs: Mapping[tuple[Moments, tuple[str, ...]], Sequence[CodeType]]) -> None:
        self._around: dict[Activation, tuple[str, ...]] = {}
        iterations: dict[tuple[Activation, Loop], dict[int, tuple[str, ...]]] = defaultdict(dict)
        calls: dict[tuple[Activation, CodeType], dict[int, tuple[str, ...]]] = defaultdict(dict)
        for (moments, scopes), codes in pairs.items():
            for moment in moments:
                _narrow_prefix(self._around, moment.activation, scopes)
                for loop in moment.loops:
                    _narrow_prefix(iterations[moment.activation, loop], moment.iterations.get(loop, 0), scopes)
            for moment, callee in zip(moments, codes[1:], strict=False):
                if _is_layer(callee):
                    _narrow_prefix(calls[moment.activation, callee], moment.place, scopes)
        # Loops whose iterations have a scope each: their numbers would say it twice.
        self._named = {key for key, scopes in iterations.items() if len(set(scopes.values())) == len(scopes)}
        # Places at which a run of a function calls another, in order, unless each has a scope.
        self._places = {key: list(scopes) for key, scopes in calls.items() if len(set(scopes.values())) < len(scopes)}

    def of(self, moments: Moments, codes: Sequence[CodeType]) -> tuple[list[tuple[int, ...]], list[int]]:
        """Return for each call the numbers of iterations and callees that have no scope, and the number of scopes."""
        indices = [
            tuple(x.iterations.get(loop, 0) for loop in x.loops if (x.activation, loop) not in self._named)
            for x in moments
        ]
        for n, (moment, callee) in enumerate(zip(moments, codes[1:], strict=False)):
            if (places := self._places.get((moment.activation, callee))) is not None:
                indices[n] += (places.index(moment.place),)
        return indices, [len(self._around[x.activation]) for x in moments]


def _narrow_prefix(prefixes: dict[Any, tuple[str, ...]], key: Hashable, scopes: tuple[str, ...]) -> None:
    """Shorten the prefix of a key to the part that it has in common with `scopes`."""
    prefix = prefixes.setdefault(key, scopes)
    if prefix is not scopes and prefix != scopes[: len(prefix)]:
        length = min(len(prefix), len(scopes))
        prefixes[key] = prefix[: next((n for n in range(length) if prefix[n] != scopes[n]), length)]


def _path(
    calls: Sequence[Call], indices: Sequence[tuple[int, ...]], depths: Sequence[int], scopes: Sequence[str]
) -> str:
    """Return the path of a layer, from frames of calls and scopes of its name stack, both outermost first."""
    # `indices` are the numbers of the iterations of loops, which number callees; `depths` the numbers of scopes around.
    names = list[str]()
    used = 0  # number of scopes in `names`
    pending = ""  # numbers of the frames around, for the next name
    codes = tuple(call.place[0] for call in calls)
    called = [n for n in range(1, len(codes)) if not depths[n] and _is_numbered(codes, indices, n - 1)]
    last_outside = max(called, default=-1)  # last numbered function outside of all scopes
    for n, (name, numbers, depth) in enumerate(zip(_names_in_path(codes), indices, depths, strict=True)):
        if name and (pending or not scopes or n <= last_outside):
            names += scopes[used:depth]
            used = max(depth, used)
            if depth and names and names[-1].rpartition(".")[2] == name:  # the scope of the function itself
                name = names.pop()
            names.append(name + pending)
        if name:
            pending = ""
        if _is_numbered(codes, indices, n):
            pending += "".join(f"[{number}]" for number in numbers)
    names += scopes[used:]
    if pending and used < len(scopes):
        names[-1] += pending
    elif pending:
        names.append(f"loop{pending}")
    return "/".join(names)


def _is_numbered(codes: Sequence[CodeType], indices: Sequence[tuple[int, ...]], number: int) -> bool:
    # Loops of the user's functions number all callees, those of a library's only modules.
    if not indices[number]:
        return False
    inside = codes[number + 1].co_name if number + 1 < len(codes) else ""
    return inside == "__call__" or not is_installed(codes[number].co_filename)


def _is_layer(code: CodeType) -> bool:
    # Calls at several places are numbered for the user's functions, and for modules of libraries.
    return code.co_name == "__call__" or not (is_installed(code.co_filename) or code.co_name.startswith("<"))


@remembered_small
def _names_in_path(codes: tuple[CodeType, ...]) -> tuple[str, ...]:
    """Return the names of functions in a path, "" for lambdas and helpers of libraries."""
    users = [n for n, code in enumerate(codes) if not is_installed(code.co_filename)]
    inside = range(users[-1] + 1 if users else 0, len(codes))
    in_path = {*users, *(n for n in inside if codes[n].co_name == "__call__")}
    updates = [n for n in inside if _UPDATE.search(codes[n].co_qualname)]
    public = [n for n in inside if not codes[n].co_name.startswith(("<", "_"))]
    # Without a module: an optimiser's update, else the innermost public function.
    if not in_path.intersection(inside):
        in_path.update(updates[-1:] or public[-1:])
    return tuple(_function_name(code) if n in in_path else "" for n, code in enumerate(codes))


def _function_name(code: CodeType) -> str:
    """Return `block`, the class of a `__call__`, or the optimiser of an update; "" for a lambda or comprehension."""
    maker, _, inner = code.co_qualname.rpartition(".<locals>.")
    if inner.startswith("update") and maker and is_installed(code.co_filename):
        return maker.rpartition(".")[2]
    owner, _, name = inner.rpartition(".")
    if name == "__call__" and owner:
        return owner.rpartition(".")[2]
    return "" if name.startswith("<") else name


def _common_path(layers: Sequence[str]) -> str:
    """Return the path common to several candidate layers, without the numbers in which they differ."""
    paths = [layer.split("/") for layer in layers]
    if len({len(path) for path in paths}) > 1:
        return "/".join(_NUMBER.sub("", name) for name in min(paths, key=len))
    places = zip(*paths, strict=True)
    return "/".join(names[0] if len(set(names)) == 1 else _NUMBER.sub("", names[0]) for names in places)
