"""`ipujax profile`: runs a script, and lists cycles and memory of each program that it compiled.

    ipujax profile [--save DIR] train.py [argument…]
    ipujax profile [--save DIR] [--html PATH] [--shape NAME=SIZES] model.onnx

Input: a script or module and its arguments, or an ONNX model. Output: the script's output, then a table on standard
error, which leaves standard output to the script; with `--save`, a file for each program; with `--html`, a page.
Limits: programs of other processes are not listed.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ipujax.cli import command_parts
from ipujax.cli.command_parts import Commands, add_command, at_least, logging_at_least
from ipujax.cli.script_run import applied_environment, run_script
from ipujax.compiled_programs import CompiledProgram, collected_programs
from ipujax.device import IPUModel
from ipujax.jax_scripts import NOTHING, PROGRAM_HEAD, ProfiledCalls, ProfilingRun, profiling, program_cells, types_apart
from ipujax.lowering.dumps import DumpRequest
from ipujax.runtime.errors import ArgumentError, ProfileError
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.logs import check_environment
from ipujax.runtime.profile import Row, coloured, text_table, wants_colours
from ipujax.runtime.target import PRESETS, nearest

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

_SET_BEFORE = "set it before `ipujax profile`"
_SUFFIX = ".profile"
_HEAD: Row = ("function", "device", *PROGRAM_HEAD)
_HELP = """
Runs a script, unchanged, and lists every program that it compiled: with `ipu.jit`, Keras or a Poplar engine, and, for
scripts that do not use ipujax, with `jax.jit`, `flax.nnx.jit` or `equinox.filter_jit`. JAX computes functions of
`jax.jit` as ever; those that matter are compiled for --device when the script has ended. The table goes to standard
error, with cycles of a call, the fullest tile, and the cause of most cycles with its line. The exit code is that of the
script. An ONNX model in its place is called once on random data. --save writes a profile of each, for `ipujax report`
and `ipujax compare`; --html writes the page of the function of most cycles.
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
        usage="ipujax profile [options] SCRIPT [argument ...]\n"
        "       ipujax profile [options] -m MODULE [argument ...]\n"
        "       ipujax profile [--save DIR] [--html PATH] [--shape NAME=SIZES] [--static NAME=VALUES] MODEL.onnx",
    )
    add = parser.add_argument
    add("--save", metavar="DIR", help="write a profile of each program to this folder")
    add(
        "--device",
        metavar="[N×]CHIP",
        help=f"the machine that functions of jax.jit are compiled for: {', '.join(PRESETS)} (default mk2), a number of "
        "IPUs, or both, 4×bow or 4xbow",
    )
    add(
        "--replicas",
        type=at_least(1),
        metavar="N",
        help="split batches of functions of jax.jit over N replicas, one IPU each",
    )
    add("--batch-size", type=at_least(1), metavar="N", help="rows of a batch, where --replicas cannot know them")
    add("--all", action="store_true", help="compile all functions of jax.jit, also small ones")
    add("--min-cycles", type=at_least(0.0), metavar="N", help="compile those with at least N estimated cycles a call")
    add(
        "--only", action="append", default=[], metavar="NAME", help="compile those of this name; may come several times"
    )
    add(
        "--trip-count",
        action="append",
        default=[],
        metavar="LOOP=N",
        help="iterations of a loop whose count is data, by its name, in place of those of the calls",
    )
    page_help = (
        "write the page of the function of jax.jit of most cycles of all calls; without any, of another program, or of "
        "the ONNX model"
    )
    add("--html", metavar="PATH", help=page_help)
    command_parts.add_onnx_arguments(parser)
    command_parts.add_script_arguments(parser)


