"""Planes of a profile for XProf and TensorBoard: an XSpace, as `jax.profiler` writes for devices.

Input: `Figures`. Output: the bytes of an XSpace. Each IPU is a plane with lines for its steps, phases and operations.
XProf's tables (op_profile, hlo_stats, roofline) read the line "XLA Ops" and the statistics of its events. They are one
event for each operation, all its runs together, one after the other: their sums are those of the profile, though their
times are none of the run.
Source: openxla/xprof, `xplane.proto` and `xplane_schema`: names of planes, lines and statistics.
Limits: XProf knows planes of TPUs and GPUs, so that those of IPUs have the names of TPUs. Bytes are those that arrive
on tiles or the host. XProf's memory viewer reads the buffers of XLA's own compiled module, which an IPU has none of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ipujax.runtime.profile import TRACE_PHASES, Figures, slices
from ipujax.runtime.profile.step_costs import StepCost
from ipujax.runtime.views.operation_view import exchange_bandwidth, peaks

_PICOSECONDS = 10**12
_PROGRAM = 1  # number of the only module
_CATEGORIES = {
    "compute": "custom-call",
    "exchange": "data formatting",
    "global_exchange": "all-reduce",
    "host_exchange": "infeed",
    "sync": "custom-call",
}
_PRODUCTS = {"dot_general": "convolution fusion", "conv_general_dilated": "convolution fusion"}
_STATISTICS = (
    *("program_id", "symbol_id", "hlo_category", "flops", "model_flops", "bytes_accessed", "tf_op", "source"),
    *("run_id", "peak_teraflops_per_second", "peak_hbm_bw_gigabytes_per_second", "device_type_string"),
    *("device_offset_ps", "device_duration_ps", "cycles", "step"),
)
_NUMBER_OF = {name: number for number, name in enumerate(_STATISTICS, 1)}
_OPERATIONS, _MODULES, _STEPS = 1, 2, 3  # numbers of lines; phases follow


def xspace(profile: Figures) -> bytes:
    """Return the serialised XSpace of a run.

    Raises:
        ProfileError: a trip count is data.
    """
    # The public reader of XSpaces has a writer too, of protocol buffers as text.
    text = "\n".join(_lines_of_text(profile))
    serialised: bytes = jax.profiler.ProfileData.text_proto_to_serialized_xspace(text)
    return serialised


def _lines_of_text(profile: Figures) -> Iterator[str]:
    for ipu in range(profile.target.num_ipus):
        yield "planes {"
        yield from _Plane(profile, ipu).text()
        yield "}"
    yield 'hostnames: "ipujax"'


@dataclass(frozen=True, slots=True)
class _Event:
    """An event: number of its metadata, start and end in cycles."""

    metadata: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Plane:
    """The plane of an IPU, as a protocol buffer in text."""

    profile: Figures
    ipu: int

    def text(self) -> Iterator[str]:
        """Yield the lines of the plane."""
        profile = self.profile
        # Numbers of operations are those of the profile: XProf adds up those of equal numbers on all planes.
        rows = {n: row for n, row in enumerate(profile.step_costs, 1) if row.ipus.get(str(self.ipu), 0)}
        first_name = len(profile.step_costs) + 1
        names: dict[str, int] = {}

        def number_of(name: str) -> int:
            return names.setdefault(name, first_name + len(names))

        module = number_of(f"{profile.identity.function or 'program'}({_PROGRAM})")
        lines = [
            (_STEPS, "Steps", [_Event(number_of("0"), 0, profile.cycles)]),
            (_MODULES, "XLA Modules", [_Event(module, 0, profile.cycles)]),
            (_OPERATIONS, "XLA Ops", self._operations(rows)),
            *((4 + n, name, events) for n, (name, events) in enumerate(self._step_events(number_of).items())),
        ]
        yield f"id: {self.ipu + 1}"
        yield f'name: "/device:TPU:{self.ipu}"'
        for number, name, events in lines:
            yield f"lines {{ id: {number} display_id: {number} name: {json.dumps(name)} timestamp_ns: 0"
            yield from self._events(events)
            yield "}"
        for number, row in rows.items():
            yield from _metadata(number, row.name, f"{row.name}.{number}", self._operation_statistics(number, row))
        for name, number in names.items():
            yield from _metadata(number, name, name, {})
        for number, name in enumerate(_STATISTICS, 1):
            yield f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}'
        target = profile.target
        capabilities = {
            "device_type_string": f"IPU {target.name}",
            "peak_teraflops_per_second": max(peaks(target).values()) / 1e12,
            "peak_hbm_bw_gigabytes_per_second": exchange_bandwidth(target) / 1e9,
        }
        yield from _stats(capabilities)

    def _operations(self, rows: Mapping[int, StepCost]) -> list[_Event]:
        """Return an event for each operation, one after the other."""
        cycles = [row.ipus[str(self.ipu)] for row in rows.values()]
        end_times = np.cumsum(cycles).tolist()
        return [_Event(number, end - length, end) for number, length, end in zip(rows, cycles, end_times, strict=True)]

    def _step_events(self, number_of: Any) -> dict[str, list[_Event]]:
        """Return the events of the steps of the program, and of each phase, in time."""
        trace = self.profile.execution_trace
        steps = np.flatnonzero((trace.ipu == self.ipu) & trace.work.any(1))
        program = [
            _Event(number_of(trace.label(step)), start, end)
            for step, start, end in zip(
                *(column[steps].tolist() for column in (trace.step, trace.start, trace.end)), strict=True
            )
        ]
        by_name = {"program": program} | {name.replace("_", " "): [] for name in TRACE_PHASES}
        cut = slices(trace)
        chosen = cut.ipu == self.ipu
        for phase, start, cycles in zip(
            *(column[chosen].tolist() for column in (cut.phase, cut.start, cut.cycles)), strict=True
        ):
            name = TRACE_PHASES[phase].replace("_", " ")
            by_name[name].append(_Event(number_of(name), start, start + cycles))
        return by_name

    def _events(self, events: Sequence[_Event]) -> Iterator[str]:
        per_cycle = _PICOSECONDS / self.profile.target.clock_hz
        for event in events:
            start, end = round(event.start * per_cycle), round(event.end * per_cycle)
            yield f"events {{ metadata_id: {event.metadata} offset_ps: {start} duration_ps: {end - start} }}"

    def _operation_statistics(self, number: int, row: StepCost) -> dict[str, Any]:
        """Return the statistics of an operation that XProf's tables read: its share on this IPU."""
        part = row.ipus[str(self.ipu)] / row.cycles
        phase = max(row.phases, key=lambda name: row.phases[name])
        kind = _PRODUCTS.get(row.name.rsplit("/", 1)[-1], _CATEGORIES[phase])
        flops = round(row.flops * part)
        return {
            "program_id": _PROGRAM,
            "symbol_id": number,
            "hlo_category": kind,
            "flops": flops,
            "model_flops": flops,
            "bytes_accessed": round(row.moved_bytes * part),
            # XProf counts some operations twice whose two names are equal.
            "tf_op": f"{row.origin.layer or '(no layer)'}/{row.name}",
            "source": str(row.origin).partition(" ")[0],  # a file and a line
        }


def _metadata(number: int, name: str, display_name: str, statistics: dict[str, Any]) -> Iterator[str]:
    """Yield the metadata of the events of one name."""
    names = f"name: {json.dumps(name)} display_name: {json.dumps(display_name)}"
    yield f"event_metadata {{ key: {number} value {{ id: {number} {names}"
    yield from _stats(statistics)
    yield "} }"


def _stats(values: dict[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        kind = "str_value" if isinstance(value, str) else "double_value" if isinstance(value, float) else "int64_value"
        yield f"stats {{ metadata_id: {_NUMBER_OF[name]} {kind}: {json.dumps(value)} }}"
