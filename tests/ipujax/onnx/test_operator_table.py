"""The table of operators of `docs/onnx.md`, and tables of the package that must agree with the operators.

`pytest --update-golden` writes the table, else it is compared.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator

import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

from ipujax.onnx import machine_learning, microsoft, operators  # noqa: F401, fill the table
from ipujax.onnx.reading import has_body
from ipujax.onnx.registry import OPERATORS
from tests.ipujax.onnx.guide_cases import ENTRIES
from tests.test_layering import ROOT

PAGE = ROOT / "docs" / "onnx.md"
BEGIN = "<!-- operators: written by tests/ipujax/onnx/test_operator_table.py -->\n"
END = "<!-- end of operators -->"
MICROSOFT = "com.microsoft"  # without schemas in onnx: a list of names
DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
CONVERTED = {"Upsample": "Resize", "Scatter": "ScatterElements"}  # deprecated: no newest form


def node_types(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yield domain and operator of each node of a graph and its subgraphs."""
    for node in graph.node:
        yield node.domain, node.op_type
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from node_types(attribute.g)


def implementation(domain: str, op_type: str) -> str:
    """Return how an operator is computed."""
    if op_type in CONVERTED and not domain:
        return f"converted, to {CONVERTED[op_type]}"
    if (domain, op_type) in OPERATORS:
        return "direct"
    return "function body" if has_body(domain, op_type) else "–"


def drawing() -> str:
    """Return the table as Markdown."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        cases = load_model_tests(kind="node")
    counts = Counter(key for case in cases for key in set(node_types(case.model.graph)))
    guide = Counter(entry.rpartition("-")[0] for entry in ENTRIES)
    schemas = sorted(onnx.defs.get_all_schemas(), key=lambda schema: (schema.domain, schema.name))
    rows = ["| operator | since opset | implementation | node cases | guide entries |", "|---|---|---|---|---|"]
    for schema in schemas:
        if schema.domain in DOMAINS:
            name = f"{schema.domain}:{schema.name}" if schema.domain else schema.name
            tests = f"{counts[schema.domain, schema.name] or ''} | {'' if schema.domain else guide[schema.name] or ''}"
            rows.append(f"| {name} | {schema.since_version} | {implementation(schema.domain, schema.name)} | {tests} |")
    listed = ", ".join(sorted(name for domain, name in OPERATORS if domain == MICROSOFT))
    return "\n".join(rows) + f"\n\nOf {MICROSOFT}, all of them direct: {listed}.\n"


def test_operators_are_listed_in_the_page(request: pytest.FixtureRequest):
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    drawn, after = rest.split(END)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(before + BEGIN + drawing() + END + after, encoding="utf-8")
    else:
        assert drawn == drawing(), "pytest --update-golden tests/ipujax/onnx/test_operator_table.py writes it"


def test_every_operator_but_those_of_maps_images_and_patterns_is_implemented():
    missing = {line.split(" | ")[0].lstrip("| ") for line in drawing().splitlines() if " | – | " in line}
    maps = {"ai.onnx.ml:CastMap", "ai.onnx.ml:DictVectorizer"}  # their operands are dictionaries
    assert missing == maps | {"ImageDecoder", "RegexFullMatch"}


def test_every_operator_is_run_by_a_test():
    rows = re.findall(
        r"^\| (?:[\w.]+:)?(\w+) \| \d+ \| [^|]+ \| *(\d*) *\| *(\d*) *\|$", PAGE.read_text(), re.MULTILINE
    )
    run = {name for name, node_cases, guide_entries in rows if node_cases or guide_entries}
    files = (path for folder in ("onnx", "popart") for path in (ROOT / "tests" / "ipujax" / folder).rglob("*.py"))
    named = set(re.findall(r'"(\w+)"', "".join(path.read_text(encoding="utf-8") for path in files)))
    # Not those of tests or PopART; models have none of `ipujax.early`: converted nodes of early opsets do.
    ours = {key for key, entry in OPERATORS.items() if entry.function.__module__.startswith("ipujax.onnx.")}
    assert not {(domain, name) for domain, name in ours if name not in run | named and domain != "ipujax.early"}
