"""Options of one compilation.

Input: named choices. Output: a validated, frozen `Options`. Every field changes the compilation, the engine or their
reports; none is accepted and ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.not_copied import ReadOnlyMapping
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.target import nearest

MAX_BYTE_COST = 1e12  # cycles; memory then outweighs everything else
MAX_LABEL = 200  # characters
Recompute = Literal["none", "all", "standard", "auto"]
Partials = Literal["float32", "float16"]  # dtypes of partial results that a program may choose
StreamLoops = bool | Literal["auto"]
RECOMPUTATIONS: tuple[Recompute, ...] = get_args(Recompute)
PARTIALS: tuple[Partials, ...] = get_args(Partials)


@checking_calls("ipu.Options")
@dataclass(frozen=True, slots=True)
class Options:
    """Choices for one compilation. One that is set and changes nothing of a program is named in a warning.

    Args:
        exact_splits: compute every axis block by block as the tiles do, instead of whole. Numbers then round as on the
            tiles, and runs are slower. Cycles and memory do not change.
        allow_out_of_memory: compile a program that overflows tiles instead of raising `TileMemoryError`; the profile
            still reports what each tile would need.
        trip_counts: iterations of loops whose count is data, by the loop's name: its source line, its name stack path,
            or `while[k]`, k counting such loops from 0 in program order. Static profiles need it for their cycles;
            results do not depend on it.
        partials: dtype of partial results of products, matrix multiplications and convolutions, whose operands and
            result are half precision: "float32" or "float16". None is PopLibs' default, float32. Other products keep
            theirs, and so does a call of poplin that names its own. Cycles and memory are those of these partials;
            numbers round, and overflow, as they do with `exact_splits` alone.
        available_memory_proportion: part of a tile's memory that operands, receive buffers and results of one operation
            may take, from 0, as little as possible, to 1; None is that of the machine, less at higher costs per byte.
            `profile.unmet_bounds` lists operations that need more.
        byte_cost: cycles that planners add for each byte of data or code on the fullest tile: a higher cost usually
            makes programs smaller and slower. None is ½; if the program does not fit, the fastest that does of the
            attempts of `docs/fitting.md`, with costs up to 16. A number is fixed. Without the tiles' limit
            (`allow_out_of_memory`) None is ½.
        recompute: values that a gradient computes again instead of storing them. "none"; "all", from the arguments of
            the function, stage or phase; "standard" as PopART does, all between two places with few live bytes; "auto"
            as few as the program needs to fit its tiles. A `jax.checkpoint` keeps its meaning in each. A loop over
            layers is one operation, whose body may have a `jax.checkpoint`.
        io_tiles: tiles of each IPU that only move data from and to the host and streaming memory, while the others
            compute; arguments that are not donated, results and offloaded values go through them. 0: all tiles compute,
            and wait for such transfers.
        prefetch_depth: batches of loads, or phases, that I/O tiles are ahead of the other tiles of an IPU at most: as
            far as values fill d / (2 · (d + 1)) of their memory at depth d, and stores as much.
        progress: show a line of progress on a terminal once compiling has taken two seconds; the program is the same.
        label: name of profiles of the program in titles and comparisons, besides that of their function; see also
            `profile.labelled`.
        cache_dir: directory of a cache of compiled programs, created if absent; None is that of `IPUJAX_CACHE_DIR` in
            the environment, "" no cache. Later processes read the profile of an equal program there, and lower it only
            if its graph is read; numbers never depend on it. See docs/caching.md.
        check: compare the program with plain JAX in the first call of each signature, on its arguments, as `ipu.check`
            does, and raise `ResultMismatchError` where an equation differs. First calls take several times longer;
            calls that `jax.jit` runs, under a transformation or on `ipu.CPU()`, have nothing to compare. A program that
            calls Python functions is refused.
        stream_loops: keep rows that a loop reads once each, and stacked results that leave the program, in the host's
            memory, and move one iteration's at a time, as `ipu.pipeline` does its batches. Each transfer has a latency.
            "auto" does where the program would not fit otherwise, or only in more cycles. Loops over batches of Keras
            and PopART stream unless it is False. Numbers are the same, up to the rounding of XLA's fusions.
        pad_rows: pad rows that are no whole number of vectors in memory, as 197 halves to 200, where that saves more
            cycles than its bytes cost; `profile.padded_rows` lists them. PopLibs pads none. Numbers are the same.
        metrics: metrics of your own, by name: functions of the costs of an operation of a line and layer, `StepCost`,
            to a number. `profile.metrics` adds them up; the program is the same.
        verify_undefined: refuse a program that may read memory before it is written; otherwise it reads zeros.

    Raises:
        ArgumentError: a value of another type, an unknown name, or a number out of range: trip counts and `io_tiles`
            are at least 0, `prefetch_depth` at least 1, `byte_cost` from 0 to 10¹², `available_memory_proportion` from
            0 to 1.
    """

    exact_splits: bool = False
    allow_out_of_memory: bool = False
    trip_counts: Mapping[str, int] = field(default_factory=dict, hash=False)  # a mapping has no hash
    verify_undefined: bool = True
    partials: Partials | None = None
    available_memory_proportion: float | None = None
    byte_cost: float | None = None
    recompute: Recompute = "none"
    io_tiles: int = 0
    prefetch_depth: int = 1
    progress: bool = True
    label: str = ""
    cache_dir: str | None = None
    check: bool = False
    stream_loops: StreamLoops = "auto"
    pad_rows: bool = False
    metrics: Mapping[str, Callable[[Any], float]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("exact_splits", "allow_out_of_memory", "verify_undefined", "progress", "check", "pad_rows"):
            if not isinstance(flag := getattr(self, name), bool):
                raise ArgumentError(f"Options.{name} must be a bool", expected="True or False", got=repr(flag))
        if self.partials is not None and not (isinstance(self.partials, str) and self.partials in PARTIALS):
            expected = f"{', '.join(repr(name) for name in PARTIALS)} or None"
            message = "Options.partials must be a dtype of partials"
            hint = nearest(self.partials, PARTIALS)
            raise ArgumentError(message, expected=expected, got=repr(self.partials), hint=hint)
        check_recompute("Options.recompute", self.recompute)
        if not isinstance(self.stream_loops, bool) and self.stream_loops != "auto":
            expected = 'True, False or "auto"'
            got = repr(self.stream_loops)
            raise ArgumentError("Options.stream_loops must be a way of streaming", expected=expected, got=got)
        check_label("Options.label", self.label)
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", _checked_folder(self.cache_dir))
        for name, lowest in (("io_tiles", 0), ("prefetch_depth", 1)):
            number = getattr(self, name)
            # A bool is an Integral, but nobody means it as a number.
            if isinstance(number, bool) or not isinstance(number, Integral) or number < lowest:
                expected = f"a whole number of at least {lowest}"
                raise ArgumentError(f"Options.{name} must be a whole number", expected=expected, got=repr(number))
            object.__setattr__(self, name, int(number))
        for name, highest, kind, unit in _NUMBERS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checked_number(name, value, highest, kind, unit))
        if not isinstance(self.trip_counts, Mapping):
            kind = type(self.trip_counts).__name__
            raise ArgumentError("Options.trip_counts must be a mapping", expected="loop name to iterations", got=kind)
        for name, count in self.trip_counts.items():
            if not isinstance(name, str):
                expected = "the name of a loop, as 'while[0]'"
                raise ArgumentError("keys of Options.trip_counts must be loops", expected=expected, got=repr(name))
            if isinstance(count, bool) or not isinstance(count, Integral) or count < 0:
                expected = "a whole number of iterations, at least 0"
                raise ArgumentError(
                    f"Options.trip_counts[{name!r}] must be a trip count", expected=expected, got=repr(count)
                )
        counts = {name: int(count) for name, count in self.trip_counts.items()}
        object.__setattr__(self, "trip_counts", ReadOnlyMapping(counts))
        object.__setattr__(self, "metrics", _checked_metrics(self.metrics))


# Names of figures of an operation, as `StepCost` has them: no metric may have one.
FIGURES_OF_OPERATIONS = (
    *("origin", "name", "cycles", "moved_bytes", "variable_bytes", "exchange_code_bytes", "flops", "precision"),
    *("tile_balance", "always_bytes", "peak_bytes", "limiting_cycles", "phases", "ipus", "largest_read"),
)


def _checked_metrics(metrics: Any) -> Mapping[str, Callable[[Any], float]]:
    """Return a user's metrics, read-only; refuse names that reports have already, and values that are no functions."""
    if not isinstance(metrics, Mapping):
        expected = "name to function, as {'pJ': lambda op: 0.6 * op.flops}"
        raise ArgumentError("Options.metrics must be a mapping", expected=expected, got=type(metrics).__name__)
    for name, metric in metrics.items():
        check_label("a name of Options.metrics", name)
        if not name:
            raise ArgumentError("a metric of Options.metrics has no name", expected="a line of text", got=repr(name))
        if name in FIGURES_OF_OPERATIONS:
            expected = f"none of {', '.join(FIGURES_OF_OPERATIONS)}"
            raise ArgumentError(f"Options.metrics cannot have {name!r}: the name is taken", expected=expected, got=name)
        if not callable(metric):
            expected = "a function of the costs of an operation to a number"
            raise ArgumentError(f"Options.metrics[{name!r}] is no function", expected=expected, got=repr(metric))
    return ReadOnlyMapping(dict(metrics))


