"""The verifier: a table of named rules that every program must keep, run on every compile.

Input: a graph and a program. Output: nothing, or the first `VerifyError`, whose `rule` is the name in the table. Rules
look at mappings, accesses and the program tree, never at values; the tile interpreter finds the same faults as they
happen. Later rules may rely on what earlier ones have made sure of.

Limits: that a program fits in tile memory is checked where memory is counted. That operands are delivered needs no
rule, as exchanges follow from accesses; the interpreter checks it. What a codelet computes inside its blocks is not
checked at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from ipujax.runtime.analysis import EffectsOf
from ipujax.runtime.errors import VerifyError
from ipujax.runtime.graph import Graph, Program
from ipujax.runtime.verify.facts import Facts
from ipujax.runtime.verify.ipus import cross_ipu
from ipujax.runtime.verify.races import read_write_race, write_race
from ipujax.runtime.verify.replicas import cross_replica, divergent_control
from ipujax.runtime.verify.types import (
    mapping,
    missing_tile,
    out_of_tensor,
    read_only_output,
    type_mismatch,
    unknown_compute_set,
    unmapped_variable,
)
from ipujax.runtime.verify.undefined import undefined_read

# By the name in `VerifyError.rule`: yields the errors of a program, none when it is sound.
RULES: dict[str, Callable[[Facts], Iterator[VerifyError]]] = {
    "unknown-compute-set": unknown_compute_set,
    "unmapped-variable": unmapped_variable,
    "mapping": mapping,
    "type-mismatch": type_mismatch,
    "missing-tile": missing_tile,
    "read-only-output": read_only_output,
    "out-of-tensor": out_of_tensor,
    "write-race": write_race,
    "read-write-race": read_write_race,
    "undefined-read": undefined_read,
    "cross-ipu": cross_ipu,
    "cross-replica": cross_replica,
    "divergent-control": divergent_control,
}


def verify(graph: Graph, program: Program, effects: EffectsOf | None = None, *, without: Collection[str] = ()) -> None:
    """Refuses a program that breaks a rule.

    Args:
        graph: variables, mappings and vertices.
        program: what would run.
        effects: effects of programs of the graph, if they were computed already.
        without: names of rules that it need not keep.

    Raises:
        VerifyError: the first error of the first rule broken.
    """
    facts = Facts.of(graph, program, effects or EffectsOf(graph))
    for name, rule in RULES.items():
        if name not in without:
            for error in rule(facts):
                raise error
