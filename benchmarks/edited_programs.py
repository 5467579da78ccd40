"""Random edits of programs that are in the cache on disk: none may return the result of the earlier text.

    python benchmarks/edited_programs.py
    python benchmarks/edited_programs.py --count 50 --seed 3

Each program computes with a number that it reaches through one to four carriers: tables and members of classes, enums,
closures, defaults, modules, wrappers, objects, a derivative of its own. The number decides results or cycles of a
codelet, the lowering of a primitive, or a part of the compiler that the program replaces: a pass, a rule, a planner, a
constant. The edit is another number, or for passes another list of passes. Four processes run all programs:

    before      fills the cache
    unedited    must find each program there
    edited      must return what it returns without a cache
    right       runs the edited programs without a cache
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Definitions at the level of the module, and an expression of the number; `{value}` is the expression inside,
# `{n}` numbers the carrier. Definitions of other modules are in `MODULES`.
CARRIERS: dict[str, tuple[str, str]] = {
    "global": ("G{n} = {value}", "G{n}"),
    "dict of a class": ("class C{n}: TABLE = {{'a': {value}}}", "C{n}.TABLE['a']"),
    "list of a class": ("class C{n}: TABLE = [1, [{value}]]", "C{n}.TABLE[1][0]"),
    "member of a base": ("class B{n}: A = {value}\nclass C{n}(B{n}): pass", "C{n}.A"),
    "special member": ("class C{n}: __scale__ = {value}", "C{n}.__scale__"),
    "static method": ("class C{n}:\n  @staticmethod\n  def f(): return {value}", "C{n}.f()"),
    "class method": ("class C{n}:\n  @classmethod\n  def f(cls): return {value}", "C{n}.f()"),
    "property": ("class C{n}:\n  @property\n  def a(self): return {value}\nO{n} = C{n}()", "O{n}.a"),
    "item": ("class C{n}:\n  def __getitem__(self, _): return {value}\nO{n} = C{n}()", "O{n}[0]"),
    "class of a class": (
        "class M{n}(type):\n  @property\n  def a(cls): return {value}\nclass C{n}(metaclass=M{n}): pass",
        "C{n}.a",
    ),
    "descriptor": (
        "class D{n}:\n  def __init__(self, a): self.a = a\n  def __get__(self, *_): return self.a\n"
        "class C{n}: a = D{n}({value})",
        "C{n}.a",
    ),
    "enum": ("class E{n}(enum.Enum): A = {value}", "E{n}.A.value"),
    "method of an enum": ("class E{n}(enum.Enum):\n  A = 1\n  def f(self): return {value}", "E{n}.A.f()"),
    "integer enum": ("class E{n}(enum.IntEnum): A = {value}", "int(E{n}.A)"),
    "closure": ("def f{n}(a): return lambda: a\nF{n} = f{n}({value})", "F{n}()"),
    "closure over a dict": ("def f{n}(**a): return lambda: a['a']\nF{n} = f{n}(a={value})", "F{n}()"),
    "default": ("def f{n}(a={value}): return a", "f{n}()"),
    "keyword default": ("def f{n}(*, a={value}): return a", "f{n}()"),
    "attribute of a function": ("def f{n}(): return f{n}.a\nf{n}.a = {value}", "f{n}()"),
    "called function": ("def f{n}(): return g{n}()\ndef g{n}(): return {value}", "f{n}()"),
    "functions that call each other": (
        "def f{n}(d=0): return g{n}(d)\ndef g{n}(d): return f{n}(1) if not d else {value}",
        "f{n}()",
    ),
    "partial": ("F{n} = functools.partial(lambda a: a, {value})", "F{n}()"),
    "cached function": ("@functools.cache\ndef f{n}(): return {value}", "f{n}()"),
    "wrapped function": (
        "def d{n}(f):\n  @functools.wraps(f)\n  def g(): return {value}\n  return g\n@d{n}\ndef f{n}(): return 1",
        "f{n}()",
    ),
    "object behind a wrapper": (
        "class W{n}:\n  def __init__(self, f, a): functools.update_wrapper(self, f); self.a = a\n"
        "  def __call__(self): return self.a\nF{n} = W{n}(len, {value})",
        "F{n}()",
    ),
    "instance": ("class C{n}: pass\nO{n} = C{n}()\nO{n}.a = {value}", "O{n}.a"),
    "slots": ("class C{n}: __slots__ = ('a',)\nO{n} = C{n}()\nO{n}.a = {value}", "O{n}.a"),
    "copies without state": (
        "class C{n}:\n  def __init__(self, a): self.a = a\n  def __getstate__(self): return {{}}\nO{n} = C{n}({value})",
        "O{n}.a",
    ),
    "dataclass": ("@dataclasses.dataclass\nclass D{n}: a: int = {value}\nO{n} = D{n}()", "O{n}.a"),
    "factory of a dataclass": (
        "@dataclasses.dataclass\nclass D{n}: a: list = dataclasses.field(default_factory=lambda: [{value}])",
        "D{n}().a[0]",
    ),
    "named tuple": ("T{n} = collections.namedtuple('T{n}', 'a b')({value}, 1)", "T{n}.a"),
    "dict of its own class": ("class D{n}(dict): pass\nO{n} = D{n}(a={value})", "O{n}['a']"),
    "default dict": ("O{n} = collections.defaultdict(lambda: {value})", "O{n}.default_factory()"),
    "deque": ("O{n} = collections.deque([1, {value}])", "O{n}[-1]"),
    "array": ("A{n} = np.full(3000, 1.0)\nA{n}[1500] = {value}", "int(A{n}[1500])"),
    "array of objects": ("A{n} = np.array([None, {value}], object)", "A{n}[1]"),
    "text": ("S{n} = str({value})", "int(S{n})"),
    "method of a number": ("F{n} = ({value}).__int__", "F{n}()"),
    "module": ("import helper_{n}_{p}", "helper_{n}_{p}.A"),
    "function of a module": ("import helper_{n}_{p}", "helper_{n}_{p}.f()"),
    "import inside": ("def f{n}():\n  import helper_{n}_{p}\n  return helper_{n}_{p}.A", "f{n}()"),
    "name imported inside": ("def f{n}():\n  from helper_{n}_{p} import f\n  return f()", "f{n}()"),
    "name of a module made at run time": ("import helper_{n}_{p}", "getattr(helper_{n}_{p}, chr(65))"),
    "module as an argument": ("import helper_{n}_{p}\ndef f{n}(m): return m.C.A[0]", "f{n}(helper_{n}_{p})"),
}
MODULE = "A = {value}\ndef f(): return A\nclass C: A = [A]\n"  # of a carrier with a module of its own
HEAD = """
import collections, dataclasses, enum, functools
import jax, jax.numpy as jnp, numpy as np
import ipujax as ipu
from ipujax.poplar import FLOAT, Input, Output, Vector, Vertex
from jax.sharding import PartitionSpec as P

