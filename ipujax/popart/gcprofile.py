"""Graphcore's package gcprofile, as PopART programs use it: the reports of a session as files.

    from ipujax.popart.gcprofile import save_popart_report
    save_popart_report(session)

Source: calls in github:graphcore/examples.
"""

from __future__ import annotations

from pathlib import Path

from ipujax.front_end import write_file
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.session import InferenceSession, TrainingSession

GRAPH_REPORT = "graph.json"
EXECUTION_REPORT = "execution.json"
PROFILE = "report.profile"


def save_popart_report(session: InferenceSession | TrainingSession, log_dir: str | Path = ".") -> None:
    """Save the reports of a session: graph and execution as JSON, and the profile, which `ipu.Profile.load` reads.

    Args:
        session: that has been prepared.
        log_dir: folder of the files; made if it is not there.

    Raises:
        popart_exception: another value than a session, or a folder that cannot be made.
    """
    if not isinstance(session, InferenceSession | TrainingSession):
        raise popart_exception("save_popart_report needs a session", expected="a TrainingSession", got=repr(session))
    folder = Path(log_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"log_dir of save_popart_report cannot be made: {error.strerror}"
        raise popart_exception(message, expected="a folder", got=str(folder)) from error
    write_file(folder / GRAPH_REPORT, session.getGraphReport())
    # A program that wants a file of executions does not clear what it may ask for later.
    write_file(folder / EXECUTION_REPORT, session.getExecutionReport(resetProfile=False))
    session.getReport().save(folder / PROFILE)
