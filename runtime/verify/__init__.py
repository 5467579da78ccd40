"""The verifier: a table of named rules that every program must keep, run on every compile.

Input: a graph and a program. Output: nothing, or the first `VerifyError`, whose `rule` is the name in the table. Rules
look at mappings, accesses and the program tree, never at values; the tile interpreter finds the same faults as they
happen. A rule may rely on all rules before it in the table.

Limits: that a program fits in tile memory is checked where memory is counted. That operands are delivered needs no
rule, as exchanges follow from accesses; the interpreter checks it. The function of a codelet is not checked at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import Graph, Program
from ipujax.runtime.verify import well_formed
from ipujax.runtime.verify.inventory import Inventory as Inventory, element_name as element_name
from ipujax.runtime.verify.ipu_access import IpuLookup as IpuLookup, cross_ipu
from ipujax.runtime.verify.races import read_write_race, write_race
from ipujax.runtime.verify.replicas import (
    cross_replica as cross_replica,
    divergent_control as divergent_control,
    map_errors as map_errors,
)
from ipujax.runtime.verify.undefined import undefined_read

# By the name in `VerifyError.rule`, in the order in which they run.
RULES: dict[str, Callable[[Inventory], Iterator[VerifyError]]] = {
    "unknown-compute-set": well_formed.unknown_compute_set,
    "foreign-tensor": well_formed.foreign_tensor,
    "unmapped-variable": well_formed.unmapped_variable,
    "mapping": well_formed.mapping,
    "type-mismatch": well_formed.type_mismatch,
    "missing-tile": well_formed.missing_tile,
    "read-only-output": well_formed.read_only_output,
    "out-of-tensor": well_formed.out_of_tensor,
    "write-race": write_race,
    "read-write-race": read_write_race,
    "undefined-read": undefined_read,
    "cross-ipu": cross_ipu,
    "cross-replica": cross_replica,
    "divergent-control": divergent_control,
}


def verify(graph: Graph, program: Program, effects: EffectsOf | None = None, *, without: Collection[str] = ()) -> None:
    """Check a program against all rules.

    Args:
        graph: variables, mappings and vertices.
        program: the whole program.
        effects: effects of programs of the graph, if already computed.
        without: names of rules to leave out.

    Raises:
        VerifyError: the first error of the first broken rule.
    """
    inventory = Inventory.of(graph, program, effects or EffectsOf(graph))
    for name, rule in RULES.items():
        if name not in without:
            for error in rule(inventory):
                raise error
