"""Equal operations left by the passes: XLA's own elimination of common subexpressions is the judge.

    python benchmarks/equal_operations.py
    python benchmarks/equal_operations.py --only gpt-4 --only "keras: a U-Net"

Programs are training steps of `models/`, of `tests/ipujax/models/` and of Keras' examples in `tests/ipujax/keras/`. For
each the jaxpr as traced, and the one after all passes, are compiled by XLA without the passes that simplify: it expands
calls and joins equal operations. What the latter drops is equal to something else. Columns:

    traced     equations that XLA joins in the function as traced, calls expanded
    after      those that it joins after the passes
    named      of these, those that `Profile.computed_again` names, by operation and line
    left       the rest, which should be none; each is printed

Views and constants are left out, as they cost no cycles; so are equations of which XLA joins only some operations, as
the counters of two random generators, or that are a step of another, as x² is of x³.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
from jax import export

import ipujax as ipu

os.environ.setdefault("KERAS_BACKEND", "jax")
FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]  # for `models` and `tests`

from models import MODELS  # noqa: E402

from ipujax.lowering.jax_compat import ClosedJaxpr, JaxprEqn, jaxpr_as_fun  # noqa: E402
from ipujax.lowering.jaxpr import Rewrite, everywhere, with_inner  # noqa: E402
from ipujax.lowering.source_info import source_line  # noqa: E402
from ipujax.lowering_plan import planned_program as planning  # noqa: E402
from tests.ipujax.models import MODELS as SMALL_MODELS, training_step  # noqa: E402

Programs = list[Any]  # of `PlannedProgram`
VIEWS = frozenset(
    ("constant", "broadcast", "reshape", "bitcast", "transpose", "slice", "iota", "copy", "tuple", "parameter")
)
_LARGE = ("resnet-50", "bert-large", "bert-base")  # minutes
_NUMBER = re.compile(r"equation(\d+)")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\(([^)]*)\)(.*)$", re.M)
_NAME = re.compile(r"%([\w.-]+)")
_UNCHECKED = [export.DisabledSafetyCheck.custom_call(name) for name in ("TopK",)]
_PASSES = "call-inliner,cse,flatten-call-graph,layout-assignment,copy-insertion,dce"
_OPTIONS = {"xla_enable_hlo_passes_only": _PASSES, "xla_dump_hlo_pass_re": ".*"}


def joined_by_xla(jaxpr: ClosedJaxpr) -> list[JaxprEqn]:
    """Equations that XLA drops, as all of their operations equal others."""
    eqns = list[JaxprEqn]()
    numbered = _numbered(eqns)(jaxpr)
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    exported = export.export(jax.jit(jaxpr_as_fun(numbered), keep_unused=True), disabled_checks=_UNCHECKED)(*shapes)
    with TemporaryDirectory() as folder:
        # Without its other passes XLA may have no code for an operation, or end the process; it has merged equal ones
        # by then.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool, suppress(BrokenProcessPool):
            pool.submit(_compile, exported.serialize(), folder).result()
        dumps = sorted(path for path in Path(folder).glob("*.txt") if re.search(r"\.\d{4}\.", path.name))
        if not any("through_layout_assignment" in path.name for path in dumps):
            raise RuntimeError("XLA ended before the passes that join equal operations")
        after = next((n for n, path in enumerate(dumps) if "after_cse" in path.name), None)
        if after is None:
            return []
        before, retained = (_instructions(dumps[n].read_text()) for n in (after - 1, after))
    equal_to = _equal_to(before, retained)
    of_equation = Counter(x.equation for x in before.values() if x.opcode not in VIEWS)
    merged, separate = set[int | None](), set[int | None]()
    for name, x in before.items():
        if x.opcode in VIEWS:
            continue
        # The equation is one step of another that XLA expands in several, as x² is of x³.
        other = before[equal_to[name]].equation if name in equal_to else x.equation
        is_step = of_equation[other] > of_equation[x.equation]
        (separate if name in retained or is_step else merged).add(x.equation)
    return [eqns[number] for number in sorted(n for n in merged - separate if n is not None)]


def _compile(serialized: bytes, folder: str) -> None:
    """Compiles an exported function without simplifications, and lets XLA write what each pass makes."""
    exported = export.deserialize(bytearray(serialized))
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    with suppress(jax.errors.JaxRuntimeError):
        jax.jit(exported.call).lower(*shapes).compile(compiler_options={**_OPTIONS, "xla_dump_to": folder})


class Instruction(NamedTuple):
    """An operation of XLA: type of its result, names of its operands, and the number of its equation."""

    result: str
    opcode: str
    operands: tuple[str, ...]
    equation: int | None


def _instructions(text: str) -> dict[str, Instruction]:
    """Operations of a module by name, in order."""
    instructions: dict[str, Instruction] = {}
    for name, result, opcode, operands, rest in _INSTRUCTION.findall(text):
        numbers = _NUMBER.findall(rest)
        equation = int(numbers[-1]) if numbers else None
        values = tuple(_NAME.findall(operands)) or (operands,)  # of a constant its value
        instructions[name] = Instruction(result, opcode, values, equation)
    return instructions


def _equal_to(before: Mapping[str, Instruction], retained: Mapping[str, Instruction]) -> dict[str, str]:
    """For each dropped operation one that is retained, with equal operands."""
    equal_to: dict[str, str] = {}
    alike: dict[tuple[object, ...], str] = {}
    # Those that are retained first, as they may come later; their operands in `retained` are such ones.
    for name, x in retained.items():
        alike.setdefault((x.result, x.opcode, tuple(sorted(x.operands))), name)
    for name, x in before.items():
        operands = sorted(equal_to.get(operand, operand) for operand in x.operands)
        equal = alike.get((x.result, x.opcode, tuple(operands)))
        if name not in retained and equal is not None:
            equal_to[name] = equal
    return equal_to


def _numbered(eqns: list[JaxprEqn]) -> Rewrite:
    """Rewrite whose equations have the number by which they are in `eqns` as scope, also in names that XLA keeps."""

    def numbered(body: ClosedJaxpr, rewrite: Rewrite) -> ClosedJaxpr:
        renamed = list[JaxprEqn]()
        for eqn in body.jaxpr.eqns:
            info = eqn.source_info
            scope = type(info.name_stack)().extend(f"equation{len(eqns)}")
            eqns.append(eqn)
            renamed.append(with_inner(eqn, rewrite).replace(source_info=info.replace(name_stack=scope)))
        return ClosedJaxpr(body.jaxpr.replace(eqns=renamed), body.consts)

    return everywhere(numbered)


Operations = Counter[tuple[str, str]]  # by operation and line: of two equal ones XLA may drop the earlier


def judged(programs: Programs) -> tuple[int, int, Operations]:
    """Numbers of equations that XLA joins, traced and after the passes, and those of the latter that are not named."""
    traced, after, unnamed = 0, 0, Operations()
    for program in programs:
        jaxprs = list(program.jaxprs.values())
        named = Operations()
        for row in program.graph.notes.computed_again:
            named[row.operation, row.origin.line] += row.count
        traced += len(joined_by_xla(jaxprs[0]))
        merged = Operations((eqn.primitive.name, source_line(eqn)) for eqn in joined_by_xla(jaxprs[-1]))
        after += merged.total()
        unnamed += merged - named
    return traced, after, unnamed


# --- programs ---------------------------------------------------------------------------------------------------------


def of_model(name: str) -> None:
    """Lowers a step of `benchmarks/models`."""
    model = MODELS[name]()
    options = ipu.Options(**{"allow_out_of_memory": True, **model.options})
    ipu.jit(model.step, device=model.device(), options=options, **model.jit).lower(*model.args).compile()


def of_small_model(name: str) -> None:
    """Lowers a step of the tests."""
    model = training_step(name)
    ipu.jit(model.step).lower(model.state, *model.batch(0)).compile()


def of_keras(name: str) -> None:
    """Runs an example of Keras."""
    from tests.ipujax.keras.keras_examples import EXAMPLES
    from tests.ipujax.keras.test_strategy import both

    example = EXAMPLES[name]
    both(example.make, example.use, **example.compiled)


def cases() -> dict[str, Callable[[], None]]:
    """What compiles the programs of each case."""
    of_benchmarks = {name: partial(of_model, name) for name in MODELS if name not in _LARGE}
    of_tests = {f"test: {name}": partial(of_small_model, name) for name in SMALL_MODELS}
    from tests.ipujax.keras.keras_examples import EXAMPLES

    return {**of_benchmarks, **of_tests, **{f"keras: {name}": partial(of_keras, name) for name in EXAMPLES}}


def programs_of(case: Callable[[], None]) -> Programs:
    """Programs that are lowered while a case runs; the last plan of each."""
    programs: dict[int, Any] = {}
    planned = planning.planned_program

    def recorded(plan: Any, *arguments: Any) -> Any:
        programs[id(plan)] = planned(plan, *arguments)
        return programs[id(plan)]

    with patch.object(planning, "planned_program", recorded):
        case()
    return list(programs.values())


# --- the script -------------------------------------------------------------------------------------------------------


def rows(chosen: Mapping[str, Callable[[], None]]) -> Iterator[tuple[str, Operations]]:
    """Line and unnamed equations of each case."""
    for name, case in chosen.items():
        traced, after, unnamed = judged(programs_of(case))
        yield f"{name:<45}{traced:>9,}{after:>9,}{after - unnamed.total():>9,}{unnamed.total():>9,}", unnamed


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row a program; returns 1 if operations are left unnamed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="names of programs; all when left out")
    only = parser.parse_args(argv).only
    programs = cases()
    if unknown := sorted(set(only or ()) - set(programs)):
        parser.error(f"no program is called {', '.join(unknown)}; there are {', '.join(programs)}")
    print(f"{'':<45}{'traced':>9}{'after':>9}{'named':>9}{'left':>9}")
    num_left = 0
    for text, unnamed in rows({name: case for name, case in programs.items() if only is None or name in only}):
        print(text, flush=True)
        for (operation, line), count in unnamed.items():
            print(f"    {count} x {operation}, {line or 'no line'}", flush=True)
        num_left += unnamed.total()
    print(f"{num_left:,} equal operations are left that no profile names")
    return int(num_left > 0)


if __name__ == "__main__":
    sys.exit(main())
