"""Scripts that fail, each in another way, for `test_script_tracebacks`: the source, or files and the command line."""

from __future__ import annotations

ARGUMENTS = "arguments"  # key of the command line, where it is not `script.py`
COMPILED = "compiled"  # keys of files that are made from a source
ARCHIVE = "archive"
LINK = "link"

SCRIPTS: dict[str, str | bytes | dict[str, str]] = {
    "import missing": """
import json
import no_such_module
""",
    "import after jax": """
import jax, jax.numpy as jnp
import no_such_module
""",
    "import jax sub": "import jax.no_such_sub\n",
    "syntax": """
x = 1
def f(:
    pass
""",
    "encoding": b"x = '\xff'\n",
    "nulls": b"x = 1\x00\n",
    "import syntax": {
        "script.py": "import broken\n",
        "broken.py": "def f(:\n",
    },
    "import raises": {
        "script.py": """
import jax
import broken
""",
        "broken.py": """
import jax.numpy as jnp
jnp.ones(3) @ jnp.ones(4)
""",
    },
    "import package": {
        "script.py": "from pkg.a import x\n",
        "pkg/__init__.py": "",
        "pkg/a.py": "from pkg import b\n",
        "pkg/b.py": "1/0\n",
    },
    "circular": {
        "script.py": "import a\n",
        "a.py": """
from b import x
y=1
""",
        "b.py": """
from a import y
x=1
""",
    },
    "importlib": {
        "script.py": """
import importlib
importlib.import_module('broken')
""",
        "broken.py": "1/0\n",
    },
    "jit trace": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    return x @ jnp.ones(5)
f(jnp.ones(3))
""",
    "jit bool": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    if x > 0:
        return x
    return -x
f(1.0)
""",
    "scan body raise": """
import jax, jax.numpy as jnp
def body(c, x):
    raise RuntimeError('in body')
jax.lax.scan(body, 0.0, jnp.ones((3, 4)))
""",
    "scan in jit": """
import jax, jax.numpy as jnp
def body(c, x):
    return c, x @ jnp.ones(5)
@jax.jit
def f(x):
    return jax.lax.scan(body, 0.0, x)
f(jnp.ones((3, 4)))
""",
    "while body": """
import jax, jax.numpy as jnp
jax.lax.while_loop(lambda x: x < 3, lambda x: x @ x, 0.0)
""",
    "cond": """
import jax, jax.numpy as jnp
jax.lax.cond(True, lambda x: x, lambda x: x @ x @ x, jnp.ones(3))
""",
    "callback": """
import jax, jax.numpy as jnp
import numpy as np
def host(x):
    raise ValueError('in callback')
@jax.jit
def f(x):
    return jax.pure_callback(host, jax.ShapeDtypeStruct((), jnp.float32), x)
print(f(1.0))
""",
    "debug callback": """
import jax, jax.numpy as jnp
def host(x):
    raise ValueError('in callback')
@jax.jit
def f(x):
    jax.debug.callback(host, x)
    return x
f(1.0).block_until_ready()
jax.effects_barrier()
""",
    "exit text": """
import sys
sys.exit('bye')
""",
    "exit number": """
import sys
sys.exit(7)
""",
    "keyboard text": """
def f():
    raise KeyboardInterrupt('now')
f()
""",
    "atexit raise": """
import atexit
def f():
    raise ValueError('late')
atexit.register(f)
""",
    "atexit exit": """
import atexit, sys
atexit.register(lambda: sys.exit(5))
""",
    "thread": """
import threading
def f():
    raise ValueError('in thread')
t = threading.Thread(target=f, name='T')
t.start()
t.join()
""",
    "thread jit": """
import jax, jax.numpy as jnp
import threading
@jax.jit
def f(x):
    return x @ jnp.ones(5)
t = threading.Thread(target=lambda: f(jnp.ones(3)), name='T')
t.start()
t.join()
""",
    "pool": """
import jax, jax.numpy as jnp
from concurrent.futures import ThreadPoolExecutor
@jax.jit
def f(x):
    return x @ jnp.ones(5)
with ThreadPoolExecutor(1) as p:
    p.submit(f, jnp.ones(3)).result()
""",
    "cause": """
try:
    1 / 0
except ZeroDivisionError as e:
    raise ValueError('second') from e
""",
    "context jit": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    return x @ jnp.ones(5)
try:
    f(jnp.ones(3))
except TypeError:
    raise ValueError('second')
""",
    "notes": """
try:
    1 / 0
except ZeroDivisionError as e:
    e.add_note('a note')
    raise
""",
    "group": """
def f(): raise ValueError('a')
errors = []
for g in (f, lambda: 1 / 0):
    try: g()
    except Exception as e: errors.append(e)
raise ExceptionGroup('both', errors)
""",
    "group jit": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    return x @ jnp.ones(5)
errors = []
try: f(jnp.ones(3))
except Exception as e: errors.append(e)
raise ExceptionGroup('one', errors)
""",
    "group import": """
errors = []
try: import no_such
except ImportError as e: errors.append(e)
raise ExceptionGroup('one', [*errors, ExceptionGroup('two', errors)])
""",
    "context import": """
try:
    import no_such
except ImportError:
    raise RuntimeError('need it')
""",
    "printed import": """
import traceback
try:
    import no_such
except ImportError:
    traceback.print_exc()
""",
    "printed jit": """
import jax, jax.numpy as jnp
import traceback
@jax.jit
def f(x):
    return x @ jnp.ones(5)
try:
    f(jnp.ones(3))
except TypeError:
    traceback.print_exc()
""",
    "printed scan": """
import jax, jax.numpy as jnp
import traceback
try:
    jax.lax.scan(lambda c, x: 1 / 0, 0.0, jnp.ones(3))
except ZeroDivisionError:
    traceback.print_exc()
""",
    "logging exc": """
import jax, jax.numpy as jnp
import logging
@jax.jit
def f(x):
    return 1 // 0
try:
    f(1.0)
except ZeroDivisionError:
    logging.exception('it failed')
""",
    "del": """
class A:
    def __del__(self):
        raise ValueError('in del')
a = A()
del a
""",
    "recursion": """
def f(n):
    return f(n + 1)
f(0)
""",
    "asyncio": """
import asyncio
async def f():
    await asyncio.sleep(0)
    raise ValueError('async')
asyncio.run(f())
""",
    "excepthook": """
import sys
def hook(k, e, t):
    print('HOOK', k.__name__, e, file=sys.stderr)
    while t: print(t.tb_frame.f_code.co_name, t.tb_lineno, file=sys.stderr); t = t.tb_next
sys.excepthook = hook
def f(): raise ValueError('x')
f()
""",
    "excepthook fails": """
import sys
def hook(*a):
    raise RuntimeError('hook fails')
sys.excepthook = hook
raise ValueError('x')
""",
    "excepthook exits": """
import sys
def hook(*a):
    sys.exit(9)
sys.excepthook = hook
raise ValueError('x')
""",
    "excepthook none": """
import sys
sys.excepthook = None
raise ValueError('x')
""",
    "warnings error": """
import warnings
warnings.simplefilter('error')
warnings.warn('loud')
""",
    "frozen error": """
class E(Exception):
    __slots__ = ()
    def __setattr__(self, n, v): raise AttributeError(n)
raise E('frozen')
""",
    "cycle": """
a = ValueError('a'); b = ValueError('b')
a.__context__ = b; b.__context__ = a
raise a
""",
    "reraised": """
import jax, jax.numpy as jnp
def f():
    try:
        jax.jit(lambda x: x @ jnp.ones(9))(jnp.ones(3))
    except TypeError as e:
        raise e
f()
""",
    "spawn": """
import multiprocessing as mp
def work(x):
    raise ValueError('child')
if __name__ == '__main__':
    p = mp.get_context('spawn').Process(target=work, args=(1,), name='P')
    p.start(); p.join()
    raise SystemExit(p.exitcode)
""",
    "spawn pool": """
import multiprocessing as mp
def work(x):
    return 1 / x
if __name__ == '__main__':
    with mp.get_context('spawn').Pool(1) as p:
        p.map(work, [0])
""",
    "flax": """
import jax, jax.numpy as jnp
from flax import nnx
m = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
@nnx.jit
def f(m, x):
    return m(x)
f(m, jnp.ones((2, 5)))
""",
    "equinox": """
import jax, jax.numpy as jnp
import equinox as eqx
m = eqx.nn.Linear(3, 4, key=jax.random.key(0))
@eqx.filter_jit
def f(m, x):
    return m(x)
f(m, jnp.ones(5))
""",
    "keras": """
import os
os.environ['KERAS_BACKEND'] = 'jax'
import keras, numpy as np
m = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
m.compile(loss='mse')
m.fit(np.ones((2, 5)), np.ones((2, 3)), verbose=0)
""",
    "grad jit": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    return (x @ jnp.ones(9)).sum()
jax.grad(f)(jnp.ones(3))
""",
    "vmap jit": """
import jax, jax.numpy as jnp
@jax.jit
def f(x):
    return x @ jnp.ones(9)
jax.vmap(f)(jnp.ones((3, 2)))
""",
    "donated": """
import jax, jax.numpy as jnp
import warnings; warnings.simplefilter('ignore')
f = jax.jit(lambda x: x + 1, donate_argnums=0)
x = jnp.ones(3)
f(x)
f(x)
""",
    "jit not callable": """
import jax, jax.numpy as jnp
jax.jit(3)
""",
    "compiled wrong": """
import jax, jax.numpy as jnp
c = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).compile()
c(jnp.ones(4))
""",
    "debug nans": """
