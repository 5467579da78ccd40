"""The known machines: Mk1 (GC2), Mk2 (GC200) and Bow, every value beside its source.

Input: a preset's name. Output: a `Target`. Source: named in each row; "reference" and a section is the project's
collection of facts, which has the exact place. Where sources disagree, the row names the one that was used.
Each value has a 90 % interval: that of its kind, or one beside its source, as multiples of the value.
Limits: no Mk2 or Bow figure was found for on-tile copies and short exchanges (Mk1 fits are carried over), and none at
all for host latency; rows that start with UNVALIDATED should be replaced by whoever has hardware.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from ipujax.runtime.errors import TargetError
from ipujax.runtime.target.target import Source, SourceKind, Target, nearest

Row = tuple[Any, Source]
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


# 90 % interval of a value by the kind of its source, over the value, where its row has no other. Assumed: figures of
# the maker are exact, a digitised measurement is within 2 %, and nothing else is known of a guess but its magnitude.
_INTERVALS: Mapping[SourceKind, tuple[float, float]] = {
    "published": (1.0, 1.0),
    "user": (1.0, 1.0),
    "measured": (0.98, 1.02),
    "derived": (0.9, 1.1),
    "fitted": (0.75, 4 / 3),
    "assumed": (0.5, 2.0),
}
_EXACT = (1.0, 1.0)  # of whole numbers that other figures confirm, and of choices


def _row(value: Any, kind: SourceKind, text: str, interval: tuple[float, float] | None = None) -> Row:
    return value, Source(kind, text, *(interval or _INTERVALS[kind]))


def _between(value: float, low_value: float, high_value: float) -> tuple[float, float]:
    """Return the interval of a value from `least` to `most`, both in its unit."""
    return low_value / value, high_value / value


# By full name, as `Target.native_dtypes` demands.
_DTYPES = frozenset({"float32", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool"})

# The same on every machine.
_COMMON: Mapping[str, Row] = {
    "num_ipus": _row(1, "user", "one IPU unless preset() is asked for more"),
    "worker_contexts": _row(6, "published", "poplibs estimators, getNumWorkerContexts (reference A1, 1.1)"),
    "worker_issue_period_cycles": _row(
        6,
        "published",
        "each worker issues once in 6 clocks: Citadel report 1912.03413, second-hand (reference A1); poplibs "
        "estimators multiply a worker's cycles by the 6 contexts (reference A4)",
    ),
    "vector_width_bytes": _row(8, "published", "getDataPathWidth is 64 bit (poplibs, reference 1.1)"),
    "supervisor_overhead_cycles": _row(
        11,
        "published",
        "poplibs basicOpSupervisorOverhead; 2 more for scaled pointers (reference A2)",
        _between(11, 11, 13),
    ),
    "exchange_bytes_per_cycle": _row(
        4, "published", "an older poplibs planner, getExchangeBytesPerCycle quoted by ipu21-rs (reference A1, 1.1)"
    ),
    "tiles_per_exchange_bus": _row(2, "published", "poplibs ExchangeEstimator.cpp requires 2 (reference A1, 1.1)"),
    "exchange_startup_cycles": _row(
        115,
        "fitted",
        "middle of 100 to 130, fitted to the exchanges of an Mk1 blur, which with 4 B/cycle an operand are met within "
        "20 % (reference B5); route delays are part of it; Mk2 and Bow: carried over",
        _between(115, 100, 130),
    ),
    "copy_startup_cycles": _row(
        100,
        "fitted",
        "fitted with copy_fragment_cycles to the copies of an Mk1 blur, which 100 to 390 suit alike (reference B5), "
        "and to the 5,071 cycles of tutorial 7 on the IPU Model, which allow no more than about 110 (reference B4); an "
        "IPU21 compiler's own copy call takes 288 (ipu21-rs, reference A1); Mk2 and Bow: carried over",
        _between(100, 100, 390),
    ),
    "copy_fragment_cycles": _row(
        6,
        "fitted",
        "fitted to the copies of an Mk1 blur, counting the pieces of its program: 8 phases within 29 % (reference B5); "
        "pieces before compute alone would give 4, those after it 9; Mk2 and Bow: carried over",
        _between(6, 4, 9),
    ),
    "exchange_receive_instructions": _row(
        2,
        "derived",
        "IPU21 sets the source and the address of a part: code that Poplar made for a receiver of four parts has two "
        "words for each (ipu21-rs, docs/EXCHANGE_INSTRUCTION_REFERENCE.md). Its exchange.rs leaves out the address of "
        "a part that goes on where the last one ended, and closes the port, a third instruction, before a gap; parts "
        "follow at once here, as in the cycles of an exchange. Mk1: carried over",
        _between(2, 1, 3),
    ),
    "global_exchange": _row(
        "lockstep",
        "assumed",
        "as PopART, whose stages all copy at the end of a pipeline cycle (pipelining.md, reference parallel.md 2.1); "
        "a collective stops only the IPUs that take part (design, section 5)",
        _EXACT,
    ),
    "sync_pattern": _row(
        "single_pipeline",
        "assumed",
        "the three patterns are PopART's (user guide, 'Sync patterns'); that each IPU syncs with the host by itself is "
        "a choice",
        _EXACT,
    ),
    "ipu_link_bytes_per_second": _row(
        128 * 2**30 / 8,
        "published",
        "128 * 2^30 bit/s a direction, poplibs_test Util.cpp (reference 1.5); second-hand: Mk2 320 GB/s over 10 links, "
        "both directions, is 16e9; an Mk1 C2 card's 64 GB/s a link is about twice this (reference A3)",
        _between(128 * 2**30 / 8, 16e9, 32e9),
    ),
    "ipu_link_efficiency": _row(0.85, "published", "poplibs_test Util.cpp (reference 1.5)"),
    "global_exchange_latency_seconds": _row(
        2050 / 1.6e9,
        "derived",
        "2,050 ± 20 cycles at 1.6 GHz of an Mk1 blur: its exchange over 16 IPUs took 3,043 cycles for n bytes, 4,017 "
        "and 4,048 for 2 n, so that n bytes took 974 to 1,005 (reference B5, lbm exchange-vs-compute.csv)",
        _between(2050, 2030, 2070),
    ),
    "ipus_per_pod": _row(64, "published", "a Pod64 is 16 machines of 4 on IPU-Links (data sheets, reference A3)"),
    "host_latency_seconds": _row(
        1e-5,
        "assumed",
        "UNVALIDATED: no readable source gives a host latency (reference A3); 10 us is a guess",
        (0.1, 10.0),
    ),
    "stream_buffer_limit_bytes": _row(
        128 * MIB,
        "published",
        "Poplar & PopLibs user guide, 'Stream buffer size limit', 128 MBytes a copy, taken as MiB",
    ),
    "max_remote_transfer_bytes": _row(128 * MIB, "published", "ipu-hpc-cookbook (reference A3)"),
    "native_dtypes": _row(
        _DTYPES, "assumed", "no list was found; bfloat16 and 64-bit types are emulated, fp8 is on the C600 only", _EXACT
    ),
    "available_memory_proportion": _row(0.6, "published", "poplibs planner default (ConvPlan.cpp, reference 2)"),
}

# The same on the Mk2 die, which Bow uses too.
_MK2_DIE: Mapping[str, Row] = {
    **_COMMON,
    "tiles_per_ipu": _row(1472, "published", "tut6, spmm-nb, tessellate (reference A1)"),
    "bytes_per_tile": _row(624 * KIB, "published", "Poplar profile header, 624.0 kB a tile (reference A1)"),
    "conv_units_fp16": _row(16, "published", "poplibs ConvPartial1x1Out.cpp; an 8-unit mode exists (reference 1.1)"),
    "conv_units_fp32": _row(
        16,
        "derived",
        "poplibs float activations on 16 units, a 16 x 8 row in 8 cycles (reference 1.2, A4, doubts)",
        _EXACT,
    ),
    "amp_weight_load_bytes_per_cycle": _row(
        8,
        "published",
        "16, halved unless use128BitConvUnitLoad (default off): poplibs ConvModel.cpp, ConvOptions.hpp (reference 1.1)",
    ),
    "load_bytes_per_cycle": _row(
        16, "published", "2 x 8 B, interleaved memory only: ld128 in poplibs and ipu21-rs (reference A1)"
    ),
    "store_bytes_per_cycle": _row(
        8,
        "derived",
        "24 B/cycle of the SRAM port less 16 of loads; wave measured 46.55 TB/s of 47.0 (reference A1)",
        _EXACT,
    ),
    "ipu_links_per_ipu": _row(
        10, "published", "poplibs_test Util.cpp (4 + 2 + 2 + 2); charlieblake (reference 1.5, A3)"
    ),
    "ipus_per_gateway": _row(4, "published", "IPUs of an M2000 and a Bow-2000 (data sheet, reference A3)"),
    "global_exchange_latency_seconds": _row(
        2050 / 1.6e9, "derived", "the time of Mk1 (reference B5), carried over without a figure", (0.5, 2.0)
    ),
    "gateway_bytes_per_second": _row(
        25e9, "published", "GW-Link 2 x 100 Gbit/s a machine (Bow-2000 data sheet, reference A3), taken a direction"
    ),
    "host_bytes_per_second": _row(
        20e9,
        "assumed",
        "UNVALIDATED: 40 MB in 2,641,488 cycles of host exchange on Mk2 (tut6, reference B4) is 20.1 GB/s at 1.33 GHz, "
        "of one IPU alone, taken as the link of its machine; PCIe Gen4 x16 is nominally 32 GB/s a direction "
        "(charlieblake, second-hand, reference A3). 5.5 GB/s is quoted for the four IPUs of a machine, without a "
        "source that could be read: as the share of each it agrees, as their sum it is a quarter of this",
        _between(20e9, 5.5e9, 32e9),
    ),
    "streaming_memory_bytes": _row(
        64 * GIB, "published", "up to 256 GB for the 4 IPUs of a Bow-2000 or M2000 (data sheets, reference A3), as GiB"
    ),
    "streaming_bytes_per_second": _row(
        20e9,
        "assumed",
        "UNVALIDATED: the rate of the host link; no readable source gives one for streaming memory",
        _between(20e9, 5.5e9, 32e9),
    ),
}

_MK1: Mapping[str, Row] = {
    **_COMMON,
    "name": _row("mk1", "published", "Mk1, GC2, Poplar's ipu1 (reference A1)"),
    "tiles_per_ipu": _row(1216, "published", "poplibs ConvUtilTest.cpp, HPC-notes (reference A1, 1.1)"),
    "bytes_per_tile": _row(256 * KIB, "published", "Citadel report 1912.03413, second-hand (reference A1, 1.1)"),
    "memory_element_bytes": _row(16 * KIB, "assumed", "the figure of an IPU21 compiler, memory.rs (reference 1.1)"),
    "interleaved_offset_bytes": _row(
        128 * KIB,
        "derived",
        "the profile in the user guide of Mk1's time: 131,608 bytes with gaps, of which 536 are interleaved, so that "
        "the region starts at 131,072 (Poplar & PopLibs user guide, 'Memory per tile')",
        _EXACT,
    ),
    "clock_hz": _row(
        1.6e9,
        "published",
        "nominal; C2 servers were seen at 1.3 GHz (cookbook, reference A1)",
        _between(1.6e9, 1.3e9, 1.6e9),
    ),
    "ipu_watts": _row(
        150.0,
        "published",
        "150 W a GC2, half of a C2 card; a limit, below which an M2000 keeps by a third while it trains",
        _between(150, 100, 150),
    ),
    "fp16_amp_macs_per_cycle": _row(
        32, "derived", "from 124.5 TF of 1216 tiles at 1.6 GHz (apaperaday, reference A1)", _EXACT
    ),
    "fp32_amp_macs_per_cycle": _row(
        8, "derived", "from 31.1 TF of 1216 tiles at 1.6 GHz (apaperaday, reference A1)", _EXACT
    ),
    "conv_units_fp16": _row(8, "published", "16 units only on ipu2 and ipu21: poplibs tests (reference 1.1)"),
    "conv_units_fp32": _row(
        8, "derived", "8 weights a unit and 8 cycles a row give the 8 MAC/cycle (reference 1.1)", _EXACT
    ),
    "amp_weight_load_bytes_per_cycle": _row(8, "derived", "inferred from poplibs ConvModel.cpp (reference 1.1)"),
    "load_bytes_per_cycle": _row(16, "published", "2 x 8 B: 31.1 TB/s, Citadel, second-hand (reference A1)"),
    "store_bytes_per_cycle": _row(8, "published", "45 TB/s with the loads: Citadel, second-hand (reference A1)"),
    "memcpy_bytes_per_cycle": _row(
        8, "derived", "inferred; ipu21-rs quotes it for ipu21 (reference 1.1)", _between(8, 6, 8)
    ),
    "exchange_receive_cycles": _row(
        2,
        "assumed",
        "1 to 3: no figure of Mk1 was found, IPU21 takes 3 (reference A2); measurements do not tell 2 and 3 apart: "
        "both are -19 to +12 % off the exchanges of a blur (B5), and +2.7 and +3.6 % off tutorial 7 (B4)",
        _between(2, 1, 3),
    ),
    "internal_sync_cycles": _row(
        90,
        "published",
        "poplibs CTCLossPlan.cpp:351; an lbm blur step measured 64 to 117 (reference A2, B5)",
        _between(90, 64, 117),
    ),
    "global_sync_cycles": _row(
        600,
        "assumed",
        "the ipu21 getter's; within the 501 to 642 lbm measured over 16 Mk1 IPUs (reference A2, B5)",
        _between(600, 501, 642),
    ),
    "ipu_links_per_ipu": _row(
        10, "assumed", "as Mk2; known: 3 between the IPUs of a C2 card (reference A3)", _between(10, 3, 10)
    ),
    "ipus_per_gateway": _row(4, "assumed", "as Mk2: C2 servers have no gateways, and no figure was found"),
    "gateway_bytes_per_second": _row(25e9, "assumed", "as Mk2: C2 servers have no gateways, and no figure was found"),
    "host_bytes_per_second": _row(
        4.4e9,
        "assumed",
        "UNVALIDATED: slow end of reading back 79 MB in 14 to 18 ms, host work included; writing was 1.4 to 2.2 GB/s "
        "(lbm output.txt, reference A3)",
        _between(4.4e9, 1.4e9, 5.3e9),
    ),
    "streaming_memory_bytes": _row(
        64 * GIB, "assumed", "as Mk2; remote buffers of a C2 server are in the memory of its host"
    ),
    "streaming_bytes_per_second": _row(
        4.4e9, "assumed", "UNVALIDATED: the host's, whose memory it is", _between(4.4e9, 1.4e9, 5.3e9)
    ),
}

_MK2: Mapping[str, Row] = {
    **_MK2_DIE,
    "name": _row("mk2", "published", "Mk2, GC200, Poplar's ipu2 (reference A1)"),
    "memory_element_bytes": _row(
        16 * KIB, "derived", "IPU21's, the same die: memory.rs, third party (reference 1.1)", _EXACT
    ),
    "interleaved_offset_bytes": _row(
        208 * KIB,
        "derived",
        "IPU21's 0x80000 less base 0x4c000, the same die: memory.rs, third party (reference 1.1)",
        _EXACT,
    ),
    "clock_hz": _row(
        1.325e9,
        "measured",
        "gc-monitor under load (spmm-nb); tut6's IPUModel converts at 1.33 GHz (reference A1)",
        _between(1.325e9, 1.325e9, 1.33e9),
    ),
    "ipu_watts": _row(
        250.0,
        "derived",
        "an M2000 of four takes 1 kW while it trains BERT-Large, of a limit of 1.5 kW (S. Knowles at Hot Chips 33, "
        "eenewseurope.com 2021), which also says 300 W a chip; a C600 card of one takes 185 W (its data sheet)",
        _between(250, 185, 375),
    ),
    "fp16_amp_macs_per_cycle": _row(
        64, "derived", "16 units x 4 load elements; agrees with 250 TF (reference 1.1, A1)", _EXACT
    ),
    "fp32_amp_macs_per_cycle": _row(
        16, "derived", "a 16 x 8 row in 8 cycles; agrees with 62.5 TF (reference A1, doubts)", _EXACT
    ),
    "memcpy_bytes_per_cycle": _row(
        8, "derived", "getMemcpyBytesPerCycle of ipu21, the same die (reference A1)", _between(8, 6, 8)
    ),
    "exchange_receive_cycles": _row(
        3, "derived", "control slots a fragment of IPU21, the same die (reference A2)", _between(3, 2, 3)
    ),
    "internal_sync_cycles": _row(
        126,
        "derived",
        "getMaxIPUSyncDelay of ipu21, the same die: a bound; Mk1 measured 64 to 117 (reference A2)",
        _between(126, 64, 126),
    ),
    "global_sync_cycles": _row(
        600, "derived", "getGlobalSyncCycles of ipu21, the same die (reference A2)", _between(600, 501, 642)
    ),
}

_BOW: Mapping[str, Row] = {
    **_MK2_DIE,
    "name": _row("bow", "published", "Bow: the Mk2 die at a higher clock (reference A1)"),
    "memory_element_bytes": _row(
        16 * KIB, "measured", "IPU21 compiler, memory.rs, third party (reference 1.1)", _EXACT
    ),
    "interleaved_offset_bytes": _row(
        208 * KIB,
        "measured",
        "boundary 0x80000 less base 0x4c000: IPU21 memory.rs, third party (reference 1.1)",
        _EXACT,
    ),
    "clock_hz": _row(1.85e9, "published", "tile_clock_frequency 1850000000.0, tessellate notebook (reference A1)"),
    "ipu_watts": _row(
        312.5,
        "derived",
        "a Bow-2000 of four takes 1.25 kW on average (eenewseurope.com 2022); the interval is Mk2's, over its value",
        _between(250, 185, 375),
    ),
    "fp16_amp_macs_per_cycle": _row(64, "published", "128 flop/cycle: tessellate, ipu21-rs (reference A1, B1)"),
    "fp32_amp_macs_per_cycle": _row(16, "published", "32 flop/cycle: ipu21-rs (reference A1)"),
    "memcpy_bytes_per_cycle": _row(
        8,
        "published",
        "getMemcpyBytesPerCycle, ipu21-rs; standard to interleaved measured about 6 (reference A1)",
        _between(8, 6, 8),
    ),
    "exchange_receive_cycles": _row(
        3,
        "measured",
        "control slots a fragment, ipu21-rs; an earlier model of it had 160 cycles (reference A2)",
        _EXACT,
    ),
    "internal_sync_cycles": _row(
        126,
        "published",
        "getMaxIPUSyncDelay, ipu21-rs: a bound that popops adds to a superstep; Mk1 measured 64 to 117 (reference A2)",
        _between(126, 64, 126),
    ),
    "global_sync_cycles": _row(
        600,
        "published",
        "getGlobalSyncCycles, ipu21-rs; 16 Mk1 IPUs measured 501 to 642 (reference A2)",
        _between(600, 501, 642),
    ),
}


def _target(rows: Mapping[str, Row]) -> Target:
    values = {name: value for name, (value, _) in rows.items()}
    return Target(**values, sources={name: source for name, (_, source) in rows.items()})


# Built at import: a row without a source, or a value out of range, fails every test.
Arch = Literal["mk1", "mk2", "bow"]
PRESETS: Mapping[str, Target] = MappingProxyType({"mk1": _target(_MK1), "mk2": _target(_MK2), "bow": _target(_BOW)})
IpuVersion = Literal["ipu1", "ipu2", "ipu21"]
# Preset by Poplar's name of the IPU version, which PopART and Graphcore's TensorFlow use too.
IPU_VERSIONS: Mapping[str, Arch] = MappingProxyType({"ipu1": "mk1", "ipu2": "mk2", "ipu21": "bow"})
# Preset by any name of a chip that front ends accept.
CHIP_NAMES: Mapping[str, Arch] = MappingProxyType({**IPU_VERSIONS, **{name: name for name in get_args(Arch)}})


def preset(name: str, num_ipus: int = 1) -> Target:
    """Return a known machine.

    Args:
        name: `mk1`, `mk2` or `bow`.
        num_ipus: IPUs of the system.

    Raises:
        TargetError: an unknown name, or a number of IPUs that is not a positive integer or exceeds the largest system.
    """
    if not isinstance(name, str) or name not in PRESETS:
        expected = f"one of {', '.join(PRESETS)}"
        hint = nearest(name, PRESETS)
        raise TargetError(f"no preset is called {name!r}", expected=expected, got=repr(name), hint=hint)
    return PRESETS[name].replace(num_ipus=num_ipus)  # validates it
