"""Dumps: DOT that can be read, JSON of all that is made, tile maps, and what is kept of a pass that fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ipujax as ipu
from ipujax.lowering import passes
from ipujax.lowering.dumps.dot import Dot, quoted
from ipujax.lowering.dumps.dumps import DOT, DUMP, FOLDER, steps
from ipujax.lowering.dumps.json_forms import plain
from ipujax.lowering.jax_compat import ClosedJaxpr
from ipujax.runtime.graph import leaves
from ipujax.runtime.tensor import owners
from tests.lowering.dumps.dot_grammar import Graph, read

DEVICE = ipu.IPUModel(tiles_per_ipu=8)
X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def layers(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Calls a function several times, loops, branches."""
    block = jax.jit(lambda x: jnp.tanh(x) @ x + jnp.sin(x))
    y = jax.lax.scan(lambda x, _: (block(block(x)), None), x, length=2)[0]
    y = jax.lax.cond(y.sum() > 0, lambda y: y @ weights['a "name" \\'], lambda y: y - 1, y)
    return jax.lax.while_loop(lambda y: y.sum() < 3, lambda y: y + 1, y), jnp.float32(2)


def lowered(fun: Callable[..., Any] = layers) -> ipu.Lowered:
    return ipu.jit(fun, device=DEVICE).lower(X, {'a "name" \\': X})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "dumps" / "here"))
    return tmp_path / "dumps" / "here"


def labels(graph: Graph) -> list[str]:
    return [label.split("\n")[0] for label in graph.all_nodes().values()]


# --- DOT --------------------------------------------------------------------------------------------------------------


