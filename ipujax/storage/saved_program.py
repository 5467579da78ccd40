"""A compiled program as one file: its computation as StableHLO, its profile, its signature, and versions.

Input: a compiled function. Output: a file; from such a file a `LoadedProgram`, on a machine with equal versions.
Limits: pytrees of dicts, lists, tuples, named tuples and None. Programs that call Python functions, change Refs, are
partitioned, spread over instances, or have arrays in the host's memory are refused.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.export

from ipujax.calls import Signature, check_compiled_call
from ipujax.lowering.digests import CALLBACKS
from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError
from ipujax.runtime.not_copied import Shared
from ipujax.runtime.signatures import checking_calls
from ipujax.storage.computation import ExportError, exported_computation
from ipujax.storage.sealed import DamagedError, Head, seal, unseal
from ipujax.storage.tree_data import tree_data, tree_of_data
from ipujax.storage.versions import installed_versions

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_KIND = "compiled"
_COMPARED = ("ipujax", "jax", "jaxlib", "machine")  # versions that must be equal
FilePath = str | os.PathLike[str]


class LoadedProgram(Shared):
    """A compiled program that was read from a file: call it, or read its profile.

    Attributes:
        name: name of the function.
        versions: versions it was compiled with, by name.
    """

    COPY_HINT = "ipu.load(path) in each process"

    def __init__(self, head: Head, sections: dict[str, bytes]) -> None:
        figures = head.figures
        exported = jax.export.deserialize(bytearray(sections["computation"]))
        self.name: str = figures["name"]
        self.versions: dict[str, str] = figures["versions"]
        self._profile_content = sections["profile"]
        donated = tuple(figures["donated"])
        unknown = (False,) * len(donated)
        self._signature = Signature(
            tree_of_data(figures["in_tree"]),
            tuple(exported.in_avals),
            donated,
            unknown,
            tuple(figures["used"]),
            tree_of_data(figures["out_tree"]),
            tuple(exported.out_avals),
            tuple(figures["arguments"]),
            tuple(figures["leaf_names"]),
        )
        donated_leaves = tuple(number for number, flag in enumerate(donated) if flag)
        self._call = jax.jit(lambda *leaves: exported.call(*leaves), donate_argnums=donated_leaves)

    @cached_property
    def profile(self) -> Profile:
        """Static profile, as of `Compiled.profile`; it has neither executable nor timeline."""
        from ipujax.runtime.report import SavedProfile

        return SavedProfile(json.loads(gzip.decompress(self._profile_content)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on arguments of the compiled signature.

        Raises:
            ArgumentError: another pytree, shape or dtype, or an array that is donated and passed twice.
        """
        signature = self._signature
        leaves = check_compiled_call(self.name, signature, args, kwargs, lambda: signature.in_avals)
        signature.check_donated(self.name, leaves)
        return jax.tree.unflatten(signature.out_tree, self._call(*leaves))

    def __repr__(self) -> str:
        return f"LoadedProgram({self.name}: {self.profile.brief})"


class Program(Protocol):
    """A lowered function, a `Lowered`."""

    name: Any
    signature: Signature
    spread: Any

    @property
    def calls(self) -> Any: ...
    @property
    def primitives(self) -> set[str]: ...
    @property
    def closes_over_host_arrays(self) -> bool: ...
    def runs_apart(self, record: None) -> bool: ...
    def evaluate(self, *leaves: Any) -> Any: ...


def _obstacle(program: Program) -> str:
    """Return why the computation cannot be a function of the arguments alone, "" if it can."""
    if program.calls is not None:
        return f"{', '.join(sorted(program.primitives.intersection(CALLBACKS)))} calls a Python function"
    if program.closes_over_host_arrays or any(map(is_ref, program.signature.in_avals)):
        return "it changes Refs, or closes over arrays in the host's memory"
    if program.spread is not None or program.runs_apart(None):
        return "shardings, instances or memories of the host move its arrays outside of XLA"
    return ""


def save_program(path: FilePath, program: Program, profile: Profile) -> None:
    """Write a compiled program to a file.

    Args:
        path: of the file; an existing one is replaced.
        program: the lowered function.
        profile: static profile.

    Raises:
        ArgumentError: the computation needs more than its arguments, `jax.export` refuses an operation, or the path
            cannot be written.
        ArgumentTypeError: a pytree of a kind that cannot be saved, or `path` is not a path.
    """
    from ipujax.runtime.profile.saved_figures import saved_data

    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError("compiled.save needs a path", expected="a str or an os.PathLike", got=repr(path))
    name = program.name
    signature = program.signature
    if obstacle := _obstacle(program):
        raise ArgumentError(f"{name} cannot be saved: {obstacle}", hint="compiled.profile.save(path)")
    figures = {
        "name": str(name),
        "versions": installed_versions(),
        "in_tree": tree_data(name, "arguments", signature.in_tree),
        "out_tree": tree_data(name, "results", signature.out_tree),
        "donated": signature.donated,
        "used": signature.used,
        "arguments": signature.arguments,
        "leaf_names": signature.leaf_names,
    }

    def flat(*leaves: jax.Array) -> Sequence[Any]:
        return jax.tree.leaves(program.evaluate(*leaves))

    try:
        computation = exported_computation(flat, signature.in_avals)
    except ExportError as error:
        problem = f"{name} cannot be saved: jax.export refuses its computation"
        raise ArgumentError(problem, got=str(error.__cause__)[:500]) from error
    profile_content = gzip.compress(json.dumps(saved_data(profile), allow_nan=False).encode(), mtime=0)
    content = seal(Head(_KIND, figures=figures), {"computation": computation, "profile": profile_content})
    try:
        with open(path, "wb") as file:
            file.write(content)
    except (OSError, ValueError) as error:
        problem = f"{name} cannot be saved to {os.fspath(path)!r}"
        raise ArgumentError(problem, got=getattr(error, "strerror", None) or str(error)) from error


@checking_calls("ipu.load", first="")
def load(path: FilePath) -> LoadedProgram:
    """Read a program that `compiled.save(path)` wrote: callable, and with its profile; nothing is compiled for IPUs.

    Args:
        path: of the file. It has code that calls run: load files that you trust.

    Raises:
        ArgumentTypeError: `path` is not a path.
        ArgumentError: the file cannot be read, is damaged or not a saved program, is of another version or machine, or
            has a named tuple whose module is not imported.
    """
    if not isinstance(path, str | os.PathLike):
        raise ArgumentTypeError("ipu.load needs a path", expected="a str or an os.PathLike", got=repr(path))
    name = repr(os.fspath(path))
    try:
        with open(path, "rb") as file:
            head, sections = unseal(file.read(), _KIND)
    except DamagedError as error:
        hint = "compiled.save(path) makes one; profiles are read by Profile.load"
        raise ArgumentError(f"{name} is not a saved program, or is damaged", got=str(error), hint=hint) from error
    except (OSError, ValueError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"the program {name} cannot be read", got=got) from error
    installed = installed_versions()
    saved = head.figures["versions"]
    for package in _COMPARED:
        if saved.get(package) != installed[package]:
            raise ArgumentError(
                f"the program {name} was saved with another {package}",
                expected=f"{package} {installed[package]}",
                got=f"{package} {saved.get(package)}",
                hint="compile and save it again",
            )
    return LoadedProgram(head, sections)
