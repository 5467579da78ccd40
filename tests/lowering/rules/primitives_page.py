"""Writes `docs/primitives.md`: what becomes of each primitive of JAX, and how that is tested.

    python -m tests.lowering.rules.primitives_page        # writes the page

Input: the primitives that JAX names in public, the rule table, the calls that are inlined, the rows of the op table.
Limits: primitives that JAX does not name in public are on the page when they have a rule or a row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import jax
from jax.extend.core import primitives  # noqa: TID251 the list of JAX that the page is held against

from ipujax.lowering.gcl.collective_params import COLLECTIVES
from ipujax.lowering.jax_compat import CALLEES, Primitive
from ipujax.lowering.rules import RULES
from ipujax.lowering.rules.flow import streaming
from tests.lowering.rules.op_case import OpCase
from tests.lowering.rules.op_rows_fallback import fallback_rows
from tests.lowering.rules.op_table import CASES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "primitives.md"

_INLINED = {*CALLEES, "custom_linear_solve"}  # the latter is its solution alone, see the pass `inline`

# What has neither a rule nor a row nor another test, with the reason.
NOTES: dict[str, str] = {
    "ragged_all_to_all": "refused: rows of any number are not exchanged between replicas",
    **dict.fromkeys(("after_all", "create_token"), "a token is no array: refused when a result hangs on it"),
    **dict.fromkeys(("get", "swap"), "values of a program never change: references are refused"),
    **dict.fromkeys(("call", "closed_call", "core_call"), "no test of its own: JAX makes none of the user's functions"),
    "custom_lin": "only while JAX differentiates",
    "stage": "not met in any program so far",
}

_REMOTE = "streaming memory: `tests/lowering/offload/test_offload.py`"
_COLLECTIVES = "collective over replicas: `tests/lowering/gcl/test_collectives.py`"

_HEAD = """# Primitives

Written by `python -m tests.lowering.rules.primitives_page`; a test keeps it equal to the rule table and the op table.

- **tile-parallel**: a lowering rule spreads it over tiles, or it is a view that costs nothing until it is used.
- **inlined**: a call; its equations take its place. Equations that come several times, as those of a layer, become a
  function of the control program, lowered once, where that saves more than it copies: `function_call`.
- **one tile**: one vertex computes it; costed, and listed in `profile.fallbacks`. Batches are shared out.

A row of the op table is run by the engine, by the engine split as the machine splits, and tile by tile, each against
plain JAX; rows marked ∂ with their gradient too.
"""


def kind_of(name: str, fallbacks: Iterable[str]) -> str:
    """What becomes of a primitive."""
    if name in RULES:
        return "tile-parallel"
    if name in _INLINED:
        return "inlined"
    return "one tile" if name in fallbacks else "–"


def public_names() -> set[str]:
    """The primitives that JAX names in public, by their own names."""
    found = (value for module in (primitives, jax.lax, jax.lax.linalg) for value in vars(module).values())
    return {value.name for value in found if isinstance(value, Primitive)}


def page() -> str:
    """The text of the page."""
    alone = fallback_rows()
    rows: dict[str, list[OpCase]] = {}
    for case in (*CASES, *alone):
        rows.setdefault(case.primitive, []).append(case)
    fallbacks = {case.primitive for case in alone}
    names = sorted({*public_names(), *RULES, *_INLINED, *rows}, key=str.lower)
    kinds = {name: kind_of(name, fallbacks) for name in names}
    counts = [f"{sum(kind == k for k in kinds.values())} {kind}" for kind in ("tile-parallel", "inlined", "one tile")]
    rest = sum(kind == "–" for kind in kinds.values())
    lines = [_HEAD, f"{len(names)} primitives: {', '.join(counts)}, {rest} others.", ""]
    lines += ["| primitive | runs | tested by |", "|---|---|---|"]
    lines += [f"| `{name}` | {kinds[name]} | {_tested(name, kinds[name], rows.get(name, ()))} |" for name in names]
    return "\n".join(lines) + "\n"


def _tested(name: str, kind: str, rows: Iterable[OpCase]) -> str:
    found = [f"{case.name}{' ∂' if case.grad else ''}" for case in rows]
    found += [_COLLECTIVES] if name in COLLECTIVES else []
    found += [_REMOTE] if name in streaming.RULES else []
    if found:
        return ", ".join(found)
    return NOTES.get(name, "`tests/lowering/passes/test_passes.py`") if kind == "inlined" else NOTES[name]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE.name} written")
