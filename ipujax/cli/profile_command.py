"""`ipujax profile`: runs a script, and says what each program that it compiled costs.

    ipujax profile [--save DIR] train.py [argument…]
    ipujax profile [--save DIR] [--shape NAME=SIZES] model.onnx

Input: a script or module and its arguments, or an ONNX model. Output: its own output, then a table on standard error,
so that what the script prints stays its own; with `--save`, a file for each program.
Limits: the script runs in this process, where JAX is imported already: what JAX reads from the environment when it is
imported has to be set before. Programs that other threads compile are not seen.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from ipujax.cli.command_parser import Commands, add_command
from ipujax.cli.onnx_model import add_onnx_arguments, check_no_onnx_arguments, is_onnx_file, onnx_profile
from ipujax.cli.scripts import add_script_arguments, script_command
from ipujax.cli.terminal import Row, table
from ipujax.compiled_programs import collected_programs
from ipujax.lowering.dumps import DumpRequest
from ipujax.runtime.errors import ArgumentError, ProfileError
from ipujax.runtime.logs import check_environment
from ipujax.runtime.profile import coloured, duration, size, wants_colours
from ipujax.runtime.report import Profile

_SUFFIX = ".profile"
_INTERRUPTED = 130  # as a shell has it: 128 and the signal
_HEAD: Row = ("function", "device", "cycles", "time", "fullest tile", "limited by")
_MORE = """
Runs a script, unchanged, and lists every program that it compiled, with `ipu.jit`, Keras or a Poplar engine: cycles of
a call, the fullest tile, and the line of source that takes most. The table goes to standard error. The exit code is
that of the script. An ONNX model in its place is called once on random data. --save writes a profile of each, for
`ipujax report` and `ipujax compare`.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Adds the command `profile`."""
    parser = add_command(
        commands,
        "profile",
        _run,
        summary="run a script and show what each program that it compiles costs",
        more=_MORE,
        example="ipujax profile --save profiles train.py --epochs 1",
        usage="ipujax profile [--save DIR] SCRIPT [argument ...]\n"
        "       ipujax profile [--save DIR] -m MODULE [argument ...]\n"
        "       ipujax profile [--save DIR] [--shape NAME=SIZES] [--static NAME=VALUES] MODEL.onnx",
    )
    parser.add_argument("--save", metavar="DIR", help="write a profile of each program to this folder")
    add_onnx_arguments(parser)
    add_script_arguments(parser)


def _run(given: argparse.Namespace) -> int:
    check_environment()  # here a wrong level is an error of this command, in the script it is a traceback
    DumpRequest.from_environment()
    command = script_command(given)
    folder = None if given.save is None else _folder(given.save)
    is_module = command[0] == "-m"
    script = command[is_module]
    if is_onnx_file(script) and not is_module:
        profile = onnx_profile(script, given)
        code = 0
        profiles = {Path(script).stem: profile}
    else:
        check_no_onnx_arguments(given)
        with collected_programs() as programs:
            code = _run_script(command)
        names = _distinct([program.name for program in programs])
        profiles = {name: Profile(program.executable) for name, program in zip(names, programs, strict=True)}
    file = f"{script.rpartition('.')[2]}.py" if is_module else Path(script).name
    text = "\n".join([_heading(script, profiles), *_table(profiles, file)])
    print(coloured(text) if wants_colours(None, is_terminal=sys.stderr.isatty()) else text, file=sys.stderr)
    if folder is not None:
        for name, profile in profiles.items():
            path = folder / f"{name}{_SUFFIX}"
            profile.save(path)
            print(f"  saved {path}", file=sys.stderr)
    return code


def _folder(path: str) -> Path:
    """The folder for profiles, made before the script runs: a wrong one costs no run."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what, expected = f"--save cannot make the folder {path}", "a folder that can be written"
        raise ArgumentError(what, expected=expected, got=error.strerror) from error
    return Path(path)


# --- the script -------------------------------------------------------------------------------------------------------


def _run_script(command: Sequence[str]) -> int:
    """Runs a script as Python would, and returns its exit code."""
    arguments, path = sys.argv, list(sys.path)
    try:
        if command[0] == "-m":
            sys.argv, sys.path = [*command[1:]], ["", *path]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path = [*command], [str(Path(command[0]).resolve().parent), *path]
            runpy.run_path(command[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return _exit_code(end.code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # of the script: shown as Python shows it
        traceback.print_exception(type(error), error, _of_script(error.__traceback__))
        return 1
    finally:
        sys.argv, sys.path = arguments, path


def _exit_code(given: object) -> int:
    """What a process ends with that calls `sys.exit(given)`."""
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that run the script."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in own:
        frames = frames.tb_next
    return frames


# --- the table --------------------------------------------------------------------------------------------------------


def _distinct(names: Sequence[str]) -> list[str]:
    """Names for a table and for files: those that come again are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("_") or "program"
        seen[plain] += 1
        found.append(plain if seen[plain] == 1 else f"{plain}-{seen[plain]}")
    return found


def _heading(script: str, profiles: Mapping[str, Profile]) -> str:
    """The script, and the day it was run."""
    days = list(dict.fromkeys(profile.identity.day for profile in profiles.values()))
    return f"{', '.join([f'Programs of {script}', *days])}:"


def _table(profiles: Mapping[str, Profile], file: str) -> list[str]:
    """The lines of the table."""
    if not profiles:
        return ["  none: nothing was compiled by ipu.jit, Keras or a Poplar engine in the script's own thread"]
    return table([_HEAD, *(_row(_name(name, profile, file), profile) for name, profile in profiles.items())])


def _name(name: str, profile: Profile, script: str) -> str:
    """The name of a program with its label, and its file if that is not the script."""
    label, file = profile.identity.label, profile.identity.file
    return f"{label and f'{label}: '}{name}" + (f" ({file})" if file and file != script else "")


def _row(name: str, profile: Profile) -> Row:
    memory, device = profile.memory, profile.device
    tile = f"{size(memory.max_tile_bytes)} of {size(profile.target.bytes_per_tile)}, tile {memory.worst_tile}"
    try:
        cycles, time, most = f"{profile.cycles:,}", duration(profile.seconds), profile.operations(1)
    except ProfileError:  # a loop runs as often as its data says
        return name, device, "depend on data", "", tile, "Options(trip_counts=…) makes them known"
    limit = [f"{each.dominant} of {each.names[0]}, {100 * each.share:.0f} %, {each.origin.line}" for each in most]
    return name, device, cycles, time, tile, "".join(limit).rstrip(", ")
