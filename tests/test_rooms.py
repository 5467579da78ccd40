"""The rooms of the house: their imports, the number of their files, and names of files.

A room is a folder of files; where a folder holds packages too, each file beside them is a room by itself, and its
`__init__` goes by the name of the folder. Every room may import those of FOR_ALL. ROOMS is what
`docs/imports.md` draws: `pytest --update-golden` writes the drawing, else it is compared.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.test_layering import FILES, ROOT, imported, within

PAGE = ROOT / "docs" / "imports.md"
BEGIN = "<!-- rooms: written by tests/test_rooms.py -->\n```text\n"
END = "```\n<!-- end of rooms -->"
MAX_FILES = 16
# Rooms of equal files: one file for each pass, schedule, command or family of operators.
FAMILIES = {"lowering.passes", "lowering.schedules", "ipujax.cli", "ipujax.onnx.operators", "ipujax.popart.operators"}
MOST_NAMING_A_NODE = 8
# Front end → what it may import beside `ipujax`, `ipujax.front_end` and itself, see `tests/test_front_ends.py`.
FRONT_ENDS = {
    "ipujax.onnx": set[str](),
    "ipujax.keras": set[str](),
    "ipujax.popart": {"ipujax.onnx", "ipujax.onnx.front_end"},  # PopART's models are those of ONNX
}
FOR_ALL = {
    *("runtime.errors", "runtime.cache", "runtime.not_copied", "runtime.garbage", "runtime.lazy_names"),
    "runtime.names_at_import",
}

# Room → rooms it may import, by floor, lowest first; each imports only rooms above it in this table.
ROOMS: dict[str, str] = {
    "runtime.cache": "",
    "runtime.garbage": "",
    "runtime.errors": "",
    "runtime.not_copied": "",
    "runtime.lazy_names": "",
    "runtime.names_at_import": "",
    "runtime.files": "",
    "runtime.target": "runtime.files",
    "runtime.tracebacks": "",
    "runtime.signatures": "runtime.target runtime.tracebacks",
    "runtime.logs": "runtime.target",
    "runtime.markup": "",
    "runtime.tensor": "runtime.markup",
    "runtime.graph": "runtime.target runtime.tensor",
    "runtime.exchange": "runtime.graph runtime.target runtime.tensor",
    "runtime.cost": "runtime.exchange runtime.graph runtime.target runtime.tensor",
    "runtime.host": "runtime.graph runtime.tensor",
    "runtime.analysis": "runtime.graph runtime.host runtime.tensor",
    "runtime.verify": "runtime.analysis runtime.exchange runtime.graph runtime.tensor",
    "runtime.engine": "runtime.analysis runtime.graph runtime.host runtime.tensor runtime.verify",
    "runtime.memory": (
        "runtime.analysis runtime.cost runtime.exchange runtime.files runtime.graph runtime.target runtime.tensor"
    ),
    "runtime.options": "runtime.signatures runtime.target",
    "runtime.timeline": "runtime.analysis runtime.cost runtime.exchange runtime.graph runtime.target runtime.tensor",
    "runtime.compile": (
        "runtime.analysis runtime.cost runtime.engine runtime.graph runtime.logs runtime.memory runtime.options"
        " runtime.target runtime.tensor runtime.timeline runtime.verify"
    ),
    "runtime.sources": "runtime.tensor",
    "runtime.sections": (
        "runtime.analysis runtime.compile runtime.cost runtime.exchange runtime.files runtime.graph runtime.memory"
        " runtime.target runtime.tensor runtime.timeline"
    ),
    "runtime.causes": (
        "runtime.compile runtime.cost runtime.files runtime.graph runtime.target runtime.tensor runtime.timeline"
    ),
    "runtime": "",
    "runtime.interpreter": "runtime.analysis runtime.exchange runtime.graph runtime.host runtime.memory runtime.tensor",
    "runtime.many_machines": (
        "runtime.analysis runtime.compile runtime.cost runtime.graph runtime.memory runtime.target runtime.timeline"
    ),
    "runtime.uncertainty": (
        "runtime.causes runtime.compile runtime.cost runtime.files runtime.graph runtime.many_machines runtime.target"
        " runtime.tensor runtime.timeline"
    ),
    "runtime.profile": (
        "runtime.causes runtime.compile runtime.cost runtime.files runtime.graph runtime.host runtime.memory"
        " runtime.sections runtime.sources runtime.target runtime.tensor runtime.timeline runtime.uncertainty"
    ),
    "runtime.schema": "runtime.files runtime.graph runtime.memory runtime.profile runtime.sections runtime.target",
    "runtime.views": (
        "runtime.causes runtime.graph runtime.memory runtime.profile runtime.sources runtime.target runtime.tensor"
    ),
    "runtime.page": (
        "runtime.causes runtime.graph runtime.markup runtime.profile runtime.sources runtime.target runtime.tensor"
        " runtime.views"
    ),
    "runtime.report": (
        "runtime.compile runtime.cost runtime.files runtime.graph runtime.host runtime.markup runtime.memory"
        " runtime.options runtime.page runtime.profile runtime.schema runtime.sections runtime.signatures"
        " runtime.target runtime.tensor runtime.timeline runtime.views"
    ),
    "lowering.jax_compat": "",
    "lowering.stored_modules": "lowering.jax_compat",
    "lowering.source_info": "lowering.jax_compat runtime.tensor",
    "lowering.layer_notes": "lowering.jax_compat lowering.source_info runtime.tensor",
    "lowering.layout": (
        "runtime.analysis runtime.compile runtime.cost runtime.exchange runtime.graph runtime.memory runtime.target"
        " runtime.tensor"
    ),
    "lowering.popops.vertices": "lowering.layout runtime.exchange runtime.graph runtime.target runtime.tensor",
    "lowering.popops.reductions": (
        "lowering.layout lowering.popops.vertices runtime.exchange runtime.graph runtime.target runtime.tensor"
    ),
    "lowering.popops.maps": (
        "lowering.layout lowering.popops.reductions lowering.popops.vertices runtime.exchange runtime.graph"
        " runtime.target runtime.tensor"
    ),
    "lowering.popops.indexing": (
        "lowering.jax_compat lowering.layout lowering.popops.maps lowering.popops.reductions lowering.popops.vertices"
        " runtime.exchange runtime.graph runtime.target runtime.tensor"
    ),
    "lowering.popops": (
        "lowering.layout lowering.popops.indexing lowering.popops.maps lowering.popops.reductions"
        " lowering.popops.vertices"
    ),
    "lowering.gcl": (
        "lowering.jax_compat lowering.layout lowering.popops lowering.popops.maps lowering.source_info runtime.cost"
        " runtime.exchange runtime.graph runtime.target runtime.tensor"
    ),
    "lowering.digests": "lowering.jax_compat lowering.source_info",
    "lowering.primitives": "lowering.jax_compat lowering.popops",
    "lowering.jaxpr": (
        "lowering.jax_compat lowering.layer_notes lowering.primitives lowering.source_info runtime.tensor"
    ),
    "lowering.replicas": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.popops lowering.primitives lowering.source_info"
        " runtime.analysis runtime.graph runtime.host runtime.target"
    ),
    "lowering.recomputation": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.primitives lowering.source_info"
    ),
    "lowering.offload": (
        "lowering.jax_compat lowering.jaxpr lowering.primitives lowering.replicas lowering.source_info runtime.logs"
        " runtime.tensor"
    ),
    "lowering.refs": "lowering.jax_compat lowering.jaxpr lowering.source_info",
    "lowering.outlining": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.layer_notes lowering.offload lowering.primitives"
        " lowering.source_info runtime.graph runtime.target runtime.tensor"
    ),
    "lowering.stablehlo": "lowering.jax_compat lowering.source_info lowering.stored_modules runtime.logs",
    "lowering.pallas_calls": "lowering.jax_compat lowering.jaxpr",
    "lowering.partition": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.popops lowering.primitives lowering.replicas"
        " lowering.source_info runtime.target"
    ),
    "lowering.passes": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.layer_notes lowering.offload lowering.outlining"
        " lowering.pallas_calls lowering.partition lowering.primitives lowering.recomputation lowering.refs"
        " lowering.replicas lowering.source_info lowering.stablehlo runtime.graph runtime.logs runtime.target"
        " runtime.tensor"
    ),
    "lowering.dumps": (
        "lowering.jax_compat lowering.passes lowering.source_info runtime.files runtime.graph runtime.target"
        " runtime.tensor"
    ),
    "lowering.ipus": (
        "lowering.gcl lowering.jax_compat lowering.jaxpr lowering.layer_notes lowering.layout lowering.passes"
        " lowering.source_info runtime.graph runtime.tensor"
    ),
    "lowering.host_rows": "lowering.layout runtime.graph runtime.tensor",
    "lowering.schedules": "runtime.target runtime.tensor",
    "lowering.poplin": (
        "lowering.layout lowering.popops lowering.popops.maps lowering.popops.vertices runtime.exchange runtime.graph"
        " runtime.target runtime.tensor"
    ),
    "lowering.poprand": "lowering.layout lowering.popops runtime.graph runtime.target runtime.tensor",
    "lowering.rules.base": (
        "lowering.jax_compat lowering.layout lowering.passes lowering.popops lowering.popops.maps lowering.primitives"
        " runtime.graph runtime.logs runtime.options runtime.target runtime.tensor"
    ),
    "lowering.rules.flow": (
        "lowering.gcl lowering.host_rows lowering.jax_compat lowering.jaxpr lowering.layout lowering.passes"
        " lowering.popops lowering.popops.maps lowering.popops.reductions lowering.replicas lowering.rules.base"
        " runtime.graph runtime.host runtime.tensor"
    ),
    "lowering.rules.arrays": (
        "lowering.jax_compat lowering.layout lowering.popops lowering.popops.maps lowering.rules.base runtime.graph"
        " runtime.tensor"
    ),
    "lowering.rules.numerics": (
        "lowering.jax_compat lowering.layer_notes lowering.layout lowering.passes lowering.poplin lowering.popops"
        " lowering.popops.indexing lowering.popops.maps lowering.popops.reductions lowering.popops.vertices"
        " lowering.poprand lowering.rules.base runtime.graph runtime.target runtime.tensor"
    ),
    "lowering.rules.tiles": (
        "lowering.jax_compat lowering.layout lowering.passes lowering.popops lowering.rules.base lowering.rules.flow"
        " runtime.analysis runtime.compile runtime.cost runtime.graph runtime.memory runtime.target runtime.tensor"
    ),
    "lowering.rules.table": (
        "lowering.jax_compat lowering.popops lowering.rules.arrays lowering.rules.base lowering.rules.flow"
        " lowering.rules.numerics lowering.rules.tiles"
    ),
    "lowering.rules.equations": (
        "lowering.jax_compat lowering.jaxpr lowering.layer_notes lowering.layout lowering.passes lowering.popops"
        " lowering.refs lowering.rules.base lowering.rules.table lowering.source_info lowering.stablehlo"
        " runtime.graph runtime.logs runtime.options runtime.target runtime.tensor"
    ),
    "lowering.popsparse": "lowering.poplin runtime.graph runtime.target runtime.tensor",
    "lowering.rules": (
        "lowering.rules.arrays lowering.rules.base lowering.rules.equations lowering.rules.flow lowering.rules.table"
        " lowering.rules.tiles"
    ),
    "lowering.pipelining": (
        "lowering.gcl lowering.host_rows lowering.ipus lowering.jax_compat lowering.jaxpr lowering.layer_notes"
        " lowering.layout lowering.offload lowering.passes lowering.popops lowering.popops.maps lowering.primitives"
        " lowering.recomputation lowering.rules lowering.schedules lowering.source_info runtime.analysis"
        " runtime.compile runtime.graph runtime.logs runtime.memory runtime.target runtime.tensor"
    ),
    "lowering.merge": "runtime.analysis runtime.cost runtime.graph runtime.tensor",
    "lowering.other_roles": "runtime.graph runtime.tensor",
    "lowering.program_inputs": "lowering.jax_compat lowering.replicas",
    "lowering.choice": "lowering.pipelining lowering.recomputation",
    "lowering.lower": (
        "lowering.choice lowering.ipus lowering.jax_compat lowering.jaxpr lowering.layout lowering.merge"
        " lowering.other_roles lowering.passes lowering.pipelining lowering.program_inputs lowering.recomputation"
        " lowering.replicas lowering.rules runtime.graph runtime.host runtime.options runtime.target runtime.tensor"
    ),
    "lowering.emit": (
        "lowering.jax_compat lowering.layout lowering.passes lowering.popops lowering.rules runtime.graph"
        " runtime.tensor"
    ),
    "lowering": "",
    "lowering.least_work": (
        "lowering.jax_compat lowering.jaxpr lowering.passes lowering.poplin lowering.popops lowering.popops.vertices"
        " lowering.primitives lowering.replicas lowering.rules.numerics runtime.graph runtime.target"
    ),
    "ipujax.device": "runtime.signatures runtime.target",
    "ipujax.sharding": "lowering.jax_compat lowering.jaxpr lowering.partition runtime.signatures",
    "ipujax.arguments": "ipujax.device runtime.signatures runtime.target",
    "ipujax.calls": (
        "ipujax.arguments ipujax.device ipujax.sharding lowering.jax_compat lowering.jaxpr lowering.refs"
        " lowering.replicas lowering.source_info lowering.stablehlo runtime.logs runtime.options runtime.signatures"
        " runtime.tensor runtime.tracebacks"
    ),
    "ipujax.distributed.instance": (
        "ipujax.calls lowering.jax_compat lowering.replicas runtime.host runtime.logs runtime.options"
        " runtime.signatures"
    ),
    "ipujax.public": "",
    "ipujax.recurrent": "",
    "ipujax.compiled_programs": "ipujax.arguments runtime.compile runtime.logs",
    "ipujax.distributed": (
        "ipujax.arguments ipujax.calls ipujax.distributed.instance ipujax.public lowering.replicas runtime.signatures"
    ),
    "ipujax.poplar.library": (
        "lowering.emit lowering.layout runtime.graph runtime.signatures runtime.target runtime.tensor"
    ),
    "ipujax.popsparse": (
        "ipujax.arguments ipujax.poplar.library ipujax.public lowering.emit lowering.jax_compat lowering.jaxpr"
        " lowering.layout lowering.popops.vertices lowering.popsparse lowering.rules runtime.graph runtime.target"
        " runtime.tensor"
    ),
    "ipujax.optim": "ipujax.arguments ipujax.public lowering.passes lowering.replicas lowering.source_info",
    "ipujax.fit": (
        "lowering.choice lowering.recomputation runtime.compile runtime.graph runtime.logs runtime.memory"
        " runtime.options"
    ),
    "ipujax.storage": (
        "ipujax.calls lowering.digests lowering.refs lowering.stored_modules runtime.files runtime.logs runtime.report"
        " runtime.schema runtime.signatures"
    ),
    "ipujax.lowering_plan": (
        "ipujax.arguments ipujax.calls ipujax.device ipujax.distributed.instance ipujax.fit ipujax.popsparse"
        " ipujax.sharding ipujax.storage lowering.choice lowering.dumps lowering.jax_compat lowering.jaxpr"
        " lowering.least_work lowering.lower lowering.offload lowering.partition lowering.passes lowering.primitives"
        " lowering.program_inputs lowering.recomputation lowering.refs lowering.replicas lowering.rules"
        " lowering.source_info runtime.compile runtime.engine runtime.graph runtime.host runtime.logs runtime.options"
        " runtime.report runtime.target runtime.tensor"
    ),
    "ipujax.stages": (
        "ipujax.arguments ipujax.calls ipujax.compiled_programs ipujax.device ipujax.distributed.instance ipujax.fit"
        " ipujax.lowering_plan ipujax.sharding ipujax.storage lowering.choice lowering.dumps"
        " lowering.jax_compat lowering.jaxpr lowering.pipelining lowering.recomputation runtime.compile runtime.engine"
        " runtime.graph runtime.host runtime.logs runtime.markup runtime.memory runtime.report runtime.signatures"
        " runtime.target runtime.tracebacks"
    ),
    "ipujax.caching": (
        "ipujax.compiled_programs ipujax.lowering_plan ipujax.stages ipujax.storage lowering.digests lowering.dumps"
        " lowering.jax_compat lowering.partition lowering.refs runtime.files runtime.logs runtime.options"
        " runtime.report runtime.schema runtime.sources"
    ),
    "ipujax.prefetching": "ipujax.arguments runtime.host runtime.signatures",
    "ipujax.poplar.types": "runtime.graph runtime.tensor",
    "ipujax.poplar.program": "ipujax.poplar.types ipujax.public runtime.graph runtime.tensor",
    "ipujax.poplar.device": "runtime.signatures runtime.target",
    "ipujax.poplar.vertex": (
        "ipujax.poplar.types lowering.passes lowering.popops runtime.graph runtime.target runtime.tensor runtime.verify"
    ),
    "ipujax.poplar.graph": (
        "ipujax.poplar.device ipujax.poplar.types ipujax.poplar.vertex runtime.graph runtime.target runtime.tensor"
    ),
    "ipujax.poplar.engine": (
        "ipujax.arguments ipujax.compiled_programs ipujax.poplar.device ipujax.poplar.graph ipujax.poplar.program"
        " ipujax.poplar.types runtime.analysis runtime.compile runtime.cost runtime.engine runtime.graph runtime.host"
        " runtime.logs runtime.options runtime.profile runtime.report runtime.target runtime.tensor runtime.verify"
    ),
    "ipujax.poplar": (
        "ipujax.poplar.device ipujax.poplar.engine ipujax.poplar.graph ipujax.poplar.program ipujax.poplar.types"
        " ipujax.poplar.vertex ipujax.public runtime.graph runtime.tensor"
    ),
    "ipujax.popops": (
        "ipujax.poplar.library ipujax.poplar.types ipujax.public lowering.emit lowering.layout lowering.popops"
        " runtime.graph runtime.tensor"
    ),
    "ipujax.poplin": (
        "ipujax.arguments ipujax.poplar.library ipujax.poplar.types ipujax.popops ipujax.public lowering.emit"
        " lowering.layout lowering.poplin runtime.graph runtime.logs runtime.tensor"
    ),
    "ipujax.popnn": (
        "ipujax.poplar.library ipujax.poplar.types ipujax.poplin ipujax.popops ipujax.public ipujax.recurrent"
        " lowering.emit lowering.layout runtime.graph runtime.tensor"
    ),
    "ipujax.poputil": (
        "ipujax.poplar.graph ipujax.poplar.library ipujax.public lowering.emit lowering.layout runtime.graph"
        " runtime.tensor"
    ),
    "ipujax.poprand": (
        "ipujax.poplar.library ipujax.poplar.types ipujax.poputil ipujax.public runtime.graph runtime.tensor"
    ),
    "ipujax.popsolver": "ipujax.public",
    "ipujax.schedules": "ipujax.public lowering.schedules",
    "ipujax.tiles": (
        "ipujax.arguments ipujax.poplar.types ipujax.poplar.vertex lowering.digests lowering.jax_compat lowering.jaxpr"
        " lowering.refs lowering.rules runtime.target runtime.tensor"
    ),
    "ipujax.keras.ops": "",
    "ipujax.onnx.graphs": "",
    "ipujax.popart.enumerations": "",
    "ipujax.popart.reserved_names": "",
    "ipujax.distributed.launcher": "ipujax.distributed.instance",
    "runtime.quick_jit": "",
    "ipujax.checking": (
        "ipujax.lowering_plan ipujax.stages lowering.gcl lowering.jax_compat lowering.jaxpr lowering.layer_notes"
        " lowering.lower lowering.refs lowering.replicas lowering.rules lowering.source_info runtime.engine"
        " runtime.graph runtime.interpreter runtime.quick_jit runtime.tensor"
    ),
    "ipujax.functions": (
        "ipujax.arguments ipujax.caching ipujax.calls ipujax.checking ipujax.compiled_programs ipujax.device"
        " ipujax.distributed.instance ipujax.lowering_plan ipujax.sharding ipujax.stages ipujax.storage lowering.dumps"
        " lowering.jax_compat lowering.jaxpr lowering.partition lowering.replicas runtime.host runtime.logs"
        " runtime.options"
    ),
    "ipujax.jit": (
        "ipujax.arguments ipujax.calls ipujax.checking ipujax.compiled_programs ipujax.device ipujax.functions"
        " ipujax.sharding ipujax.stages runtime.options runtime.report runtime.signatures runtime.target"
        " runtime.tracebacks"
    ),
    "ipujax.jax_scripts": (
        "ipujax.arguments ipujax.caching ipujax.calls ipujax.device ipujax.lowering_plan ipujax.sharding ipujax.stages"
        " lowering.jax_compat lowering.jaxpr lowering.partition lowering.primitives lowering.source_info"
        " lowering.stablehlo runtime.engine runtime.files runtime.graph runtime.host runtime.logs runtime.options"
        " runtime.profile runtime.quick_jit runtime.report runtime.signatures runtime.sources runtime.target"
    ),
    "ipujax.auto_sharding": (
        "ipujax.device ipujax.jit lowering.jax_compat lowering.partition lowering.passes runtime.signatures"
        " runtime.target"
    ),
    "ipujax.pipeline": (
        "ipujax.arguments ipujax.calls ipujax.device ipujax.jit ipujax.stages lowering.jax_compat lowering.jaxpr"
        " lowering.pipelining lowering.refs lowering.schedules runtime.graph runtime.options runtime.report"
        " runtime.signatures runtime.target runtime.tracebacks"
    ),
    "ipujax.advice": (
        "ipujax.arguments ipujax.device ipujax.jit ipujax.pipeline lowering.jaxpr lowering.schedules runtime.causes"
        " runtime.markup runtime.options runtime.report runtime.signatures runtime.target runtime.tensor runtime.views"
    ),
    "ipujax.models": "ipujax.arguments ipujax.pipeline ipujax.popnn ipujax.public runtime.target",
    "ipujax.studies": (
        "ipujax.caching ipujax.compiled_programs ipujax.device ipujax.jit ipujax.stages ipujax.storage"
        " lowering.digests runtime.compile runtime.logs runtime.many_machines runtime.markup runtime.memory"
        " runtime.page runtime.profile runtime.signatures runtime.target runtime.tensor runtime.timeline"
    ),
    "ipujax.front_end": (
        "ipujax.arguments ipujax.jit ipujax.public ipujax.recurrent lowering.jaxpr lowering.schedules"
        " lowering.source_info runtime.files runtime.logs runtime.options runtime.signatures runtime.target"
    ),
    "ipujax.onnx.onnx_errors": "ipujax.front_end",
    "ipujax.onnx.element_types": "ipujax.onnx.onnx_errors",
    "ipujax.onnx.bounded_values": "ipujax.onnx.onnx_errors",
    "ipujax.onnx.registry": (
        "ipujax.front_end ipujax.onnx.bounded_values ipujax.onnx.element_types ipujax.onnx.onnx_errors"
    ),
    "ipujax.onnx.budget": "ipujax.onnx.onnx_errors",
    "ipujax.onnx.iterations": "",
    "ipujax.onnx.operators": (
        "ipujax.front_end ipujax.onnx.bounded_values ipujax.onnx.budget ipujax.onnx.element_types"
        " ipujax.onnx.iterations ipujax.onnx.onnx_errors ipujax.onnx.registry"
    ),
    "ipujax.onnx.machine_learning": (
        "ipujax.onnx.budget ipujax.onnx.element_types ipujax.onnx.onnx_errors ipujax.onnx.operators"
        " ipujax.onnx.registry"
    ),
    "ipujax.onnx.microsoft": (
        "ipujax.onnx.element_types ipujax.onnx.onnx_errors ipujax.onnx.operators ipujax.onnx.registry"
    ),
    "ipujax.onnx.call_arguments": (
        "ipujax.front_end ipujax.onnx.budget ipujax.onnx.element_types ipujax.onnx.graphs ipujax.onnx.onnx_errors"
    ),
    "ipujax.plan_search": (
        "ipujax.arguments ipujax.auto_sharding ipujax.caching ipujax.device ipujax.jit ipujax.storage ipujax.studies"
        " lowering.digests lowering.gcl lowering.jax_compat lowering.jaxpr lowering.partition lowering.passes"
        " lowering.pipelining lowering.primitives lowering.replicas lowering.rules lowering.schedules"
        " lowering.source_info runtime.graph runtime.logs runtime.options runtime.signatures runtime.target"
        " runtime.tensor"
    ),
    "ipujax": (
        "ipujax.advice ipujax.auto_sharding ipujax.checking ipujax.device ipujax.distributed ipujax.jax_scripts"
        " ipujax.jit ipujax.optim ipujax.pipeline ipujax.plan_search ipujax.poplar ipujax.poplin ipujax.popnn"
        " ipujax.popops ipujax.poprand ipujax.popsolver ipujax.popsparse ipujax.poputil ipujax.prefetching"
        " ipujax.public ipujax.schedules ipujax.stages ipujax.storage ipujax.studies ipujax.tiles runtime.host"
        " runtime.options runtime.report runtime.target"
    ),
    "ipujax.keras.model_state": "ipujax ipujax.front_end",
    "ipujax.keras.config": "ipujax ipujax.front_end",
    "ipujax.keras.utils": "ipujax ipujax.front_end ipujax.keras.config",
    "ipujax.keras.callbacks": "ipujax ipujax.front_end",
    "ipujax.keras.layer_stages": "ipujax ipujax.front_end ipujax.keras.model_state",
    "ipujax.keras.stage_assignment": "ipujax ipujax.front_end ipujax.keras.layer_stages ipujax.keras.model_state",
    "ipujax.keras.layer_places": "ipujax.front_end ipujax.keras.model_state",
    "ipujax.keras.model_steps": "ipujax ipujax.keras.layer_stages ipujax.keras.model_state",
    "ipujax.keras.device_loop": (
        "ipujax ipujax.front_end ipujax.keras.layer_places ipujax.keras.layer_stages ipujax.keras.model_state"
        " ipujax.keras.model_steps"
    ),
    "ipujax.keras.update_counts": "ipujax ipujax.keras.device_loop ipujax.keras.model_state",
    "ipujax.keras.ipu_strategy": (
        "ipujax ipujax.front_end ipujax.keras.config ipujax.keras.device_loop ipujax.keras.layer_places"
        " ipujax.keras.layer_stages ipujax.keras.model_state ipujax.keras.model_steps ipujax.keras.stage_assignment"
        " ipujax.keras.update_counts"
    ),
    "ipujax.keras.keras": "ipujax.keras.layer_stages",
    "ipujax.keras": (
        "ipujax ipujax.front_end ipujax.keras.callbacks ipujax.keras.config ipujax.keras.ipu_strategy"
        " ipujax.keras.keras ipujax.keras.layer_stages ipujax.keras.ops ipujax.keras.stage_assignment"
        " ipujax.keras.utils"
    ),
    "ipujax.onnx.reading": (
        "ipujax ipujax.front_end ipujax.onnx.budget ipujax.onnx.graphs ipujax.onnx.onnx_errors ipujax.onnx.registry"
    ),
    "ipujax.onnx.evaluation": (
        "ipujax ipujax.front_end ipujax.onnx.budget ipujax.onnx.element_types ipujax.onnx.graphs"
        " ipujax.onnx.onnx_errors ipujax.onnx.reading ipujax.onnx.registry"
    ),
    "ipujax.onnx.model": (
        "ipujax.front_end ipujax.onnx.budget ipujax.onnx.call_arguments ipujax.onnx.element_types"
        " ipujax.onnx.evaluation ipujax.onnx.graphs ipujax.onnx.machine_learning ipujax.onnx.microsoft"
        " ipujax.onnx.operators ipujax.onnx.reading"
    ),
    "ipujax.onnx.sessions": (
        "ipujax ipujax.front_end ipujax.onnx.budget ipujax.onnx.call_arguments ipujax.onnx.element_types"
        " ipujax.onnx.graphs ipujax.onnx.model ipujax.onnx.onnx_errors ipujax.onnx.reading"
    ),
    "ipujax.onnx.random_call": "ipujax ipujax.onnx.sessions",
    "ipujax.onnx.front_end": (
        "ipujax.onnx.element_types ipujax.onnx.evaluation ipujax.onnx.graphs ipujax.onnx.iterations"
        " ipujax.onnx.reading ipujax.onnx.registry"
    ),
    "ipujax.onnx": (
        "ipujax.front_end ipujax.onnx.graphs ipujax.onnx.model ipujax.onnx.onnx_errors ipujax.onnx.registry"
        " ipujax.onnx.sessions"
    ),
    "ipujax.popart.exceptions": "ipujax ipujax.front_end ipujax.onnx ipujax.onnx.front_end",
    "ipujax.popart.tensor_info": "ipujax.popart.exceptions",
    "ipujax.popart.operators": (
        "ipujax.front_end ipujax.onnx ipujax.onnx.front_end ipujax.popart.enumerations ipujax.popart.exceptions"
        " ipujax.popart.tensor_info"
    ),
    "ipujax.popart.flow": (
        "ipujax.front_end ipujax.onnx.front_end ipujax.popart.enumerations ipujax.popart.exceptions"
        " ipujax.popart.reserved_names ipujax.popart.tensor_info"
    ),
    "ipujax.popart.devices": "ipujax ipujax.front_end ipujax.popart.enumerations ipujax.popart.exceptions",
    "ipujax.popart.options": "ipujax ipujax.front_end ipujax.popart.enumerations ipujax.popart.exceptions",
    "ipujax.popart.building": (
        "ipujax.front_end ipujax.onnx ipujax.onnx.front_end ipujax.popart.enumerations ipujax.popart.exceptions"
        " ipujax.popart.operators ipujax.popart.options ipujax.popart.tensor_info"
    ),
    "ipujax.popart.graph_transformer": "ipujax.popart.building ipujax.popart.exceptions ipujax.popart.tensor_info",
    "ipujax.popart.supported_operations": "ipujax.onnx.front_end ipujax.popart.building ipujax.popart.enumerations",
    "ipujax.popart.optimisers": (
        "ipujax.popart.enumerations ipujax.popart.exceptions ipujax.popart.reserved_names ipujax.popart.tensor_info"
    ),
    "ipujax.popart.popart_log": "ipujax.popart.exceptions",
    "ipujax.popart.model_graph": (
        "ipujax ipujax.onnx.front_end ipujax.popart.building ipujax.popart.devices ipujax.popart.enumerations"
        " ipujax.popart.exceptions ipujax.popart.flow ipujax.popart.operators ipujax.popart.options"
        " ipujax.popart.tensor_info"
    ),
    "ipujax.popart.steps": (
        "ipujax ipujax.front_end ipujax.popart.building ipujax.popart.enumerations ipujax.popart.exceptions"
        " ipujax.popart.flow ipujax.popart.model_graph ipujax.popart.operators ipujax.popart.optimisers"
        " ipujax.popart.options ipujax.popart.reserved_names ipujax.popart.tensor_info"
    ),
    "ipujax.popart.session": (
        "ipujax ipujax.front_end ipujax.popart.building ipujax.popart.devices ipujax.popart.enumerations"
        " ipujax.popart.exceptions ipujax.popart.flow ipujax.popart.model_graph ipujax.popart.optimisers"
        " ipujax.popart.options ipujax.popart.popart_log ipujax.popart.reserved_names ipujax.popart.steps"
        " ipujax.popart.tensor_info"
    ),
    "ipujax.popart.horovod": (
        "ipujax ipujax.front_end ipujax.popart.exceptions ipujax.popart.optimisers ipujax.popart.options"
        " ipujax.popart.session"
    ),
    "ipujax.cli": (
        "ipujax ipujax.advice ipujax.compiled_programs ipujax.device ipujax.distributed.launcher ipujax.jax_scripts"
        " ipujax.jit ipujax.models ipujax.onnx.random_call ipujax.storage lowering.dumps lowering.rules"
        " lowering.rules.table runtime.logs runtime.profile runtime.report runtime.target"
    ),
    "ipujax.__main__": "ipujax.cli",
    "ipujax.popart.gcprofile": "ipujax.front_end ipujax.popart.exceptions ipujax.popart.session",
    "ipujax.popart.numerics_report": "ipujax.popart.building ipujax.popart.exceptions ipujax.popart.tensor_info",
    "ipujax.popart": (
        "ipujax ipujax.popart.building ipujax.popart.devices ipujax.popart.enumerations ipujax.popart.exceptions"
        " ipujax.popart.flow ipujax.popart.graph_transformer ipujax.popart.numerics_report ipujax.popart.optimisers"
        " ipujax.popart.options ipujax.popart.popart_log ipujax.popart.reserved_names ipujax.popart.session"
        " ipujax.popart.supported_operations ipujax.popart.tensor_info"
    ),
    "ipujax.popart.serving": "ipujax.popart.exceptions",
    "ipujax.popart.__main__": "ipujax.popart.exceptions ipujax.popart.serving",
}

# Why several files may have one name.
SAME_NAMES = {
    "each package has one": "__init__",
    "an operation: its lowering rule, its library function, what Poplar programs call": (
        "collectives convolution dynamic_slices elementwise indexing matmul operands poprand reductions codelet_calls"
    ),
    "the same thing as the runtime has it and as Poplar programs see it": ("device engine graph mapping program"),
    "programs of several replicas, in the engine and in the tile interpreter": "replicated",
    "partial results, of reductions and of products": "partials",
    "what a front end may import of the package that it stands on": "front_end",
    "what `python -m` runs": "__main__",
}

PACKAGES = {module.removesuffix(".__init__") for module in FILES if module.endswith(".__init__")}
HALLS = {package.rpartition(".")[0] for package in PACKAGES} - {""}  # packages that hold packages


def room_of(module: str) -> str:
    """The room of a module, without the leading `ipujax.` of the two lower floors."""
    package, _, name = module.rpartition(".")
    room = package if package not in HALLS or name == "__init__" else module
    return re.sub(r"^ipujax\.(?=(runtime|lowering)\b)", "", room)


def module_of(name: str) -> str | None:
    """The module in which an imported name lies; None outside the package."""
    if not within(name, "ipujax"):
        return None
    parts = name.split(".")
    tries = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next(module for actual in tries for module in (actual, f"{actual}.__init__") if module in FILES)


def arrows(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Room → other rooms its files import, wherever in them; `sources` by module."""
    actual: dict[str, set[str]] = {room_of(module): set() for module in sources}
    for module, source in sources.items():
        for _, name in imported(ast.parse(source), module):
            target = module_of(name)
            if target and room_of(target) not in {room_of(module), *FOR_ALL}:
                actual[room_of(module)].add(room_of(target))
    return actual