def test_dot_after_every_step(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv(DOT, ", ".join(f"after:{name}" for name in steps()))
    made = lowered()
    assert {path.name for path in folder.iterdir()} == {f"layers.{name}.dot" for name in steps()}
    for step in steps()[:-1]:
        graph = read((folder / f"layers.{step}.dot").read_text(encoding="utf-8"))
        assert graph.name == f"layers after {step}"
        assert {"scan", "cond", "while", "tanh", "dot_general", "output 1"} <= set(labels(graph)), step
        assert any("test_dumps.py" in label for label in graph.nodes.values())
    called = read((folder / "layers.outline.dot").read_text(encoding="utf-8"))
    assert labels(called).count("tanh") == 1 and labels(called).count("function_call") == 2  # a function is drawn once
    graph = read((folder / "layers.lower.dot").read_text(encoding="utf-8"))
    numbered = [label for label in labels(graph) if re.match(r"\d+\. \w", label)]
    assert len(numbered) == len(list(leaves(made.program)))
    assert "weights['a \"name\" \\\\']" in labels(graph)
    assert {"function <lambda>", "repeat 2"} <= {cluster.label.split(" test_")[0] for cluster in graph.all_clusters()}


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_draws_it(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv(DOT, "after:fuse,after:lower")
    lowered()
    for path in folder.iterdir():
        drawn = subprocess.run(["dot", "-Tsvg", path], capture_output=True, check=True, text=True)
        assert "<svg" in drawn.stdout and not drawn.stderr


@pytest.mark.parametrize("text", ['"', "\\", '\\"', "a\nb", "a\\nb", "ü → 漢", "<b>", "{x|y}", "\x1b\r", "", "a; b"])
def test_names_of_any_characters(text: str) -> None:
    dot = Dot(text)
    with dot.cluster(text):
        first = dot.node(text)
        second = dot.node("other", "ellipse")
    dot.edge(first, second, text, dashed=True)
    graph = read(dot.text())
    displayed = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
    assert graph.name == graph.clusters[0].label == graph.clusters[0].nodes[first] == displayed
    assert "\n" not in quoted(text) and graph.edges == [(first, second)]


def test_a_cluster_is_indented_and_ends_at_its_depth() -> None:
    dot = Dot("graph")
    with dot.cluster("inside"):
        dot.node("a")
    dot.node("b")
    indents = [len(line) - len(line.lstrip()) for line in dot.text().splitlines()]
    assert indents == [0, 2, 2, 2, 4, 4, 2, 2, 0]


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_the_whole_ir_as_json(tmp_path: Path) -> None:
    made = lowered()
    made.to_json(tmp_path / "ir.json")
    ir = json.loads((tmp_path / "ir.json").read_text(encoding="utf-8"))
    assert (ir["format"], ir["version"], ir["function"], ir["failed"]) == ("ipujax ir", 1, "layers", None)
    assert [each["name"] for each in ir["passes"]] == list(steps()[:-1])
    jaxprs = ir["jaxprs"]
    graph = ir["graph"]
    for each in ir["passes"]:
        assert [value["type"] for value in jaxprs[each["jaxpr"]]["inputs"]] == ["f32[4,4]"] * 2
    assert ir["passes"][2]["jaxpr"] == ir["passes"][3]["jaxpr"]  # there is no shard_map
    last = jaxprs[ir["passes"][-1]["jaxpr"]]
    assert len(last["equations"]) == len(made.jaxpr.eqns)
    assert [each["primitive"] for each in last["equations"]] == [eqn.primitive.name for eqn in made.jaxpr.eqns]
    assert [v["name"] for v in graph["variables"][: len(made.graph.variables)]] == [
        v.name for v in made.graph.variables
    ]
    assert len(graph["compute_sets"]) == len(made.graph.groups) and len(graph["functions"]) == 1
    assert graph["listing"] == made.as_text() == made.as_text(after="lower")


def test_names_in_jaxprs_are_of_values_made_before(tmp_path: Path) -> None:
    lowered().to_json(tmp_path / "ir.json")
    for jaxpr in json.loads((tmp_path / "ir.json").read_text(encoding="utf-8"))["jaxprs"]:
        known = {value["name"] for value in (*jaxpr["inputs"], *jaxpr["constants"])}
        for equation in jaxpr["equations"]:
            assert known >= {name for name in equation["inputs"] if isinstance(name, str)}
            known |= {value["name"] for value in equation["outputs"]}
        assert known >= {name for name in jaxpr["outputs"] if isinstance(name, str)}


def test_the_program_tree_has_every_step(tmp_path: Path) -> None:
    made = lowered()
    made.to_json(tmp_path / "ir.json")
    graph = json.loads((tmp_path / "ir.json").read_text(encoding="utf-8"))["graph"]

    def walk(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(inner for child in node["children"] for inner in walk(child))]

    nodes = [node for root in (graph["program"], *(f["body"] for f in graph["functions"])) for node in walk(root)]
    executed = {node["compute_set"] for node in nodes if node["type"] == "Execute"}
    assert executed == set(range(len(graph["compute_sets"])))
    assert {"Repeat", "RepeatWhile", "Switch", "Call", "StreamIn", "StreamOut", "Copy"} <= {n["type"] for n in nodes}
    names = [v["name"] for v in graph["variables"]]
    (read_in,) = [node for node in nodes if node.get("stream") == "x"]
    assert [names[n] for n in read_in["writes"]] == ["x"] and read_in["reads"] == []


def test_parameters_as_json() -> None:
    numbers = jax.lax.GatherDimensionNumbers((0,), (1,), (2,))
    inputs = {"a": np.int64(3), "b": (1, None, True), "c": float("nan"), "d": jnp.float32, "e": numbers, "f": layers}
    actual = plain(inputs)
    assert json.loads(json.dumps(actual, allow_nan=False)) == actual
    assert (actual["a"], actual["b"], actual["c"], actual["f"]) == (3, [1, None, True], "nan", "layers")
    assert actual["e"]["offset_dims"] == [0] and "0x" not in str(plain(object()))


@pytest.mark.parametrize("where", ["/no/such/folder/ir.json", "\0", 3])
def test_a_path_that_cannot_be_written_is_refused(where: Any) -> None:
    with pytest.raises(ipu.ArgumentError, match=r"dump (cannot be written|needs a path)"):
        lowered().to_json(where)


# --- tile maps --------------------------------------------------------------------------------------------------------


def test_the_tile_map_has_each_element_once() -> None:
    made = lowered()
    actual = json.loads(json.dumps(made.tile_map()))
    assert (actual["target"], actual["num_tiles"]) == ("mk2", 8)
    for row, variable in zip(actual["variables"], made.graph.variables, strict=True):
        owned = owners(made.graph.mappings[variable])
        tiles, counts = np.unique(owned, return_counts=True)
        assert (row["name"], row["tiles"], row["elements"]) == (variable.name, tiles.tolist(), counts.tolist())
        assert sum(row["elements"]) == variable.size
        np.testing.assert_array_equal(_owners(row), owned)


def _owners(row: dict[str, Any]) -> np.ndarray:
    """The tile of each element, from the mapping of a row alone."""
    if "intervals" in row["mapping"]:
        starts = row["mapping"]["intervals"]["starts"]
        tiles = row["mapping"]["intervals"]["tiles"]
        return np.repeat(tiles, np.diff([*starts, int(np.prod(row["shape"]))]))
    cuts = row["mapping"]["blocks"]["cuts"]
    owned = np.reshape(row["mapping"]["blocks"]["tiles"], [len(cut) - 1 for cut in cuts])
    for axis, cut in enumerate(cuts):
        owned = np.repeat(owned, np.diff(cut), axis)
    return owned.ravel()


# --- the environment --------------------------------------------------------------------------------------------------


def test_requests_of_the_environment(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv(DUMP, "ir, tiles")
    made = ipu.jit(lambda x: x + 1, device=DEVICE).lower(X)
    assert {path.name for path in folder.iterdir()} == {"lambda.ir.json", "lambda.tiles.json"}
    assert json.loads((folder / "lambda.tiles.json").read_text(encoding="utf-8")) == made.tile_map()
    assert json.loads((folder / "lambda.ir.json").read_text(encoding="utf-8"))["graph"]["listing"] == made.as_text()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            DOT,
            "after:fuze",
            r"IPUJAX_DOT names an unknown pass: 'fuze'(.|\n)*trace, discharge, inline.*lower(.|\n)*try: 'fuse'",
        ),
        (DOT, "after:fuse,dce", r"IPUJAX_DOT must name a pass(.|\n)*after:PASS(.|\n)*'dce'"),
        (DUMP, "tile", r"IPUJAX_DUMP names an unknown dump: 'tile'(.|\n)*try: 'tiles'"),
    ],
)
def test_unknown_names_are_refused(name: str, value: str, message: str, monkeypatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ipu.ArgumentError, match=message):
        lowered()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    monkeypatch.setenv(DUMP, "ir")
    with pytest.raises(ipu.ArgumentError, match="the dump cannot be written"):
        lowered()