def _run(args: argparse.Namespace) -> int:
    check_environment()  # a wrong log level is an error of this command, not a traceback of the script
    DumpRequest.from_environment()
    command = command_parts.script_command(args, takes_models=True)
    if args.save is not None:
        _make_folder(args.save)
    is_module = command[0] == "-m"
    script = command[is_module]
    if command_parts.is_onnx_file(script) and not is_module:
        _check_no_jax_arguments(args)
        _show(script, Path(script).name, {Path(script).stem: command_parts.onnx_profile(script, args)}, None, args, {})
        return 0
    command_parts.check_no_onnx_arguments(args)
    process = os.getpid()
    device = None if args.device is None else _device(args.device)
    file = f"{script.rpartition('.')[2]}.py" if is_module else Path(script).name
    with ExitStack() as stack:
        programs = stack.enter_context(collected_programs())
        run = stack.enter_context(_profiling(args, device))
        without_effect = stack.enter_context(applied_environment())

        def show() -> None:
            stack.close()
            for name in sorted(without_effect):
                print(f"{name} was changed by the script, without effect: {_SET_BEFORE}", file=sys.stderr)
            names = _distinct([program.name for program in programs])
            profiles = {name: program.profile() for name, program in zip(names, programs, strict=True)}
            types = dict(zip(names, _types_apart(programs), strict=True))
            # Scripts that log everything informative, as with absl, do not mean compilations that they know nothing of.
            with logging_at_least(logging.WARNING), collecting_rarely():
                _show(script, file, profiles, run, args, types)

        try:
            return run_script(command, at_immediate_exit=show)
        finally:
            if os.getpid() == process:  # else a child that the script has forked: the table is its parent's
                show()


def _profiling(args: argparse.Namespace, device: IPUModel | None) -> AbstractContextManager[ProfilingRun]:
    return profiling(
        device,
        every=args.all,
        min_cycles=args.min_cycles,
        only=tuple(args.only),
        replicas=1 if args.replicas is None else args.replicas,
        batch_size=args.batch_size,
        trip_counts=dict(map(_trip_count, args.trip_count)),
    )


_DEVICE = re.compile(r"(?:(?P<number>\d+)(?:[x×]|$))?(?P<chip>\w*)")


def _device(text: str) -> IPUModel:
    """Return the device of `bow`, `4` or `4×bow`."""
    match = _DEVICE.fullmatch(text)
    chip = match["chip"] if match else text
    if match is None or not text or chip not in ("", *PRESETS):
        expected = f"{', '.join(PRESETS)}, a number of IPUs, or both, as 4×bow"
        raise ArgumentError(
            "--device is no machine", expected=expected, got=text, hint=nearest(chip, list(PRESETS)) or ""
        )
    number = int(match["number"] or 1)
    return IPUModel(number, arch=chip) if chip else IPUModel(number)  # type: ignore[arg-type]


def _trip_count(text: str) -> tuple[str, int]:
    name, _, count = text.rpartition("=")
    if not name or not count.isdigit():
        hint = "--trip-count train.py:12=100, or the name of a row that says 'depend on data'"
        raise ArgumentError("--trip-count is no loop with a number", expected="LOOP=N", got=text, hint=hint)
    return name, int(count)


def _options_of_jax(args: argparse.Namespace) -> list[str]:
    """Return the options that are given, and mean functions of `jax.jit` alone."""
    names = ("device", "replicas", "batch_size", "all", "min_cycles", "only", "trip_count")
    set_options = [name for name in names if (value := getattr(args, name)) or type(value) is float]  # 0.0 is one too
    return [f"--{name.replace('_', '-')}" for name in set_options]


def _check_no_jax_arguments(args: argparse.Namespace) -> None:
    """Refuse options of functions of `jax.jit` where the profiled file is an ONNX model."""
    for option in _options_of_jax(args):
        raise ArgumentError(f"{option} is for functions of jax.jit", expected="a Python file", got=args.script)


def _make_folder(path: str) -> None:
    try:  # before the script runs: a wrong folder must not cost a run
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"--save cannot make the folder {path}"
        raise ArgumentError(problem, expected="a folder that can be written", got=error.strerror) from error