def replicated(function, cache):
    return ipu.jit(function, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=8), replicas=2, in_specs=P("replica"),
                   out_specs=P("replica"), options=ipu.Options(cache_dir=cache))

def single(function, cache, **options):
    return ipu.jit(function, device=ipu.IPUModel(tiles_per_ipu=16), options=ipu.Options(cache_dir=cache, **options))

def sums(codelet):
    return lambda x: ipu.codelet_call(codelet, x)

ARGUMENT = np.arange(40, dtype=np.float32).reshape(4, 10)
"""
# What the number decides: text of a module with a function `program(cache, patch)`, which returns a function of
# `ipu.jit`; `patch` undoes its changes of the compiler after the call.
SUBJECTS: dict[str, str] = {
    "numbers of a codelet": """
class Scaled(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[FLOAT]
    def compute(x): return jnp.sum(x * {value})
    def cycles(x): return 100 + x.size
def program(cache, patch): return replicated(sums(Scaled), cache)
""",
    "cycles of a codelet": """
class Scaled(Vertex):
    x: Input[Vector[FLOAT]]
    out: Output[FLOAT]
    def compute(x): return jnp.sum(x)
    def cycles(x): return 100 + x.size + {value}
def program(cache, patch): return replicated(sums(Scaled), cache)
""",
    "lowering of a primitive": """
from jax.extend.core import Primitive
from jax.interpreters import mlir
scaled_p = Primitive("scaled")
scaled_p.def_abstract_eval(lambda x: x)
scaled_p.def_impl(lambda x: x * {value})
mlir.register_lowering(scaled_p, mlir.lower_fun(lambda x: x * {value}, multiple_results=False))
def program(cache, patch): return replicated(lambda x: scaled_p.bind(x) + 1, cache)
""",
    "lowering of a primitive of JAX": """
from jax.interpreters import mlir
def program(cache, patch):
    patch.setitem(mlir._lowerings, jax.lax.erf_inv_p, mlir._lowerings[jax.lax.erf_inv_p])
    mlir.register_lowering(jax.lax.erf_inv_p, mlir.lower_fun(lambda x: x * {value}, multiple_results=False))
    return replicated(lambda x: jax.lax.erf_inv(x) + 1, cache)
""",
    "passes left out": """
import ipujax.lowering.passes as passes
def program(cache, patch):
    is_whole = ({value}) % 2
    patch.setattr(passes, "PASSES", tuple(x for x in passes.PASSES if is_whole or x[0] not in ("fuse", "outline")))
    return single(lambda x: jnp.tanh(x @ x.T) * 2 + 1, cache)
""",
    "pass of its own": """
import ipujax.lowering.passes as passes
def scaled(jaxpr):
    scale = {value}
    def function(*x): return [y * scale for y in jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *x)]
    return jax.make_jaxpr(function)(*jaxpr.in_avals) if len(jaxpr.out_avals) == 1 else jaxpr
