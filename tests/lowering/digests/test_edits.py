"""Edits of code: every one changes the digest of what uses it; the same text in another module object does not."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from ipujax.lowering.digests import NoDigestError, digest_of

# Text of a module that defines `subject`, and of one with an edit of what `subject` uses.
EDITS: dict[str, tuple[str, str]] = {
    "constant": ("def subject(x): return x + 2", "def subject(x): return x + 9"),
    "global": ("A = 2\ndef subject(x): return x + A", "A = 9\ndef subject(x): return x + A"),
    "default": ("def subject(x, y=2): return x + y", "def subject(x, y=9): return x + y"),
    "text of a class": ("class subject: 'two'", "class subject: 'nine'"),
    "keyword default": ("def subject(x, *, y=2): return x + y", "def subject(x, *, y=9): return x + y"),
    "any number of arguments": ("def subject(x, y): return x + len(y)", "def subject(x, *y): return x + len(y)"),
    "arguments by any name": ("def subject(x, *y): return x + len(y)", "def subject(x, **y): return x + len(y)"),
    "attribute of a function": (
        "def subject(x): return x + subject.a\nsubject.a = 2",
        "def subject(x): return x + subject.a\nsubject.a = 9",
    ),
    "closure": (
        "def outer(a): return lambda x: x + a\nsubject = outer(2)",
        "def outer(a): return lambda x: x + a\nsubject = outer(9)",
    ),
    "closure over a list": (
        "def outer(*a): return lambda x: x + a[0][0]\nsubject = outer([2])",
        "def outer(*a): return lambda x: x + a[0][0]\nsubject = outer([9])",
    ),
    "called function": (
        "def f(x): return g(x)\ndef g(x): return x + 2\nsubject = f",
        "def f(x): return g(x)\ndef g(x): return x + 9\nsubject = f",
    ),
    "functions that call each other": (
        "def f(x): return g(x)\ndef g(x): return h(x) if x else f(x)\ndef h(x): return x + 2\nsubject = f",
        "def f(x): return g(x)\ndef g(x): return h(x) if x else f(x)\ndef h(x): return x + 9\nsubject = f",
    ),
    "dict of a class": ("class subject: TABLE = {'a': [2]}", "class subject: TABLE = {'a': [9]}"),
    "set of a class": ("class subject: TABLE = {(1, 2)}", "class subject: TABLE = {(1, 9)}"),
    "object of a class": (
        "class P:\n  def __init__(self, a): self.a = a\nclass subject: P = P(2)",
        "class P:\n  def __init__(self, a): self.a = a\nclass subject: P = P(9)",
    ),
    "array of a class": (
        "import numpy as np\nclass subject: A = np.arange(5000.)",
        "import numpy as np\nclass subject:\n  A = np.arange(5000.)\n  A[2500] = 9",
    ),
    "special method": (
        "class subject:\n  def __call__(self, x): return x + 2",
        "class subject:\n  def __call__(self, x): return x + 9",
    ),
    "special value": ("class subject: __scale__ = 2", "class subject: __scale__ = 9"),
    "class method": (
        "class subject:\n  @classmethod\n  def f(cls): return 2",
        "class subject:\n  @classmethod\n  def f(cls): return 9",
    ),
    "setter": (
        "class subject:\n  @property\n  def a(self): return 2\n  @a.setter\n  def a(self, x): self.b = 2",
        "class subject:\n  @property\n  def a(self): return 2\n  @a.setter\n  def a(self, x): self.b = 9",
    ),
    "base class": ("class B: A = 2\nclass subject(B): pass", "class B: A = 9\nclass subject(B): pass"),
    "class of a class": (
        "class M(type):\n  def __len__(cls): return 2\nclass subject(metaclass=M): pass",
        "class M(type):\n  def __len__(cls): return 9\nclass subject(metaclass=M): pass",
    ),
    "class inside": ("class subject:\n  class B: A = 2", "class subject:\n  class B: A = 9"),
    "slots": (
        "class S:\n  __slots__ = ('a',)\nsubject = S()\nsubject.a = 2",
        "class S:\n  __slots__ = ('a',)\nsubject = S()\nsubject.a = 9",
    ),
    "state that a class leaves out of copies": (
        "class S:\n  def __getstate__(self): return {}\nsubject = S()\nsubject.a = 2",
        "class S:\n  def __getstate__(self): return {}\nsubject = S()\nsubject.a = 9",
    ),
    "attribute outside of the fields of a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass D: a: int\nsubject = D(1)\nsubject.b = 2",
        "import dataclasses\n@dataclasses.dataclass\nclass D: a: int\nsubject = D(1)\nsubject.b = 9",
    ),
    "default of a dataclass": (
        "import dataclasses\n@dataclasses.dataclass\nclass subject: a: int = 2",
        "import dataclasses\n@dataclasses.dataclass\nclass subject: a: int = 9",
    ),
    "number of a class of its own": (
        "class N(int): pass\nsubject = N(2)",
        "class N(int): pass\nsubject = N(9)",
    ),
    "dict of a class of its own": (
        "class D(dict): pass\nsubject = D(a=2)",
        "class D(dict): pass\nsubject = D(a=9)",
    ),
    "deque": (
        "import collections\nsubject = collections.deque([2])",
        "import collections\nsubject = collections.deque([9])",
    ),
    "value of an enum": (
        "import enum\nclass E(enum.Enum): A = 2\ndef subject(x): return E.A.value",
        "import enum\nclass E(enum.Enum): A = 9\ndef subject(x): return E.A.value",
    ),
    "method of an enum": (
        "import enum\nclass E(enum.Enum):\n  A = 2\n  def f(self): return 2\nsubject = E.A",
        "import enum\nclass E(enum.Enum):\n  A = 2\n  def f(self): return 9\nsubject = E.A",
    ),
    "flag": (
        "import enum\nclass E(enum.Flag):\n  A = 1\n  B = 2\nsubject = E.A | E.B",
        "import enum\nclass E(enum.Flag):\n  A = 1\n  B = 8\nsubject = E.A | E.B",
    ),
    "object behind a wrapper": (
        "import functools\nclass W:\n  def __init__(self, f, a): functools.update_wrapper(self, f); self.a = a\n"
        "subject = W(len, 2)",
        "import functools\nclass W:\n  def __init__(self, f, a): functools.update_wrapper(self, f); self.a = a\n"
        "subject = W(len, 9)",
    ),
    "function under another's name": (
        "import functools, jax.numpy as jnp\n@functools.wraps(jnp.tanh)\ndef subject(x): return x + 2",
        "import functools, jax.numpy as jnp\n@functools.wraps(jnp.tanh)\ndef subject(x): return x + 9",
    ),
    "partial": (
        "import functools\nsubject = functools.partial(pow, 2)",
        "import functools\nsubject = functools.partial(pow, 9)",
    ),
    "cached function": (
        "import functools\n@functools.cache\ndef subject(x): return x + 2",
        "import functools\n@functools.cache\ndef subject(x): return x + 9",
    ),
    "function of jax.jit": (
        "import jax\n@jax.jit\ndef f(x): return x + 2\ndef subject(x): return f(x)",
        "import jax\n@jax.jit\ndef f(x): return x + 9\ndef subject(x): return f(x)",
    ),
    "function with a derivative of its own": (
        "import jax\n@jax.custom_jvp\ndef f(x): return x + 2\ndef subject(x): return f(x)",
        "import jax\n@jax.custom_jvp\ndef f(x): return x + 9\ndef subject(x): return f(x)",
    ),
    "bound method": (
        "class C:\n  def __init__(self, a): self.a = a\n  def f(self, x): return x + self.a\nsubject = C(2).f",
        "class C:\n  def __init__(self, a): self.a = a\n  def f(self, x): return x + self.a\nsubject = C(9).f",
    ),
    "bound method of a builtin type": ("subject = [2].count", "subject = [9].count"),
    "pattern": ("import re\nsubject = re.compile('2')", "import re\nsubject = re.compile('9')"),
    "slice": ("subject = slice([2], 3)", "subject = slice([9], 3)"),
    "annotation of a class": ("class subject:\n  a: 'two'", "class subject:\n  a: 'nine'"),
    "order of a dict": ("subject = {'a': 1, 'b': 2}", "subject = {'b': 2, 'a': 1}"),
    "kind of a number": ("subject = [1]", "subject = [True]"),
    "masked array": (
        "import numpy as np\nsubject = np.ma.arange(3000.)",
        "import numpy as np\nsubject = np.ma.arange(3000.)\nsubject[1500] = 9",
    ),
    "polynomial": (
        "import numpy as np\nsubject = np.polynomial.Polynomial([1, 2])",
        "import numpy as np\nsubject = np.polynomial.Polynomial([1, 2 + 3e-12])",
    ),
    "order in memory": (
        "import numpy as np\nsubject = np.ones((3, 4))",
        "import numpy as np\nsubject = np.ones((3, 4), order='F')",
    ),
    "metadata of a dtype": (
        "import numpy as np\nsubject = np.dtype('f4', metadata={'a': 2})",
        "import numpy as np\nsubject = np.dtype('f4', metadata={'a': 9})",
    ),
    "data of a pytree": (
        "import jax\nclass C:\n  def __init__(self, a): self.a = a\n"
        "  def __repr__(self): return 'C'\nclass T: pass\n"
        "jax.tree_util.register_pytree_node(T, lambda t: ((), C(2)), lambda *_: T())\n"
        "subject = jax.tree.structure(T())",
        "import jax\nclass C:\n  def __init__(self, a): self.a = a\n"
        "  def __repr__(self): return 'C'\nclass T: pass\n"
        "jax.tree_util.register_pytree_node(T, lambda t: ((), C(9)), lambda *_: T())\n"
        "subject = jax.tree.structure(T())",
    ),
    "attribute of a set": (
        "class S(set): pass\nsubject = S([1])\nsubject.a = 2",
        "class S(set): pass\nsubject = S([1])\nsubject.a = 9",
    ),
    "cause of an error": (
        "subject = ValueError()\nsubject.__cause__ = ValueError(2)",
        "subject = ValueError()\nsubject.__cause__ = ValueError(9)",
    ),
    "annotation of a function": ("def subject(x: 'two'): return x", "def subject(x: 'nine'): return x"),
    "objects that are one": ("a = [1]\nsubject = (a, a)", "subject = ([1], [1])"),
}


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith("edited_")]:
        del sys.modules[name]


def defined(text: str, name: str = "edited_program") -> types.ModuleType:
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(text, f"{name}.py", "exec"), vars(module))
    return module


def subject(text: str) -> Any:
    return defined(text).subject


@pytest.mark.parametrize(("before", "after"), EDITS.values(), ids=EDITS)
def test_every_edit_changes_the_digest(before, after):
    digest = digest_of(subject(before))
    assert digest_of(subject(before)) == digest
    assert digest_of(subject(after)) != digest


USES = {
    "attribute": "import edited_costs\ndef subject(x): return x + edited_costs.A",
    "attribute of an attribute": "import edited_costs\ndef subject(x): return x + edited_costs.C.A",
    "import inside": "def subject(x):\n  import edited_costs\n  return x + edited_costs.A",
    "import of a name inside": "def subject(x):\n  from edited_costs import A\n  return x + A",
    "function of the module": "import edited_costs\ndef subject(x): return edited_costs.f(x)",
    "module in a closure": "def outer():\n  import edited_costs as m\n  return lambda x: x + m.A\nsubject = outer()",
    "module as an argument": (
        "import edited_costs\ndef f(m, x): return x + m.A\ndef subject(x): return f(edited_costs, x)"
    ),
    "name in a constant": "import edited_costs\ndef subject(x): return x + getattr(edited_costs, 'A')",
    "name made at run time": "import edited_costs\ndef subject(x): return x + getattr(edited_costs, chr(65))",
    "dict of the module": "import edited_costs\ndef subject(x): return x + edited_costs.__dict__['A']",
    "attribute getter": (
        "import edited_costs, operator\nG = operator.attrgetter('C.A')\ndef subject(x): return G(edited_costs)"
    ),
    "getattr under another name": ("import edited_costs\nG = getattr\ndef subject(x): return G(edited_costs, chr(65))"),
    "format": "import edited_costs\ndef subject(x): return '{0.A}'.format(edited_costs)",
    "attribute getter inside": (
        "import edited_costs\nfrom operator import attrgetter\ndef subject(x): return attrgetter(chr(65))(edited_costs)"
    ),
    "name in a table": (
        "import edited_costs\nT = {'scale': 'A'}\ndef read(m, n): return m.__getattribute__(n)\n"
        "def subject(x): return read(edited_costs, T['scale'])"
    ),
    "module of an object": (
        "import edited_costs\nclass O:\n  m = edited_costs\n  def f(self, x): return x + self.m.A\nsubject = O().f"
    ),
}
COSTS = "A = {0}\nclass C: A = {0}\ndef f(x): return x + A"


@pytest.mark.parametrize("text", USES.values(), ids=USES)
def test_values_of_modules_count_where_code_reads_them(text):
    digests = []
    for number in (2, 9, 2):
        defined(COSTS.format(number), "edited_costs")
        digests.append(digest_of(subject(text)))
    assert digests[0] == digests[2] != digests[1]


def test_packages_of_an_import_count(tmp_path, monkeypatch):
    """`import package.module` inside of a function binds the package too."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_package").mkdir()
    (tmp_path / "edited_package" / "module.py").write_text("")
    (tmp_path / "edited_package" / "__init__.py").write_text("A = 2")
    text = "def subject(x):\n  import edited_package.module\n  return x + edited_package.A"
    digest = digest_of(subject(text))
    sys.modules["edited_package"].A = 9
    assert digest_of(subject(text)) != digest


