"""The figures of `docs/reading_a_profile.md` are those of the models that its pictures show."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import Any

import pytest

from tests.examples.doc_pages import ROOT, assert_figures, excerpt

sys.path.insert(0, str(ROOT / "benchmarks"))
import doc_images

sys.path.pop(0)

PAGE = ROOT / "docs" / "reading_a_profile.md"
CHAPTERS = {"BERT-Base on 16 IPUs": "bert-base", "A transformer of 12 layers on one IPU": "transformer-loop"}


@pytest.mark.parametrize("title", CHAPTERS)
def test_code_prints_the_pasted_output(title: str, request: pytest.FixtureRequest) -> None:
    chapter = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    names: dict[str, Any] = {"profile": doc_images.profile_of(CHAPTERS[title])}
    pairs = re.findall(r"```py\n(.*?)```\n\n```text\n(.*?)```\n", chapter, re.DOTALL)
    assert len(pairs) == chapter.count("```py\n") > 1
    for code, pasted in pairs:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, "reading.py", "exec", dont_inherit=True), names)
        printed = output.getvalue()
        if request.config.getoption("--update-golden"):
            page = PAGE.read_text(encoding="utf-8")
            old, new = (f"{code}```\n\n```text\n{text}```\n" for text in (pasted, printed))
            assert page.count(old) == 1
            PAGE.write_text(page.replace(old, new), encoding="utf-8")
            continue
        kept = excerpt(pasted, printed)
        assert_figures(pasted, kept, kept)