import jax, jax.numpy as jnp
jax.config.update('jax_debug_nans', True)
@jax.jit
def f(x):
    return jnp.log(x)
f(-1.0)
""",
    "ipu": """
import jax, jax.numpy as jnp
import ipujax as ipu
@ipu.jit
def f(x):
    return x @ jnp.ones(5)
f(jnp.ones(3))
""",
    "ipu error": """
import ipujax as ipu
ipu.IPUModel(num_ipus=3)
""",
    "faulty main": {
        ARGUMENTS: "pkgdir",
        "pkgdir/__main__.py": """
def f():
    1 / 0
f()
""",
    },
    "module": {
        ARGUMENTS: "-m mod",
        "mod.py": """
def f():
    1 / 0
f()
""",
    },
    "module syntax": {
        ARGUMENTS: "-m mod",
        "mod.py": "def f(:\n",
    },
    "module pkg": {
        ARGUMENTS: "-m pkg",
        "pkg/__init__.py": "",
        "pkg/__main__.py": "from . import b\n",
        "pkg/b.py": "1/0\n",
    },
    "module pkg init": {
        ARGUMENTS: "-m pkg.m",
        "pkg/__init__.py": "1/0\n",
        "pkg/m.py": "",
    },
    "module no main": {
        ARGUMENTS: "-m pkg",
        "pkg/__init__.py": "",
    },
    "module missing sub": {
        ARGUMENTS: "-m pkg.none",
        "pkg/__init__.py": "",
    },
    "zip": {
        ARGUMENTS: "app.zip",
        ARCHIVE: """
def f():
    1 / 0
f()
""",
    },
    "link": {
        ARGUMENTS: "link.py",
        "real.py": "1/0\n",
        LINK: "real.py",
    },
    "pyc": {
        ARGUMENTS: "script.pyc",
        COMPILED: """
def f(): 1/0
f()
""",
    },
    "empty name": {
        ARGUMENTS: "script",
        "script": "1/0\n",
    },
}
