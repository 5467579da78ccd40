"""Annotations of JAX that have no effect on an IPU: a program that has one is told so, with the line.

Input: a traced jaxpr. Output: a warning for each kind of annotation, or an error for memories that cannot be had.
Parameters of primitives that are not in the table mean on an IPU what they mean to `jax.jit`.

Source: jax 0.10. Limits: of equal annotations on several lines the first is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.layout import Layout

from ipujax.calls.unsupported_memories import check_policies, memories_without_effect
from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn
from ipujax.lowering.jaxpr import equations
from ipujax.lowering.source_info import source_line
from ipujax.runtime.logs import Log

_LOG = Log("passes")
_HOST = "device_host"  # of jax.experimental.compute_on
# Of products in the dtype of the operands, or in any.
_OWN_ALGORITHMS = frozenset({"DEFAULT", "F16_F16_F16", "F16_F16_F32", "F32_F32_F32", "F64_F64_F64"})


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


def _algorithm(value: Any) -> Iterator[str]:
    is_algorithm = isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)
    if is_algorithm and getattr(value, "name", "") not in _OWN_ALGORITHMS:
        yield f"asks for precision={value}, and products have the precision of their operands"


def _metadata(value: Any) -> Iterator[str]:
    if value:
        yield f"has metadata for XLA, {dict(value)}, and XLA does not compile what the IPU runs"


def _host_compute(value: Any) -> Iterator[str]:
    if value == _HOST:
        yield f"asks to compute on {_HOST!r}, and tiles compute it"


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
    ("dot_general", "precision"): _algorithm,
    ("ragged_dot_general", "precision"): _algorithm,
    ("compute_on", "compute_type"): _host_compute,
    ("xla_metadata_value", "xla_metadata_kvs"): _metadata,
    ("xla_metadata_call", "xla_metadata_kvs"): _metadata,
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
    "compute_type": _host_compute,
    "xla_metadata": _metadata,
}


def check_annotations(who: str, jaxpr: ClosedJaxpr) -> None:
    """Warns of annotations without effect; refuses policies that offload to other than streaming memory."""
    eqns = list(equations(jaxpr.jaxpr))
    check_policies(who, eqns)
    reported = set[str]()
    for eqn in eqns:
        for text in _texts(eqn):
            if text not in reported:
                reported.add(text)
                _LOG.warning("%s %s (%s)", who, text, source_line(eqn) or "no known line")


def _texts(eqn: JaxprEqn) -> Iterator[str]:
    yield from memories_without_effect(eqn)
    for param, value in eqn.params.items():
        texts = WITHOUT_EFFECT.get((eqn.primitive.name, param)) or WITHOUT_EFFECT.get(("*", param))
        if texts is not None:
            yield from texts(value)
    for attribute, texts in CONTEXT_WITHOUT_EFFECT.items():
        yield from texts(getattr(eqn.ctx, attribute, None))
