"""`ipu.check`: a function by plain JAX and by its lowered program, compared on the arguments of one call.

Input: a function, and arguments of a call. Output: a `CheckReport`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, ParamSpec

from ipujax.jit import IpuFunction, jit
from ipujax.runtime.tracebacks import showing_user_frames

if TYPE_CHECKING:
    from ipujax.checking import CheckReport

_P = ParamSpec("_P")


@showing_user_frames
def check(fun: Callable[_P, Any], /, *args: _P.args, **kwargs: _P.kwargs) -> CheckReport:
    """Compare the program of a function with plain JAX, on the arguments of a call::

        report = ipu.check(step, weights, batch)
        print(report)

    The function is computed by `jax.jit`, by its program as calls compute it, and by the tile interpreter if the
    machine has at most 64 tiles, as with `ipu.jit(step, device=ipu.IPUModel(tiles_per_ipu=16))`. Every equation of the
    program is computed again by plain JAX from the program's own operands, and the jaxpr after every pass is computed
    by plain JAX: what differs by more than rounding is named, with its line. Arguments stay as they are: nothing is
    donated, and no Ref is written.

    Args:
        fun: a function of `ipu.jit`, whose settings hold, or of plain JAX, for the default device.
        args: arguments of a call, pytrees of arrays.
        kwargs: likewise by name.

    Returns:
        The differences of all results, and the first equation at which they part.

    Raises:
        ArgumentError: shapes in place of arrays, a call under a transformation of JAX, a function on `ipu.CPU()`, one
            that calls Python functions or reads the cycle counter, or replicas on several instances.
        TileMemoryError: the program does not fit.
    """
    call_args: tuple[Any, ...] = args
    function: Any = fun
    if isinstance(fun, MethodType) and isinstance(fun.__func__, IpuFunction):
        function = fun.__func__
        call_args = (fun.__self__, *args)
    if not isinstance(function, IpuFunction):
        function = jit(function)
    report: CheckReport = function.check(*call_args, **kwargs)
    return report
