"""One process of a run: its place among the others, and arrays of all of them.

instance.py     runs the script inside an instance; itself runs as a script, with the standard library alone, so that an
                instance imports nothing before the user's own first line
membership.py   an instance's view: its index, the number of instances, and barriers of all
spread.py       a function of several replicas among instances, which are devices of JAX
"""

from typing import TYPE_CHECKING

from ipujax.distributed.instance.instance import (
    CONTROL_FD as CONTROL_FD,
    EXIT_CODE as EXIT_CODE,
    LAUNCHER_PID as LAUNCHER_PID,
)
from ipujax.distributed.instance.membership import (
    COORDINATOR as COORDINATOR,
    INSTANCE_INDEX as INSTANCE_INDEX,
    NUM_INSTANCES as NUM_INSTANCES,
    NUM_REPLICAS as NUM_REPLICAS,
    Facts as Facts,
    check_alone as check_alone,
    check_joined as check_joined,
    leave as leave,
    meet as meet,
    stable as stable,
)
from ipujax.distributed.instance.spread import over_instances as over_instances, to_all as to_all, to_local as to_local
from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.distributed.instance.spread import (
        Operands as Operands,
        Spread as Spread,
        check_same_program as check_same_program,
        received as received,
    )
else:
    # For functions of several replicas alone.
    __getattr__ = lazy_names(__name__)