def test_other_names_of_a_module_do_not_count():
    digests = []
    for text in ("A = 2\nB = 2", "A = 2\nB = 9"):
        defined(text, "edited_costs")
        digests.append(digest_of(subject(USES["attribute"])))
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def subject(x): return open('table').read()", "subject calls open"),
        ("def subject(x): return eval('A')", "subject calls eval"),
        ("E = eval\ndef subject(x): return E('A')", r"its code uses builtins\.eval"),
        ("import numpy as np\nL = np.loadtxt\ndef subject(x): return L('table')", r"its code uses numpy\.loadtxt"),
        ("import numpy as np\nsubject = np.frompyfunc(lambda x: 3, 1, 1)", "has no code in Python"),
        ("def subject(x): return globals()['A']", "subject calls globals"),
        ("A = 2\ndef subject(x): return subject.__globals__['A']", "subject reads __globals__"),
        ("import os\ndef subject(x): return os.environ['A']", "its code uses the module os"),
        ("import time\ndef subject(x): return time.time()", "its code uses the module time"),
        ("from time import time\ndef subject(x): return time()", r"its code uses time\.time"),
        ("def subject(x):\n  import random\n  return random.random()", "its code uses the module random"),
        ("import numpy as np\ndef subject(x): return np.load('table.npy')", r"its code uses numpy\.load"),
        ("import numpy as np\ndef subject(x): return np.random.rand()", r"its code uses the module numpy\.random"),
        ("from scipy.io import loadmat\ndef subject(x): return loadmat('table')", r"its code uses scipy\.io\."),
        ("import pytest\ndef subject(x): return pytest.approx(x)", "its code uses the module pytest"),
        ("from pytest import approx\ndef subject(x): return approx(x)", r"its code uses _pytest\.approx\.approx"),
        ("import functools, pytest\nF = functools.partial(pytest.approx, 2)\ndef subject(x): return F()", "_pytest"),
        ("import threading\nL = threading.Lock()\ndef subject(x): return L", "a value of type _thread.lock"),
        (
            "f = open(__file__) if 0 else iter(())\nclass subject: F = (x for x in ())",
            "a value of type builtins.generator",
        ),
    ],
)
def test_code_that_reads_more_than_values_has_none(text, reason):
    with pytest.raises(NoDigestError, match=reason):
        digest_of(subject(text))


