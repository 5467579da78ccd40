"""Log lines: levels and destination of the environment, handlers of the host program, refused settings."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import ipujax as ipu
from ipujax.fit import ATTEMPTS
from ipujax.lowering.passes import PASSES
from ipujax.runtime.compile import STEPS
from ipujax.runtime.logs import log as log_module
from ipujax.runtime.logs.log import CONFIG, DESTINATION, LEVEL, LEVELS, MODULES, Log
from tests.test_layering import FILES, ROOT

FORM = re.compile(r"\[\d{4}(-\d\d){2} \d\d(:\d\d){2}\.\d{3}\] \[ipujax:(\w+)\] \[(\w+)\] .+")
DEVICE = ipu.IPUModel(tiles_per_ipu=4)


def compiled(options: ipu.Options | None = None) -> ipu.Compiled:
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x.T).sum()

    return ipu.jit(step, device=DEVICE, options=options).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).compile()


def lines(path: Path) -> list[tuple[str, str, str]]:
    """(module, level, text) of each line of a log file."""
    matches = [FORM.fullmatch(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(matches)
    return [(match[3], match[4], match[0].split("] ", 3)[3]) for match in matches if match]


@pytest.fixture
def log_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log.txt"
    monkeypatch.setenv(DESTINATION, str(path))
    return path


def test_info_names_every_pass_with_its_time_and_every_attempt(log_file: Path, monkeypatch) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    compiled()
    output = [(module, re.sub(r"[\d.,]+ ms", "", text)) for module, level, text in lines(log_file) if level == "info"]
    expected = ["trace", *(name for name, _ in PASSES), "lower", *STEPS, "attempt 1"]
    assert [text for _, text in output if "took" in text] == [f"step: {name} took " for name in expected]
    assert output[-1][0] == "fit" and "attempt 1 at 0.5 cycles per byte fits" in output[-1][1]
    assert {module for module, *_ in lines(log_file)} == {"jit", "passes", "lowering", "compile", "fit"}


@pytest.mark.parametrize(
    ("bytes_per_tile", "byte_costs"),
    [(24_000, [cost for cost, _ in ATTEMPTS]), (4096, [0.5, 16])],
    ids=["short", "hopeless"],
)
def test_logs_the_bytes_of_each_attempt(
    bytes_per_tile: int, byte_costs: list[float], log_file: Path, monkeypatch
) -> None:
    """The last attempt is the second where tiles lack a multiple of their memory."""
    monkeypatch.setenv(CONFIG, '{"fit": "INFO"}')
    small = ipu.IPUModel(tiles_per_ipu=4, bytes_per_tile=bytes_per_tile)
    with pytest.raises(ipu.TileMemoryError):
        ipu.jit(lambda x: jnp.sin(x @ x), device=small).lower(jnp.ones((128, 128))).compile()
    attempts = [text for _, _, text in lines(log_file) if "cycles per byte" in text]
    assert [float(re.search(r"at ([\d.]+) cycles per byte", text)[1]) for text in attempts] == byte_costs  # type: ignore[index]
    assert all("does not fit, the fullest tile needs at least" in text for text in attempts)


def test_each_cut_of_a_pipeline_is_logged_with_its_cycles(log_file: Path, monkeypatch) -> None:
    monkeypatch.setenv(CONFIG, '{"lowering": "INFO"}')

    def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
        for n in range(3):
            x = jnp.tanh(x @ weights[n])
        return x

    piped = ipu.pipeline(layers, micro_batches=2, reduce="stack", stages=2)
    lowered = ipu.jit(piped, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4)).lower(
        jnp.ones((3, 8, 8)), jnp.ones((4, 8))
    )
    ways = [text for _, _, text in lines(log_file) if "stages that begin at segments" in text]
    assert len(ways) > 1 and len(ways) == len(set(ways))
    assert any(f"segments {lowered.choice.cuts[0]} take" in text for text in ways)
    assert len([text for _, _, text in lines(log_file) if "stages took" in text]) == len(ways)


def test_debug_counts_the_graph_and_trace_the_tiles(log_file: Path, monkeypatch) -> None:
    monkeypatch.setenv(LEVEL, "trace")
    program = compiled()
    rows = lines(log_file)
    graph = program.executable.graph
    memory = program.profile.memory
    vertices = sum(group.num_vertices for groups in graph.groups.values() for group in groups)
    assert any(f"{len(graph.groups)} compute sets" in text and f"{vertices:,} vertices" in text for *_, text in rows)
    assert any(text.startswith(f"step: {len(graph.variables)} variables of") for *_, text in rows)
    assert any("after fuse" in text and "equations" in text for *_, text in rows)
    tiles = [text for _, level, text in rows if level == "trace"]
    assert len(tiles) == 4 and f"{memory.max_tile_bytes:,} of" in tiles[0]
    assert {level for _, level, _ in rows} == {"info", "debug", "trace"}


def test_levels_of_modules_go_before_the_level_of_all(log_file: Path, tmp_path: Path, monkeypatch) -> None:
    config = tmp_path / "levels.json"
    config.write_text('{"passes": "OFF", "compile": "DEBUG"}', encoding="utf-8")
    monkeypatch.setenv(CONFIG, str(config))
    compiled()
    assert {module for module, *_ in lines(log_file)} == {"compile"}  # no level of all: the others say nothing
    log_file.unlink()
    monkeypatch.setenv(LEVEL, "INFO")
    compiled()
    rows = lines(log_file)
    assert "passes" not in {module for module, *_ in rows}
    assert ("fit", "info") in {line[:2] for line in rows} and ("compile", "debug") in {line[:2] for line in rows}


def test_lines_go_to_the_stream_that_is_named(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    for name in ("", "stderr", "stdout"):
        monkeypatch.setenv(DESTINATION, name)
        Log("passes").info("one %s", "line")
        output = capsys.readouterr()
        named, other = (output.out, output.err) if name == "stdout" else (output.err, output.out)
        assert FORM.fullmatch(named.rstrip("\n")) and not other


def test_no_line_is_written_without_a_request(capfd, monkeypatch) -> None:
    for name in (LEVEL, CONFIG, DESTINATION):
        monkeypatch.delenv(name, raising=False)
    compiled()
    assert not any(Log(module).is_on(logging.INFO) for module in MODULES)
    assert capfd.readouterr() == ("", "")


def test_handlers_of_the_host_program_get_lines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(5, "ipujax"):
        compiled()
    names = {record.name for record in caplog.records}
    assert {"ipujax.passes", "ipujax.compile"} <= names
    assert "TRACE" in {record.levelname for record in caplog.records if record.name == "ipujax.compile"}
    caplog.clear()
    with caplog.at_level(logging.INFO, "ipujax.fit"):
        compiled()
    assert {record.name for record in caplog.records} == {"ipujax.fit"}
    assert caplog.records[-1].filename == "fit.py"


def test_off_silences_warnings_without_handlers(monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.Logger, "hasHandlers", lambda self: False)
    monkeypatch.setattr(logging.Logger, "handle", lambda self, record: print("by the library"))
    Log("jit").error("raised too")
    assert not capsys.readouterr().out
    Log("jit").warning("something")
    assert capsys.readouterr().out == "by the library\n"
    monkeypatch.setenv(LEVEL, "OFF")
    Log("jit").warning("something")
    assert not capsys.readouterr().out


def test_a_compilation_that_fails_is_an_error_line(log_file: Path, monkeypatch) -> None:
    monkeypatch.setenv(LEVEL, "ERR")

    def step(x: jax.Array) -> jax.Array:
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError):
        ipu.jit(step, device=DEVICE)(jnp.ones(3))
    assert lines(log_file) == [("jit", "err", "step: ZeroDivisionError: of the user")]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (LEVEL, "DEBGU", r"IPUJAX_LOG_LEVEL must be a log level(.|\n)*one of OFF, ERR.*(.|\n)*try: 'DEBUG'"),
        (CONFIG, '{"pases": "INFO"}', r"names an unknown module: 'pases'(.|\n)*try: 'passes'"),
        (CONFIG, '{"passes": "INF"}', r"for 'passes', must be a log level(.|\n)*try: 'INFO'"),
        (CONFIG, '{"passes": 3}', r"for 'passes', must be a log level"),
        (CONFIG, "{", r"IPUJAX_LOG_CONFIG must be JSON"),
        (CONFIG, "/no/such/file.json", r"names a file that cannot be read(.|\n)*No such file"),
        (DESTINATION, "/no/such/folder/log.txt", r"IPUJAX_LOG_DEST names a file that cannot be written"),
    ],
)
def test_refuses_an_unknown_level_module_or_file(name: str, value: str, message: str, monkeypatch) -> None:
    monkeypatch.setenv(LEVEL, "INFO")
    monkeypatch.setenv(name, value)
    with pytest.raises(ipu.ArgumentError, match=message):
        compiled()


def test_refuses_a_list_of_modules(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "levels.json"
    path.write_text('["passes"]', encoding="utf-8")
    monkeypatch.setenv(CONFIG, str(path))
    with pytest.raises(ipu.ArgumentError, match="must map modules to levels"):
        log_module.requested_level("passes")


def test_the_page_has_every_level_and_module() -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    assert all(f"| `{module}` | {says} |" in page for module, says in MODULES.items())
    assert ", ".join(f"`{level}`" for level in list(LEVELS)[1:]) in page


def test_every_log_is_of_a_known_module() -> None:
    texts = [path.read_text(encoding="utf-8") for path in FILES.values()]
    used = {name for text in texts for name in re.findall(r'\bLog\("(\w+)"\)', text)}
    assert used == set(MODULES)
    assert not [text for text in texts if re.search(r"^_LOG = logging", text, re.MULTILINE)]
