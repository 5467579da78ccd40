"""Reports of a session: summary, graph and execution profile, cycles; texts of the guide where profiling is off."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipujax as ipu
from ipujax.front_end import write_file
from ipujax.popart.exceptions import poplar_exception
from ipujax.popart.model_graph.annotated_graph import dot_text, ir_text
from ipujax.popart.options.session_options import REPORT_SWITCHES
from ipujax.popart.popart_log import logger

if TYPE_CHECKING:
    from ipujax.popart.model_graph.annotated_graph import AnnotatedGraph
    from ipujax.popart.options import SessionOptions
    from ipujax.popart.steps.runner import Runner

_LOG = logger("session")
SUMMARY_OFF = "Execution profiling not enabled"
EXECUTION_OFF = '{"profilerMode":"NONE"}'
DOT_CHECKS = "IPUJAX_POPART_DOT_CHECKS"
TILE_MAP = "IPUJAX_POPART_TENSOR_TILE_MAP"
IR_DUMP = "IPUJAX_POPART_IR_DUMP"


class Reports(ABC):
    """Reports of a prepared session."""

    name: str
    _options: SessionOptions
    _graph: AnnotatedGraph
    _runner: Runner | None

    @abstractmethod
    def _prepared(self) -> Runner: ...

    @property
    def _is_profiled(self) -> bool:
        engine = self._options.engineOptions
        is_on = any(str(engine.get(name, "")).lower() == "true" for name in REPORT_SWITCHES)
        return is_on and self._prepared().profile is not None

    def getReport(self) -> ipu.Profile:
        """Return the profile of one call: of a step, or of a batch where the host runs batches one by one.

        Raises:
            poplar_exception: a session on a CPU, which has no profile.
        """
        profile = self._prepared().profile
        if profile is None:
            hint = "DeviceManager().createIpuModelDevice({...})"
            raise poplar_exception("Profiling is disabled for current device type.", got="a CPU", hint=hint)
        return profile

    def getSummaryReport(self, resetProfile: bool = True) -> str:
        """Return the profile as text; a sentence where profiling is off.

        Raises:
            poplar_exception: a session on a CPU, which has no profile.
        """
        report = self.getReport()
        return report.summary() if self._is_profiled else SUMMARY_OFF

    def getGraphReport(self, useCbor: bool = False) -> bytes:
        """Return the graph profile as JSON, or CBOR.

        Args:
            useCbor: whether it is CBOR.
        """
        return _encoded(dict(self.getReport().graph()), useCbor)

    def getExecutionReport(self, useCbor: bool = False, resetProfile: bool = True) -> bytes:
        """Return the execution profile as JSON, or CBOR; the guide's text where profiling is off.

        Args:
            useCbor: whether it is CBOR.
            resetProfile: has no effect; profiles are static.

        Raises:
            poplar_exception: a session on a CPU, which has no profile.
        """
        report = self.getReport()
        if not self._is_profiled:
            return EXECUTION_OFF.encode()
        return _encoded(dict(report.execution()), useCbor)

    def getCycleCount(self, id: str = "") -> int:
        """Return the cycles of a step.

        Args:
            id: has no effect; a step has one program.
        """
        return self.getReport().cycles * self._prepared().calls_of_step

    def getSerializedGraph(self) -> bytes:
        """Return the graph profile as JSON."""
        return self.getGraphReport()

    def _serializeIr(self, format: Any = None) -> str:
        """Return the operations of the graph as JSON."""
        return ir_text(self._graph)

    def _dump(self) -> None:
        """Write the dumps that options and environment variables ask for."""
        # PopART draws the graph between its passes; there is one graph here, under each name that is asked for.
        checks = {*self._options.dotChecks, *filter(None, os.environ.get(DOT_CHECKS, "").split(":"))}
        for check in sorted(map(str, checks)):
            path = Path(self._options.logDir or ".") / f"{self.name}_{check.lower()}.dot"
            write_file(path, dot_text(self._graph).encode())
            _LOG.info("wrote %s", path)
        if os.environ.get(IR_DUMP):
            write_file(os.environ[IR_DUMP], ir_text(self._graph).encode())
        if os.environ.get(TILE_MAP) and self._runner is not None:
            write_file(os.environ[TILE_MAP], json.dumps(self._runner.tile_map()).encode())


def _encoded(report: dict[str, Any], is_cbor: bool) -> bytes:
    if not is_cbor:
        return json.dumps(report).encode()
    import cbor2

    return bytes(cbor2.dumps(report))
