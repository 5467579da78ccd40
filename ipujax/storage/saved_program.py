"""A compiled program as one file: its computation as StableHLO, its profile, its signature, and versions.

Input: a compiled function. Output: a file; from such a file a `LoadedProgram`, on a machine with equal versions.
Everything in a file is checked when it is loaded, before anything is built of it.
Limits: pytrees of dicts, lists, tuples, named tuples and None. Programs that call Python functions, change Refs, are
partitioned, spread over instances, or have arrays in the host's memory are refused.

The structure of a pytree is JSON-able data, with the number of each leaf. Nothing is imported or called for it: the
module of a named tuple must be imported already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

import jax

from ipujax.calls import Signature, check_compiled_call
from ipujax.lowering.digests import CALLBACKS
from ipujax.lowering.refs import is_ref
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError
from ipujax.runtime.files import (
    DamagedError,
    FileError,
    FileKind,
    FilePath,
    Sealed,
    UnreadableError,
    VersionError,
    file_problem,
    read_sealed,
    seal,
    write_file,
)
from ipujax.runtime.files.kinds import Anything, Flag, List, Map, Record, Text
from ipujax.runtime.names_at_import import jax_jit
from ipujax.runtime.not_copied import Shared
from ipujax.runtime.signatures import checking_calls
from ipujax.storage.computation import COMPUTATION, ExportError, exported_computation, read_computation
from ipujax.storage.versions import installed_versions

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_MAX_DEPTH = 200


def tree_data(who: str, place: str, tree: Any) -> Any:
    """Return the structure of a pytree as data; `who` and `place` are for the error of one that has no such form."""
    try:
        data = _data(jax.tree.unflatten(tree, range(tree.num_leaves)))
        _node(data, 0)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArgumentTypeError(
            f"{who} cannot be saved: its {place} have a pytree that no file can describe",
            expected="dicts with keys of text, lists, tuples, named tuples of modules, None",
            got=str(error),
            hint="jax.tree.leaves of it as an argument, and jax.tree.unflatten inside of the function",
        ) from error
    return data


def _data(node: Any) -> Any:
    """Return a pytree as JSON, by the kinds of its nodes; raise TypeError for a node of any other class."""
    kind = type(node)
    if node is None or kind is int:
        return node
    if kind is dict and all(isinstance(key, str) for key in node):
        return {"dict": {key: _data(child) for key, child in node.items()}}
    if kind in (list, tuple):
        return {kind.__name__: [_data(child) for child in node]}
    if isinstance(node, tuple) and _found(kind.__module__, kind.__qualname__) is kind:
        return {"namedtuple": [kind.__module__, kind.__qualname__], "children": [_data(child) for child in node]}
    raise TypeError(f"{kind.__module__}.{kind.__qualname__}")


def tree_of_data(data: Any) -> Any:
    """Return the structure of the data.

    Raises:
        DamagedError: data of another form.
        ArgumentError: the module of a named tuple is not imported.
    """
    return jax.tree.structure(_node(data, 0))


def _node(data: Any, depth: int) -> Any:
    """Return the pytree that JSON of `_data` describes; refuse anything else, as a file may be damaged."""
    if depth > _MAX_DEPTH:
        raise DamagedError("its pytree is too deep", f"at most {_MAX_DEPTH} nodes inside each other", "more")
    match data:
        case None:
            return None
        case int() if type(data) is int:
            return data
        case {"dict": dict(children), **rest} if not rest:
            return {key: _node(child, depth + 1) for key, child in children.items()}
        case {"list": list(children), **rest} if not rest:
            return [_node(child, depth + 1) for child in children]
        case {"tuple": list(children), **rest} if not rest:
            return tuple(_node(child, depth + 1) for child in children)
        case {"namedtuple": [str(module), str(name)], "children": list(children), **rest} if not rest:
            kind = _named_tuple(module, name)
            if len(kind._fields) != len(children):
                expected = f"{len(kind._fields)} fields of {name}"
                raise DamagedError("a named tuple has other fields", expected, f"{len(children)}")
            return tuple.__new__(kind, [_node(child, depth + 1) for child in children])  # without its own `__new__`
    raise DamagedError(
        "its pytree is damaged", "dicts, lists, tuples, named tuples, None and leaves", type(data).__name__
    )


def _named_tuple(module: str, name: str) -> Any:
    kind = _found(module, name)
    if kind is None:
        problem = f"a saved program has the named tuple {name[:100]!r} of {module[:100]!r}, which is not imported"
        raise ArgumentError(problem, hint="import that module before ipu.load, if you trust the file")
    return kind


def _found(module: str, name: str) -> Any:
    """Return a class of named tuples; None if no imported module has it."""
    scope: Any = sys.modules.get(module)
    for part in name.split("."):
        # By their dictionaries: `getattr` may run code of a module.
        scope = vars(scope).get(part) if isinstance(scope, ModuleType | type) else None
    is_named_tuple = isinstance(scope, type) and issubclass(scope, tuple) and hasattr(scope, "_fields")
    return scope if is_named_tuple else None


_COMPARED = ("ipujax", "jax", "jaxlib", "machine")  # versions that must be equal
_COMPUTATION, _PROFILE = "computation", "profile"
_LEAVES = "leaves of the arguments"
_FIGURES = Record(
    {"name": Text(), "versions": Map(Text()), "in_tree": Anything(), "out_tree": Anything()}
    | {"donated": List(Flag(), _LEAVES), "used": List(Flag(), _LEAVES)}
    | {"arguments": List(Text()), "leaf_names": List(Text(), _LEAVES)}
)


@cache
def saved_program_kind() -> FileKind:
    """Return the kind of the files of saved programs."""
    from ipujax.runtime.schema import PROFILE_SECTION  # which imports all of the profile

    return FileKind("compiled", {_COMPUTATION: COMPUTATION, _PROFILE: PROFILE_SECTION}, _FIGURES)


class LoadedProgram(Shared):
    """A compiled program that was read from a file: call it, or read its profile.

    Attributes:
        name: name of the function.
        versions: versions it was compiled with, by name.
    """

    COPY_HINT = "ipu.load(path) in each process"

    def __init__(self, path: FilePath, sealed: Sealed) -> None:
        figures = sealed.figures
        computation = read_computation(sealed.sections[_COMPUTATION])
        self.name: str = figures["name"]
        self.versions: dict[str, str] = figures["versions"]
        self._path = path
        self._sealed = sealed
        donated = tuple(figures["donated"])
        unknown = (False,) * len(donated)
        self._signature = Signature(
            tree_of_data(figures["in_tree"]),
            computation.in_avals,
            donated,
            unknown,
            tuple(figures["used"]),
            tree_of_data(figures["out_tree"]),
            computation.out_avals,
            tuple(figures["arguments"]),
            tuple(figures["leaf_names"]),
        )
        _check_leaves(self._signature)
        donated_leaves = tuple(number for number, flag in enumerate(donated) if flag)
        self._call = jax_jit(computation, donate_argnums=donated_leaves)

    @cached_property
    def profile(self) -> Profile:
        """Static profile, as of `Compiled.profile`; it has neither executable nor timeline.

        Raises:
            ProfileError: the file's profile is damaged.
        """
        from ipujax.runtime.report import Profile, refused_profile

        try:
            return Profile.from_data(self._sealed.data(_PROFILE))
        except FileError as error:
            raise refused_profile(f"of the program {os.fspath(self._path)!r}", error) from error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program on arguments of the compiled signature.

        Raises:
            ArgumentError: another pytree, shape or dtype, an array that is donated and passed twice, or XLA cannot run
                the computation of the file.
        """
        signature = self._signature
        leaves = check_compiled_call(self.name, signature, args, kwargs, lambda: signature.in_avals)
        signature.check_donated(self.name, leaves)
        try:
            results = self._call(*leaves)
        except jax.errors.JaxRuntimeError as error:
            problem = f"{self.name}: XLA cannot run the computation of {os.fspath(self._path)!r}"
            raise ArgumentError(problem, got=str(error)[:500], hint="compile and save it again") from error
        return jax.tree.unflatten(signature.out_tree, results)

    def __repr__(self) -> str:
        return f"LoadedProgram({self.name}: {self.profile.brief})"


