"""Annotations of JAX that have no effect on an IPU, and stages and phases around others: a program that has one is told
so, with the line.

Input: a traced jaxpr. Output: a warning for each kind of annotation, or an error for memories that cannot be had.
Those of an exported function are in its module, and have the line of its first call; those of a library's equations
without a line have that of the call around them.
Parameters of primitives that are not in the table mean on an IPU what they mean to `jax.jit`.

Source: jax 0.10. Limits: of equal annotations on several lines the first is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.layout import Layout

from ipujax.calls.memory_kinds import check_policies, memories_without_effect
from ipujax.lowering.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params
from ipujax.lowering.jaxpr import numbered_scopes
from ipujax.lowering.source_info import source_line
from ipujax.runtime.logs import Log

_LOG = Log("passes")
_Nested = tuple[JaxprEqn, ...]  # an equation, and those around it
_EXPORTED = "call_exported"
_METADATA_CALL = "xla_metadata_call"
_DEVICE = "device"  # of jax.experimental.compute_on
# Dtypes of operands whose products have the cycles of an algorithm; those of DEFAULT may have any.
_OWN_ALGORITHMS = {
    "F16_F16_F16": "float16",
    "F16_F16_F32": "float16",
    "F32_F32_F32": "float32",
    "F64_F64_F64": "float64",
}


def _layouts(value: Any) -> Iterator[str]:
    values = value if isinstance(value, tuple) else (value,)
    if any(isinstance(layout, Layout) for layout in values):
        yield "asks for a layout of an array, and planners choose the tiles and the order of elements"


def _unroll(value: Any) -> Iterator[str]:
    if value not in (1, True, False):
        yield f"asks for unroll={value}, and the device repeats one iteration"


def _accuracy(value: Any) -> Iterator[str]:
    if value is not None:
        yield f"asks for accuracy={getattr(value, 'name', 'Tolerance')}, and each function has one implementation"


def _algorithm(value: Any, dtypes: Sequence[Any]) -> Iterator[str]:
    is_algorithm = isinstance(value, str | jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
    name = getattr(value, "name", str(value))
    if is_algorithm and name != "DEFAULT" and any(dtype != _OWN_ALGORITHMS.get(name) for dtype in dtypes):
        yield f"asks for precision={name}, and a product has the cycles of its operands' dtypes"


def _metadata(value: Any) -> Iterator[str]:
    if value:
        yield f"has metadata for XLA, {dict(value)}, and XLA does not compile what the IPU runs"


def _machine(value: Any) -> Iterator[str]:
    if value not in (None, _DEVICE):
        yield f"asks to compute on {value!r}, and tiles compute it"


def _caller(value: Any) -> Iterator[str]:
    if value is not None:
        yield "names a device that calls a Python function, and the host calls it"


def _devices(value: Any) -> Iterator[str]:
    for device in value:
        if isinstance(device, jax.Device) and device != jax.local_devices()[0]:
            yield f"puts a value to {device}, and it stays on the IPU"


def _kernel(what: str) -> Callable[[Any], Iterator[str]]:
    def texts(value: Any) -> Iterator[str]:
        if value:
            yield f"gives a Pallas kernel {what}, and the kernel is interpreted"

    return texts


def _memory_of_ref(value: Any) -> Iterator[str]:
    if value not in (None, jax.memory.Space.Device):
        yield f"asks for a Ref in {value}, and it is on the chip"


# Texts for a parameter's value, by primitive and parameter; any primitive is "*".
WITHOUT_EFFECT: Mapping[tuple[str, str], Callable[[Any], Iterator[str]]] = {
    ("scan", "unroll"): _unroll,
    ("layout_constraint", "layout"): _layouts,
    ("sharding_constraint", "layout"): _layouts,
    ("jit", "in_layouts"): _layouts,
    ("jit", "out_layouts"): _layouts,
    ("*", "accuracy"): _accuracy,
    ("*", "compute_type"): _machine,
    ("*", "xla_metadata_kvs"): _metadata,
    ("io_callback", "sharding"): _caller,
    ("pure_callback", "sharding"): _caller,
    ("device_put", "devices"): _devices,
    ("pallas_call", "compiler_params"): _kernel("compiler_params"),
    ("pallas_call", "cost_estimate"): _kernel("a cost_estimate"),
    ("new_ref", "memory_space"): _memory_of_ref,
    ("empty_ref", "memory_space"): _memory_of_ref,
}
# Of the context that an equation was traced in, by attribute.
CONTEXT_WITHOUT_EFFECT: Mapping[str, Callable[[Any], Iterator[str]]] = {
    "compute_type": _machine,
    "xla_metadata": _metadata,
}


def check_annotations(who: str, jaxpr: ClosedJaxpr) -> None:
    """Warns of annotations without effect; refuses policies that offload to other than streaming memory."""
    nested = list(_with_callers(jaxpr.jaxpr))
    check_policies(who, [eqn for eqn, *_ in nested])
    asking: dict[str, _Nested] = {}
    for eqns in nested:
        for text in (*_texts(eqns[0]), *_other_scopes_around(eqns)):
            asking.setdefault(text, eqns)
    calls = [eqns for eqns in nested if eqns[0].primitive.name == _EXPORTED]
    for eqns in {id(eqns[0].params["exported"]): eqns for eqns in reversed(calls)}.values():
        from ipujax.lowering.stablehlo.module_annotations import module_annotations  # few programs have a module

        for values, dtypes in module_annotations(eqns[0].params["exported"]):
            for text in _texts_of(_EXPORTED, values, dtypes):
                asking.setdefault(text, eqns)
    for text, eqns in asking.items():
        line = next(filter(None, map(source_line, eqns)), "no known line")
        _LOG.warning("%s %s (%s)", who, text, line)


def _with_callers(jaxpr: Jaxpr, callers: _Nested = ()) -> Iterator[_Nested]:
    """Yield each equation with those around it, the innermost first: equations of libraries may have no line."""
    for eqn in jaxpr.eqns:
        nested = (eqn, *callers)
        yield nested
        for inner in jaxprs_in_params(eqn.params):
            yield from _with_callers(getattr(inner, "jaxpr", inner), nested)


def _other_scopes_around(eqns: _Nested) -> Iterator[str]:
    """Texts of stages and phases of an equation's calls that an inner one overrides; the equation itself is first."""
    innermost = dict(numbered_scopes(eqns[0]))  # by word, the last of several
    for eqn in eqns if innermost else ():
        for word, number in numbered_scopes(eqn):
            if innermost.get(word, number) != number:
                inner = f"ipu.{word}({innermost[word]})"
                yield f"has {inner} inside of ipu.{word}({number}), and operations are in the innermost: {inner}"


def _texts(eqn: JaxprEqn) -> Iterator[str]:
    yield from memories_without_effect(eqn)
    params = eqn.params
    if eqn.primitive.name == _METADATA_CALL:  # whose parameters are the metadata
        params = {"xla_metadata_kvs": {key: value for key, value in params.items() if key != "jaxpr"}}
    yield from _texts_of(eqn.primitive.name, params, [getattr(x.aval, "dtype", None) for x in eqn.invars[:2]])
    for attribute, texts in CONTEXT_WITHOUT_EFFECT.items():
        yield from texts(getattr(eqn.ctx, attribute, None))


def _texts_of(primitive: str, params: Mapping[str, Any], dtypes: Sequence[Any]) -> Iterator[str]:
    """Texts of parameters; `dtypes` are those of the operands of a product."""
    yield from _algorithm(params.get("precision"), dtypes)
    for param, value in params.items():
        texts = WITHOUT_EFFECT.get((primitive, param)) or WITHOUT_EFFECT.get(("*", param))
        if texts is not None:
            yield from texts(value)
