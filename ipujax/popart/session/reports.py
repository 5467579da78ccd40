"""Reports of a session: summary, graph and execution profile, cycles; texts of the guide where profiling is off.

Summary and execution profile are of all executions since the last one that was fetched. Profiles are static, so that
executions are equal: their cycles, and how often each step ran, are multiplied by their number.

Source: PopART user guide, "Retrieving profiling reports".
Limits: `programTrace` and the times of steps are those of one execution.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipujax as ipu
from ipujax.front_end import write_file
from ipujax.popart.exceptions import popart_exception, poplar_exception
from ipujax.popart.model_graph.annotated_graph import dot_text, ir_text
from ipujax.popart.options.session_options import REPORT_DIRECTORY
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
        return self._options.has_reports and self._prepared().profile is not None

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
        """Return the profile of an execution as text, and how many there were; a sentence where profiling is off.

        Args:
            resetProfile: whether the next report leaves these executions out.

        Raises:
            poplar_exception: a session on a CPU, which has no profile.
        """
        report = self.getReport()
        if not self._is_profiled:
            return SUMMARY_OFF
        executions = self._executions(resetProfile)
        total = executions * report.cycles
        return f"{report.summary()}\nExecutions since the last report: {executions:,}, {total:,} cycles\n"

    def getGraphReport(self, useCbor: bool = False) -> bytes:
        """Return the graph profile as JSON, or CBOR.

        Args:
            useCbor: whether it is CBOR.
        """
        return _encoded(dict(self.getReport().graph()), useCbor)

    def getExecutionReport(self, useCbor: bool = False, resetProfile: bool = True) -> bytes:
        """Return the profile of the executions since the last report as JSON, or CBOR; a text where profiling is off.

        Args:
            useCbor: whether it is CBOR.
            resetProfile: whether the next report leaves these executions out.

        Raises:
            poplar_exception: a session on a CPU, which has no profile.
        """
        report = self.getReport()
        if not self._is_profiled:
            return EXECUTION_OFF.encode()
        return _encoded(_of_executions(report.execution(), self._executions(resetProfile)), useCbor)

    def _executions(self, is_reset: bool) -> int:
        """Return the executions since the last report; begin to count anew where the profile is reset."""
        runner = self._prepared()
        executions = runner.unreported_calls
        runner.unreported_calls = 0 if is_reset else executions
        return executions

    def getCycleCount(self, id: str = "") -> int:
        """Return the cycles of a step.

        Args:
            id: has no effect; a step has one program.
        """
        return self.getReport().cycles * self._prepared().calls_of_step

    def getTensorTileMap(self) -> dict[str, Any]:
        """Return the tile mapping of each variable of the device; empty on a CPU."""
        return self._prepared().tile_map()

    def getSerializedGraph(self) -> bytes:
        """Return the graph profile as JSON."""
        return self.getGraphReport()

    def _serializeIr(self, format: Any = None) -> str:
        """Return the operations of the graph as JSON."""
        return ir_text(self._graph)

    def _dump(self) -> None:
        """Write the dumps, and the saved profile, that options and environment variables ask for."""
        profile = self._prepared().profile
        if self._options.report_directory and profile is not None:
            # A file a session: a program may have one for training and one for tests.
            directory = Path(self._options.report_directory)
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                message = f"{REPORT_DIRECTORY} cannot be made: {error.strerror}"
                raise popart_exception(message, expected="a directory", got=str(directory)) from error
            profile.save(directory / f"{self.name}.profile")
            _LOG.info("saved the profile in %s", directory)
        # PopART draws the graph between its passes; there is one graph here, under each name that is asked for.
        checks = {*self._options.dotChecks, *filter(None, os.environ.get(DOT_CHECKS, "").split(":"))}
        for check in sorted(map(str, checks)):
            path = Path(self._options.logDir or ".") / f"{self.name}_{check.lower()}.dot"
            write_file(path, dot_text(self._graph).encode())
            _LOG.info("wrote %s", path)
        if os.environ.get(TILE_MAP) and self._runner is not None:
            write_file(os.environ[TILE_MAP], json.dumps(self._runner.tile_map()).encode())


def dump_ir(text: str) -> None:
    """Write the operations of a session to the file that the environment names, if it does.

    Args:
        text: JSON.
    """
    if os.environ.get(IR_DUMP):
        write_file(os.environ[IR_DUMP], text.encode())


def _of_executions(report: dict[str, Any], executions: int) -> dict[str, Any]:
    """Return the profile of a number of equal executions, given that of one."""
    simulation = report["simulation"]
    steps = [
        {**step, "repeats": step["repeats"] * executions} if "repeats" in step else step
        for step in simulation["steps"]
        if executions
    ]
    return {
        **report,
        "programTrace": report["programTrace"] if executions else [],
        "programTraceLength": report["programTraceLength"] * executions,
        "simulation": {
            "cycles": simulation["cycles"] * executions,
            "tileCycles": {name: cycles * executions for name, cycles in simulation["tileCycles"].items()},
            "steps": steps,
        },
    }


def _encoded(report: dict[str, Any], is_cbor: bool) -> bytes:
    if not is_cbor:
        return json.dumps(report).encode()
    import cbor2

    return bytes(cbor2.dumps(report))
