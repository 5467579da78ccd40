"""Runs a PopART program as it is: `python -m ipujax.popart [--library NAME=FILE.py] SCRIPT [ARGUMENT ...]`.

The program imports `popart`, `gcprofile` and `horovod.popart`, which are those of this package.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from ipujax.popart.exceptions import popart_exception
from ipujax.popart.serving import serve_names

_LIBRARY = """Python file that registers the operators of a library of C++, which need not exist: the file runs when the
program loads a library of this file name; may be repeated"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a program; its exit code is that of the process.

    Args:
        arguments: of the command line; those of this process when None.
    """
    parser = argparse.ArgumentParser(prog="python -m ipujax.popart", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--library", metavar="NAME=FILE.py", action="append", default=[], type=_library, help=_LIBRARY)
    parser.add_argument("script", type=Path, help="program that imports popart")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(arguments)
    if not args.script.is_file():
        parser.error(f"no script {args.script}")
    try:
        serve_names(dict(args.library))
    except popart_exception as error:
        parser.error(str(error))
    # As `python SCRIPT` has them.
    sys.argv = [str(args.script), *args.arguments]
    sys.path[0] = str(args.script.resolve().parent)
    runpy.run_path(str(args.script), run_name="__main__")


def _library(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=FILE.py, as custom_ops.so=operators.py, got {text!r}")
    return name, Path(path)


if __name__ == "__main__":
    main()
