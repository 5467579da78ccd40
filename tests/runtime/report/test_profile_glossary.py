"""The glossary of the profile names every category that a profile prints, and no other."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ipujax.runtime.compile import compile
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import If, Sequence
from ipujax.runtime.host import HostData
from ipujax.runtime.memory.report import CATEGORIES
from ipujax.runtime.profile import TRACE_PHASES
from ipujax.runtime.report import limit_sections, summary
from ipujax.runtime.report.profile import Profile
from ipujax.runtime.tensor.mapping import on_one_tile
from ipujax.runtime.views.answers import QUESTIONS
from ipujax.runtime.views.hints import MEMORY_HINTS, TIME_HINTS, hints
from ipujax.runtime.views.part_views import PART_LABELS, PARTS
from ipujax.runtime.views.situation import Situation
from tests.runtime.profile.profile_helpers import BOOL, TARGET, apply, codelet, inputs, variables
from tests.runtime.profile.test_reports import everything, paths

PAGE = Path(__file__).resolve().parents[3] / "docs" / "profile_glossary.md"


def rows(heading: str) -> list[str]:
    """Names in the first column of the tables under a heading."""
    (text,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return re.findall(r"^\| [`\"](.+?)[`\"] \|", text, re.MULTILINE)


def conditional() -> Profile:
    """A program whose branch has no alternative."""
    graph = Graph(TARGET)
    a, b = variables(graph, "a", "b")
    flag = graph.add_variable((), BOOL, "flag", on_one_tile(1, 0))
    decide = If(flag, apply(graph, codelet("once", 1), a, b, 4), Sequence())
    return Profile(compile(graph, Sequence(*inputs(a, flag), decide)))


@pytest.fixture(scope="module")
def profile() -> Profile:
    executable = everything()
    options = replace(executable.options, metrics={"pJ": lambda op: 0.6 * op.flops})
    return Profile(replace(executable, options=options)).with_host(HostData(1, 0.5, 0.1))


def types(data) -> set[str]:
    """Types of all programs and steps."""
    if isinstance(data, list):
        return set().union(*map(types, data))
    if not isinstance(data, dict):
        return set()
    named = {data["type"]} if isinstance(data.get("type"), str) else set()
    return named.union(*(types(value) for name, value in data.items() if name != "target"))


def glossary_path(path: str) -> str:
    """The row that explains a name: of any category, of any pass, or of a list that one row explains as a whole."""
    path = re.sub(r"^(memory\.byCategory\.)\w+(\.\w+)?", r"\1*\2", path)
    path = re.sub(r"^(memory\.byCategory\.\*\.)\w+(\.\w+)$", r"\1*\2", path)
    if path == "memory.byCategory.*":
        return "memory.byCategory"
    nested = re.match(r"optimizationInfo|memory\.liveness\.(?:\w*[vV]ariables|programs)\b", path)
    return nested[0] if nested else path


def test_memory_categories() -> None:
    assert sorted(rows("Memory categories")) == sorted(CATEGORIES)


def test_phases(profile: Profile) -> None:
    assert rows("Phases") == list(TRACE_PHASES) == list(profile.phase_cycles)


@pytest.mark.parametrize(("heading", "section"), [("Graph profile", "graph"), ("Execution profile", "execution")])
def test_names_of_the_data(heading: str, section: str, profile: Profile) -> None:
    names = set(paths(getattr(profile, section)()))
    leaves = {glossary_path(path) for path in names if not any(other.startswith(f"{path}.") for other in names)}
    listed = rows(heading)
    assert len(listed) == len(set(listed))
    assert not leaves - set(listed), "names that the glossary lacks"
    assert not set(listed) - set(map(glossary_path, names)), "names that no profile has"


def test_names_inside_of_one_row(profile: Profile) -> None:
    liveness = profile.graph()["memory"]["liveness"]
    inside = {path.split(".")[-1] for name in ("variables", "programs") for path in paths(liveness[name])}
    assert inside <= set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))


def test_types_of_programs_and_steps(profile: Profile) -> None:
    data = [made for each in (profile, conditional()) for made in (each.graph(), each.execution())]
    assert sorted(rows("Types of program and step")) == sorted(types(data))


def test_sections_of_the_summary(profile: Profile) -> None:
    everything_shown = dict.fromkeys(
        ("show_execution_steps", "show_var_storage", "show_optimizations", "show_per_ipu_memory_usage"), True
    )
    texts = [each.summary(**everything_shown) for each in (profile, conditional())]
    printed = {title for text in texts for title in re.findall(r"^(\w[^\n]*?):", text, re.MULTILINE)}
    sources = inspect.getsource(summary) + inspect.getsource(limit_sections)
    written = set(re.findall(r"(?:table|section|_list_types)\(\s*\"([^\"]+)\"", sources))
    assert sorted(rows("Sections of the summary")) == sorted(printed | written)


def test_parts_of_training() -> None:
    assert rows("Layers") == [PART_LABELS.get(part, part) for part in PARTS]


def test_figures_for_loggers(profile: Profile) -> None:
    listed = rows("Figures for loggers")
    patterns = [re.compile(re.escape(name).replace("…", ".+")) for name in listed]
    figures = profile.scalars()
    assert all(any(pattern.fullmatch(name) for pattern in patterns) for name in figures)
    assert all(any(pattern.fullmatch(name) for name in figures) for pattern in patterns)


def test_questions_and_hints() -> None:
    names = rows("Questions and hints")
    full = Situation(num_ipus=2, precision="float32", fullness=0.9, cycles_per_byte=0.5)
    phases = {phase for phase in TRACE_PHASES if hints(TIME_HINTS, replace(full, phase=phase))}
    categories = {name for name in CATEGORIES if hints(MEMORY_HINTS, replace(full, main_use=name))}
    assert sorted(names) == sorted({*QUESTIONS, *phases, "idle", *categories})
