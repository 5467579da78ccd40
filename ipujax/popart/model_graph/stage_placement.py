"""Annotations of nodes as scopes of this compiler: stages, phases and recomputation.

Input: annotations, and the options that say which of them count. Output: a scope for each node, and the settings of
`ipu.pipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import ipujax as ipu
from ipujax.onnx.front_end import Node
from ipujax.popart.building import Annotations
from ipujax.popart.building.annotations import EXECUTION_PHASE, PIPELINE_STAGE, VIRTUAL_GRAPH
from ipujax.popart.devices import DeviceInfo
from ipujax.popart.enumerations import VirtualGraphMode
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
from ipujax.popart.options import SessionOptions


@dataclass(frozen=True, slots=True)
class Placement:
    """Annotations that a session follows, as settings of stages and phases.

    Args:
        stages: stage of each result that a stage computes, by its name; empty where nodes have no stages. A single
            stage has the number of its IPU.
        has_phases: whether annotations of execution phases count.
        is_pipelined: whether stages work on several micro-batches at once.
        device_mapping: IPU of each stage; None for stage i on IPU i.
        found_stages: number of stages to find; None for those of the annotations.
    """

    stages: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    has_phases: bool = False
    is_pipelined: bool = False
    device_mapping: tuple[int, ...] | None = None
    found_stages: int | None = None

    @property
    def has_stages(self) -> bool:
        """True with several stages."""
        return len(set(self.stages.values())) > 1 or self.found_stages is not None

    def scope(self, node: Node, annotations: Annotations) -> ExitStack:
        """Return the scope in which a node is traced.

        Args:
            node: of the graph.
            annotations: of the node.
        """
        stack = ExitStack()
        number = next((self.stages[name] for name in node.outputs if name in self.stages), None)
        if number is not None:
            stack.enter_context(ipu.stage(number))
        if self.has_phases and EXECUTION_PHASE in annotations:
            stack.enter_context(ipu.phase(int(annotations[EXECUTION_PHASE])))
        return stack


def placement_of(graph: AnnotatedGraph, options: SessionOptions, device: DeviceInfo) -> Placement:
    """Return the placement of a graph.

    Args:
        graph: with annotations.
        options: of the session.
        device: of the session.

    Raises:
        popart_exception: an IPU that the device lacks, stages that run backwards, or pipelining without stages.
    """
    mode = options.virtualGraphMode
    ipus = device.numIpus // options.replicas
    if device.ipuVersion and device.numIpus % options.replicas:
        message = "IPUs of the device cannot be divided among replicas"
        expected = f"a multiple of {options.replicas} IPUs (replicatedGraphCount)"
        raise popart_exception(
            message, expected=expected, got=device.numIpus, hint="createIpuModelDevice({'numIPUs': …})"
        )
    if mode == VirtualGraphMode.ExecutionPhases:
        _check_phases(graph, options.executionPhaseSettings.phases)
        return Placement(has_phases=_has(graph, EXECUTION_PHASE))
    # Off ignores annotations of IPUs, as PopART does: the same model runs on one IPU.
    if mode == VirtualGraphMode.Off:
        if options.enablePipelining:
            hint = "virtualGraphMode = VirtualGraphMode.Manual or Auto"
            sentence = "Pipelining requires more than one IPU: operations on several"
            raise popart_exception(sentence, got="VirtualGraphMode.Off", hint=hint)
        return Placement()
    if mode == VirtualGraphMode.Auto:
        stages = max(ipus, 1)
        return Placement(is_pipelined=options.enablePipelining, found_stages=stages if stages > 1 else None)
    _check_ipus(graph, ipus, device)
    is_pipelined = bool(options.enablePipelining)
    # Without stages of their own, operations are pipelined by their IPUs.
    if is_pipelined and _has(graph, PIPELINE_STAGE):
        _check_forward(graph)
        return _placed(_annotated_stages(graph), _device_mapping(graph), is_pipelined)
    if is_pipelined:
        _check_forward(graph, VIRTUAL_GRAPH)
    return _placed(*_stages_of_ipus(graph), is_pipelined)


def _placed(stages: Mapping[str, int], ipus: Sequence[int], is_pipelined: bool) -> Placement:
    """Return a placement of results in stages, with the IPU of each number of a stage."""
    used = set(stages.values())
    if len(used) == 1:
        return Placement({name: ipus[stage] for name, stage in stages.items()}, is_pipelined=is_pipelined)
    mapping = None if tuple(ipus) == tuple(range(len(ipus))) else tuple(ipus)
    return Placement(stages, is_pipelined=is_pipelined, device_mapping=mapping)


def _numbers(graph: AnnotatedGraph, attribute: str) -> set[int]:
    return {int(notes[attribute]) for notes in graph.annotations if attribute in notes}


def _has(graph: AnnotatedGraph, attribute: str) -> bool:
    return bool(_numbers(graph, attribute))


def _annotated_stages(graph: AnnotatedGraph) -> dict[str, int]:
    rows = ((node, notes) for node, notes in graph.annotated_nodes() if PIPELINE_STAGE in notes)
    return {name: int(notes[PIPELINE_STAGE]) for node, notes in rows for name in node.outputs if name}


def _stages_of_ipus(graph: AnnotatedGraph) -> tuple[dict[str, int], list[int]]:
    """Return the stage of each result, and the IPU of each stage: several are on an IPU that values come back to."""
    stages: dict[str, int] = {}
    earliest: dict[str, int] = {}
    ipus: list[int] = []
    for node, notes in graph.annotated_nodes():
        first = max((earliest.get(name, 0) for name in node.inputs), default=0)
        if VIRTUAL_GRAPH in notes:
            ipu_number = int(notes[VIRTUAL_GRAPH])
            first = next((number for number in range(first, len(ipus)) if ipus[number] == ipu_number), len(ipus))
            if first == len(ipus):
                ipus.append(ipu_number)
            stages |= dict.fromkeys(filter(None, node.outputs), first)
        # A node without an IPU hands on the stage of its operands.
        earliest |= dict.fromkeys(node.outputs, first)
    return stages, ipus


def _check_phases(graph: AnnotatedGraph, phases: int) -> None:
    last = max(_numbers(graph, EXECUTION_PHASE), default=0)
    if phases and last >= phases:
        hint = f"executionPhaseSettings.phases = {last + 1}"
        message = f"an operation is in execution phase {last} of {phases}"
        raise popart_exception(message, expected=f"phases from 0 to {phases - 1}", got=last, hint=hint)


def _check_ipus(graph: AnnotatedGraph, ipus: int, device: DeviceInfo) -> None:
    # A CPU computes the numbers of any placement.
    is_limited = device.ipuVersion != ""
    for number in sorted(_numbers(graph, VIRTUAL_GRAPH)):
        if number < 0 or (is_limited and number >= ipus):
            expected = f"an IPU from 0 to {ipus - 1} of a replica"
            raise popart_exception("an operation is on an IPU that the device lacks", expected=expected, got=number)


def _check_forward(graph: AnnotatedGraph, attribute: str = PIPELINE_STAGE) -> None:
    """Refuse an operation that reads a result of a later stage."""
    # A tensor without a stage counts as one of stage 0: inputs and parameters are there from the start.
    stages: dict[str, int] = {}
    for node, notes in graph.annotated_nodes():
        number = notes.get(attribute)
        for name in node.inputs:
            if number is not None and stages.get(name, 0) > int(number):
                sentence = f"Tensor {name} is consumed in an earlier pipeline stage than it is produced"
                raise popart_exception(
                    f"{sentence}: stages run backwards, {node.op_type} reads it",
                    expected=f"stage {stages[name]} or later",
                    got=f"stage {int(number)}",
                    hint="number the stages in the order in which operations depend on each other",
                )
        if number is not None:
            stages |= dict.fromkeys(node.outputs, int(number))


def _device_mapping(graph: AnnotatedGraph) -> list[int]:
    """Return the IPU of each number of a pipeline stage up to the last, its own number where it has none."""
    ipus: dict[int, int] = {}
    for notes in graph.annotations:
        if PIPELINE_STAGE in notes:
            number = int(notes[PIPELINE_STAGE])
            ipu_number = int(notes.get(VIRTUAL_GRAPH, ipus.get(number, number)))
            if ipus.setdefault(number, ipu_number) != ipu_number and VIRTUAL_GRAPH in notes:
                message = f"Ops on IPUs {ipus[number]} and {ipu_number} have the same pipeline stage {number}"
                raise popart_exception(message, expected="one IPU a stage", got=f"{ipus[number]} and {ipu_number}")
    return [ipus.get(number, number) for number in range(max(ipus) + 1)]


def pipeline_settings(placement: Placement) -> Mapping[str, Any]:
    """Return the keywords of `ipu.pipeline` for a placement.

    Args:
        placement: of the session.
    """
    settings: dict[str, Any] = {}
    if placement.found_stages is not None:
        settings["stages"] = placement.found_stages
    if placement.device_mapping is not None:
        settings["device_mapping"] = placement.device_mapping
    if placement.has_stages and not placement.is_pipelined:
        settings["schedule"] = "sequential"
    return settings
