"""Stages of a function that a script compiles ahead of time: calls of the compiled one are counted.

Input: `jax.stages.Traced`, `Lowered` or `Compiled`. Output: an object with its attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ipujax.jax_scripts.hidden_frames import hiding_frames
from ipujax.jax_scripts.recorder import FunctionRecord, Recorder


class ProfiledStage:
    """A stage of JAX that tells a recorder of calls.

    Args:
        stage: the stage.
        recorder: recorder of calls.
        record: returns the record of the function, None if it has none.
    """

    def __init__(self, stage: Any, recorder: Recorder, record: Callable[[], FunctionRecord | None]) -> None:
        self._stage = stage
        self._recorder = recorder
        self._record = record

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the stage, for `isinstance`."""
        return type(self._stage)

    @hiding_frames
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Return the lowered stage."""
        return ProfiledStage(self._stage.lower(*args, **kwargs), self._recorder, self._record)

    @hiding_frames
    def compile(self, *args: Any, **kwargs: Any) -> Any:
        """Return the compiled stage."""
        return ProfiledStage(self._stage.compile(*args, **kwargs), self._recorder, self._record)

    @hiding_frames
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._recorder.counts_now:
            record = self._record()
            if record is not None:
                self._recorder.count(record)
        return self._stage(*args, **kwargs)

    @hiding_frames
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_stage":
            raise AttributeError(name)
        return getattr(self._stage, name)

    def __reduce__(self) -> Any:
        return self._stage.__reduce__()

    def __repr__(self) -> str:
        return repr(self._stage)