def program(cache, patch):
    patch.setattr(passes, "PASSES", (*passes.PASSES[:8], ("scaled", scaled), *passes.PASSES[8:]))
    return single(lambda x: jnp.tanh(x) + 1, cache, exact_splits=True)
""",
    "rule": """
from ipujax.lowering.rules.table import RULES
tanh_rule = RULES["tanh"]
def repeated_rule(ctx, *operands, **params):
    for _ in range(({value}) % 7): tanh_rule(ctx, *operands, **params)
    return tanh_rule(ctx, *operands, **params)
def program(cache, patch):
    patch.setitem(RULES, "tanh", repeated_rule)
    return single(lambda x: jnp.tanh(x @ x.T), cache)
""",
    "cost function of the compiler": """
import ipujax.lowering.popops.vertices.reducers as reducers
issue_round_cycles = reducers.issue_round_cycles
def program(cache, patch):
    patch.setattr(reducers, "issue_round_cycles", lambda target: issue_round_cycles(target) + {value})
    return single(lambda x: jnp.tanh(x).max(1), cache)
""",
    "constant of the compiler": """
import ipujax.lowering.popops.vertices.kernel_cycles as kernel_cycles
def program(cache, patch):
    patch.setattr(kernel_cycles, "_START_CYCLES", {value})
    return single(lambda x: jnp.tanh(x) * x + jnp.sin(x), cache)
""",
    "item of a table of the compiler": """
from ipujax.lowering.popops.vertices.reducers import _EXTRA_CYCLES
def program(cache, patch):
    patch.setitem(_EXTRA_CYCLES, "max", 10 * ({value}))
    return single(lambda x: jnp.tanh(x).max(1), cache)
