"""A program over the IPUs of a mesh: shardings of arguments and results, collectives, devices of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ipujax.lowering.jax_compat import ClosedJaxpr, is_float0, is_on_host
from ipujax.lowering.partition import Shardings, explicit_axes, splits
from ipujax.runtime.errors import ArgumentError
from ipujax.sharding.call_shardings import NO_SHARDINGS, CallShardings
from ipujax.sharding.meshes import in_words, mesh_in_words, on_devices, split_axes

if TYPE_CHECKING:
    from ipujax.lowering.partition import Notes


@dataclass(frozen=True, eq=False, slots=True)
class PlanShardings:
    """Shardings of a program.

    Args:
        of_values: shardings of the inputs and results of the jaxpr.
        call: shardings of the call.
        results: sharding that the user wants of each leaf of the results; none when empty.
        devices: mesh of devices that results are put on; None for results on one device.
    """

    of_values: Shardings
    call: CallShardings = NO_SHARDINGS
    results: tuple[NamedSharding | None, ...] = ()
    devices: Mesh | None = None


@dataclass(frozen=True, slots=True)
class Partitioning:
    """A program over the IPUs of a mesh.

    Args:
        mesh: its mesh, axes left to the compiler.
        argument_specs: spec of each leaf of the arguments.
        output_specs: spec of each result of the program.
        notes: collectives that partitioning has added, and equations that each IPU computes whole.
        shardings: shardings that the user has set.
    """

    mesh: AbstractMesh
    argument_specs: tuple[PartitionSpec, ...]
    output_specs: tuple[PartitionSpec, ...]
    notes: Notes
    shardings: PlanShardings

    @staticmethod
    def of(
        jaxprs: Mapping[str, ClosedJaxpr],
        notes: Notes,
        positions: Sequence[int],
        num_leaves: int,
        shardings: PlanShardings,
    ) -> Partitioning | None:
        """Return the partitioning of a program; None if the pass has changed nothing.

        Args:
            jaxprs: jaxpr after each pass.
            notes: of the pass.
            positions: for each input of the program the number of its leaf.
            num_leaves: number of leaves of the arguments.
            shardings: shardings that the user has set.
        """
        after = jaxprs["partition"]
        if after is jaxprs["memory_spaces"]:
            return None
        (eqn,) = after.eqns
        if eqn.primitive.name != "shard_map":  # each replica has a mesh of its own
            return None
        outputs = [_leaving(spec, axes) for spec, axes in zip(eqn.params["out_specs"], notes.unreduced, strict=True)]
        # Operands may include constants, and come in any order.
        spec_of_var = dict(zip(eqn.invars, eqn.params["in_specs"], strict=True))
        specs = [PartitionSpec()] * num_leaves
        # The last inputs may be constants in the host's memory, which are no leaves; Refs are numbered behind these.
        for position, var in zip(positions, after.jaxpr.invars, strict=False):
            if position < num_leaves:
                specs[position] = spec_of_var.get(var, PartitionSpec())
        for number, sharding in enumerate(shardings.call.inputs):
            if sharding is not None:
                specs[number] = sharding.spec
        mesh = eqn.params["mesh"]
        return Partitioning(mesh, tuple(specs), tuple(outputs), notes, shardings)

    def argument_shardings(self) -> list[NamedSharding]:
        """Return the sharding of each leaf of the arguments."""
        return [NamedSharding(self.shardings.devices or self.mesh, spec) for spec in self.argument_specs]

    def result_shardings(self, avals: Sequence[Any]) -> list[NamedSharding]:
        """Return the sharding of each leaf of the results, by their types."""
        specs = iter(self.output_specs)
        # float0 holds no data, and is no result of the program.
        made = [PartitionSpec() if is_float0(aval) else next(specs) for aval in avals]
        settings = self.shardings.results or (None,) * len(avals)
        mesh = self.shardings.devices or self.mesh
        specs_of_results = [
            self._written(aval, spec) if setting is None else setting.spec
            for aval, spec, setting in zip(avals, made, settings, strict=True)
        ]
        memories = ["pinned_host" if is_on_host(aval) else None for aval in avals]
        return [
            NamedSharding(mesh, spec, memory_kind=kind) for spec, kind in zip(specs_of_results, memories, strict=True)
        ]

    def _written(self, aval: Any, spec: PartitionSpec) -> PartitionSpec:
        """An equal spec: that of the type, else that of an argument, with the Nones that the user wrote, as JAX has."""
        typed = _typed(aval)
        if typed is not None:
            return typed
        rank = len(aval.shape)
        # The type has the explicit axes of a mesh that has automatic ones too.
        of_type = getattr(aval, "sharding", None) if explicit_axes(aval) else None
        shardings = (of_type, *self.shardings.call.inputs)
        specs = (sharding.spec for sharding in shardings if isinstance(sharding, NamedSharding))
        equal = (s for s in specs if len(s) <= rank and self._axes(s, rank) == self._axes(spec, rank))
        return next(equal, spec)

    def _axes(self, spec: PartitionSpec, rank: int) -> Any:
        return split_axes(self.mesh, spec, rank), spec.unreduced, spec.reduced

    def text(self, names: Sequence[str]) -> str:
        """Return the shardings of arguments and results, and the collectives, a line each; `names` of the arguments."""
        lines = [f"argument {name}: {spec}" for name, spec in zip(names, self.argument_specs, strict=True)]
        lines += [f"result {number}: {spec}" for number, spec in enumerate(self.output_specs)]
        for move in self.notes.moves:
            axes = ", ".join(move.step.axes)
            place = f" at {move.line}" if move.line else ""
            transfer = f"{move.num_bytes:,} B of each IPU, for {move.primitive}{place}"
            lines.append(f"{move.step.kind} over {axes}: {transfer}: {move.why}")
        lines += self.notes.conflicts
        lines += [f"gathered, no partition rule: {name} at {line}" for name, line in self.notes.gathered]
        return "\n".join([mesh_in_words(self.mesh), *lines])

    def placed(self, results: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
        """Return results on the devices of the mesh, if it has any; without, the sums that results leave are taken."""
        return self.placing(avals)(results)

    def placing(self, avals: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Return the function that puts results of these types where `placed` does."""
        axes_of_results = iter(self.notes.unreduced)
        stacked = [() if is_float0(aval) else next(axes_of_results) for aval in avals]
        if self.shardings.devices is None:
            return lambda results: [
                jnp.sum(x, 0, dtype=x.dtype) if axes else x for x, axes in zip(results, stacked, strict=True)
            ]
        shardings = self.result_shardings(avals)
        unsplit = [n for n, axes in enumerate(stacked) if not axes]
        whole_shardings = [shardings[n] for n in unsplit]

        def place(results: Sequence[Any]) -> list[Any]:
            # Together: each call of `device_put` has its own costs.
            put = iter(jax.device_put([results[n] for n in unsplit], whole_shardings))
            return [
                on_devices(x, axes, sharding) if axes else next(put)
                for x, axes, sharding in zip(results, stacked, shardings, strict=True)
            ]

        return place


