"""State of the compiler and its packages: a stored program or plan is used in an equal state alone.

Input: the packages that are installed, and settings of JAX. Output: their versions and values, by name.
"""

from __future__ import annotations

import hashlib
import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

_PACKAGE = Path(__file__).parent.parent
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


def compiler_state() -> tuple[dict[str, str], str, dict[str, object]]:
    """Return the versions of the packages, the state of the files of ipujax, and the settings of JAX."""
    settings = {name: getattr(jax.config, name, None) for name in _SETTINGS}
    return installed_versions(), source_state(), settings


@cache  # of the process: installed files do not change while it runs
def installed_versions() -> dict[str, str]:
    """Return the versions of ipujax, JAX, NumPy, Python and the machine, by name."""
    return {
        "ipujax": version("ipujax"),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


@cache
def source_state() -> str:
    """Return a digest of names, sizes and times of the files of ipujax, which change without its version."""
    files = sorted(_files(_PACKAGE))
    return hashlib.sha256(repr(files).encode()).hexdigest()


def _files(folder: Path, root: str = "") -> list[tuple[str, int, int]]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{root}/{entry.name}"
            if entry.is_dir():
                files += _files(Path(entry.path), name)
            elif entry.name.endswith(".py"):
                stat = entry.stat()
                files.append((name, stat.st_size, stat.st_mtime_ns))
    return files
