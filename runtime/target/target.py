"""The machine description: one frozen value with all that the model knows of a system of IPUs.

Input: numbers, each with its `Source`. Output: a validated, hashable `Target`, and derived figures.
Source: the values are in `presets`, each beside its source; here are only names, units and ranges.
Limits: on-chip exchange is one width for every pair of tiles (real latency depends on the distance of tiles), IPU-Links
are one rate for every link, and host figures are unvalidated in every preset. `machine_page` prints all of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, Literal, get_args, overload

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ipujax.runtime.errors import TargetError
from ipujax.runtime.not_copied import ReadOnlyMapping

SourceKind = Literal["published", "measured", "derived", "assumed", "fitted", "user"]
GlobalExchange = Literal["lockstep", "buffered"]
SyncPattern = Literal["single_pipeline", "ping_pong", "full"]
PartOf = Literal["rates", "counts", "program"]

_MAX_IPUS = 2**16  # published: Pods "to 64K IPUs" (Graphcore's IPU-POD datasheets; reference A3)
# Assumed: the largest system of known chips has 96,468,992 tiles. The model keeps arrays with one entry for each tile.
_MAX_TILES = 2**27
_WORD = 8  # bytes; regions of tile memory begin at multiples of it


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a value.

    Args:
        kind: `published` (stated by a named source), `measured` (on hardware), `derived` (arithmetic from such figures,
            or carried over from the same die), `assumed` (chosen without a figure for this machine), `fitted` (to
            measurements), `user`.
        text: the source's name, and the doubts about the value.
        low: lower end of the value's 90 % interval, over the value, at most 1.
        high: upper end, at least 1.

    Raises:
        TargetError: unknown kind, empty text, or an interval without the value.
    """

    kind: SourceKind
    text: str
    low: float = 1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(SourceKind):
            expected = f"one of {get_args(SourceKind)}"
            raise TargetError("Source.kind must be a known kind", expected=expected, got=repr(self.kind))
        if not isinstance(self.text, str) or not self.text.strip():
            raise TargetError("Source.text must not be empty", expected="the name of a source", got=repr(self.text))
        if not 0 < self.low <= 1 <= self.high < math.inf:
            expected = "0 < low <= 1 <= high"
            raise TargetError(
                "Source must have an interval around 1", expected=expected, got=f"{self.low}, {self.high}"
            )


def constant(
    *, unit: str, doc: str, zero_ok: bool = False, maximum: float | None = None, part_of: PartOf = "rates"
) -> Any:
    """Declare a field of `Target`: its unit, its meaning, and the range of a number (above zero unless `zero_ok`).

    It is `part_of` a "program" if another value makes another program of a function. Over the others a program is held:
    it has other costs, by "rates" alone, or by the "counts" of what it transfers, or who waits for whom.
    """
    metadata = {"unit": unit, "doc": doc, "zero_ok": zero_ok, "maximum": maximum, "part_of": part_of}
    return field(metadata=metadata)


_COUNTING_WORDS = frozenset({"num", "n", "number", "count", "per", "of"})


def _words(name: str) -> list[str]:
    """Words of a name that tell what it is, in the singular."""
    return [word.removesuffix("s") for word in name.split("_") if word not in _COUNTING_WORDS]


def _of_same_words(name: str, known_names: Iterable[str]) -> list[str]:
    """Known names that share words with `name`: those with most, then with fewest others, then that begin with one."""
    words = set(_words(name))
    sharing = [other for other in known_names if words & set(_words(other))]

    def rank(other: str) -> tuple[int, int, bool, str]:
        other_words = set(_words(other))
        return -len(words & other_words), len(other_words - words), _words(other)[0] not in words, other

    return sorted(sharing, key=rank)


