"""One process of a job: its place among the others, and arrays of all of them.

instance.py     runs the script inside an instance of `ipujax run`; itself runs as a script, with the standard library
                alone, so that an instance imports nothing before the user's own first line
membership.py   the index of this process and the number of processes, as JAX has them
process_arrays.py  arrays of all processes, which are devices of JAX
meeting.py      what all agree on before they act together; processes that are lost
spread.py       a function of several replicas among processes
"""

from typing import TYPE_CHECKING

from ipujax.distributed.instance.instance import CONTROL_FD as CONTROL_FD, LAUNCHER_PID as LAUNCHER_PID
from ipujax.distributed.instance.membership import (
    COORDINATOR as COORDINATOR,
    INSTANCE_INDEX as INSTANCE_INDEX,
    NUM_INSTANCES as NUM_INSTANCES,
    NUM_REPLICAS as NUM_REPLICAS,
    TIMEOUT_SECONDS as TIMEOUT_SECONDS,
    join as join,
    membership as membership,
)
from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.distributed.instance.meeting import (
        agree as agree,
        naming_lost as naming_lost,
        stable as stable,
    )
    from ipujax.distributed.instance.process_arrays import (
        over_instances as over_instances,
        to_all as to_all,
        to_local as to_local,
    )
    from ipujax.distributed.instance.spread import (
        Operands as Operands,
        Spread as Spread,
        check_same_program as check_same_program,
        received as received,
    )
else:
    # For functions of several replicas alone.
    __getattr__ = lazy_names(__name__)