def _leaving(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
    """Spec of a result by that of the program's, which is a stack where a sum over axes is unreduced."""
    return PartitionSpec(*spec.partitions[1:], unreduced=set(axes)) if axes else spec


def _typed(aval: Any) -> PartitionSpec | None:
    """Spec in a type over explicit axes, with the Nones that the user wrote."""
    sharding = getattr(aval, "sharding", None)
    is_typed = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 and sharding.mesh.are_all_axes_explicit
    return sharding.spec if sharding is not None and is_typed else None


def check_split_alike(who: str, names: Sequence[str], leaves: Sequence[Any], partitioning: Partitioning) -> None:
    """Refuse an argument that is split otherwise than the program was compiled for, as `jax.stages.Compiled` does.

    Args:
        who: name of the function, for the message.
        names: name of each leaf.
        leaves: arguments.
        partitioning: specs that the program was compiled for.

    Raises:
        ArgumentError: with the argument.
    """
    shape = dict(partitioning.mesh.shape)
    for name, leaf, spec in zip(names, leaves, partitioning.argument_specs, strict=True):
        sharding: Any = getattr(leaf, "sharding", None)
        if not splits(sharding):
            continue
        rank = len(leaf.shape)
        is_equal = split_axes(sharding.mesh, sharding.spec, rank) == split_axes(partitioning.mesh, spec, rank)
        if dict(sharding.mesh.shape) != shape or not is_equal:
            raise ArgumentError(
                f"argument {name} of {who} has another sharding than the compiled program",
                expected=f"{spec} over {mesh_in_words(partitioning.mesh)}",
                got=in_words(sharding),
                hint="call the ipu.jit function itself, which compiles again; or jax.device_put(x, sharding)",
            )