def nearest(name: object, known_names: Iterable[str]) -> str | None:
    """Return a hint that names the known name closest to `name`; None when none is close."""
    by_lower = {word.lower(): word for word in known_names}
    lower = str(name).lower()
    # Names with swapped letters come before those that difflib finds similar, and a shared word before little likeness.
    matches = [word for word in by_lower if sorted(word) == sorted(lower)]
    matches = matches or difflib.get_close_matches(lower, list(by_lower), n=1, cutoff=0.8)
    matches = matches or _of_same_words(lower, by_lower)
    matches = matches or difflib.get_close_matches(lower, list(by_lower), n=1)
    return f"{by_lower[matches[0]]!r}, the nearest known name" if matches else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Description of one system of IPUs; equal and hashed by its values, not by their sources.

    Args:
        sources: a `Source` for every other field, by field name; copied, read-only.
        (other fields): see each one's `doc` and `unit` in `dataclasses.fields(Target)`.

    Raises:
        TargetError: a value of the wrong type or out of range, too many tiles, or a field without a source.
    """

    name: str = constant(unit="name", doc="which machine this describes")
    num_ipus: int = constant(unit="IPUs", maximum=_MAX_IPUS, doc="IPUs of the system", part_of="program")

    tiles_per_ipu: int = constant(unit="tiles", doc="tiles of one IPU", part_of="program")
    bytes_per_tile: int = constant(unit="bytes", doc="SRAM of one tile, code included")
    memory_element_bytes: int = constant(unit="bytes", doc="one SRAM element: one access port")
    interleaved_offset_bytes: int = constant(
        unit="bytes", zero_ok=True, doc="offset of the interleaved region in tile memory; code lies below"
    )
    clock_hz: float = constant(unit="Hz", doc="tile clock")
    ipu_watts: float = constant(unit="W", doc="power of one IPU and its share of its machine, while programs run")
    worker_contexts: int = constant(
        unit="workers", doc="worker threads of a tile, issuing in turn, one slot each", part_of="program"
    )
    worker_issue_period_cycles: int = constant(
        unit="cycles",
        zero_ok=True,
        doc="least cycles between two instructions of one worker, however few workers a tile has",
    )
    vector_width_bytes: int = constant(
        unit="bytes", doc="data path of an ordinary vector instruction", part_of="program"
    )
    supervisor_overhead_cycles: int = constant(
        unit="cycles", zero_ok=True, doc="the supervisor's launch of the workers of one vertex"
    )

    fp16_amp_macs_per_cycle: int = constant(unit="MAC/cycle/tile", doc="peak fp16 multiply-adds of the AMP unit")
    fp32_amp_macs_per_cycle: int = constant(unit="MAC/cycle/tile", doc="peak fp32 multiply-adds of the AMP unit")
    conv_units_fp16: int = constant(
        unit="units/tile", doc="AMP engines, fp16: output channels of one pass", part_of="program"
    )
    conv_units_fp32: int = constant(
        unit="units/tile", doc="AMP engines, fp32: output channels of one pass", part_of="program"
    )
    amp_weight_load_bytes_per_cycle: int = constant(
        unit="B/cycle/tile", doc="loading of AMP weights, with the 128-bit load option off"
    )

    load_bytes_per_cycle: int = constant(
        unit="B/cycle/tile", doc="SRAM load ports together; ordinary memory gives one 8 B load, interleaved memory all"
    )
    store_bytes_per_cycle: int = constant(unit="B/cycle/tile", doc="SRAM store port")
    memcpy_bytes_per_cycle: float = constant(unit="B/cycle/tile", doc="ideal rate of an on-tile copy")
    copy_startup_cycles: int = constant(unit="cycles", zero_ok=True, doc="on-tile copy: launch of the copying workers")
    copy_fragment_cycles: int = constant(
        unit="cycles", zero_ok=True, doc="on-tile copy: cost of each contiguous piece, beside its bytes"
    )

    exchange_bytes_per_cycle: float = constant(unit="B/cycle/tile", doc="internal exchange, each direction")
    tiles_per_exchange_bus: int = constant(
        unit="tiles",
        doc="adjacent tiles on one bus; receiving the same data, they get that multiple of the rate",
        part_of="program",
    )
    exchange_startup_cycles: int = constant(
        unit="cycles", zero_ok=True, doc="fixed cost of one internal exchange, sync not included"
    )
    exchange_receive_cycles: int = constant(
        unit="cycles",
        zero_ok=True,
        doc="least cycles of receiving from one tile to successive addresses (its control slots): max, not sum",
    )
    exchange_receive_instructions: int = constant(
        unit="instructions", doc="exchange code of receiving from one tile to successive addresses"
    )
    internal_sync_cycles: int = constant(unit="cycles", zero_ok=True, doc="sync of the tiles of one IPU")
    global_sync_cycles: int = constant(unit="cycles", zero_ok=True, doc="sync of all IPUs")
    global_exchange: GlobalExchange = constant(
        unit="choice", doc="how the clocks of IPUs meet at a copy between stages", part_of="program"
    )
    sync_pattern: SyncPattern = constant(
        unit="choice",
        doc="which IPUs sync with each other before a host exchange: none, those of even or of odd number, or all",
        part_of="counts",
    )

    ipu_link_bytes_per_second: float = constant(unit="B/s", doc="one IPU-Link, one direction, before efficiency")
    ipu_links_per_ipu: int = constant(unit="links", doc="IPU-Links of one IPU, all neighbours together")
    ipu_link_efficiency: float = constant(unit="ratio", maximum=1.0, doc="payload share of an IPU-Link's rate")
    global_exchange_latency_seconds: float = constant(
        unit="s", zero_ok=True, doc="fixed cost of one exchange between IPUs, beside bytes and sync"
    )
    ipus_per_pod: int = constant(
        unit="IPUs", doc="IPUs that IPU-Links connect; beyond them data goes over gateways", part_of="counts"
    )
    ipus_per_gateway: int = constant(
        unit="IPUs", doc="IPUs of one machine, which share its gateway and host link", part_of="counts"
    )
    gateway_bytes_per_second: float = constant(unit="B/s", doc="all GW-Links of one machine, one direction")
    host_bytes_per_second: float = constant(
        unit="B/s", doc="host to the IPUs of one machine or back, one direction; IPUs that transfer at once share it"
    )
    host_latency_seconds: float = constant(unit="s", zero_ok=True, doc="fixed cost of one host exchange")
    stream_buffer_limit_bytes: int = constant(
        unit="bytes", doc="most a host stream moves at once for one IPU; more takes several host exchanges"
    )
    streaming_memory_bytes: int = constant(unit="bytes", zero_ok=True, doc="streaming memory of one IPU")
    streaming_bytes_per_second: float = constant(
        unit="B/s", doc="streaming memory to IPU or back, one direction, for one IPU"
    )
    max_remote_transfer_bytes: int = constant(
        unit="bytes", doc="most that moves at once to or from a remote buffer for one IPU; more takes several exchanges"
    )

    native_dtypes: frozenset[str] = constant(
        unit="dtype names", doc="dtypes computed natively; others are emulated", part_of="program"
    )
    available_memory_proportion: float = constant(
        unit="ratio",
        zero_ok=True,
        maximum=1.0,
        doc="share of a tile a planner may use; 0: as little as possible",
        part_of="program",
    )

    sources: Mapping[str, Source] = field(compare=False, repr=False)

    def __post_init__(self) -> None:
        # Frozen, so that a target can be a key of caches; conversions (an int for a float) are stored all the same.
        for item in _constants():
            object.__setattr__(self, item.name, _check_value(item, getattr(self, item.name)))
        object.__setattr__(self, "sources", _check_sources(self.sources))
        if self.num_tiles > _MAX_TILES:
            raise TargetError(
                f"{self.name} has too many tiles",
                expected=f"at most {_MAX_TILES:,} tiles on all IPUs together",
                got=f"{self.num_tiles:,} tiles: {self.num_ipus:,} × {self.tiles_per_ipu:,}",
                hint="fewer IPUs, or fewer tiles on each",
            )

    def _values(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in _constants()}

    def to_data(self) -> dict[str, Any]:
        """Return all constants with their sources, JSON-able."""
        # Sorted, so that files of equal targets are equal.
        values = {name: sorted(x) if isinstance(x, frozenset) else x for name, x in self._values().items()}
        return values | {"sources": {name: list(dataclasses.astuple(source)) for name, source in self.sources.items()}}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Target:
        """Build the target of `to_data`.

        Raises:
            TargetError: as a new target.
        """
        sources = {name: Source(*values) for name, values in data["sources"].items()}
        values = {**data, "native_dtypes": frozenset(data["native_dtypes"])}
        return cls(**{**values, "sources": sources})

    def changes(self) -> dict[str, Any]:
        """Return the constants that were set by `replace`, by name, without the number of IPUs."""
        changed = [name for name, source in self.sources.items() if source.kind == "user" and name != "num_ipus"]
        return {name: getattr(self, name) for name in changed}

    def replace(self, **changes: Any) -> Target:
        """Return a target with some constants changed, to study a machine that may not exist.

        The interleaved region keeps its share of a tile's memory unless its offset is changed too: code is below it,
        and programs with more memory have more code.

        Args:
            **changes: new values by field name, in the field's unit. Their source becomes of kind `user`.

        Raises:
            TargetError: an unknown field (the nearest name is suggested), or a value the field refuses.
        """
        values = self._values()
        sources = dict(self.sources)
        for name in changes:
            if name not in values:
                hint = nearest(name, values) or "dataclasses.fields(ipu.Target) lists them with unit and meaning"
                got = f"{name}={changes[name]!r}"
                raise TargetError(f"Target has no constant {name!r}", expected="a field of Target", got=got, hint=hint)
            sources[name] = Source("user", f"replaced; was {values[name]!r} ({self.sources[name].kind})")
        # Validates the changes before another value is derived from them.
        result = Target(**(values | changes), sources=sources)
        if result.bytes_per_tile == self.bytes_per_tile or "interleaved_offset_bytes" in changes:
            return result
        offset = self.interleaved_offset_bytes * result.bytes_per_tile // self.bytes_per_tile
        sources["interleaved_offset_bytes"] = Source("derived", "the same share of bytes_per_tile as before")
        return dataclasses.replace(result, interleaved_offset_bytes=-(-offset // _WORD) * _WORD, sources=sources)

    @property
    def num_tiles(self) -> int:
        """Tiles of the whole system."""
        return self.num_ipus * self.tiles_per_ipu

    @property
    def total_memory_bytes(self) -> int:
        """SRAM of the whole system, in bytes."""
        return self.num_tiles * self.bytes_per_tile

    @property
    def operation_bytes(self) -> float:
        """Bytes of a tile that planners may use for one operation, at least 1."""
        return max(1.0, self.available_memory_proportion * self.bytes_per_tile)

    @property
    def interleaved_bytes(self) -> int:
        """Size of one tile's interleaved region, in bytes; 0 for a tile too small to have one."""
        return max(0, self.bytes_per_tile - self.interleaved_offset_bytes)

    @property
    def exchange_bytes_per_second(self) -> float:
        """Internal exchange of the whole system, each direction, in B/s."""
        return self.num_tiles * self.clock_hz * self.exchange_bytes_per_cycle

    @property
    def sram_bytes_per_second(self) -> float:
        """SRAM loads and stores of the whole system at their peak, in B/s."""
        return self.num_tiles * self.clock_hz * (self.load_bytes_per_cycle + self.store_bytes_per_cycle)

    @property
    def peak_fp16_flops(self) -> float:
        """Peak fp16 AMP rate of the whole system, in flop/s; a multiply-add is 2 flop."""
        return 2 * self.num_tiles * self.clock_hz * self.fp16_amp_macs_per_cycle

    @property
    def peak_fp32_flops(self) -> float:
        """Peak fp32 AMP rate of the whole system, in flop/s; a multiply-add is 2 flop."""
        return 2 * self.num_tiles * self.clock_hz * self.fp32_amp_macs_per_cycle

    @property
    def global_exchange_bytes_per_second(self) -> float:
        """Payload rate of all IPU-Links of one IPU, one direction, in B/s; a single neighbour gets only some links."""
        return self.ipu_links_per_ipu * self.ipu_link_bytes_per_second * self.ipu_link_efficiency

    @overload
    def seconds(self, cycles: float) -> float: ...
    @overload
    def seconds(self, cycles: NDArray[Any]) -> NDArray[Any]: ...
    def seconds(self, cycles: float | NDArray[Any]) -> float | NDArray[Any]:
        """Return the time of `cycles` tile clock cycles, in seconds; of any shape."""
        return cycles / self.clock_hz