def check_recompute(name: str, value: Any) -> None:
    """Check a choice of recomputation.

    Args:
        name: name of the argument, for the message.
        value: its value.

    Raises:
        ArgumentError: it is none of `RECOMPUTATIONS`; the hint is the nearest.
    """
    if not isinstance(value, str) or value not in RECOMPUTATIONS:
        raise ArgumentError(
            f"{name} must be a way of recomputation",
            expected=f"one of {', '.join(map(repr, RECOMPUTATIONS))}",
            got=repr(value),
            hint=nearest(value, RECOMPUTATIONS) if isinstance(value, str) else None,
        )


def check_label(name: str, value: Any) -> None:
    """Refuse a label of a profile that is not one line of text; `name` is that of the argument."""
    if not isinstance(value, str) or len(value) > MAX_LABEL or not (value.isprintable() and value == value.strip()):
        expected = f"one line of at most {MAX_LABEL} characters, no spaces around it"
        raise ArgumentError(f"{name} must be a label", expected=expected, got=repr(value)[:MAX_LABEL])


def _checked_folder(path: Any) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or "\0" in text:
        expected = "a str or an os.PathLike, or None"
        raise ArgumentError("Options.cache_dir must be the path of a folder", expected=expected, got=repr(path))
    return text


_NUMBERS = (  # option, highest value, kind, unit
    ("byte_cost", MAX_BYTE_COST, "cost per byte", "a number of cycles per byte"),
    ("available_memory_proportion", 1.0, "proportion", "a number"),
)


def _checked_number(name: str, value: Any, highest: float, kind: str, unit: str) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= highest:
        expected = f"{unit} from 0 to {highest:g}, or None"
        raise ArgumentError(f"Options.{name} must be a {kind}", expected=expected, got=repr(value))
    return float(value)
