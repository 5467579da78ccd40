"""The verifier: named rules that every program is checked against before it is compiled."""

from ipujax.runtime.verify.inventory import Inventory as Inventory, element_name as element_name
from ipujax.runtime.verify.ipu_access import IpuLookup as IpuLookup
from ipujax.runtime.verify.replicas import (
    cross_replica as cross_replica,
    divergent_control as divergent_control,
    map_errors as map_errors,
)
from ipujax.runtime.verify.verifier import verify as verify