@pytest.mark.parametrize("value", [[3], {"a": 3}, types.SimpleNamespace(a=3), len])
def test_any_value_of_an_installed_module_counts(monkeypatch, value):
    import math

    text = "import math\ndef subject(x): return math.ceil(x)"
    digest = digest_of(subject(text))
    monkeypatch.setattr(math, "ceil", value)
    assert digest_of(subject(text)) != digest


MAKES_NAMES = {
    "__getattr__": "V = {0}\ndef __getattr__(name):\n  if name == 'A': return V\n  raise AttributeError(name)",
    "property": ("import types\nclass M(types.ModuleType):\n  @property\n  def A(self): return {0}\nKIND = M"),
}


@pytest.mark.parametrize("costs", MAKES_NAMES.values(), ids=MAKES_NAMES)
def test_modules_that_make_attributes_count(costs):
    digests = []
    for number in (2, 9, 2):
        module = defined(costs.format(number), "edited_costs")
        module.__class__ = getattr(module, "KIND", types.ModuleType)
        digests.append(digest_of(subject(USES["attribute"])))
    assert digests[0] == digests[2] != digests[1]


def test_submodules_that_a_function_imports_count(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_package").mkdir()
    (tmp_path / "edited_package" / "__init__.py").write_text("")
    digests = []
    for number in (2, 9):
        (tmp_path / "edited_package" / "costs.py").write_text(f"A = {number}#{'x' * number}")
        for name in [name for name in sys.modules if name.startswith("edited_package")]:
            del sys.modules[name]
        digests.append(digest_of(subject("def subject(x):\n  from edited_package import costs\n  return x + costs.A")))
    assert digests[0] != digests[1]


def test_a_replaced_attribute_of_an_installed_module_counts(monkeypatch):
    import numpy as np

    text = "import numpy as np\ndef subject(x): return np.flip(x) + np.pi"
    digest = digest_of(subject(text))
    monkeypatch.setattr(np, "pi", 3.0)
    assert digest_of(subject(text)) != digest
    monkeypatch.undo()
    assert digest_of(subject(text)) == digest
    for own in ("def subject(x, y): return x", "import jax\n@jax.jit\ndef subject(x, y): return x"):
        monkeypatch.setattr(np, "flip", functools.wraps(np.flip)(subject(own)))
        assert digest_of(subject(text)) != digest