def failing(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
    raise ZeroDivisionError("in the pass")


@pytest.mark.parametrize("asked", [False, True])
def test_dumps_name_a_failed_pass_and_have_the_forms_before_it(folder: Path, asked: bool, monkeypatch) -> None:
    broken = tuple((name, failing if name == "narrow" else run) for name, run in passes.PASSES)
    monkeypatch.setattr(passes, "PASSES", broken)
    if asked:
        monkeypatch.setenv(DUMP, "ir")
        monkeypatch.setenv(DOT, "after:inline,after:fuse")
    with pytest.raises(ZeroDivisionError) as caught:
        lowered()
    note, *_ = caught.value.__notes__  # the note on removed frames follows
    assert note.startswith("the step 'narrow' of compiling layers failed; ")
    if not asked:
        assert note.endswith("IPUJAX_DUMP=ir writes what was made before it") and not folder.exists()
        return
    assert note.endswith(f"is in {folder / 'layers.ir.json'}")
    ir = json.loads((folder / "layers.ir.json").read_text(encoding="utf-8"))
    assert ir["failed"] == {"step": "narrow", "error": "ZeroDivisionError: in the pass"} and ir["graph"] is None
    done = ["trace", *takewhile(lambda name: name != "narrow", (name for name, _ in passes.PASSES))]
    assert [each["name"] for each in ir["passes"]] == done
    assert (folder / "layers.inline.dot").exists() and not (folder / "layers.fuse.dot").exists()


def test_lowering_that_fails_is_named(folder: Path, monkeypatch) -> None:
    monkeypatch.setenv(DUMP, "ir")

    def differing(x: jax.Array) -> jax.Array:
        return x + jax.lax.axis_index("replica")

    spec = jax.sharding.PartitionSpec()
    two = ipu.jit(
        differing, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=8), replicas=2, in_specs=spec, out_specs=spec
    )
    with pytest.raises(ipu.GraphError) as caught:
        two.lower(X)
    assert "the step 'lower' of compiling differing failed" in caught.value.__notes__[0]
    ir = json.loads((folder / "differing.ir.json").read_text(encoding="utf-8"))
    assert len(ir["passes"]) == len(steps()) - 1 and ir["failed"]["error"].startswith("GraphError: ")