def _constants() -> tuple[dataclasses.Field[Any], ...]:
    return tuple(item for item in dataclasses.fields(Target) if item.name != "sources")


def _as_int(value: Any) -> int | None:
    # A bool is an Integral, and `num_ipus=True` is a mistake.
    return None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _as_finite_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the range of float counts as infinite
        return None
    return number if math.isfinite(number) else None


def _as_text(value: object) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


def _one_of(choices: object) -> tuple[str, Callable[[object], object]]:
    names = get_args(choices)
    return f"one of {names}", lambda value: value if isinstance(value, str) and value in names else None


def _dtype_names(value: object) -> frozenset[str] | None:
    if not isinstance(value, (set, frozenset)) or not value:
        return None
    return frozenset(value) if all(_is_dtype_name(name) for name in value) else None


def _is_dtype_name(name: object) -> bool:
    if not isinstance(name, str):
        return False
    try:
        dtype = jnp.dtype(name)
    except TypeError:  # NumPy's error for an unknown dtype name
        return False
    # Aliases such as "float" are refused: only the full name is the same in every list.
    return dtype.name == name and bool(jnp.issubdtype(dtype, jnp.number) or dtype == np.bool_)


# By annotation: text of the expected value, and the conversion to it (None: refused).
_READERS: Mapping[str, tuple[str, Callable[[object], object]]] = MappingProxyType(
    {
        "int": ("a whole number", _as_int),
        "float": ("a finite number", _as_finite_float),
        "str": ("a non-empty string", _as_text),
        "GlobalExchange": _one_of(GlobalExchange),
        "SyncPattern": _one_of(SyncPattern),
        "frozenset[str]": ("a non-empty set of full number or bool dtype names, as 'float32'", _dtype_names),
    }
)


