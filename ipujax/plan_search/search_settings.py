"""Settings of a search: checked before anything is traced, and refused with what works.

Input: arguments of `ipu.search` as they are given. Output: positions of arguments, numbers, axes, or a typed error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from ipujax.arguments import as_numbers, check_function, whole_number
from ipujax.jit import IpuFunction
from ipujax.lowering.schedules import SCHEDULE_NAMES
from ipujax.runtime.errors import ArgumentError, ArgumentTypeError, ArgumentValueError
from ipujax.runtime.options import RECOMPUTATIONS, Options
from ipujax.runtime.target import nearest

AXES = ("data", "shards", "stages", "micro_batches", "schedule", "recompute", "offload", "shard_state")
_NUMBERS = AXES[:4]
_EXAMPLES = {"schedule": "1f1b", "recompute": "auto", "offload": (1,), "shard_state": True}
_VALUES: dict[str, tuple[Any, ...]] = {
    "schedule": (None, *SCHEDULE_NAMES),
    "recompute": RECOMPUTATIONS,
    "shard_state": (False, True),
}


def check_search(step: Any, compiled: Any, options: Any, executor: Any) -> None:
    """Refuse a step that cannot be called, and settings of other types.

    Raises:
        ArgumentError: one of them.
    """
    check_function(step)
    if isinstance(getattr(step, "__func__", None), IpuFunction):
        expected = "a function, whose arguments are those of the call"
        hint = f"lambda *args: {step.__name__}(*args)"
        raise ArgumentTypeError("ipu.search takes no method of ipu.jit", expected=expected, got=repr(step), hint=hint)
    whole_number("compiled", compiled, 1, "plans that are compiled at most: a whole number from 1")
    if not (options is None or isinstance(options, Options)):
        raise ArgumentTypeError(
            "options of ipu.search must be ipu.Options", expected="ipu.Options(...)", got=repr(options)
        )
    if not (executor is None or hasattr(executor, "submit")):
        expected = "an executor like those of concurrent.futures, with the method submit"
        raise ArgumentTypeError("executor of ipu.search has no submit", expected=expected, got=repr(executor))


def checked_seconds(seconds: Any) -> float:
    """Return the seconds of a search, infinite when None.

    Raises:
        ArgumentError: no number of at least 0.
    """
    if seconds is None:
        return inf
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds >= 0:  # not a number is not at least 0 either
        raise ArgumentValueError("seconds of ipu.search", expected="a number of at least 0, or None", got=repr(seconds))
    return float(seconds)


def checked_positions(setting: str, value: Any, args: Sequence[Any], who: str = "ipu.search") -> tuple[int, ...]:
    """Return positions of arguments, from 0, each once.

    Raises:
        ArgumentError: no position of one of the arguments.
    """
    count = len(args)
    numbers = as_numbers(setting, value, who)
    if not count:
        raise ArgumentValueError(f"{who} needs the arguments of the step", expected=f"{who}(step, *args)", got="none")
    for number in numbers:
        if not -count <= number < count:
            expected = f"positions from {-count} to {count - 1}, of {count} arguments"
            raise ArgumentValueError(f"{setting} of {who}", expected=expected, got=number)
    return tuple(dict.fromkeys(number % count for number in numbers))


def checked_axes(axes: Any, args: Sequence[Any], batch: Sequence[int]) -> dict[str, tuple[Any, ...]]:
    """Return axes of the user.

    Args:
        axes: values to try, by name of a field of `ipu.Plan`.
        args: arguments of the step.
        batch: positions of those of the batch.

    Raises:
        ArgumentError: an unknown axis, one without values, or a value that it cannot have.
    """
    if not isinstance(axes, Mapping):
        expected = "values by name, as axes={'stages': (1, 2)}"
        raise ArgumentTypeError("axes of ipu.search must be a dictionary", expected=expected, got=repr(axes))
    return {name: _values_of_axis(name, values, args, batch) for name, values in axes.items()}


def _values_of_axis(name: Any, values: Any, args: Sequence[Any], batch: Sequence[int]) -> tuple[Any, ...]:
    """Return the values of an axis, which may be an iterator."""
    if name not in AXES:
        hint = nearest(name, AXES)
        raise ArgumentError(f"ipu.search has no axis {name!r}", expected=f"one of {', '.join(AXES)}", hint=hint)
    several = () if isinstance(values, str | bytes) or not hasattr(values, "__iter__") else tuple(values)
    if not several:
        expected = f"values to try, as {name}=[{_EXAMPLES.get(name, 1)!r}]"
        raise ArgumentError(f"axis {name} of ipu.search has no candidates", expected=expected, got=repr(values))
    for value in several:
        _check_value(name, value)
    if name != "offload":
        return several
    offloads = []
    for value in several:
        if isinstance(value, str) or not hasattr(value, "__iter__"):
            problem = "axis offload of ipu.search has a value that is no tuple of arguments"
            raise ArgumentError(problem, expected="positions of arguments, as offload=[(), (1,)]", got=repr(value))
        offloads.append(checked_positions("offload", tuple(value), args))
        if not set(offloads[-1]).isdisjoint(batch):
            problem = "axis offload of ipu.search names the batch"
            raise ArgumentError(problem, expected="arguments that stay from step to step", got=repr(value))
    return tuple(offloads)


def _check_value(name: str, value: Any) -> None:
    """Refuse a value that an axis cannot have."""
    if name in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        problem = f"axis {name} of ipu.search has a value that is no number of parts"
        raise ArgumentError(problem, expected="whole numbers of at least 1", got=repr(value))
    values_allowed = _VALUES.get(name)
    if values_allowed is not None and value not in values_allowed:
        hint = nearest(str(value), [each for each in values_allowed if isinstance(each, str)])
        problem = f"axis {name} of ipu.search has no value {value!r}"
        raise ArgumentError(problem, expected=f"one of {values_allowed}", got=repr(value), hint=hint)