def _check_leaves(signature: Signature) -> None:
    """Refuse a file whose pytrees have other leaves than its computation."""
    in_tree = signature.in_tree
    counts: dict[str, tuple[int, ...]] = {
        "arguments": (in_tree.num_leaves, len(signature.donated), len(signature.in_avals)),
        "results": (signature.out_tree.num_leaves, len(signature.out_avals)),
    }
    for place, numbers in counts.items():
        if len(set(numbers)) > 1:
            got = " and ".join(map(str, numbers))
            raise DamagedError(f"its {place} differ from those of its computation", "equal numbers of leaves", got)
    args = jax.tree.unflatten(in_tree, range(in_tree.num_leaves))
    if not (type(args) is tuple and len(args) == 2 and type(args[0]) is tuple and type(args[1]) is dict):
        raise DamagedError("its arguments are damaged", "a tuple and a dict")


class Program(Protocol):
    """A lowered function, a `Lowered`."""

    @property
    def name(self) -> Any: ...
    @property
    def signature(self) -> Signature: ...
    @property
    def spread(self) -> Any: ...
    @property
    def calls(self) -> Any: ...
    @property
    def primitives(self) -> set[str]: ...
    @property
    def call_program(self) -> Any: ...
    def evaluate(self, *leaves: Any) -> Any: ...


