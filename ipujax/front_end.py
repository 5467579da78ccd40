"""Names of the compiler for front ends, beside the public ones of `ipujax`: nothing else of it is theirs to import.

A front end translates models of another library into functions of `ipu.jit`: `ipujax.onnx`, `ipujax.popart`,
`ipujax.keras`. There are at most 20 names, and each is here for a reason:

    ArgumentTypeError, ArgumentValueError, ArgumentAttributeError   errors that code of the other library catches too
    nearest               the hint of an error about an unknown name
    checking_calls        errors of this form for calls that do not fit a signature
    whole_number, as_numbers, check_recompute, as_schedule   checks of settings that `ipu.jit` and `ipu.pipeline` take
    read_options          option dictionaries of Poplar, with unknown names and those without effect
    CHIP_NAMES            chips under Graphcore's names
    Recompute             type of `Options.recompute`
    IpuFunction           type of the functions that `ipu.jit` returns
    named_stages          stages that the operations of a traced model are in
    MadeAt                the line of a model that made what is traced, in place of the line of a call
    Log                   lines of the log, for requests without effect
    NotCopied             refusal of copies, for sessions and builders
    public_names          the `__dir__` of a module
    recurrent             cells of recurrent layers, and the scan that runs them
    write_file            files that are whole or absent, with errors of this form

`import ipujax` does not import this module, and this module imports neither the compiler nor a framework.
"""

from typing import TYPE_CHECKING

from ipujax import recurrent as recurrent
from ipujax.arguments import as_numbers as as_numbers, whole_number as whole_number
from ipujax.arguments.poplar_options import read_options as read_options
from ipujax.jit import IpuFunction as IpuFunction
from ipujax.public import public_names as public_names
from ipujax.runtime.errors import (
    ArgumentAttributeError as ArgumentAttributeError,
    ArgumentTypeError as ArgumentTypeError,
    ArgumentValueError as ArgumentValueError,
)
from ipujax.runtime.files import write_file as write_file
from ipujax.runtime.lazy_names import lazy_names as _lazy_names
from ipujax.runtime.logs import Log as Log
from ipujax.runtime.not_copied import NotCopied as NotCopied
from ipujax.runtime.options import Recompute as Recompute, check_recompute as check_recompute
from ipujax.runtime.signatures import checking_calls as checking_calls
from ipujax.runtime.target import CHIP_NAMES as CHIP_NAMES, nearest as nearest

if TYPE_CHECKING:
    from ipujax.lowering.jaxpr import named_stages as named_stages
    from ipujax.lowering.schedules import as_schedule as as_schedule
    from ipujax.lowering.source_info import MadeAt as MadeAt
else:
    __getattr__ = _lazy_names(__name__)
