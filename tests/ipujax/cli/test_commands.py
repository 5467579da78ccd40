"""The command line: output of each command, exit codes, and wrong input as one error text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.cli import commands, main
from ipujax.lowering.rules.table import primitive_kind, primitive_names
from ipujax.runtime.target import PRESETS
from tests.sealed_parts import put_together, taken_apart
from tests.test_layering import ROOT

Capture = pytest.CaptureFixture[str]
NAMES = commands._parser().get_default("names")


@pytest.fixture(autouse=True)
def no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ipu.Profile]:
    """Profiles by the path they are saved to."""
    folder = tmp_path_factory.mktemp("profiles")
    actual = {}
    for name, dtype in (("wide", jnp.float32), ("narrow", jnp.float16)):
        shape = jax.ShapeDtypeStruct((32, 32), dtype)
        compiled = ipu.jit(lambda x: jnp.tanh(x @ x), device=ipu.IPUModel(tiles_per_ipu=8)).lower(shape).compile()
        compiled.profile.save(folder / name)
        actual[str(folder / name)] = compiled.profile
    return actual


@pytest.mark.parametrize("where", ["option", "environment"])
def test_cache_is_shown_and_cleared(capsys: Capture, monkeypatch, tmp_path, where) -> None:
    folder = ["--dir", str(tmp_path)] if where == "option" else []
    monkeypatch.setenv("IPUJAX_CACHE_DIR", "" if folder else str(tmp_path))
    # Without compute sets, whose costs are files too.
    ipu.jit(lambda x: x, device=ipu.IPUModel(tiles_per_ipu=8), options=ipu.Options(cache_dir=tmp_path)).lower(
        1.0
    ).compile()
    assert main(["cache", *folder]) == 0 and "1 programs, 1 files" in capsys.readouterr().out
    assert main(["cache", "--clear", *folder]) == 0 and "1 programs, 1 files" in capsys.readouterr().out
    assert main(["cache", "--info", *folder]) == 0 and "0 programs" in capsys.readouterr().out


# --- what commands print ----------------------------------------------------------------------------------------------


def test_info_names_versions_and_machines(capsys: Capture) -> None:
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    assert re.search(rf"^  jax +{re.escape(jax.__version__)}$", output, re.MULTILINE)
    assert all(re.search(rf"^  {name} +[\d,]+ +\d+ KiB", output, re.MULTILINE) for name in PRESETS)
    assert re.search(r"^  mk2 .* default$", output, re.MULTILINE) and "IPUModel(1 × mk2, 1472 tiles)" in output


def test_info_names_missing_packages(capsys: Capture, monkeypatch) -> None:
    monkeypatch.setattr("ipujax.cli.info_command._OPTIONAL", ("no_such_package_of_anybody",))
    assert main(["info"]) == 0 and "no_such_package_of_anybody  not installed" in capsys.readouterr().out


def test_demo_trains_and_shows_the_profile(capsys: Capture, monkeypatch) -> None:
    monkeypatch.setattr(ipu, "IPUModel", partial(ipu.IPUModel, tiles_per_ipu=16))  # plans quickly
    assert main(["demo", "--arch", "bow"]) == 0
    output = capsys.readouterr().out
    losses = [float(text) for text in re.findall(r"(\d\.\d+) before", output)]
    assert losses[-1] < 0.2 < losses[0]
    assert (
        'ipu.IPUModel(arch="bow")' in output
        and "demo.py:4 (loss_of)" in output
        and re.search(r"^  Cycles: +\d+,\d{3}$", output, re.MULTILINE)
    )


def test_report_is_the_summary(saved, tmp_path, capsys: Capture) -> None:
    for path, profile in saved.items():
        assert main(["report", path]) == 0 and capsys.readouterr().out == profile.summary()
        assert main(["report", path, "--operations", "1"]) == 0 and capsys.readouterr().out == profile.summary(1)
        page = str(tmp_path / "page.html")
        assert main(["report", path, "--operations", "1", "--html", page]) == 0
        assert capsys.readouterr().out == f"wrote {page}\n{profile.summary(1)}"
        assert main(["report", path, "--memory"]) == 0
        text = capsys.readouterr().out
        assert text == profile.summary(show_memory_breakdown=True)
        assert all(line in text for line in profile.memory.breakdown.lines())


def test_compare_is_the_comparison(saved, capsys: Capture) -> None:
    assert main(["compare", *saved]) == 0
    assert capsys.readouterr().out == f"{ipu.compare(*saved.values())}\n"


def test_a_comparison_is_shown_and_written_as_a_page(saved, tmp_path, capsys: Capture) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", *saved, "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"{ipu.compare(*saved.values())}\nwrote {page}\n" and page.exists()


def test_completion_is_a_script_of_the_shell(capsys: Capture) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "_shtab_ipujax_profile_pos_0_COMPGEN=_shtab_compgen_files" in script and "--trip-count" in script


def test_completion_names_the_package_that_it_needs(monkeypatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install ipujax[completion]" in capsys.readouterr().err


def test_three_profiles_are_compared_in_a_table(saved, tmp_path, capsys: Capture) -> None:
    first, second = saved
    assert main(["compare", first, second, first]) == 0
    text = capsys.readouterr().out
    for path, profile in saved.items():
        (row, *_) = [line for line in text.splitlines() if line.strip().startswith(Path(path).stem)]
        assert f"{profile.cycles:,}" in row
    assert main(["compare", first, second, first, "--html", str(tmp_path / "page.html")]) == 2
    assert "a page compares two profiles" in capsys.readouterr().err


def test_primitives_are_listed_by_kind(capsys: Capture) -> None:
    assert main(["primitives"]) == 0
    parts = {part.split(":")[0]: part.split("\n")[1:] for part in capsys.readouterr().out.strip().split("\n\n")}
    for title, lines in parts.items():
        count, kind = title.split(" ", 1)
        listed = [name for line in lines for name in line.split()]
        expected = [name for name in primitive_names() if primitive_kind(name) == ("–" if kind == "others" else kind)]
        assert listed == expected and len(listed) == int(count)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("dot_general", ("dot_general: tile-parallel", "by ipujax.lowering.rules.numerics.linear.dot_general_rule")),
        ("fft", ("fft: one tile", "profile.fallbacks")),
        ("jit", ("jit: inlined",)),
        ("get", ("get: others", "which replaces a Ref by its values")),
    ],
)
def test_one_primitive_is_explained(name: str, texts: tuple[str, ...], capsys: Capture) -> None:
    assert main(["primitives", name]) == 0
    output = capsys.readouterr().out
    assert all(text in output for text in texts)


def test_every_primitive_can_be_asked_for(capsys: Capture) -> None:
    assert all(main(["primitives", name]) == 0 for name in primitive_names())
    assert capsys.readouterr().out.count("\n  ") >= len(primitive_names())


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example_that_is_parsed(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    output = capsys.readouterr().out
    (example,) = re.findall(r"^example: ipujax (.*)$", output, re.MULTILINE)
    assert ended.value.code == 0 and example.split()[0] == name
    assert commands._parser().parse_args(example.split()).command.prog == f"ipujax {name}"


def test_help_lists_all_commands(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    output = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", output, re.MULTILINE) for name in NAMES) and "example: ipujax " in output


@pytest.mark.parametrize("name", NAMES)
def test_a_command_is_called_by_a_test_and_has_a_row_on_its_page(name: str) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| `{name}\b", page, re.MULTILINE)
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "ipujax").rglob("*.py"))
    assert re.search(rf"""(?:\[|main\()\[?(?:"-m", "ipujax", )?"{name}"[],]""", tests)


# --- wrong input ------------------------------------------------------------------------------------------------------


def other_version(profile: ipu.Profile, path: Path) -> None:
    profile.save(path)
    head, sections = taken_apart(path)
    path.write_bytes(put_together(head | {"version": "0"}, sections))


def cut_off(profile: ipu.Profile, path: Path) -> None:
    profile.save(path)
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, Callable[[ipu.Profile, Path], object]] = {
    "is of another version": other_version,
    "is damaged": cut_off,
    "is not a profile": lambda _, path: path.write_text("{}", encoding="utf-8"),
    "cannot be read": lambda _, path: path.mkdir(),
}


@pytest.mark.parametrize("message", BROKEN)
@pytest.mark.parametrize("command", ["report", "compare"])
def test_refuses_a_file_that_is_not_a_profile(command: str, message: str, saved, tmp_path, capsys: Capture) -> None:
    good = next(iter(saved))
    bad = tmp_path / "bad"
    BROKEN[message](saved[good], bad)
    assert main([command, *([good] if command == "compare" else []), str(bad)]) == 2
    output = capsys.readouterr()
    assert (
        not output.out
        and output.err.startswith(f"usage: ipujax {command}")
        and f"ipujax {command}: error: " in output.err
    )
    assert message in output.err and "Traceback" not in output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["primitives", "dot_generl"], r"no primitive is called 'dot_generl'(.|\n)*try: 'dot_general'"),
        (["profile"], "no script is given"),
        (["profile", "no_such.py"], "there is no file no_such.py"),
        (["profile", str(Path(__file__).parent)], "is a folder without __main__.py"),
        (["profile", "-m", "no_such_module"], "there is no module no_such_module"),
        (["profile", "--save", "/dev/null/x", __file__], "--save cannot make the folder /dev/null/x"),
        (["profile", "python", "a.py"], r"ipujax profile \.\.\. train\.py"),
        (["report", "a", "--operations", "-1"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_one_error(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert not output.out and re.search(message, output.err) and "Traceback" not in output.err


@pytest.mark.parametrize(
    ("variable", "value", "nearest"),
    [("IPUJAX_LOG_LEVEL", "INF", "INFO"), ("IPUJAX_DOT", "after:fus", "fuse"), ("IPUJAX_DUMP", "tile", "tiles")],
)
def test_the_environment_is_looked_at_before_a_script_runs(variable, value, nearest, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(variable, value)
    (tmp_path / "train.py").write_text("print('it runs')")
    assert main(["profile", str(tmp_path / "train.py")]) == 2
    output = capsys.readouterr()
    assert not output.out and variable in output.err and repr(nearest) in output.err


@pytest.mark.parametrize("arguments", [[], ["no_such"], ["report"], ["demo", "--arch", "mk9"], ["info", "--wrong"]])
def test_arguments_that_cannot_be_parsed_end_with_2(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "hint"), [("repotr", "'report', the nearest"), ("comp", "'compare'"), ("zzz", "ipujax --help")]
)
def test_a_misspelt_command_gets_the_nearest(word: str, hint: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word, "a.profile"])
    output = capsys.readouterr().err
    assert ended.value.code == 2 and f"there is no command '{word}'" in output and f"try: {hint}" in output


def test_a_misspelt_option_gets_the_nearest_and_the_usage_of_its_command(capsys: Capture) -> None:
    for arguments, hint in (
        (["report", "a", "--summery"], "\n  try: '--summary'"),
        (["info", "extra"], "arguments: extra\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        output = capsys.readouterr().err
        assert ended.value.code == 2 and output.startswith(f"usage: ipujax {arguments[0]}") and hint in output


def test_a_number_of_operations_below_0_is_refused(saved, capsys: Capture) -> None:
    assert main(["report", next(iter(saved)), "--operations", "-1"]) == 2
    assert "expected: a whole number from 0" in capsys.readouterr().err


# --- as a process -----------------------------------------------------------------------------------------------------


def test_a_pipe_that_nobody_reads_is_quiet() -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ipujax", "primitives"]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(write)
    assert ended.returncode == 141 and not ended.stderr


class Full:
    """A standard output that takes nothing."""

    def __init__(self, file: int) -> None:
        self._file = file

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._file

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        self.write("")


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch, capsys: Capture) -> None:
    with open(tmp_path / "out", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stdout", Full(file.fileno()))
        assert main(["primitives"]) == 2
    assert (
        capsys.readouterr().err
        == "ipujax primitives: error: output cannot be written\n  got: No space left on device\n"
    )


def test_a_file_that_cannot_be_written_leaves_the_output_open(capfd: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("ipujax.cli.info_command._version", lambda name: os.stat(f"/no/such/folder/{name}"))
    assert main(["info"]) == 2
    assert capfd.readouterr().err.startswith("ipujax info: error: output cannot be written '/no/such")
    print("still here", flush=True)
    assert capfd.readouterr().out == "still here\n"


# --- colours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "info", "primitives"])
@pytest.mark.parametrize(
    ("environment", "is_terminal", "expected"),
    [({}, False, False), ({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"CLICOLOR_FORCE": "1"}, False, True)],
)
def test_only_a_terminal_gets_colours(command, environment, is_terminal, expected, saved, monkeypatch, capsys) -> None:
    monkeypatch.setattr("ipujax.cli.command_parts.sys.stdout.isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main([command, *([next(iter(saved))] if command == "report" else [])]) == 0
    assert ("\x1b[" in capsys.readouterr().out) is expected


def test_prints_the_version(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"ipujax {ipu.__version__}\n"
