"""Keywords of changes to a target, for type checkers and editors.

Each is a field of `Target`, with its type: a test compares the two. `num_ipus` is an argument of its own.
"""

from __future__ import annotations

from typing import TypedDict

from ipujax.runtime.target.target import GlobalExchange, SyncPattern


class TargetChanges(TypedDict, total=False):
    """Constants of a `Target` that `ipu.IPUModel` takes by name, to study a machine that may not exist."""

    name: str
    tiles_per_ipu: int
    bytes_per_tile: int
    memory_element_bytes: int
    interleaved_offset_bytes: int
    clock_hz: float
    ipu_watts: float
    worker_contexts: int
    worker_issue_period_cycles: int
    vector_width_bytes: int
    supervisor_overhead_cycles: int
    fp16_amp_macs_per_cycle: int
    fp32_amp_macs_per_cycle: int
    conv_units_fp16: int
    conv_units_fp32: int
    amp_weight_load_bytes_per_cycle: int
    load_bytes_per_cycle: int
    store_bytes_per_cycle: int
    memcpy_bytes_per_cycle: float
    copy_startup_cycles: int
    copy_fragment_cycles: int
    exchange_bytes_per_cycle: float
    tiles_per_exchange_bus: int
    exchange_startup_cycles: int
    exchange_receive_cycles: int
    exchange_receive_instructions: int
    internal_sync_cycles: int
    global_sync_cycles: int
    global_exchange: GlobalExchange
    sync_pattern: SyncPattern
    ipu_link_bytes_per_second: float
    ipu_links_per_ipu: int
    ipu_link_efficiency: float
    global_exchange_latency_seconds: float
    ipus_per_pod: int
    ipus_per_gateway: int
    gateway_bytes_per_second: float
    host_bytes_per_second: float
    host_latency_seconds: float
    stream_buffer_limit_bytes: int
    streaming_memory_bytes: int
    streaming_bytes_per_second: float
    max_remote_transfer_bytes: int
    native_dtypes: frozenset[str]
    available_memory_proportion: float
