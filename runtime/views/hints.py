"""Hints: changes that a user can try, each with the condition under which it can help.

Input: a `Situation`. Output: the text of the hints that hold, in order.
Limits: hints are rules of thumb; no change is compiled (`ipu.advise` does that).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from ipujax.runtime.memory import EXCHANGE_CODE
from ipujax.runtime.tensor.roles import (
    ARGUMENTS,
    GRADIENTS,
    INPUTS,
    INTERMEDIATES,
    OPTIMISER_STATE,
    PARTIALS,
    RECOMPUTED,
    STORED,
    WEIGHTS,
)
from ipujax.runtime.views.situation import Situation

_FEW_TILES = 0.05  # tile balance
EVEN_SHARE = 0.5  # tile balance: equal parts, of which each tile has one at least, make no less
_UNEVEN = 0.8  # tile balance
_SPREAD = 0.6  # tile balance
_NEAR_PEAK = 0.5  # share of the peak
_CROWDED = 0.75  # of a tile; less is no reason to change a program
_MAJORITY = 0.5  # of the live bytes
_HIGHEST_CYCLES_PER_BYTE = 16.0  # at which `fit` plans without a request, see `fit.BYTE_COSTS`


@dataclass(frozen=True, slots=True)
class Hint:
    """Change to try.

    Args:
        text: the change, with the fields of a `Situation` in braces.
        holds: condition under which it can help.
    """

    text: str
    holds: Callable[[Situation], bool]


def _computes(at: Situation) -> bool:
    return at.phase == "compute" and not at.fallback  # a fallback has its hint: the others would not help it


def _is_spread(at: Situation) -> bool:
    return _computes(at) and at.tile_balance >= _SPREAD


def _is_schedule(at: Situation) -> bool:
    return _computes(at) and at.tile_balance < _FEW_TILES and at.has_backward and not at.multiplies


def _is_dense(at: Situation) -> bool:
    return _is_spread(at) and at.multiplies


# For the operation or the line with most cycles. All that hold are shown, in this order: the most specific first.
# In the words of each front end: a profile does not know by which its program was made.
SEVERAL_BATCHES = (
    "several batches a call, in a loop (lax.scan; Keras: steps_per_execution; PopART: batches per step; Poplar: Repeat)"
)

TIME_HINTS = {
    "fallback": Hint(
        "{fallback} has no parallel rule and runs on one tile: another formulation, or several at once with jax.vmap, "
        "each on its own tile",
        lambda at: at.phase == "compute" and bool(at.fallback),
    ),
    "emulated": Hint(
        "float32 or float16 in place of {emulated}, which the machine does not have",
        lambda at: _computes(at) and bool(at.emulated),
    ),
    "schedule": Hint(
        "compute scalars (learning-rate schedules, counters) on the host, or once for many steps: it computes on few "
        "tiles, and the others wait",
        _is_schedule,
    ),
    "few tiles": Hint(
        "more elements, or several such operations at once (jax.vmap, a larger batch): it computes on few tiles, and "
        "the others wait",
        lambda at: _computes(at) and at.tile_balance < EVEN_SHARE and not (_is_schedule(at) or at.splits_batches),
    ),
    "uneven": Hint(
        "sizes that divide evenly over tiles: they compute in {tile_balance:.0%} of its compute time",
        lambda at: _computes(at) and EVEN_SHARE <= at.tile_balance < _UNEVEN and not at.splits_batches,
    ),
    "micro-batches": Hint(
        "fewer, larger micro-batches: it cuts them for the stages and stores what is handed on",
        lambda at: _computes(at) and at.splits_batches,
    ),
    "half": Hint(
        "half precision (float16), for it computes in float32",
        lambda at: _is_spread(at) and at.precision == "float32" and not at.emulated and not at.splits_batches,
    ),
    "less": Hint(
        "fewer or smaller products, for they run at {peak_share:.0%} of an IPU's peak",
        lambda at: _is_dense(at) and at.peak_share > _NEAR_PEAK,
    ),
    "replicas": Hint(
        "more replicas, each with a part of the batch",
        lambda at: _is_dense(at) and at.peak_share > _NEAR_PEAK and at.has_backward,
    ),
    "larger": Hint(
        "larger products, for they run at {peak_share:.1%} of an IPU's peak",
        lambda at: _is_dense(at) and 0 < at.peak_share <= _NEAR_PEAK and not at.is_exchange_bound,
    ),
    "move less": Hint(
        "products that share more of their operands, as of a larger batch: exchange allows less than the peak",
        lambda at: _is_dense(at) and at.peak_share <= _NEAR_PEAK and at.is_exchange_bound,
    ),
    "merge": Hint(
        "fewer, larger operations move less between tiles",
        lambda at: at.phase == "exchange",
    ),
    "half exchange": Hint(
        "float16 halves what is exchanged",
        lambda at: at.phase == "exchange" and at.precision == "float32",
    ),
    "cut": Hint(
        "stages that begin where less is handed on",
        lambda at: at.phase == "global_exchange" and at.num_ipus > 1,
    ),
    "fewer replicas": Hint(
        "fewer replicas or shards, or a larger batch for each: they exchange as much for a small batch as for a large",
        lambda at: at.phase == "global_exchange" and at.replicas > 1,
    ),
    "donate": Hint(
        "donate what comes back changed (donate_argnums)",
        lambda at: at.phase == "host_exchange" and at.updates_arguments,
    ),
    "scan": Hint(
        SEVERAL_BATCHES,
        lambda at: at.phase == "host_exchange" and not at.has_loop,
    ),
    "overlap": Hint(
        "overlap transfers with computing (Options(io_tiles=…))",
        lambda at: at.phase == "host_exchange" and at.has_loop and not at.overlaps_io,
    ),
    "sync": Hint(
        "a larger batch, or fewer and larger operations: it has many short supersteps",
        lambda at: at.phase == "sync",
    ),
}


_OF_BATCH = (STORED, RECOMPUTED, INPUTS, INTERMEDIATES)  # roles whose bytes grow with the batch
_OF_CALLS = (WEIGHTS, OPTIMISER_STATE, ARGUMENTS, INPUTS)  # roles of arguments, which streaming memory can store
_EXCHANGE = (*EXCHANGE_CODE, "exchange code")


def _is_full(at: Situation) -> bool:
    return at.fullness > _CROWDED and not at.crowding  # a crowding variable is spread over tiles: another hint


def _can_raise_cost_per_byte(at: Situation) -> bool:
    return _is_full(at) and at.cycles_per_byte < _HIGHEST_CYCLES_PER_BYTE


# For the fullest tile.
MEMORY_HINTS = {
    "spread": Hint(
        "spread {crowding} over more tiles: {crowding_share:.0%} of it is on this one",
        lambda at: at.fullness > _CROWDED and bool(at.crowding),
    ),
    "recompute": Hint(
        "recompute activations (Options(recompute='auto'), jax.checkpoint)",
        lambda at: _is_full(at) and at.has_backward and not at.recomputes and at.stores_activations,
    ),
    "shorter parts": Hint(
        "shorter parts inside jax.checkpoint",
        lambda at: _is_full(at) and at.main_use == RECOMPUTED,
    ),
    "batch": Hint(
        "a smaller batch, or more micro-batches",
        lambda at: _is_full(at) and at.main_use in _OF_BATCH,
    ),
    "offload": Hint(
        "keep arguments in streaming memory (offload_argnums)",
        lambda at: _is_full(at) and at.main_use in _OF_CALLS,
    ),
    "shard": Hint(
        "a share of the optimiser's state for each replica (ipu.optim.shard)",
        lambda at: _is_full(at) and at.main_use == OPTIMISER_STATE and at.replicas > 1,
    ),
    "stages": Hint(
        "more IPUs, each with a part of the model (ipu.stage)",
        lambda at: _is_full(at) and at.main_use in (WEIGHTS, GRADIENTS, OPTIMISER_STATE, "variable") and not at.fits,
    ),
    "sums": Hint(
        "a higher cost per byte (Options(byte_cost=…)) splits sums less",
        lambda at: _can_raise_cost_per_byte(at) and at.main_use == PARTIALS,
    ),
    "split operands": Hint(
        "a higher cost per byte (Options(byte_cost=…)) splits operations finer: operands arrive whole",
        lambda at: _can_raise_cost_per_byte(at) and at.main_use == "message",
    ),
    "copies": Hint(
        "a higher cost per byte (Options(byte_cost=…)) avoids copies on tiles",
        lambda at: _can_raise_cost_per_byte(at) and at.main_use == "rearrangement",
    ),
    "split results": Hint(
        "a higher cost per byte (Options(byte_cost=…)) splits results finer",
        lambda at: _can_raise_cost_per_byte(at) and at.main_use == "outputEdge",
    ),
    "borrowed": Hint(
        "another formulation of the operation that runs on one tile only, see the fallbacks",
        lambda at: _is_full(at) and at.main_use == "borrowed",
    ),
    "vertices": Hint(
        "fewer, larger operations need fewer vertices",
        lambda at: _is_full(at) and at.main_use in ("vertexInstanceState", "vertex state"),
    ),
    "kinds": Hint(
        "fewer kinds of operations need less code",
        lambda at: _is_full(at) and at.main_use in ("vertexCode", "vertex code"),
    ),
    "share code": Hint(
        "repeated layers in lax.scan share their code",
        lambda at: _is_full(at) and at.main_use in (*_EXCHANGE, "controlCode", "control code") and not at.has_loop,
    ),
    "shorter exchanges": Hint(
        "a higher cost per byte (Options(byte_cost=…)) favours exchanges of less code",
        lambda at: _can_raise_cost_per_byte(at) and at.main_use in _EXCHANGE,
    ),
}

# For the IPU that waits for longest.
WAIT_HINTS = {
    "fill": Hint(
        "more micro-batches make filling and draining a smaller part",
        lambda at: at.wait in ("filling", "draining") and at.has_pipeline,
    ),
    "pipeline": Hint(
        "ipu.pipeline, so that stages work on several micro-batches at once",
        lambda at: bool(at.wait) and at.has_stages and not at.has_pipeline,
    ),
    "balance": Hint(
        "move work to this IPU from IPU {busiest_ipu}, which works most",
        lambda at: at.wait == "steady" and not at.waits_alike,
    ),
    "schedule": Hint(
        "all IPUs wait about as long: more micro-batches, another schedule, or less that is handed on",
        lambda at: at.wait == "steady" and at.waits_alike and at.has_pipeline,
    ),
}


def hints(table: dict[str, Hint], situation: Situation) -> str:
    """Join the texts of the hints of a table that hold; "" when none does."""
    values = asdict(situation)
    return "; ".join(hint.text.format(**values) for hint in table.values() if hint.holds(situation))
