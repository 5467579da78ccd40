"""Profile of one run of a program: its figures, saved and loaded, and reports of them.

Input: see `Figures`. Output: `Profile`. The text has the sections of Poplar's profile summary, in its order.
Source: Poplar & PopLibs user guide, "Profiling" and "Profile summary output".
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, Self

from ipujax.runtime.errors import ArgumentError, ArgumentValueError, ProfileError, shortened
from ipujax.runtime.files import FilePath, file_problem
from ipujax.runtime.garbage import collecting_rarely
from ipujax.runtime.host import HostData
from ipujax.runtime.markup import table
from ipujax.runtime.options import check_label
from ipujax.runtime.page import PageFrame, profile_page
from ipujax.runtime.profile.figures import Figures, Lines
from ipujax.runtime.profile.serialise import Where, path_name, write_cbor, write_file, write_json
from ipujax.runtime.profile.text import coloured, duration, share, size, wants_colours
from ipujax.runtime.report import summary as sections
from ipujax.runtime.report.chakra import chakra_files
from ipujax.runtime.report.flame_graph import speedscope, tables_as_csv
from ipujax.runtime.report.limit_sections import causes, stages
from ipujax.runtime.report.many_runs import scalars
from ipujax.runtime.report.perfetto import perfetto
from ipujax.runtime.report.profile_file import profile_content, read_profile
from ipujax.runtime.report.xspace import xspace
from ipujax.runtime.schema import saved_data
from ipujax.runtime.signatures import checking_calls
from ipujax.runtime.views import Verdict, verdict

_FEW_ITEMS = 5  # at the peak
_LEAST_HEIGHT = 100  # pixels of a page in a notebook
_FEW_LAYERS = 8  # of a summary by line
_ALL_LAYERS = 1_000  # of a summary by layer: a bound for programs with a name scope for each equation


class Profile(Figures):
    """Figures of one run of an executable, as values, files and text."""

    def __repr__(self) -> str:
        return f"Profile({self.brief})"

    def __copy__(self) -> Self:
        return self.replaced()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return copy.copy(self)  # figures never change

    def __reduce__(self) -> tuple[Any, ...]:
        # The executable and its timeline stay with the process: a pickle has what a saved profile has.
        return type(self).from_data, (saved_data(self),)

    @checking_calls("profile.with_host")
    def with_host(self, host: HostData, batches_per_call: int = 1) -> Self:
        """Return a copy of the profile with the host's times for the batches that the program was called with.

        Args:
            host: `ipu.prefetch(…).host`, or measured otherwise.
            batches_per_call: batches that each call takes, at least 1.

        Raises:
            ArgumentError: another type, or a number below 1.
        """
        if not isinstance(host, HostData):
            raise ArgumentError("profile.with_host needs a HostData", expected="batches.host", got=shortened(host))
        if not isinstance(batches_per_call, Integral) or isinstance(batches_per_call, bool) or batches_per_call < 1:
            title = "batches_per_call of profile.with_host"
            raise ArgumentError(title, expected="a whole number of at least 1", got=shortened(batches_per_call))
        return self.replaced(
            host=replace(host, batches_per_call=int(batches_per_call))
        )  # no figure depends on the host

    @checking_calls("profile.labelled")
    def labelled(self, label: str) -> Self:
        """Return a copy of the profile with another label, which titles, comparisons and saved files show.

        Args:
            label: a line of text; "" for none.

        Raises:
            ArgumentError: several lines, or no text.
        """
        check_label("the label of profile.labelled", label)
        return self.replaced(identity=replace(self.identity, label=label))  # no figure depends on the label

    @property
    def verdict(self) -> Verdict:
        """The cause whose removal saves most, as in the summary, on the page and in tables of programs.

        Raises:
            ProfileError: a trip count is data.
        """
        return verdict(self)

    def _repr_html_(self) -> str:
        """Return a short table, which notebooks show; `to_html` writes the page."""
        memory = self.memory
        rows = [("Machine", f"{self.target.num_ipus:,} × {self.target.name}")]
        try:
            rows += [("Cycles", f"{self.cycles:,}"), ("Estimated time", duration(self.seconds))]
            phases = {name.replace("_", " "): cycles for name, cycles in self.phase_cycles.items() if cycles}
            rows.append(("Phases", ", ".join(f"{name} {share(c, self.cycles).strip()}" for name, c in phases.items())))
            rows += [("Most expensive line", f"{row.origin}, {row.share:.1%}") for row in self.operations(1)]
        except ProfileError as error:  # a trip count is unknown; memory is known even so
            rows.append(("Cycles", f"unknown: {error.what}"))
        full = f"{size(memory.max_tile_bytes)} of {size(self.target.bytes_per_tile)}"
        return table((), [*rows, ("Fullest tile", f"{memory.worst_tile:,} with {full}")], self.title)

    def save(self, path: FilePath) -> None:
        """Write all figures to a file that `load` reads, on any machine.

        Args:
            path: of the file; an existing one is replaced.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a path that cannot be written, or a figure that the format lacks, such as NaN.
        """
        path_name(path)
        write_file(path, profile_content(self))

    @staticmethod
    def load(path: FilePath) -> Profile:
        """Read a saved profile: it has equal figures, text and reports, but neither executable nor timeline.

        Args:
            path: a file of `save`.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a file that is missing, is not a profile, is of another version of ipujax, or is damaged; then
                it names the first wrong field.
        """
        return Profile.from_data(read_profile(path))

    def scalars(self) -> dict[str, float]:
        """Return the figures of the run as a flat dict, for loggers such as TensorBoard's.

        Metrics of `Options.metrics` are "metrics/…".

        Returns:
            "memory/…" in bytes, "compile/…" in seconds and "unpriced_operations"; where trip counts are known also
            "cycles", "seconds", "busy_cycles", "phases/…" in cycles of the limiting IPU, and "layers/…" in busy cycles
            without the layers inside.
        """
        return scalars(self)

    def to_json(self, where: Where, *, pretty: bool = False) -> None:
        """Write both profiles as JSON: {"graphProfile": …, "executionProfile": …}.

        Args:
            where: a path, or a file open for text or bytes.
            pretty: whether to indent it.

        Raises:
            ProfileError: as `execution()`; nothing is written then.
        """
        write_json(self._graph_and_execution(), where, pretty=pretty)

    def to_cbor(self, where: Where) -> None:
        """Write both profiles as CBOR, with the data of `to_json`.

        Args:
            where: a path, or a file open for bytes.

        Raises:
            ProfileError: as `execution()`, or the extra `profile` is not installed; nothing is written then.
        """
        write_cbor(self._graph_and_execution(), where)

    def to_perfetto(self, path: FilePath) -> None:
        """Write the steps and phases of each IPU as a trace, which https://ui.perfetto.dev and chrome://tracing show.

        Args:
            path: of a file of the trace event format, which is JSON; an existing one is replaced.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: as `execution()`, or a path that cannot be written.
        """
        path_name(path)
        write_json(perfetto(self), path)

    def to_xspace(self, folder: FilePath) -> None:
        """Write the planes of the IPUs for XProf and TensorBoard, as a host of the newest run in a folder.

        Args:
            folder: the folder of `jax.profiler.trace`, whose last run then has the IPUs too; without a run one is made.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a trip count is data, or a folder that cannot be written.
        """
        path_name(folder)
        content = xspace(self)
        runs = Path(folder) / "plugins" / "profile"
        try:
            runs.mkdir(parents=True, exist_ok=True)
            latest = max((each for each in runs.iterdir() if each.is_dir()), default=runs / "ipujax")
            latest.mkdir(exist_ok=True)
        except (OSError, ValueError) as error:
            hint = "a folder that can be written"
            raise ProfileError(f"{str(runs)!r} cannot be made", got=file_problem(error), hint=hint) from error
        write_file(latest / "ipujax.xplane.pb", content)

    def to_speedscope(self, path: FilePath) -> None:
        """Write flame graphs of cycles and of bytes by layer and operation, which https://www.speedscope.app shows.

        Args:
            path: of a file of JSON; an existing one is replaced.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a trip count is data, or a path that cannot be written.
        """
        path_name(path)
        write_json(speedscope(self), path)

    def to_csv(self, folder: FilePath) -> None:
        """Write each table that has rows as comma-separated values: operations, lines, layers, causes and others.

        Args:
            folder: an existing folder; its files of these names are replaced.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a trip count is data, or a path that cannot be written.
        """
        path_name(folder)
        for name, text in tables_as_csv(self).items():
            write_file(Path(folder) / f"{name}.csv", text.encode())

    @checking_calls("profile.to_chakra")
    def to_chakra(self, directory: FilePath, *, max_steps: int = 100_000) -> list[str]:
        """Write execution traces of Chakra, one file for each IPU, which simulators of networks read.

        Args:
            directory: of the files `trace.RANK.et`, made if there is none. IPU i of n of replica r has rank r·n + i.
            max_steps: most steps of the run, each iteration of a loop counted.

        Returns:
            The paths of the files.

        Raises:
            ProfileError: a saved profile, a run of unknown length or of more steps, or a folder that cannot be written,
                or has traces of more IPUs.
        """
        name = path_name(directory)
        folder = Path(directory)
        ranks = self.replicas * self.target.num_ipus
        other = folder / f"trace.{ranks}.et"
        if os.path.exists(other):  # false for a path that no system has; to write there says why
            raise ProfileError(f"{name} has traces of more IPUs", expected=f"no {other.name}", hint="another folder")
        files = chakra_files(self, max_steps)
        paths = []
        for rank, content in files:
            with suppress(OSError, ValueError):  # the first file that cannot be written says why
                folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"trace.{rank}.et"
            write_file(path, content)
            paths.append(str(path))
        return paths

    def to_html(self, path: FilePath) -> None:
        """Write a page with the limits of the program, its time, memory, operations and source.

        Args:
            path: of the HTML file, which needs no network; an existing one is replaced.

        Raises:
            ArgumentTypeError: another type than a path.
            ProfileError: a path that cannot be written, or the extra `report` is not installed.
        """
        write_file(path, profile_page(self).encode())

    @checking_calls("profile.show")
    def show(self, height: int = 900) -> PageFrame:
        """Return the page of `to_html` in a frame, which a notebook shows as the value of a cell.

        Args:
            height: of the frame in pixels, at least 100.

        Raises:
            ArgumentValueError: a height that is no whole number, or below 100.
            ProfileError: the extra `report` is not installed.
        """
        if not isinstance(height, Integral) or isinstance(height, bool) or height < _LEAST_HEIGHT:
            expected = f"a whole number of at least {_LEAST_HEIGHT}"
            raise ArgumentValueError("height of profile.show, in pixels", expected=expected, got=shortened(height))
        return PageFrame(profile_page(self), int(height))

    def _graph_and_execution(self) -> dict[str, Any]:
        return {"graphProfile": self.graph(), "executionProfile": self.execution()}

    @checking_calls("profile.summary")
    @collecting_rarely()
    def summary(
        self,
        operations: int = 5,
        *,
        by: Literal["line", "layer"] = "line",
        lines: Lines = "user",
        show_execution_steps: bool = False,
        show_var_storage: bool = False,
        show_optimizations: bool = False,
        show_per_ipu_memory_usage: bool = False,
        show_memory_breakdown: bool = False,
        colours: bool | None = None,
    ) -> str:
        """Return the profile as text for people.

        Args:
            operations: number of the most expensive source lines to list.
            by: "line" for a list of source lines and the eight most expensive layers, "layer" for all layers.
            lines: source lines of the "user" or of a "library"; see `operations`.
            show_execution_steps: list every step of the run.
            show_var_storage: list the live variables of every step of the program.
            show_optimizations: list the seconds of each step of the compilation, and what is computed again on purpose.
            show_per_ipu_memory_usage: list the memory of each IPU.
            show_memory_breakdown: list all that is in memory at the peak, not only what takes most of the fullest tile.
            colours: use ANSI colours; None for no. `CLICOLOR=0` and `CLICOLOR_FORCE=1` in the environment override it.

        Raises:
            ArgumentValueError: an unknown `by` or `lines`, or a number of lines below 0.
        """
        if by not in ("line", "layer"):
            raise ArgumentValueError("summary must be by line or layer", expected="'line' or 'layer'", got=repr(by))
        max_layers = _ALL_LAYERS if by == "layer" else _FEW_LAYERS
        # In the order of Poplar's summary; the second value says whether a section is shown.
        sections_of_text: list[tuple[Callable[[Figures], str], bool]] = [
            (sections.headline, True),
            (sections.first_screen, True),
            (causes, True),
            (sections.target, True),
            (sections.graph, True),
            (sections.optimizations, show_optimizations),
            (sections.memory_totals, True),
            (sections.memory_by_role, True),
            (sections.memory_by_category, True),
            (sections.memory_by_type, True),
            (sections.memory_histogram, True),
            (partial(sections.memory_breakdown, max_rows=None if show_memory_breakdown else _FEW_ITEMS), True),
            (sections.attempts, True),
            (sections.memory_by_ipu, show_per_ipu_memory_usage),
            (sections.variable_storage, show_var_storage),
            (partial(sections.execution, operations=operations, lines=lines), True),
            (partial(sections.layers, max_layers=max_layers), True),
            (stages, True),
            (sections.host_data, True),
            (sections.streamed_loops, True),
            (sections.unpriced, True),
            (sections.fallbacks, True),
            (sections.emulated, True),
            (sections.slow_paths, True),
            (sections.padded_rows, True),
            (sections.unmet_bounds, True),
            (sections.computed_again, show_optimizations),
            (sections.execution_steps, show_execution_steps),
        ]
        text = "\n\n".join(filter(None, (section(self) for section, is_shown in sections_of_text if is_shown))) + "\n"
        return coloured(text) if wants_colours(colours, is_terminal=False) else text