def table() -> dict[str, set[str]]:
    """ROOMS as sets."""
    return {room: set(others.split()) for room, others in ROOMS.items()}


def sources() -> dict[str, str]:
    """Text of each module."""
    return {module: path.read_text(encoding="utf-8") for module, path in FILES.items()}


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Names that import one another in a circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def differences(code: Mapping[str, set[str]], rooms: Mapping[str, set[str]]) -> list[str]:
    """Imports in the code and not in the table, and the other way round."""
    unsaid = [f"{a} imports {b}, which the table does not say" for a in code for b in code[a] - rooms.get(a, set())]
    unused = [f"the table lets {a} import {b}, and nothing does" for a in rooms for b in rooms[a] - code.get(a, set())]
    return sorted([*unsaid, *unused, *(f"{room} is in one of them alone" for room in set(code) ^ set(rooms))])


def drawing(rooms: Mapping[str, Iterable[str]]) -> str:
    """A line a room: its imports, floor by floor, the highest first."""
    for_all = " ".join(sorted(room.removeprefix("runtime.") for room in FOR_ALL))
    lines = textwrap.wrap(f"{'every room':<26}← runtime: {for_all}", 120, subsequent_indent=" " * 28)
    for floor in ("ipujax", "lowering", "runtime"):
        lines += [f"{floor}/"]
        for room in reversed([room for room in rooms if within(room, floor) and room not in ("lowering", "runtime")]):
            groups: dict[str, list[str]] = {below: [] for below in ("ipujax", "lowering", "runtime")}
            for other in sorted(rooms[room]):
                groups[other.split(".")[0]].append(other.partition(".")[2] or other)
            own = " ".join(groups.pop(floor))
            parts = [own, *(f"{below}: {' '.join(others)}" for below, others in groups.items() if others)]
            name = "  " + (room.removeprefix(f"{floor}.") if room != floor else "__init__").ljust(24)
            text = name + "← " + "; ".join(filter(None, parts)) if any(parts) else name.rstrip()
            lines += textwrap.wrap(text, 120, subsequent_indent=" " * 28, break_on_hyphens=False) or [text]
    return "\n".join(lines) + "\n"


