"""`ipujax profile`: runs a script, and lists cycles and memory of each program that it compiled.

    ipujax profile [--save DIR] train.py [argument…]
    ipujax profile [--save DIR] [--shape NAME=SIZES] model.onnx

Input: a script or module and its arguments, or an ONNX model. Output: the script's output, then a table on standard
error, which leaves standard output to the script; with `--save`, a file for each program.
Limits: the script runs in this process, where JAX is imported already: environment variables that JAX reads at import
must be set before. Programs that other threads compile are not listed.
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
_HELP = """
Runs a script, unchanged, and lists every program that it compiled, with `ipu.jit`, Keras or a Poplar engine: cycles of
a call, the fullest tile, and the line of source that takes most. The table goes to standard error. The exit code is
that of the script. An ONNX model in its place is called once on random data. --save writes a profile of each, for
`ipujax report` and `ipujax compare`.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `profile`."""
    parser = add_command(
        commands,
        "profile",
        _run,
        summary="run a script and show what each program that it compiles costs",
        description=_HELP,
        example="ipujax profile --save profiles train.py --epochs 1",
        usage="ipujax profile [--save DIR] SCRIPT [argument ...]\n"
        "       ipujax profile [--save DIR] -m MODULE [argument ...]\n"
        "       ipujax profile [--save DIR] [--shape NAME=SIZES] [--static NAME=VALUES] MODEL.onnx",
    )
    parser.add_argument("--save", metavar="DIR", help="write a profile of each program to this folder")
    add_onnx_arguments(parser)
    add_script_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    check_environment()  # a wrong log level is an error of this command, not a traceback of the script
    DumpRequest.from_environment()
    command = script_command(args)
    folder = None if args.save is None else _folder(args.save)
    is_module = command[0] == "-m"
    script = command[is_module]
    if is_onnx_file(script) and not is_module:
        profile = onnx_profile(script, args)
        code = 0
        profiles = {Path(script).stem: profile}
    else:
        check_no_onnx_arguments(args)
        with collected_programs() as programs:
            code = _run_script(command)
        names = _distinct([program.name for program in programs])
        profiles = {name: program.profile() for name, program in zip(names, programs, strict=True)}
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
    try:  # before the script runs: a wrong folder must not cost a run
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"--save cannot make the folder {path}"
        raise ArgumentError(problem, expected="a folder that can be written", got=error.strerror) from error
    return Path(path)


# --- the script -------------------------------------------------------------------------------------------------------


def _run_script(command: Sequence[str]) -> int:
    """Run a script as Python would, and return its exit code."""
    arguments = sys.argv
    path = list(sys.path)
    try:
        if command[0] == "-m":
            sys.argv = [*command[1:]]
            sys.path = ["", *path]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*command]
            sys.path = [str(Path(command[0]).resolve().parent), *path]
            runpy.run_path(command[0], run_name="__main__")
        return 0
    except SystemExit as end:
        return _exit_code(end.code)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except Exception as error:  # of the script: printed as Python prints it
        traceback.print_exception(type(error), error, _of_script(error.__traceback__))
        return 1
    finally:
        sys.argv = arguments
        sys.path = path


def _exit_code(status: object) -> int:
    """Return the exit code of `sys.exit(status)`, which prints a status that is not a number."""
    if status is None or isinstance(status, int):
        return status or 0
    print(status, file=sys.stderr)
    return 1


def _of_script(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that run the script."""
    runner_files = (__file__, runpy.__file__, "<frozen runpy>")
    while frames is not None and frames.tb_frame.f_code.co_filename in runner_files:
        frames = frames.tb_next
    return frames


# --- the table --------------------------------------------------------------------------------------------------------


def _distinct(names: Sequence[str]) -> list[str]:
    """Return names for a table and for files, with a number after repeated ones."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in names:
        plain = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("_") or "program"
        counts[plain] += 1
        distinct.append(plain if counts[plain] == 1 else f"{plain}-{counts[plain]}")
    return distinct


def _heading(script: str, profiles: Mapping[str, Profile]) -> str:
    """Return a title with the script and the day of its run."""
    days = list(dict.fromkeys(profile.identity.day for profile in profiles.values()))
    return f"{', '.join([f'Programs of {script}', *days])}:"


def _table(profiles: Mapping[str, Profile], file: str) -> list[str]:
    if not profiles:
        return ["  none: nothing was compiled by ipu.jit, Keras or a Poplar engine in the script's own thread"]
    return table([_HEAD, *(_row(_name(name, profile, file), profile) for name, profile in profiles.items())])


def _name(name: str, profile: Profile, script: str) -> str:
    """Return the name of a program with its label, and its file if that is not the script."""
    label = profile.identity.label
    file = profile.identity.file
    return f"{label and f'{label}: '}{name}" + (f" ({file})" if file and file != script else "")


def _row(name: str, profile: Profile) -> Row:
    memory = profile.memory
    device = profile.device
    tile = f"{size(memory.max_tile_bytes)} of {size(profile.target.bytes_per_tile)}, tile {memory.worst_tile}"
    try:
        cycles = f"{profile.cycles:,}"
        time = duration(profile.seconds)
        slowest = profile.operations(1)
    except ProfileError:  # a trip count is data
        return name, device, "depend on data", "", tile, "Options(trip_counts=…) makes them known"
    limit = [f"{op.dominant} of {op.names[0]}, {100 * op.share:.0f} %, {op.origin.line}" for op in slowest]
    return name, device, cycles, time, tile, "".join(limit).rstrip(", ")