def _show(
    script: str,
    file: str,
    profiles: Mapping[str, Profile],
    run: ProfilingRun | None,
    args: argparse.Namespace,
    types: Mapping[str, str],
) -> None:
    """Print the tables, and write the files that are asked for; `types` tell programs of one name apart."""
    has_rows = run is not None and bool(run.functions or run.operations)
    parts = [_heading(script, profiles), *_table(profiles, file, types)] if profiles or not has_rows else []
    parts += [str(run)] if has_rows else []
    text = "\n".join(parts)
    print(coloured(text) if wants_colours(None, is_terminal=sys.stderr.isatty()) else text, file=sys.stderr)
    functions = () if run is None else run.functions
    compiled = [row for row in functions if row.profile is not None]
    profiles = {**profiles, **_distinct_profiles(compiled, profiles)}
    for name in sorted(set(args.only) - {row.name for row in functions}):
        print(f"  no function named {name} was called", file=sys.stderr)
    unused = [] if functions or run is None else _options_of_jax(args)
    if unused:
        print(f"  no effect, without a function of jax.jit: {', '.join(unused)}", file=sys.stderr)
    if args.html is not None and run is not None and compiled:
        run.to_html(args.html)
        print(f"  wrote {args.html}, the page of {compiled[0].name}", file=sys.stderr)
    elif args.html is not None:
        _write_page(args.html, profiles)
    if args.save is not None:
        for name, profile in profiles.items():
            path = Path(args.save) / f"{name}{_SUFFIX}"
            profile.save(path)
            print(f"  saved {path}", file=sys.stderr)


def _write_page(path: str, profiles: Mapping[str, Profile]) -> None:
    """Write the page of the program of most cycles, where no function of `jax.jit` was compiled."""
    cycles: dict[str, int] = {}
    for name, profile in profiles.items():
        with suppress(ProfileError):  # a trip count is data
            cycles[name] = profile.cycles
    if not cycles:
        print(f"  {path} is not written: no function whose cycles are known was compiled", file=sys.stderr)
        return
    name = max(cycles, key=cycles.__getitem__)
    profiles[name].to_html(path)
    print(f"  wrote {path}, the page of {name}", file=sys.stderr)


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


def _distinct_profiles(rows: Sequence[ProfiledCalls], profiles_by_name: Mapping[str, Profile]) -> dict[str, Profile]:
    """Return the profiles of functions by names that no other program has."""
    names = _distinct([*profiles_by_name, *(row.name for row in rows)])[len(profiles_by_name) :]
    return {name: row.profile for name, row in zip(names, rows, strict=True) if row.profile is not None}


def _heading(script: str, profiles: Mapping[str, Profile]) -> str:
    """Return a title with the script and the day of its run."""
    days = list(dict.fromkeys(profile.identity.day for profile in profiles.values()))
    return f"{', '.join([f'Programs of {script}', *days])}:"


def _types_apart(programs: Sequence[CompiledProgram]) -> list[str]:
    """Return for each program the types of its arguments that others of its name lack; "" without such others."""
    by_name: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for program in programs:
        by_name[program.name].append(program.types)
    return [types_apart(program.types, by_name[program.name]) for program in programs]


def _table(profiles: Mapping[str, Profile], file: str, types: Mapping[str, str]) -> list[str]:
    if not profiles:
        return [f"  {NOTHING}"]
    names = (_name(name, profile, file, types.get(name, "")) for name, profile in profiles.items())
    return text_table([_HEAD, *(_row(name, profile) for name, profile in zip(names, profiles.values(), strict=True))])


def _name(name: str, profile: Profile, script: str, types: str) -> str:
    """Return the name of a program with its label, its file if that is not the script, and types of arguments."""
    label = profile.identity.label
    file = profile.identity.file
    named = f"{label and f'{label}: '}{name}" + (f" ({file})" if file and file != script else "")
    return f"{named}, {types}" if types else named


def _row(name: str, profile: Profile) -> Row:
    return name, profile.device, *program_cells(profile)
