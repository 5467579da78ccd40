"""State of the compiler and its packages: a stored program or plan is used in an equal state alone.

Input: the packages that are installed, settings of JAX, and names of ipujax that the program replaced, such as passes,
rules and planners. Output: their versions and values, by name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
from jaxlib.version import __version__ as JAXLIB_VERSION

from ipujax.lowering.digests import NoDigestError, replaced_lowerings
from ipujax.runtime.names_at_import import FRONT_ENDS, import_time_ns, replaced_names

_PACKAGE = Path(__file__).parent.parent
# Folders without a part of the compiler: what front ends do shows in the traced function.
_OTHER_FOLDERS = tuple(f"/{name}" for name in (*FRONT_ENDS, "cli"))
# Settings of JAX that the lowering of a jaxpr reads.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
)


def compiler_state() -> tuple[object, ...]:
    """Return versions of packages, the state of the files of ipujax, settings of JAX, replaced names and lowerings.

    Raises:
        NoDigestError: a file of ipujax was changed after this process imported ipujax.
    """
    settings = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return installed_versions(), source_state(), settings, replaced_names(), replaced_lowerings()


@cache  # of the process: installed files do not change while it runs
def installed_versions() -> dict[str, str]:
    """Return the versions of ipujax, JAX, NumPy, Python and the machine, by name."""
    return {
        "ipujax": version("ipujax"),
        "jax": jax.__version__,
        "jaxlib": JAXLIB_VERSION,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def source_state() -> str:
    """Return a digest of names, sizes and times of the compiler's files, which change without its version."""
    files = sorted(_files(str(_PACKAGE)))
    changed = [name for name, _, time_ns in files if import_time_ns() < time_ns <= time.time_ns()]
    if changed:  # the code that runs may be that of the earlier file
        raise NoDigestError(f"the file {changed[0]} of ipujax was changed after this process imported ipujax")
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(root: str) -> list[tuple[str, int, int]]:
    """Return name, size and time of each file of the compiler below a folder."""
    files = []
    folders = [root]
    for folder in folders:  # which grows meanwhile
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".py"):
                    stat = entry.stat()
                    files.append((entry.path.removeprefix(root), stat.st_size, stat.st_mtime_ns))
                elif entry.name != "__pycache__" and entry.is_dir():
                    folders += [] if entry.path.removeprefix(root) in _OTHER_FOLDERS else [entry.path]
    return files
