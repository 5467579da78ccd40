"""Functions of blocks that a user writes: `jax.shard_map`, and `jax.experimental.custom_partitioning`.

Input: an equation. A `shard_map` names the specs of its operands and results. In a `custom_partitioning` the
`sharding_rule` names the factors of dimensions; `partition` chooses, from the shardings of operands and results, those
that its function of blocks takes and gives. Output: specs, factors, and that function on the blocks of one device.
Source: jax 0.10 with Shardy, which asks the rule and never the older callbacks for shardings. Limits: shardings are
`NamedSharding`s also with `decode_shardings=False`; permutation factors count as those that stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import BATCHING, custom_partitioning
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import JaxprEqn, shape_of
from ipujax.lowering.partition.specs import MeshAxes, Spec, local_shape, spec_of
from ipujax.lowering.primitives import Factors, Labels
from ipujax.lowering.source_info import source_line
from ipujax.runtime.errors import ArgumentValueError, GraphError

CUSTOM_PARTITIONING = "custom_partitioning"


def shard_map_specs(eqn: JaxprEqn, mesh: MeshAxes) -> tuple[list[Spec], list[Spec]]:
    """Specs of the operands and results of a user's `shard_map`."""
    pairs = ((eqn.invars, eqn.params["in_specs"]), (eqn.outvars, eqn.params["out_specs"]))
    in_specs, out_specs = (
        [spec_of(spec, len(shape_of(atom)), mesh) for atom, spec in zip(atoms, specs, strict=True)]
        for atoms, specs in pairs
    )
    return in_specs, out_specs


def check_mesh(eqn: JaxprEqn, mesh: MeshAxes) -> None:
    """Refuse a user's `shard_map` over another mesh, or with axes that are left to the compiler.

    Raises:
        GraphError: with its line.
    """
    other = MeshAxes.of(eqn.params["mesh"])
    if other != mesh:
        raise GraphError(
            "jax.shard_map over another mesh than the program's",
            where=source_line(eqn) or None,
            expected=str(mesh),
            got=str(other),
        )
    manual = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    if manual is not None and set(manual) != set(mesh.names):
        raise GraphError(
            "jax.shard_map leaves axes of its mesh to the compiler",
            where=source_line(eqn) or None,
            expected=f"all of {list(mesh.names)}",
            got=sorted(manual),
            hint="name all axes, or none, in axis_names=",
        )


def custom_factors(eqn: JaxprEqn, mesh: Mesh | AbstractMesh) -> Factors:
    """Factors that the sharding rule of an equation names; without a rule none.

    Args:
        eqn: a `custom_partitioning`.
        mesh: mesh of the user's shardings, for a rule that is a callback.
    """
    shapes = list(map(shape_of, (*eqn.invars, *eqn.outvars)))
    num_operands = len(eqn.invars)
    rule = _sharding_rule(eqn, mesh)
    if rule is None:
        no_factors = tuple(((),) * len(shape) for shape in shapes)
        return Factors(no_factors[:num_operands], no_factors[num_operands:], {})
    numbers: dict[str, int] = {}
    sizes: dict[int, int] = {}
    labels: list[Labels] = []
    for mapping, shape in zip((*rule.operand_mappings, *rule.result_mappings), shapes, strict=True):
        dims = list(_factor_names(mapping, len(shape)))
        dims += [()] * (len(shape) - len(dims))
        for names, size in zip(dims, shape, strict=True):
            for name in names:
                number = numbers.setdefault(name, len(numbers))
                sizes[number] = rule.factor_sizes.get(name, size)  # it has those of dimensions with several factors
        labels.append(tuple(tuple(numbers[name] for name in names) for names in dims))
    unsplit = {numbers[name] for name in (*rule.need_replication_factors, *rule.permutation_factors)}
    return _without_whole(unsplit, labels, num_operands, sizes)


def _sharding_rule(eqn: JaxprEqn, mesh: Mesh | AbstractMesh) -> Any:
    """The equation's `SdyShardingRule`, which a callback may give for shapes; None for none."""
    rule = eqn.params["sharding_rule"]
    if not callable(rule):
        return rule
    avals: list[list[Any]] = [[atom.aval for atom in atoms] for atoms in (eqn.invars, eqn.outvars)]
    shapes = [[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in values] for values in avals]
    returned = rule(*eqn.params["static_args"], mesh, *shapes)
    text, settings = returned if isinstance(returned, tuple | list) else (returned, {})
    # `def_partition` parses the text of a rule; the function itself is not called.
    function = custom_partitioning(lambda: None)
    function.def_partition(None, sharding_rule=text, **settings)
    return function.sharding_rule


