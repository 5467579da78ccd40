"""Files of ipujax: one writer, and one reader, which checks all before anything is built.

content ── write_file ──▶ a whole file, or the older one as it was

figures, sections ── seal ──▶ content          file ── read_sealed ──▶ figures and sections, or a `FileError`
"""

from ipujax.runtime.files.figure_kinds import (
    numbers_of_runs as numbers_of_runs,
    runs_of as runs_of,
    total_of_runs as total_of_runs,
)
from ipujax.runtime.files.file_access import (
    DamagedError as DamagedError,
    FileError as FileError,
    FilePath as FilePath,
    ForeignError as ForeignError,
    UnreadableError as UnreadableError,
    VersionError as VersionError,
    file_problem as file_problem,
    parse_json as parse_json,
    write_file as write_file,
)
from ipujax.runtime.files.kinds import FieldError as FieldError
from ipujax.runtime.files.sealed import (
    FileKind as FileKind,
    Sealed as Sealed,
    Section as Section,
    compress as compress,
    decompress as decompress,
    read_sealed as read_sealed,
    seal as seal,
)