def _obstacle(program: Program) -> str:
    """Return why the computation cannot be a function of the arguments alone, "" if it can."""
    if program.calls is not None:
        return f"{', '.join(sorted(program.primitives.intersection(CALLBACKS)))} calls a Python function"
    if program.call_program.closes_over_host_arrays or any(map(is_ref, program.signature.in_avals)):
        return "it changes Refs, or closes over arrays in the host's memory"
    if program.spread is not None or program.call_program.runs_apart(None):
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
    from ipujax.runtime.report import profile_section

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
        computation = exported_computation(flat, str(name), signature.in_avals)
    except ExportError as error:
        problem = f"{name} cannot be saved: jax.export refuses its computation"
        raise ArgumentError(problem, got=str(error.__cause__)[:500]) from error
    sections = {_COMPUTATION: computation, _PROFILE: profile_section(profile)}
    content = seal(saved_program_kind(), sections, figures)
    try:
        write_file(path, content)
    except (OSError, ValueError) as error:
        problem = f"{name} cannot be saved to {os.fspath(path)!r}"
        raise ArgumentError(problem, got=file_problem(error)) from error


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
    try:
        sealed = read_sealed(path, saved_program_kind())
        _check_versions(path, sealed.figures["versions"])
        return LoadedProgram(path, sealed)
    except (OSError, FileError) as error:
        raise _refused(repr(os.fspath(path)), error) from error


def _check_versions(path: FilePath, saved: dict[str, str]) -> None:
    installed = installed_versions()
    for package in _COMPARED:
        if saved.get(package) != installed[package]:
            raise ArgumentError(
                f"the program {os.fspath(path)!r} was saved with another {package}",
                expected=f"{package} {installed[package]}",
                got=f"{package} {saved.get(package)}",
                hint="compile and save it again",
            )


def _refused(name: str, error: OSError | FileError) -> ArgumentError:
    """Return the error of a file that is no program of this version."""
    match error:
        case OSError() | UnreadableError():
            return ArgumentError(f"the program {name} cannot be read", got=file_problem(error))
        case VersionError():
            title = f"the program {name} is of another version of ipujax"
            return ArgumentError(title, expected=error.expected, got=error.got, hint="compile and save it again")
    hint = "compiled.save(path) makes one; profiles are read by Profile.load"
    return ArgumentError(f"{name} is not a saved program, or is damaged", got=str(error), hint=hint)
