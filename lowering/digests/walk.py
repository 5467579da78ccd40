"""Digests of jaxprs and values, SHA-256, equal in every process.

Input: a closed jaxpr, or a value. That of a jaxpr is equal for an equal program from equal lines: it is of the
canonical form, with variables by number, primitives with their implementation, parameters, types, bytes of constants,
names and places of equations. That of a value is equal for equal values and equal code, different for an edit anywhere
inside: it is of a walk over the value and all that it refers to, each object once, later references by its number. No
address is in it. Modules of the user's own are not read whole: only attributes whose names occur in the code and the
texts of the walk, or all of them where that code reads attributes by names that it makes.
Limits: `NoDigestError` names a parameter, a callback of Python or a value that cannot be read, see `readings`.
Functions for derivatives are left out: a traced jaxpr has them applied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.lowering.digests.code_reads import distribution_of, names_in
from ipujax.lowering.digests.readings import ATOMS, READERS_BY_NAME, NoDigestError, check_module, is_ours, reading_of
from ipujax.lowering.jax_compat import (
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    Var,
    implementations,
    mlir,
    raw_frames,
)
from ipujax.lowering.source_info import traced_from

_WRITTEN_BY_IMPORT = frozenset(vars(ModuleType(""))) | {"__builtins__", "__cached__", "__file__", "__path__"}
_BY_NAME = frozenset({"__dict__", "__getattribute__"})  # attributes of a module by which others are read
_READERS_BY_NAME = frozenset(map(id, READERS_BY_NAME))  # by identity: values may have no hash, or equal anything
# Type → text of its values, which is the same wherever they occur: a function of the digests and a value.
TextReaders = Mapping[type, Callable[["Digests", Any], str]]


def digest_of_text(text: str) -> str:
    """Return the SHA-256 digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


class Digests:
    """Digests of values that share objects: those of jaxprs, code and plain records are computed once.

    Args:
        text_readers: texts by type.
        common: values that each digest includes.
    """

    def __init__(self, text_readers: TextReaders, *common: Any) -> None:
        self._text_readers: TextReaders = {CodeType: Digests._code_digest, **text_readers}
        self._reader_of_class: dict[type, Callable[[Digests, Any], str] | None] = {}
        self._texts: dict[int, str] = {}  # by identity of the value
        self._lines: dict[int, str] = {}  # by identity of the code
        self._kept: list[Any] = []  # alive, so that no other object has their identity
        self._common = self.walk_digest(common)

    def of(self, value: Any) -> str:
        """Return the digest of a value with the common ones.

        Raises:
            NoDigestError: a value inside cannot be read.
        """
        return digest_of_text(self._common + self.walk_digest(value))

    def once(self, value: Any, text: Callable[[Any], str]) -> str:
        """Return a text of an object, computed once for each object.

        An object may refer to itself: meanwhile its text is a placeholder, so that the walk ends.

        Args:
            value: the object, which is kept alive so that no other gets its identity.
            text: computes the text.
        """
        digest = self._texts.get(id(value))
        if digest is None:
            self._kept.append(value)
            self._texts[id(value)] = f"inside {type(value).__name__}"
            try:
                digest = text(value)
            except NoDigestError:
                del self._texts[id(value)]
                raise
            self._texts[id(value)] = digest
        return digest

    def text(self, value: Any) -> str:
        """Return the text of a value: an atom's own, that of each item of a tuple, else a digest."""
        digest = self._texts.get(id(value))
        if digest is not None:
            return digest
        if type(value) is tuple:
            return f"({','.join(map(self.text, value))})"
        text = self.context_free_text(value)
        return self.once(value, self.walk_digest) if text is None else text

    def context_free_text(self, value: Any) -> str | None:
        """Return the text of a value for a digest, if it is the same wherever the value occurs; None for others.

        Others are walked through, since their text depends on which values the walk has met before.
        """
        kind = type(value)
        if kind in ATOMS:
            return repr(value)
        if kind not in self._reader_of_class:
            readers = (reader for base, reader in self._text_readers.items() if issubclass(kind, base))
            self._reader_of_class[kind] = next(readers, None)
        reader = self._reader_of_class[kind]
        if reader is not None:
            return self.once(value, lambda each: reader(self, each))
        # A dataclass of ipujax is never inside itself, so that a walk of its own ends.
        return self.once(value, self.walk_digest) if is_ours(value) else None

    def walk_digest(self, value: Any) -> str:
        """Return the digest of a value and of all that it refers to, by a walk that reaches each object once."""
        try:
            return digest_of_text("\n".join(_Walk(self, value).parts()))
        except RecursionError as error:
            raise NoDigestError(
                f"a value of type {type(value).__name__} has too many values inside each other"
            ) from error

    def lines(self, code: CodeType) -> str:
        """Return file, name and lines of a code object: all that a place in it shows, whatever the code computes."""
        digest = self._lines.get(id(code))
        if digest is None:
            self._kept.append(code)
            table = hashlib.sha256(code.co_linetable).hexdigest()
            digest = f"{code.co_filename}:{code.co_firstlineno} {code.co_qualname} {table}"
            self._lines[id(code)] = digest
        return digest

    def places(self, frames: Iterable[tuple[CodeType, int]]) -> str:
        """Return the text of frames of a traceback: lines of a code object, and the instruction."""
        lines = self._lines  # looked up here: a program has thousands of frames
        return "".join([f"{lines.get(id(code)) or self.lines(code)}@{n};" for code, n in frames])

    def _code_digest(self, code: CodeType) -> str:
        """Return the digest of a function: byte code, names, parameters, lines, constants, functions inside it."""
        names = (code.co_filename, code.co_qualname, code.co_firstlineno, code.co_names, code.co_varnames)
        # Which of the names are parameters, and whether the last ones take any number of arguments.
        parameters = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        lines = hashlib.sha256(code.co_code + code.co_linetable + code.co_exceptiontable).hexdigest()
        return digest_of_text(f"{names!r}{parameters!r}{lines}{self.walk_digest(code.co_consts)}")


