"""Pass `outline`: repeated runs of equations become functions, and the equation `function_call` that calls one."""

from ipujax.lowering.outlining.function_call import (
    CallCosts as CallCosts,
    Copied as Copied,
    function_call_p as function_call_p,
    gain as gain,
    gain_of as gain_of,
)
from ipujax.lowering.outlining.outline import outline as outline, outline_placed as outline_placed, outliner as outliner
from ipujax.lowering.outlining.repeats import last_uses as last_uses
