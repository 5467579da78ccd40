"""Modules of StableHLO as text, from functions of arrays, and functions of arrays from such text.

Input: a function and the shapes of its arguments. Output: text; from such text a function that `jax.jit` compiles.
Text is parsed, where the bytes of `jax.export` would be decoded: damaged text is an error of the parser, damaged bytes
can end the process. Nothing but the text says what a function computes.
Source: JAX, "Exporting and serializing staged-out computations"; StableHLO specification.
Limits: no derivatives, no batching, no effects, one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import jax
import jax.export
import numpy as np

from ipujax.lowering.jax_compat import Primitive, func as func_dialect, mlir
from ipujax.runtime.names_at_import import jax_jit

_MAIN = "main"
_MAX_DEPTH = 500  # of brackets: the parser is recursive, and ends the process beyond some 10,000
_TEXTS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|//[^\n]*', re.DOTALL)  # and comments
# Names of types and attributes that others use: a few lines can make a type of 2³¹ parts. JAX writes those of places.
_ALIAS = re.compile(rb"([!#][\w$.-]+)\s*=")
_PLACE_ALIAS = re.compile(rb"#loc\d*")
_DIALECTS = frozenset({"builtin", "chlo", "func", "stablehlo"})
_CALLBACK = "callback"  # in the names of custom calls that run Python by an address


class ModuleError(ValueError):
    """A text that is no module of the function; the text says why."""


@dataclass(frozen=True, eq=False)
class StoredModule:
    """A module that computes a function of arrays.

    Args:
        text: StableHLO.
        name: name of the function, for reports of XLA.
        in_avals: shape and dtype of each argument.
        out_avals: shape and dtype of each result.
    """

    text: str
    name: str
    in_avals: tuple[jax.ShapeDtypeStruct, ...]
    out_avals: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, *arrays: Any) -> list[Any]:
        """Compute the results."""
        return list(_module_p.bind(*arrays, module=self))

    def check(self) -> None:
        """Check that the text, which may come from a file, is a module that is safe to give to XLA.

        Raises:
            ModuleError: no module, or one of other arguments or results, or one that runs Python.
        """
        _check_text(self.text)
        with mlir.make_ir_context(), mlir.ir.Location.unknown():
            try:
                module = mlir.ir.Module.parse(self.text)
                module.operation.verify()
            except Exception as error:  # of the parser of another package, which documents none
                raise ModuleError(f"{type(error).__name__}: {str(error)[:300]}") from error
            self._check_type(module)
            _check_operations(module)

    def _check_type(self, module: Any) -> None:
        """Refuse a module whose main has other arguments or results than `in_avals` and `out_avals`.

        Arrays of those shapes are passed to it, and XLA's compiled code does not check them.
        """
        symbols = [op for op in module.body.operations if "sym_name" in op.attributes]
        main = [op for op in symbols if mlir.ir.StringAttr(op.attributes["sym_name"]).value == _MAIN]
        if [op.operation.name for op in main] != ["func.func"]:
            raise ModuleError("it has no function main")
        kind = main[0].type
        for avals, types, place in (
            (self.in_avals, kind.inputs, "arguments"),
            (self.out_avals, kind.results, "results"),
        ):
            expected = [str(_type_of_array(aval)) for aval in avals]
            if expected != (got := [str(each) for each in types]):
                raise ModuleError(f"its {place} are {', '.join(got)[:200]}, not {', '.join(expected)[:200]}")


def _check_text(text: str) -> None:
    """Refuse text that could end the process in the parser, by its aliases or by brackets nested too deep."""
    code = _TEXTS.sub(b"", text.encode()).replace(b"->", b"")
    for name in _ALIAS.findall(code):
        if not _PLACE_ALIAS.fullmatch(name):
            raise ModuleError(f"it names {name.decode()}, as no module of JAX does")
    characters = np.frombuffer(code, np.uint8)
    steps = np.zeros(256, np.int8)
    steps[list(b"([{<")] = 1
    steps[list(b")]}>")] = -1
    depths = np.cumsum(steps[characters], dtype=np.int32)
    # Above the lowest depth so far: `>=` of a comparison closes nothing.
    if (depths - np.minimum.accumulate(np.minimum(depths, 0))).max(initial=0) > _MAX_DEPTH:
        raise ModuleError(f"it has more than {_MAX_DEPTH} brackets inside each other")


def _check_operations(module: Any) -> None:
    """Refuse operations of other dialects, calls of Python, and functions that call themselves or have no body."""
    calls: dict[str, list[str]] = {}
    faults: list[str] = []

    def note_faults(op: Any) -> Any:
        """Note faults and calls of an operation; an error would not pass through the parser's own code."""
        if op.name.partition(".")[0] not in _DIALECTS:
            faults.append(f"it has the operation {op.name}")
        if op.name == "func.func":
            calls.setdefault(_text_of(op, "sym_name"), [])
            faults.extend([] if len(op.regions[0].blocks) else [f"its function {_text_of(op, 'sym_name')} has no body"])
        elif op.name == "func.call":
            calls.setdefault(_function_of(op), []).append(str(op.attributes["callee"]).removeprefix("@"))
        elif op.name == "stablehlo.custom_call" and _CALLBACK in _text_of(op, "call_target_name"):
            faults.append(f"it calls {_text_of(op, 'call_target_name')}")
        return mlir.ir.WalkResult.ADVANCE

    module.operation.walk(note_faults)
    try:
        TopologicalSorter(calls).prepare()
    except CycleError as error:
        faults.append(f"its function {error.args[1][0]} calls itself")
    if faults:
        raise ModuleError(faults[0])


def _function_of(op: Any) -> str:
    while op.name != "func.func":
        op = op.parent
    return _text_of(op, "sym_name")


def _text_of(op: Any, name: str) -> str:
    return str(mlir.ir.StringAttr(op.attributes[name]).value)


def _type_of_array(aval: Any) -> Any:
    return mlir.ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype)))


def stored_module(function: Callable[..., Sequence[Any]], name: str, avals: Sequence[Any]) -> StoredModule:
    """Return the module of a function, in the forms that `jax.export` promises to keep.

    Args:
        function: from arrays to a sequence of arrays.
        name: its name.
        avals: shape and dtype of each argument; no keys of random numbers.

    Raises:
        ValueError, NotImplementedError, TypeError: as `jax.export.export`.
    """
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    jitted = jax_jit(lambda *arrays: list(function(*arrays)), keep_unused=True)
    exported = jax.export.export(jitted, platforms=("cpu",))(*shapes)
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in exported.out_avals)
    return StoredModule(exported.mlir_module(), name, tuple(shapes), outs)


def _lower_module(ctx: Any, *operands: Any, module: StoredModule) -> Any:
    """Adds a stored module to the one that JAX lowers to, and calls its function."""
    with ctx.module_context.context:
        parsed = mlir.ir.Module.parse(module.text)
    symbols = ctx.module_context.symbol_table
    symbol = mlir.merge_mlir_modules(ctx.module_context.module, "stored_module", parsed, dst_symtab=symbols)
    results = [_type_of_array(aval) for aval in module.out_avals]
    return func_dialect.CallOp(results, mlir.ir.FlatSymbolRefAttr.get(symbol), operands).results


_module_p = Primitive("stored_module")
_module_p.multiple_results = True
_module_p.def_abstract_eval(
    lambda *_, module: [jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in module.out_avals]
)
_module_p.def_impl(lambda *arrays, module: jax_jit(module)(*arrays))
mlir.register_lowering(_module_p, _lower_module)