def test_imports_between_rooms_are_those_of_the_table() -> None:
    assert not differences(arrows(sources()), table())


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_ends_import_public_names(front_end: str) -> None:
    others = {other for room, names in table().items() if within(room, front_end) for other in names}
    outside = {other for other in others if not within(other, front_end)}
    assert outside == {"ipujax", "ipujax.front_end", *FRONT_ENDS[front_end]}


def test_rooms_import_no_circle() -> None:
    assert not circle(table())


def test_imports_go_to_rooms_above_in_the_table() -> None:
    place = {room: n for n, room in enumerate(ROOMS)}
    assert not [(room, other) for room, others in table().items() for other in others if place[other] > place[room]]


def test_modules_import_no_circle() -> None:
    """Imports inside functions count, and those for type checkers."""
    graph: dict[str, set[str]] = {}
    for module, source in sources().items():
        actual = {module_of(name) for _, name in imported(ast.parse(source), module)}
        graph[module] = {target for target in actual if target and target != module}
    assert not circle(graph)


def test_rooms_are_small() -> None:
    files = Counter(path.parent for path in FILES.values())
    names = {folder: ".".join(folder.relative_to(ROOT).parts) for folder in files}
    assert set(names.values()) > FAMILIES
    assert {names[folder] for folder, count in files.items() if count > MAX_FILES} <= FAMILIES


