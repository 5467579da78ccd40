"""`ipujax info`: versions, the default device, and the machines that are known.

Input: nothing. Output: text.
"""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from ipujax.cli.command_parts import Commands, add_command, say
from ipujax.device import IPUModel, current_device
from ipujax.runtime.profile import Row, text_table
from ipujax.runtime.target import PRESETS, Target

_PACKAGES = ("ipujax", "jax", "jaxlib", "numpy")
_OPTIONAL = ("keras", "cbor2")
_HELP = """
Says which versions are installed, which machine `ipu.jit` compiles for unless another is named, and which machines
there are; docs/machine.md has every constant of them, with its source.
"""


def add(commands: Commands[argparse.ArgumentParser]) -> None:
    """Add the command `info`."""
    summary = "show versions, the default device and the machines that are known"
    add_command(commands, "info", _run, summary=summary, description=_HELP, example="ipujax info")


def _run(args: argparse.Namespace) -> int:
    del args
    versions = [("python", platform.python_version()), *((name, _version(name)) for name in (*_PACKAGES, *_OPTIONAL))]
    head: Row = ("machine", "tiles an IPU", "memory a tile", "clock", "memory an IPU", "")
    default = current_device()
    default_name = default.target.name if isinstance(default, IPUModel) else None
    rows = [_machine(name, target, name == default_name) for name, target in PRESETS.items()]
    say("\n".join(["Versions:", *text_table(versions), "", "Machines:", *text_table([head, *rows]), ""]))
    say(f"Default device:\n  {default!r}")
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _machine(name: str, target: Target, is_default: bool) -> Row:
    memory_kib = target.bytes_per_tile / 1024
    total_mib = target.bytes_per_tile * target.tiles_per_ipu / (1 << 20)
    clock = f"{target.clock_hz / 1e9:.3f} GHz"
    size = f"{memory_kib:,.0f} KiB", clock, f"{total_mib:,.0f} MiB"
    return name, f"{target.tiles_per_ipu:,}", *size, "default" if is_default else ""
