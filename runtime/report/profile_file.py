"""Saved profiles: sealed files of one section, or a section of other files.

Input: the figures of a profile, or a path. Output: the content of a file, or the data of a profile.
"""

from __future__ import annotations

from typing import Any

from ipujax.runtime.errors import ProfileError
from ipujax.runtime.files import (
    FieldError,
    FileError,
    FilePath,
    ForeignError,
    UnreadableError,
    VersionError,
    file_problem,
    read_sealed,
    seal,
)
from ipujax.runtime.files.sealed import section_of
from ipujax.runtime.profile.figures import Figures
from ipujax.runtime.profile.serialise import path_name
from ipujax.runtime.schema import DATA, PROFILE_FILE, check_profile, saved_data

_COPY = "save or copy it again"


def profile_section(figures: Figures, level: int = 6) -> bytes:
    """Return figures as a section of a file; `level` is that of its compression.

    Raises:
        ProfileError: a figure that no file can have, such as NaN.
    """
    data = saved_data(figures)
    try:
        check_profile(data)  # before writing: a file that `load` refuses would be noticed too late
    except FieldError as error:
        title = f"the profile cannot be saved: no file can have its {error.path}"
        raise ProfileError(title, expected=error.expected, got=error.got) from error
    return section_of(data, level)


def profile_content(figures: Figures) -> bytes:
    """Return the content of a saved profile.

    Raises:
        ProfileError: as `profile_section`.
    """
    return seal(PROFILE_FILE, {DATA: profile_section(figures)})


def read_profile(path: FilePath) -> Any:
    """Return the data of a saved profile, of the fields of the schema.

    Raises:
        ArgumentTypeError: a value that is not a path.
        ProfileError: a file that is missing, is not a profile, is damaged, or is of another version.
    """
    name = path_name(path)
    try:
        return read_sealed(path, PROFILE_FILE).data(DATA)
    except (OSError, FileError) as error:
        raise refused_profile(name, error) from error


def refused_profile(name: str, error: OSError | FileError) -> ProfileError:
    """Return the error of a profile that cannot be read; `name` is that of its file."""
    match error:
        case OSError() | UnreadableError():
            return ProfileError(f"the profile {name} cannot be read", got=file_problem(error))
        case VersionError():
            title = f"the profile {name} is of another version of ipujax"
            return ProfileError(title, expected=error.expected, got=error.got, hint="save it again with this ipujax")
        case ForeignError():
            expected = "a file that profile.save wrote"
            hint = "profile.save(path) makes one; ipu.load reads those of compiled.save"
            return ProfileError(f"{name} is not a profile", expected=expected, got=str(error), hint=hint)
        case FieldError():
            title = f"{name} is not a profile: its field {error.path} is damaged"
            return ProfileError(title, expected=error.expected, got=error.got, hint="profile.save(path) makes one")
    title = f"the profile {name} is damaged: {error.problem}"
    return ProfileError(title, expected=error.expected or None, got=error.got or None, hint=_COPY)