class _Walk:
    """One walk: the parts of its text, in the order in which values are reached.

    Args:
        digests: of values inside that have one by themselves.
        root: value at which it starts.
    """

    def __init__(self, digests: Digests, root: Any) -> None:
        """Begins a walk that has reached its root alone; `parts` goes on to all values that the root refers to."""
        self._digests = digests
        self._root = root
        self._pending: list[Any] = [root]  # the next one last
        self._numbers: dict[int, int] = {}  # by identity of the values that were reached
        self._kept: list[Any] = []  # alive, so that no other object has their identity
        self._attributes: set[str] = set()  # names that the code and the texts of the walk may read
        self._modules: dict[str, ModuleType] = {}  # by name, those that were reached
        self._used: dict[str, set[str]] = {}  # attributes of each module that were reached
        self._reads_any_name = False  # whether code of the walk reads attributes by names that it makes

    def parts(self) -> Iterator[str]:
        """Yield the text of each value; attributes of modules follow as long as code that reads them is reached."""
        while self._pending:
            while self._pending:
                yield self._text_of(self._pending.pop())
            self._add_used_attributes()

    def _text_of(self, value: Any) -> str:
        """Return the text of a value for a digest, and put the values inside it on the stack of those to read next.

        A value that was met before is a reference to it, `^7`.
        """
        number = self._numbers.get(id(value))
        if number is not None:
            return f"^{number}"
        if type(value) is str:
            self._attributes.update(names_in(value))
        self._reads_any_name |= id(value) in _READERS_BY_NAME  # such as `getattr`
        # The root of a walk is walked through: its text would be that of another walk of it.
        if value is not self._root or type(value) in ATOMS:
            text = self._digests.context_free_text(value)
            if text is not None:
                return text
        if not isinstance(value, tuple):  # equal tuples may be one object or two
            self._numbers[id(value)] = len(self._numbers)
        self._kept.append(value)
        if isinstance(value, ModuleType):
            return self._module_text(value)
        if type(value) in (set, frozenset):
            return f"{type(value).__name__} {sorted(map(self._digests.walk_digest, value))}"
        reading = reading_of(value)
        if isinstance(value, FunctionType):
            self._attributes |= reading.reads.attributes
            self._reads_any_name |= not _BY_NAME.isdisjoint(reading.reads.attributes)
        self._pending += reversed(reading.children)
        return f"{reading.label}/{len(reading.children)}"

    def _module_text(self, module: ModuleType) -> str:
        """Return a module's name and the version of its distribution; its attributes are walked as code names them."""
        distribution = distribution_of(module.__name__)
        self._modules[module.__name__] = module
        if distribution is None and type(module) is not ModuleType:
            self._pending.append(type(module))
        elif distribution is not None:
            check_module(module)
        return f"module {module.__name__} {distribution}"

    def _add_used_attributes(self) -> None:
        """Put on the stack of values to read next the attributes of modules that code of this walk names.

        A digest has only what is used of a module. It is called again as the walk meets more code.
        """
        for name, module in sorted(self._modules.items()):
            used = self._used.setdefault(name, set())
            names = (self._attributes & vars(module).keys()) - used
            # Code that computes names, or a module that computes attributes, may read any of the user's.
            makes_names = "__getattr__" in vars(module) or type(module) is not ModuleType
            if (self._reads_any_name or makes_names) and distribution_of(name) is None:
                names |= {key for key, value in vars(module).items() if _is_of_user(key, value)} - used
            for attribute in sorted(names):
                used.add(attribute)
                self._pending += (vars(module)[attribute], f"{name}.{attribute}")


def _is_of_user(name: str, value: Any) -> bool:
    """Return whether a name of a user's module is neither written by the import nor a module that is installed."""
    is_installed = isinstance(value, ModuleType) and distribution_of(value.__name__) is not None
    return name not in _WRITTEN_BY_IMPORT and not is_installed


# Parameters that only later derivatives use, by primitive.
_OF_DERIVATIVES: Mapping[str, frozenset[str]] = {
    "custom_jvp_call": frozenset({"jvp_jaxpr_fun"}),
    "custom_vjp_call": frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees"}),
}
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")  # primitives that call Python functions
_NUMBERS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


