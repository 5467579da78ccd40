"""Stages and tasks in texts, pages and traces: slow ones are named, and all views agree."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ipujax.runtime.profile.execution_trace import execution_trace
from ipujax.runtime.report import Profile
from ipujax.runtime.report.perfetto import COMPUTE_TILES, TASKS, perfetto, thread_of_tasks
from ipujax.runtime.views import Answer, answers, task_view
from ipujax.runtime.views.part_answers import STAGE
from tests.ipujax.pipeline.test_pipeline_figures import profile_of, slow_micro_batch, slow_stage


def stage_answer_of(profile: Profile) -> Answer:
    (answer,) = (answer for answer in answers(profile) if answer.question == STAGE)
    return answer


@pytest.mark.parametrize(("slow", "exchange"), [(2, "buffered"), (1, "lockstep")])
def test_a_slow_stage_is_named_on_the_first_screen(slow: int, exchange: str, tmp_path: Path) -> None:
    profile = slow_stage(slow, exchange)
    answer = stage_answer_of(profile)
    (pipeline,) = profile.pipelines
    assert answer.subject == f"stage {slow}" and f"Stage {slow} (IPU {slow}) limits" in answer.sentence
    assert "for it. Its bubble" in answer.sentence and f"{pipeline.ideal_share:.1%}" in answer.sentence
    assert f"{pipeline.bubble_share:.1%}" in answer.sentence and f"move work from stage {slow}" in answer.hint
    assert answer.share == pytest.approx(profile.stages[slow].busy_cycles / pipeline.cycles)
    assert answer.sentence in profile.summary()
    profile.to_html(tmp_path / "page.html")
    assert f"Stage {slow} (IPU {slow}) limits" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("slow", [5, 2])
def test_a_slow_micro_batch_is_named_on_the_first_screen(slow: int) -> None:
    profile = slow_micro_batch(slow)
    answer = stage_answer_of(profile)
    row = profile.stages[1]
    told = f"In stage 1, forward of micro-batch {slow} takes {row.slow_ratio:.1f} times what the others take."
    assert told in answer.sentence and "equally long" in answer.hint
    assert f"{slow}: {row.slow_ratio:.1f} × the others (forward)" in profile.summary()


def test_equal_stages_are_not_said_to_limit() -> None:
    answer = stage_answer_of(profile_of("looped-1f1b", "buffered"))
    assert "None alone" in answer.sentence and "micro-batch" not in answer.hint


def test_a_stage_that_loads_longer_than_it_computes_is_named() -> None:
    answer = stage_answer_of(slow_stage(-1, "buffered"))
    assert "Stage 0 (IPU 0) limits: its tasks and host exchanges" in answer.sentence and "io_tiles" in answer.hint


def test_a_summary_has_the_shares_of_the_profile() -> None:
    profile = profile_of("looped-1f1b", "buffered")
    text = profile.summary().split("Stages:")[1].split("\n\n")[0]
    for row in profile.stages:
        (line,) = (line.split() for line in text.splitlines() if line.split()[:2] == [f"{row.stage}", f"{row.ipu}"])
        assert line[2 : 2 + len(row.phases)] == [f"{cycles / profile.cycles:.1%}" for cycles in row.phases.values()]
    assert "Stages on one IPU share" in text


def slices_of(profile: Profile, tmp_path: Path) -> list[dict[str, Any]]:
    profile.to_perfetto(tmp_path / "trace.json")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return events


@pytest.mark.parametrize("exchange", ["lockstep", "buffered"])
def test_tasks_are_parents_of_their_steps_in_perfetto(exchange: str, tmp_path: Path) -> None:
    profile = profile_of("1f1b", exchange)
    events = slices_of(profile, tmp_path)
    tasks = {(event["pid"], event["name"]): event for event in events if event.get("cat") == "task"}
    assert len(tasks) == len(profile.tasks) and {event["tid"] for event in tasks.values()} == {COMPUTE_TILES}
    assert tasks[3, "stage 2, backward, micro-batch 5"]["args"]["work"] == "backward"
    spans = [event for event in events if event["ph"] == "X" and event["tid"] == COMPUTE_TILES and event["pid"] <= 4]
    assert sum(event["dur"] > 0 for event in spans) == len(spans)
    inside: Counter[tuple[int, str]] = Counter()
    for (pid, name), task in tasks.items():
        start = task["ts"]
        end = task["ts"] + task["dur"]
        for event in (event for event in spans if event["pid"] == pid and event is not task):
            first = event["ts"]
            last = event["ts"] + event["dur"]
            apart = last <= start + 1e-5 or first >= end - 1e-5
            within = start - 1e-5 <= first and last <= end + 1e-5
            assert apart or within
            inside[pid, name] += within and not apart and event["cat"] == "step"
    assert min(inside.values()) > 1 and len(inside) == len(tasks)


def test_arrows_join_the_tasks_that_hand_values_on(tmp_path: Path) -> None:
    profile = profile_of("1f1b", "buffered")
    events = slices_of(profile, tmp_path)
    trace = profile.tasks
    arrows = {(event["id"], event["ph"]): event for event in events if event.get("cat") == "handed on"}
    assert len(arrows) == 2 * len(trace.links()) == 2 * 2 * 3 * 8
    slices = [event for event in events if event.get("cat") == "task"]
    for number, (writer, reader) in enumerate(trace.links().tolist(), 1):
        assert abs(trace.stage[writer] - trace.stage[reader]) == 1
        assert trace.micro_batch[writer] == trace.micro_batch[reader]
        for phase, task in (("s", writer), ("f", reader)):
            arrow = arrows[number, phase]
            (bound,) = (
                event["name"]
                for event in slices
                if event["pid"] == arrow["pid"] and event["ts"] < arrow["ts"] < event["ts"] + event["dur"]
            )
            assert bound == trace.label(task)


def test_tasks_have_a_thread_of_their_own_where_steps_are_folded_across_them() -> None:
    profile = profile_of("1f1b", "buffered", micro_batches=16)
    folded = profile.executable.spans_of(None, max_steps=40)
    trace = execution_trace(profile.executable, folded, profile.timeline.clocks)
    assert thread_of_tasks(trace, profile.tasks) == TASKS
    assert thread_of_tasks(profile.execution_trace, profile.tasks) == COMPUTE_TILES


def test_a_chart_of_many_tasks_is_bounded() -> None:
    profile = profile_of("1f1b", "buffered")
    view = task_view(profile, max_tasks=20, max_links=5)
    assert len(view.start) == len(view.labels) == 20 and view.num_omitted == len(profile.tasks) - 20
    assert len(view.links) == 5 and view.num_omitted_links > 0 and view.links.max() < 20


def test_a_page_has_stages_a_chart_and_words_for_it(tmp_path: Path) -> None:
    profile = profile_of("zb-h1", "lockstep")
    profile.to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    first_tab = text.split('<section id="summary"')[1].split("</section>")[0]
    assert 'id="chart-tasks"' in first_tab and "88 tasks on 4 IPUs" in first_tab
    section = text.split('<section id="stages"')[1].split("</section>")[0]
    assert 'data-table="tasks-table"' in section and '"backward of input"' in text
    trace = text.split('<section id="trace"')[1].split("</section>")[0]
    assert "Above its slices each IPU has its tasks" in trace and "handed on" in trace
    assert all(f"{row.phases['idle'] / profile.cycles:.1%}" in section for row in profile.stages)


def test_a_saved_profile_writes_the_same(tmp_path: Path) -> None:
    profile = slow_stage(2, "buffered")
    profile.save(tmp_path / "p.ipuprofile")
    loaded = Profile.load(tmp_path / "p.ipuprofile")
    assert loaded.summary() == profile.summary() and perfetto(loaded) == perfetto(profile)