def test_rooms_hold_files_of_names_of_their_own() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for module in FILES:
        modules[module.rpartition(".")[2]].append(module)
    repeated = {name for name, same in modules.items() if len(same) > 1}
    allowed = Counter(name for names in SAME_NAMES.values() for name in names.split())
    assert not [name for name, count in allowed.items() if count > 1]
    assert repeated == set(allowed), (sorted(repeated - set(allowed)), sorted(set(allowed) - repeated))


@pytest.mark.parametrize("node", ["RepeatWhile", "If", "Switch"])
def test_few_modules_name_a_node_of_control(node: str) -> None:
    """The others ask a node for its form, see `runtime.graph.forms`."""
    naming = [module for module, source in sources().items() if node in source and node in names_in(ast.parse(source))]
    assert 1 < len(naming) <= MOST_NAMING_A_NODE, naming


def names_in(tree: ast.Module) -> set[str]:
    """Names that code uses, imports or defines as a class."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(attr=name) | ast.ClassDef(name) | ast.alias(name):
                names.add(name)
    return names


def test_rooms_are_drawn_in_the_page_of_imports(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    drawn, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + BEGIN + drawing(table()) + END + after, encoding="utf-8")
    else:
        assert drawn == drawing(table()), "pytest --update-golden tests/test_rooms.py writes it"


def test_room_of_a_module() -> None:
    assert room_of("ipujax.runtime.tensor.view") == room_of("ipujax.runtime.tensor.__init__") == "runtime.tensor"
    assert room_of("ipujax.runtime.errors") == "runtime.errors" and room_of("ipujax.runtime.__init__") == "runtime"
    assert room_of("ipujax.distributed.__init__") == "ipujax.distributed"
    assert module_of("ipujax.runtime.errors.IpuError") == "ipujax.runtime.errors" and module_of("jax.numpy") is None


@pytest.mark.parametrize(
    "source",
    [
        "from ipujax.runtime.engine import engine",
        "import ipujax.runtime.engine.engine",
        "def f():\n    from ipujax.runtime.engine.engine import engine_function",
        "if TYPE_CHECKING:\n    from ..engine import engine",
    ],
)
def test_an_import_that_rooms_do_not_allow_is_found(source: str) -> None:
    actual = arrows({"ipujax.runtime.tensor.view": source})
    assert actual == {"runtime.tensor": {"runtime.engine"}}
    assert "runtime.tensor imports runtime.engine, which the table does not say" in differences(actual, table())
    assert "runtime.tensor" in circle({**table(), **actual})
