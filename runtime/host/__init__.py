"""What answers the host transfers of a program, and processes that share its replicas."""

from ipujax.runtime.host.host import GuardedHost as GuardedHost, Host as Host
from ipujax.runtime.host.host_call import CallStream as CallStream, HostCall as HostCall, HostCalls as HostCalls
from ipujax.runtime.host.instances import ALONE as ALONE, AXIS as AXIS, Instances as Instances
