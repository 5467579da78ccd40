"""Programs as files: the directory of a cache, saved programs, computations as StableHLO, pytrees and plans as data.

Input: compiled programs and plans. Output: sealed files, see `runtime.files`, and what is read from them.
"""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names
from ipujax.storage.cache_directory import (
    CACHE_BYTES as CACHE_BYTES,
    CACHE_DIR as CACHE_DIR,
    PLAN as PLAN,
    PROGRAM as PROGRAM,
    CacheDirectory as CacheDirectory,
    CacheFile as CacheFile,
    NewFile as NewFile,
    requested_directory as requested_directory,
)
from ipujax.storage.computation import (
    COMPUTATION as COMPUTATION,
    Computation as Computation,
    ExportError as ExportError,
    exported_computation as exported_computation,
    read_computation as read_computation,
)

if TYPE_CHECKING:
    from ipujax.storage.saved_program import LoadedProgram as LoadedProgram, load as load, save_program as save_program
else:  # a program of the cache is called without
    __getattr__ = lazy_names(__name__)