def _factor_names(mapping: Sequence[Any], rank: int) -> Iterator[tuple[str, ...]]:
    """Names of factors of each dimension; dimensions written as an ellipsis have one each, counted from the last."""
    for entry in mapping:
        if isinstance(entry, str) and entry.startswith(BATCHING):
            yield from ((f"{entry.removeprefix(BATCHING) or 0} {n}",) for n in range(rank - len(mapping) + 1))
        else:
            yield (entry,) if isinstance(entry, str) else tuple(entry)


def _without_whole(unsplit: set[int], labels: Sequence[Labels], num_operands: int, sizes: dict[int, int]) -> Factors:
    """Factors without those that stay whole, and without all behind them in a dimension.

    A split of a factor behind (minor to) a whole one would give blocks that are not contiguous in the dimension.

    Args:
        unsplit: factors that are never split.
        labels: factors of each dimension, of operands and then of results.
        num_operands: number of operands.
        sizes: length of each factor.
    """
    split: list[Labels] = []
    for dims in labels:
        split.append(tuple(tuple(takewhile(lambda factor: factor not in unsplit, factors)) for factors in dims))
    used = {f for dims in split for factors in dims for f in factors}
    return Factors(
        tuple(split[:num_operands]), tuple(split[num_operands:]), {f: size for f, size in sizes.items() if f in used}
    )


class CustomFunction(NamedTuple):
    """A user's function of blocks: of those of operands under `operand_specs`, to those of results."""

    compute: Callable[..., list[Any]]
    operand_specs: list[Spec]
    result_specs: list[Spec]


def custom_function(
    eqn: JaxprEqn,
    operand_specs: Sequence[Spec],
    result_specs: Sequence[Spec],
    axes: MeshAxes,
    mesh: Mesh | AbstractMesh,
) -> CustomFunction:
    """The user's function on blocks, as `partition` chooses it.

    Args:
        eqn: the equation.
        operand_specs: spec of each operand.
        result_specs: spec that each result should have.
        axes: axes of the mesh.
        mesh: mesh of the user's shardings.

    Returns:
        The function, and the specs of operands and results that `partition` chooses for it.

    Raises:
        ArgumentValueError: the function returns other shapes than the shardings that `partition` returns.
    """
    params = eqn.params
    in_tree, out_tree = params["in_tree"], params["out_tree"]
    operands = _types_with_shardings(eqn.invars, operand_specs, mesh)
    results = _types_with_shardings(eqn.outvars, result_specs, mesh)
    _, function, out_shardings, in_shardings = params["partition"](
        *params["static_args"], mesh, in_tree.unflatten(operands), out_tree.unflatten(results)
    )
    chosen_operand_specs, chosen_result_specs = (
        [spec_of(s.spec, len(x.shape), axes) for s, x in zip(tree.flatten_up_to(shardings), values, strict=True)]
        for tree, shardings, values in ((in_tree, in_shardings, operands), (out_tree, out_shardings, results))
    )
    expected = [(local_shape(x.shape, s, axes), x.dtype) for x, s in zip(results, chosen_result_specs, strict=True)]

    def compute(*arrays: Any) -> list[Any]:
        """Results of the user's function on blocks, of the shapes that its shardings ask for."""
        values = list(out_tree.flatten_up_to(function(*in_tree.unflatten(arrays))))
        actual = [(tuple(x.shape), x.dtype) for x in map(jax.typeof, values)]
        if actual != expected:
            raise ArgumentValueError(
                "the function of blocks of a custom_partitioning returns other shapes than its shardings ask for",
                where=source_line(eqn) or None,
                expected=_shapes_in_words(expected),
                got=_shapes_in_words(actual),
                hint="partition returns the shardings of results, then those of operands",
            )
        return values

    return CustomFunction(compute, chosen_operand_specs, chosen_result_specs)


def _types_with_shardings(
    atoms: Sequence[Any], specs: Sequence[Spec], mesh: Mesh | AbstractMesh
) -> list[jax.ShapeDtypeStruct]:
    """Shapes with shardings, whose specs have an entry for each dimension."""
    parts = [[dim[0] if len(dim) == 1 else dim or None for dim in spec.dims] for spec in specs]
    return [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=NamedSharding(mesh, PartitionSpec(*dims)))
        for x, dims in zip(atoms, parts, strict=True)
    ]


def _shapes_in_words(values: Sequence[tuple[tuple[int, ...], Any]]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for shape, dtype in values)