""",
}


def values(random_numbers: random.Random) -> tuple[int, int]:
    """Return two numbers of which one is even."""
    first = random_numbers.randrange(2, 50)
    return first, first + random_numbers.choice((1, 3, 5, 9, 11))


def write_program(folder: Path, number: int, seed: int, is_edited: bool) -> str:
    """Write the modules of a program; return its subject and carriers."""
    choices = random.Random(f"{seed} {number}")
    subject = list(SUBJECTS)[number % len(SUBJECTS)]
    carriers = choices.choices(list(CARRIERS), k=choices.randint(1, 4))
    value = str(values(choices)[is_edited])
    definitions = []
    for n, carrier in enumerate(carriers):
        definition, expression = CARRIERS[carrier]
        if "helper_" in definition + expression:
            (folder / f"helper_{n}_{number}.py").write_text(MODULE.format(value=value) if n == 0 else "")
            if n:  # the number comes through other carriers: the helper has it from its importer
                definition = f"{definition}\nA{n} = {value}"
                expression = f"A{n}"
        definitions.append(definition.format(value=value, n=n, p=number))
        value = expression.format(n=n, p=number)
    text = "\n".join([HEAD, *definitions, SUBJECTS[subject].format(value=value)])
    (folder / f"program_{number}.py").write_text(text)
    return f"{subject}: {', '.join(carriers)}"


def run_program(folder: Path, number: int, cache: str) -> dict[str, Any]:
    """Return result, cycles, and whether the program was in the cache."""
    spec = importlib.util.spec_from_file_location(f"program_{number}", folder / f"program_{number}.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"program_{number}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        compiled = module.program(cache, patch).lower(module.ARGUMENT).compile()
        cycles = compiled.profile.cycles
        result = np.asarray(compiled(module.ARGUMENT), np.float64).ravel().tolist()
    return {"result": result, "cycles": cycles, "is_hit": compiled.lowered.call_program.is_stored}


def child(folder: Path, count: int, cache: str) -> None:
    """Print the outcomes of all programs as JSON."""
    sys.path.insert(0, str(folder))
    reasons: list[str] = []
    log = logging.getLogger("ipujax.cache")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: reasons.append(record.getMessage()) or False)
    outcomes = []
    for number in range(count):
        reasons.clear()
        outcome = run_program(folder, number, cache)
        outcomes.append(outcome | {"reasons": [line for line in reasons if "is not cached" in line]})
    print("OUTCOMES", json.dumps(outcomes))


def outcomes_of(folder: Path, count: int, cache: str) -> list[dict[str, Any]]:
    """Run all programs in a process of their own."""
    command = [sys.executable, __file__, "--child", str(folder), cache, "--count", str(count)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = (line for line in run.stdout.splitlines() if line.startswith("OUTCOMES "))
    outcomes: list[dict[str, Any]] = json.loads(line.removeprefix("OUTCOMES "))
    return outcomes


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Return whether result and cycles are equal."""
    return bool(first["result"] == second["result"] and first["cycles"] == second["cycles"])


def measure(count: int, seed: int) -> Counter[str]:
    """Return how many edits had which outcome, and print those without effect and those that are wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache = str(folder / "cache")
        titles = [write_program(folder, number, seed, False) for number in range(count)]
        before, unedited = (outcomes_of(folder, count, cache) for _ in range(2))
        for number in range(count):
            write_program(folder, number, seed, True)
        edited = outcomes_of(folder, count, cache)
        right = outcomes_of(folder, count, "")
    counts = Counter(edits=count, stale=0, missed=0, changed=0, refused=0)
    for title, *outcomes in zip(titles, before, unedited, edited, right, strict=True):
        first, second, third, expected = outcomes
        if same(first, expected):
            print(f"EQUAL   {title}")
        else:
            counts["changed"] += 1
        counts["refused"] += bool(first["reasons"])
        if not same(third, expected):
            counts["stale"] += 1
            print(f"STALE   {title}")
        if not second["is_hit"] and not first["reasons"]:
            counts["missed"] += 1
            print(f"MISSED  {title}")
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="number of programs")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        child(Path(options.child[0]), options.count, options.child[1])
        return 0
    counts = measure(options.count, options.seed)
    print(
        f"{counts['edits']} edits, of which {counts['changed']} change results or cycles: {counts['stale']} stale"
        f" results; {counts['missed']} unedited programs were not found; {counts['refused']} are not cached"
    )
    return int(counts["stale"] + counts["missed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
