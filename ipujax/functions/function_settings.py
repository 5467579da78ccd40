"""Settings of an `ipu.jit` function.

Input: keywords of `ipu.jit`. Output: checked values, which the compiler of the function reads. Nothing of the compiler
is imported here: a program that only decorates functions does not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict

import jax

from ipujax.arguments import FunctionName
from ipujax.device import CPU, Device, current_device
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.options import Options

if TYPE_CHECKING:
    from ipujax.calls import Replication
    from ipujax.sharding import ShardingSettings


_DEFAULT = {field.name: getattr(Options(), field.name) for field in fields(Options)}


# `jit` itself has no annotations: its overloads take these, so that both forms of the decorator have one list.
class Settings(TypedDict, total=False):
    """Keywords of `jit`."""

    device: Device | None
    replicas: int | None
    in_specs: Any
    out_specs: Any
    axis_name: str | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    offload_argnums: int | Sequence[int]
    in_shardings: Any
    out_shardings: Any
    keep_unused: bool
    inline: bool
    backend: None
    compiler_options: Mapping[str, Any] | None
    options: Options | None


@dataclass(frozen=True, slots=True, eq=False)
class FunctionSettings:
    """Settings of an `ipu.jit` function.

    Args:
        device: device that was given to `ipu.jit`; None for the default device of each call.
        options: compiler options.
        of_jax: what `jax.jit` takes too, by its keywords. Donated and static arguments are None where unset: only then
            does JAX derive positions from names, and names from positions.
        replication: None for a function without an axis of replicas.
        offload: positional arguments in streaming memory.
        shardings: None without any in `ipu.jit`.
        line: line of `ipu.jit`, the origin of equations without a line of the user's.
    """

    device: Device | None
    options: Options
    of_jax: Mapping[str, Any]
    replication: Replication | None
    offload: tuple[int, ...]
    shardings: ShardingSettings | None
    line: str = ""

    def name_of(self, fun: Callable[..., Any]) -> FunctionName:
        """Return the name of a function with these settings."""
        return FunctionName.of(fun, self.device, None if self.replication is None else self.replication.replicas)

    @property
    def key(self) -> Hashable:
        """All settings that programs depend on; without a hash where a leaf or a node of a pytree has none."""
        axes = self.replication and self.replication.settings
        shardings = self.shardings and (self.shardings.inputs, self.shardings.outputs)
        leaves, tree = jax.tree.flatten((axes, shardings, self.of_jax))
        return self.device, self.options, self.offload, tuple(leaves), tree

    @property
    def static(self) -> tuple[Any, Any]:
        """Positions and names of static arguments."""
        return self.of_jax["static_argnums"], self.of_jax["static_argnames"]

    @property
    def donated(self) -> tuple[Any, Any]:
        """Positions and names of donated arguments."""
        return self.of_jax["donate_argnums"], self.of_jax["donate_argnames"]

    def check_kept(self, name: str, who: str, kept: Collection[str]) -> None:
        """Refuse settings that a function made of this one would not have.

        Args:
            name: name of the function.
            who: public name of what makes another function of it.
            kept: keywords of `ipu.jit` that the other function has too.

        Raises:
            ArgumentError: a setting that is not among them, by its name.
        """
        shardings = self.shardings
        given = {
            **self.of_jax,
            "replicas": self.replication,
            "offload_argnums": self.offload,
            "in_shardings": shardings and jax.tree.leaves(shardings.inputs),
            "out_shardings": shardings and jax.tree.leaves(shardings.outputs),
        }
        dropped = [keyword for keyword, value in given.items() if value and keyword not in kept]
        if dropped:
            raise ArgumentError(
                f"{who} does not keep {', '.join(dropped)} of ipu.jit",
                expected=f"a function with {', '.join(['device, options', *kept])} alone, or a plain one",
                got=name,
                hint=f"ipu.jit({name}, ...) without {', '.join(dropped)}",
            )

    def unused_inside(self, outer: Options) -> list[str]:
        """Return a line for each setting without effect where a function with options `outer` calls this one."""
        names = [field.name for field in fields(Options)]
        unused = [name for name in names if getattr(self.options, name) not in (getattr(outer, name), _DEFAULT[name])]
        settings = [f"Options({name}={getattr(self.options, name)!r})" for name in unused]
        of_arguments = {name: self.of_jax[name] for name in ("donate_argnums", "donate_argnames")}
        of_arguments["offload_argnums"] = self.offload
        settings += [f"{name}={value}" for name, value in of_arguments.items() if value]
        return [f"{setting} has no effect: its caller is of ipu.jit, whose settings hold" for setting in settings]

    @property
    def for_xla(self) -> dict[str, Any]:
        """Settings of XLA's computation."""
        return {name: self.of_jax[name] for name in ("keep_unused", "compiler_options")}

    @property
    def current_device(self) -> Device:
        """Device of the next call."""
        return self.device or current_device()

    @property
    def computes_whole(self) -> bool:
        """True if no sharding partitions the function: replicas split its arguments, or a `CPU` computes it."""
        return self.replication is not None or isinstance(self.current_device, CPU)
