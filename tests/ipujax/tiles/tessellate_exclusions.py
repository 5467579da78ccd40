"""Tests of TessellateIPU that are excepted or fail against `ipujax`, with a reason each; see `test_tessellate_own.py`.

Names are file and function: a function counts if one of its cases fails.
"""

from __future__ import annotations

from collections.abc import Mapping

_CPP = "a C++ vertex or a structure of the library's C++ extension"
_HARDWARE = "marked ipu_hardware: cycles of a chip, with in-place C++ vertices"
_SELECT = "the library's vertex of select_n has the mask the other way round than JAX's primitive"
_DEVICE = "`jax.Array.device()` is no function in JAX of today"
_LIMIT = "the test expects that some axes cannot be reduced; here they can"

# Files whose tests are all of one kind, and do not run.
EXCEPTED_FILES: Mapping[str, str] = {
    "core/test_tile_common_utils.py": _CPP,
    "core/test_tile_interpreter_hw_primitives.py": _HARDWARE,
    "core/test_tile_interpreter_primitives.py": _CPP,
    "core/test_tile_interpreter_vertex_utils.py": "helpers that lay out the work of C++ vertices",
    "lax/test_tile_lax_dot.py": f"{_CPP}, or {_HARDWARE}",
    "lax/test_tile_lax_small_dot.py": _HARDWARE,
    "lax/test_tile_random.py": "random numbers and seeds of the hardware",
    "lib/test_tessellate_core.py": _CPP,
    "lib/test_tessellate_ops_jax.py": _CPP,
    "linalg/test_tile_linalg_hessenberg.py": f"{_CPP}, or {_HARDWARE}",
    "linalg/test_tile_linalg_jacobi.py": f"{_CPP}, or {_HARDWARE}",
    "linalg/test_tile_linalg_qr.py": f"{_CPP}, or {_HARDWARE}",
    "utils/test_ipu_device.py": "properties of a device of the library",
}

# Functions in other files that need C++ or hardware: not counted.
EXCEPTED: Mapping[str, str] = {
    "test_tile_array_primitives::test__tile_data_barrier_params__init__proper_fields": _CPP,
    "test_tile_array_primitives::test__tile_data_barrier_params__json__proper_value": _CPP,
    "test_tile_interpreter::test__tile_map__custom_arange_vertex__single_output__ipu_jitting": _CPP,
    "test_tile_interpreter::test__tile_map__custom_inplace_vertex__fori_loop__zero_cycle_count_overhead": _HARDWARE,
    "test_tile_lax_basic::test__ipu_unary_primitive_translation__proper_data_structure": _CPP,
    "test_tile_lax_basic::test__make_unary1d_vertex_fullname__proper_result": _CPP,
    "test_tile_lax_basic::test__tile_map__sqrt_inplace_ops__fori_loop__zero_copy_cycle_count": _HARDWARE,
    "test_tile_lax_reduce::test__make_continuous_reduce_vertex_fullname__proper_name": _CPP,
}

# Functions that fail: counted.
FAILING: Mapping[str, str] = {
    "test_tile_lax_basic::test__tile_map__select__ipu_jitting__proper_result": _SELECT,
    "test_tile_lax_reduce::test__tile_map__reduce__jitting_options__proper_result": _DEVICE,
    "test_tile_lax_reduce::test__tile_map__reduce_partial__unsupported_axes": _LIMIT,
}