_LOWERINGS_AT_IMPORT = dict(mlir._lowerings)


def replaced_lowerings() -> tuple[Any, ...]:
    """Return the lowerings of JAX's primitives that the program replaced: those of others may use them."""
    return tuple(
        mlir._lowerings.get(p) for p, rule in _LOWERINGS_AT_IMPORT.items() if mlir._lowerings.get(p) is not rule
    )


def value_digests(*common: Any) -> Digests:
    """Return digests of values that may have jaxprs inside; `common` values are part of each."""
    return Digests(_TEXT_READERS, *common)


def digest_of(*values: Any) -> str:
    """Return the digest of values.

    Raises:
        NoDigestError: a value, or one inside it, cannot be read.
    """
    return value_digests().of(values)


def jaxpr_digest(jaxpr: ClosedJaxpr) -> str:
    """Return the digest of a closed jaxpr with its constants.

    Raises:
        NoDigestError: a constant or parameter has none.
    """
    return _closed_digest(value_digests(), jaxpr)


def _closed_digest(digests: Digests, jaxpr: ClosedJaxpr) -> str:
    constants = "".join(digests.once(x, _constant_text) for x in jaxpr.consts)
    return digest_of_text(digests.once(jaxpr.jaxpr, lambda x: _open_jaxpr_digest(digests, x)) + constants)


def _open_jaxpr_digest(digests: Digests, jaxpr: Jaxpr) -> str:
    """Digest of a jaxpr with its constants as inputs: equal for equal equations, whatever the names of variables.

    A variable is the number of its definition.

    Args:
        digests: the digests so far, in which each type and parameter has one text.
        jaxpr: the jaxpr.
    """
    numbers: dict[Var, int] = {}

    def define(variables: Iterable[Var]) -> str:
        for var in variables:
            numbers.setdefault(var, len(numbers))
        return ",".join("_" if isinstance(var, DropVar) else digests.once(var.aval, _type_text) for var in variables)

    def use(atoms: Iterable[Any]) -> str:
        return ",".join(_literal_text(x) if isinstance(x, Literal) else str(numbers[x]) for x in atoms)

    lines = [repr(traced_from(jaxpr)), define(jaxpr.constvars), define(jaxpr.invars)]
    for eqn in jaxpr.eqns:
        lines.append(f"{use(eqn.invars)}>{define(eqn.outvars)} {_equation_text(digests, eqn)}")
    return digest_of_text("\n".join([*lines, use(jaxpr.outvars)]))


def _equation_text(digests: Digests, eqn: JaxprEqn) -> str:
    """Return an equation's part of the digest of a jaxpr, without its variables; refuse a callback, which runs Python.

    Parameters that only later derivatives would use are left out: gradients are equations of their own by now.
    """
    name = eqn.primitive.name
    if name in CALLBACKS:
        raise NoDigestError(f"{name} calls a Python function")
    skipped = _OF_DERIVATIVES.get(name, frozenset())
    params = " ".join(f"{key}={digests.text(x)}" for key, x in sorted(eqn.params.items()) if key not in skipped)
    effects = sorted(type(effect).__qualname__ for effect in eqn.effects)
    return f"{digests.text(eqn.primitive)}[{params}] {effects} {digests.text(eqn.ctx)} {_place_text(digests, eqn)}"


def _primitive_text(digests: Digests, primitive: Primitive) -> str:
    """Return name and implementation of a primitive: a rule of the user's own is part of the program."""
    return f"{primitive.name}:{digests.text(implementations(primitive))}"


def _place_text(digests: Digests, eqn: JaxprEqn) -> str:
    info = eqn.source_info
    stack = digests.once(info.name_stack, lambda stack: repr(str(stack)))
    if info.traceback is None:
        return stack
    frames = digests.once(info.traceback, lambda _: digest_of_text(digests.places(raw_frames(eqn))))
    return f"{stack} {frames}"


def _literal_text(literal: Literal) -> str:
    return f"{_type_text(literal.aval)}:{_bytes_text(np.asarray(literal.val))}"


def _constant_text(value: Any) -> str:
    """Return type and digest of the bytes of a constant; refuse tracers, and values that are no arrays."""
    if isinstance(value, jax.core.Tracer):
        raise NoDigestError("it closes over a tracer")
    if not isinstance(value, _NUMBERS):
        raise NoDigestError(f"it closes over {type(value).__name__}")
    aval = jax.typeof(value)
    data: Any = value
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        data = jax.random.key_data(data)
    return f"{_type_text(aval)}:{_bytes_text(np.asarray(data))}"


def _bytes_text(array: np.ndarray) -> str:
    return f"{array.dtype!r}{array.shape}{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def _type_text(aval: Any) -> str:
    weak = "w" if getattr(aval, "weak_type", False) else ""
    return f"{type(aval).__name__} {aval.str_short()}{weak} {getattr(aval, 'memory_space', '')}"


_TEXT_READERS: TextReaders = {
    ClosedJaxpr: _closed_digest,
    Jaxpr: _open_jaxpr_digest,
    Primitive: _primitive_text,
    jax.Array: lambda _, value: _constant_text(value),
}
