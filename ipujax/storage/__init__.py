"""Programs as files: sealed files, the directory of a cache, computations as StableHLO.

bytes ── seal ──▶ file with head and checksum          file ── unseal ──▶ the bytes, or an error: damaged
"""

from ipujax.storage.cache_directory import (
    CACHE_BYTES as CACHE_BYTES,
    CACHE_DIR as CACHE_DIR,
    PLAN as PLAN,
    PROFILE as PROFILE,
    PROGRAM as PROGRAM,
    CacheDirectory as CacheDirectory,
    CacheFile as CacheFile,
    cache_directory as cache_directory,
    requested_directory as requested_directory,
)
from ipujax.storage.computation import (
    Computation as Computation,
    ExportError as ExportError,
    exported_computation as exported_computation,
    read_computation as read_computation,
)
from ipujax.storage.saved_program import LoadedProgram as LoadedProgram, load as load, save_program as save_program
from ipujax.storage.sealed import DamagedError as DamagedError, Head as Head, seal as seal, unseal as unseal
from ipujax.storage.versions import installed_versions as installed_versions
