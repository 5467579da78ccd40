"""Parts that commands share: a parser, files and modules as arguments, and output that suits the terminal.

Input: name, help texts and example of a command; its parsed arguments; texts whose headings are not indented. Output:
its parser; a command line of Python, `("train.py", "--epochs", "1")` or `("-m", "train", …)`, or, of an ONNX model in
place of a script, the profile of one call, see `ipujax.onnx.model`: this is the door of the commands to `ipujax.onnx`;
lines on standard output, with coloured headings on a terminal.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.profile import coloured, wants_colours

if TYPE_CHECKING:
    from ipujax.runtime.report import Profile

Commands = argparse._SubParsersAction  # the result of `add_subparsers`, whose type has no public name
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands[argparse.ArgumentParser],
    name: str,
    run: Run,
    *,
    summary: str,
    description: str,
    example: str,
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a command to `ipujax`, and return its parser; `run` takes the parsed arguments and returns the exit code."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=description,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, command=parser)
    return parser


def at_least(least: float) -> Callable[[str], float]:
    """Return the type of an argument that is a number of at least `least`, a whole number if that is one."""
    return partial(_number, least)


def _number(least: float, text: str) -> float:
    try:
        number = type(least)(text)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:  # NaN neither
        kind = "a whole number" if isinstance(least, int) else "a finite number"
        raise argparse.ArgumentTypeError(f"expected {kind} of at least {least:g}, got {text!r}")
    return number


def say(text: str) -> None:
    """Print a text, in colours if standard output is a terminal, unless the environment decides otherwise."""
    print(coloured(text) if has_colours() else text)


def has_colours() -> bool:
    """Return whether texts on standard output are coloured."""
    return wants_colours(None, is_terminal=sys.stdout.isatty())


@contextmanager
def logging_at_least(level: int) -> Iterator[None]:
    """Log nothing of compilations below a level to the script's handlers, unless it has set a level for ipujax."""
    logger = logging.getLogger("ipujax")
    own_level = logger.level
    logger.setLevel(own_level or level)
    try:
        yield
    finally:
        logger.setLevel(own_level)


_SUFFIX = ".onnx"


def add_onnx_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ONNX files."""
    help_shape = "shape of an input of an ONNX model, as images=8,3,224,224; sizes that the file leaves open are 1"
    help_static = "value of an input of an ONNX model that decides a shape or a branch, as rate=16000"
    parser.add_argument("--shape", metavar="NAME=SIZES", action="append", default=[], help=help_shape)
    parser.add_argument("--static", metavar="NAME=VALUES", action="append", default=[], help=help_static)


def is_onnx_file(path: str | None) -> bool:
    """Return whether a file is an ONNX model, by the end of its name."""
    return path is not None and path.endswith(_SUFFIX)


def check_no_onnx_arguments(args: argparse.Namespace) -> None:
    """Refuse options of ONNX files where the profiled file is none."""
    for option in ("shape", "static"):
        if getattr(args, option):
            raise ArgumentError(f"--{option} is for ONNX models", expected=f"a file that ends with {_SUFFIX}")


def onnx_profile(path: str, args: argparse.Namespace) -> Profile:
    """Return the profile of one call of an ONNX model on random data."""
    try:
        from ipujax.onnx.random_call import random_call_profile
    except ImportError as error:
        raise ArgumentError(f"{path} cannot be read", got=str(error), hint="pip install 'ipujax[onnx]'") from error
    return random_call_profile(path, args.shape, args.static)


def add_script_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a script or a module with its arguments, which come after all options."""
    add = parser.add_argument
    add("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, as `python -m` does")
    add("script", nargs="?", metavar="SCRIPT", help="a Python file")
    add("arguments", nargs=argparse.REMAINDER, metavar="argument", help="arguments of the script")


def script_command(args: argparse.Namespace, *, takes_models: bool = False) -> tuple[str, ...]:
    """Return the Python command line of the parsed script or module; refuse one that does not exist."""
    if args.module is not None:
        _check_module(args.module)
        return ("-m", *args.module)
    _check_script(args.script, args.command.prog)
    if is_onnx_file(args.script) and not takes_models:
        hint = f"ipujax profile {args.script}"
        raise ArgumentError(f"{args.script} is an ONNX model", expected="a Python file", hint=hint)
    return (args.script, *args.arguments)


def _check_script(script: str | None, prog: str) -> None:
    if script is None:
        raise ArgumentError("no script is given", expected="a Python file, or -m and a module")
    if script in ("python", "python3") or Path(script).name == Path(sys.executable).name:
        hint = f"leave the interpreter out: {prog} ... train.py"
        raise ArgumentError(
            "ipujax runs a Python script, not a command", expected="a Python file", got=script, hint=hint
        )
    if not Path(script).exists():
        raise ArgumentError(f"there is no file {script}", expected="a Python file", got=f"looked in {os.getcwd()}")
    if Path(script).suffix == ".ipynb":
        hint = "jupyter nbconvert --to script, or profile.save(path) and profile.to_html(path) in a cell"
        raise ArgumentError(f"{script} is a notebook", expected="a Python file", hint=hint)
    if Path(script).is_dir() and not (Path(script) / "__main__.py").exists():
        raise ArgumentError(f"{script} is a folder without __main__.py", expected="a Python file")


def _check_module(module: Sequence[str]) -> None:
    if not module:
        raise ArgumentError("no module is named after -m")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        spec = importlib.util.find_spec(module[0].partition(".")[0])  # a submodule would import its package
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise ArgumentError(f"there is no module {module[0]}", expected="a module that Python can import")