# Smallest and largest number by unit, assumed: far beyond any machine, and cycles stay within whole numbers of 64 bits.
_LIMITS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {"Hz": (1, 1e12), "s": (1e-15, 1e6), "B/s": (1e3, math.inf), "B/cycle/tile": (1e-6, math.inf), "bytes": (1, 1e18)}
)
_OTHER_LIMITS = 1e-9, 1e12


def _check_value(item: dataclasses.Field[Any], value: object) -> object:
    """Return the value of a constant in its type; refuse other types, and numbers outside of the limits of its unit."""
    expected, read = _READERS[str(item.type)]
    unit, zero_ok, maximum = (item.metadata[key] for key in ("unit", "zero_ok", "maximum"))
    result = read(value)
    if item.type in ("int", "float"):
        smallest, largest = _LIMITS.get(unit, _OTHER_LIMITS)
        largest = min(largest, maximum or math.inf)
        expected += " of at least 0" if zero_ok else " above 0"
        expected += "" if maximum is None else f", at most {maximum:,g}"
        number = result if isinstance(result, (int, float)) and (result > 0 or (zero_ok and result == 0)) else None
        if number and not smallest <= number <= largest:
            expected += f", from {smallest:g} to {largest:g}" if maximum is None else ""
            number = None
        result = number
    if result is None:
        got = f"{value!r} ({type(value).__name__})"
        hint = f"leave {item.name} out for the preset's value"
        text = f"Target.{item.name} cannot be {value!r}"
        raise TargetError(text, expected=f"{expected} [{unit}]", got=got, hint=hint)
    return result


def _check_sources(sources: object) -> Mapping[str, Source]:
    """Return the sources of all constants, read-only; refuse a constant without one and a source of no constant."""
    names = [item.name for item in _constants()]
    if not isinstance(sources, Mapping):
        raise TargetError("Target.sources must be a mapping", expected="field to Source", got=type(sources).__name__)
    for name in sources:
        if name not in names:
            text = f"Target.sources must name fields, got {name!r}"
            raise TargetError(text, expected="fields of Target", got=repr(name), hint=nearest(name, names))
    for name in names:
        if not isinstance(sources.get(name), Source):
            raise TargetError(f"Target.{name} must have a source", expected="a Source", got=repr(sources.get(name)))
    return ReadOnlyMapping(sources)
