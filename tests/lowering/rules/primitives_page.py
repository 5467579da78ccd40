"""Writes `docs/primitives.md`: the kind of each primitive of JAX, and its tests.

    python -m tests.lowering.rules.primitives_page        # writes the page

Input: the primitives that JAX names in public with their kinds, the rows of the op table.
Limits: a primitive that JAX does not name in public is on the page only if it has a rule or a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ipujax.lowering.gcl.collective_params import COLLECTIVES
from ipujax.lowering.rules.flow import streaming
from ipujax.lowering.rules.table import OTHERS, primitive_kind, primitive_names
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_rows_fallback import fallback_rows
from tests.lowering.rules.op_table import CASES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "primitives.md"

# Primitives with neither a row nor another test, with the reason.
NOTES: dict[str, str] = {
    "call_exported": "`tests/lowering/stablehlo/test_exported_calls.py`",
    "module_operation": "operation of a module without a counterpart, on one tile: `tests/ipujax/test_opaque_calls.py`",
    "opaque_call": "module without a counterpart, on one tile: `tests/ipujax/test_opaque_calls.py`",
    "pallas_call": "`tests/lowering/test_pallas_calls.py`",
    **OTHERS,
    "call_once": "a host call that devices of a mesh share: `tests/ipujax/test_mesh_annotations.py`",
    **dict.fromkeys(("call", "closed_call", "core_call"), "no test: JAX does not make it of a user's function"),
}

_REMOTE = "streaming memory: `tests/lowering/offload/test_offload.py`"
_COLLECTIVES = "collective over replicas: `tests/lowering/gcl/test_collectives.py`"

_HEAD = """# Primitives

Written by `python -m tests.lowering.rules.primitives_page`; a test keeps it equal to the rule table and the op table.

- **tile-parallel**: a lowering rule spreads it over tiles, or it is a view, without cost until it is used.
- **inlined**: a call, replaced by the equations of its callee. Repeated equations, such as those of layers, become a
  function of the control program, lowered once, where that saves more cycles than its copies take: `function_call`.
- **one tile**: one vertex computes it; it is costed, and listed in `profile.fallbacks`. Batches are spread over tiles.

The last column names the rows of the op table. Each row is run by the engine, by the engine with every operation split
as on the machine, and by the tile interpreter, and is compared with plain JAX; rows marked ∂ with their gradient too.
"""


def page() -> str:
    """Text of the page."""
    one_tile = fallback_rows()
    rows: dict[str, list[OpCase]] = {}
    for case in (*CASES, *one_tile):
        rows.setdefault(case.primitive, []).append(case)
    names = sorted({*primitive_names(), *rows}, key=str.lower)
    kinds = {name: primitive_kind(name) for name in names}
    counts = [f"{sum(kind == k for k in kinds.values())} {kind}" for kind in ("tile-parallel", "inlined", "one tile")]
    num_others = sum(kind == "–" for kind in kinds.values())
    lines = [_HEAD, f"{len(names)} primitives: {', '.join(counts)}, {num_others} others.", ""]
    lines += ["| primitive | runs | tested by |", "|---|---|---|"]
    lines += [f"| `{name}` | {kinds[name]} | {_tested(name, kinds[name], rows.get(name, ()))} |" for name in names]
    return "\n".join(lines) + "\n"


def _tested(name: str, kind: str, rows: Iterable[OpCase]) -> str:
    tests = [f"{case.name}{' ∂' if case.grad else ''}" for case in rows]
    tests += [_COLLECTIVES] if name in COLLECTIVES else []
    tests += [_REMOTE] if name in streaming.RULES else []
    if tests:
        return ", ".join(tests)
    return NOTES.get(name, "`tests/lowering/passes/test_passes.py`") if kind == "inlined" else NOTES[name]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name} written")
