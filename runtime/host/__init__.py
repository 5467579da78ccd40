"""Answers to the host transfers of a program, processes that share its replicas, and the time for its batches."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.runtime.host.host import (
        CallStream as CallStream,
        GuardedHost as GuardedHost,
        Host as Host,
        HostCall as HostCall,
        HostCalls as HostCalls,
        wait_for_calls as wait_for_calls,
    )
    from ipujax.runtime.host.host_data import HostData as HostData
    from ipujax.runtime.host.instances import ALONE as ALONE, AXIS as AXIS, Instances as Instances
else:
    __getattr__ = lazy_names(__name__)
