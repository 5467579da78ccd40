"""The profile of one run of a program: its figures, as files, from files, and as text for people.

Input: see `Figures`. Output: `Profile`. The text has the sections of Poplar's profile summary, in its order.
Source: Poplar & PopLibs user guide, "Profiling" and "Profile summary output".
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Any, Self

from ipujax.runtime.errors import ArgumentError, ArgumentValueError, ProfileError, shortened
from ipujax.runtime.host import HostData
from ipujax.runtime.markup import table
from ipujax.runtime.options import check_label
from ipujax.runtime.page import profile_page
from ipujax.runtime.profile.figures import Figures
from ipujax.runtime.profile.saved_figures import SavedFigures, saved_data
from ipujax.runtime.profile.serialise import (
    VERSION,
    FilePath,
    Where,
    checked_path,
    not_a_profile,
    read_profile,
    write_cbor,
    write_file,
    write_json,
    write_profile,
)
from ipujax.runtime.profile.text import coloured, duration, share, size, wants_colours
from ipujax.runtime.report import summary as sections
from ipujax.runtime.report.many_runs import scalars
from ipujax.runtime.report.perfetto import perfetto
from ipujax.runtime.report.stage_summary import stages
from ipujax.runtime.schema import FieldError, check_profile
from ipujax.runtime.signatures import checking_calls

_FEW_LAYERS, _ALL_LAYERS = 8, 1_000  # of a summary


class Profile(Figures):
    """What one run of an executable costs, as figures, files and text."""

    def __repr__(self) -> str:
        return f"Profile({self.brief})"

    @checking_calls("profile.with_host")
    def with_host(self, host: HostData, batches_per_call: int = 1) -> Self:
        """The same profile, which also has what the host took for the batches that the program was called with.

        Args:
            host: `ipu.prefetch(…).host`, or measured otherwise.
            batches_per_call: how many of them each call takes.

        Raises:
            ArgumentError: for something else.
        """
        if not isinstance(host, HostData):
            raise ArgumentError("profile.with_host needs a HostData", expected="batches.host", got=shortened(host))
        if not isinstance(batches_per_call, Integral) or isinstance(batches_per_call, bool) or batches_per_call < 1:
            what, expected = "batches_per_call of profile.with_host", "a whole number of at least 1"
            raise ArgumentError(what, expected=expected, got=shortened(batches_per_call))
        changed = copy.copy(self)  # with all that is computed already
        changed.__dict__["host"] = replace(host, batches_per_call=int(batches_per_call))  # figures are frozen
        return changed

    @checking_calls("profile.labelled")
    def labelled(self, label: str) -> Self:
        """The same profile under a label, which titles, comparisons and saved files have.

        Args:
            label: a line of text in the place of the label before; "" for none.

        Raises:
            ArgumentError: for something else.
        """
        check_label("the label of profile.labelled", label)
        changed = copy.copy(self)  # with all that is computed already
        changed.__dict__["renamed"] = replace(self.identity, label=label)  # figures are frozen
        return changed

    def _repr_html_(self) -> str:
        """A short table for notebooks; `to_html` makes a whole page."""
        memory, rows = self.memory, [("Machine", f"{self.target.num_ipus:,} × {self.target.name}")]
        try:
            rows += [("Cycles", f"{self.cycles:,}"), ("Estimated time", duration(self.seconds))]
            spent = {name.replace("_", " "): cycles for name, cycles in self.phase_cycles.items() if cycles}
            rows.append(("Phases", ", ".join(f"{name} {share(c, self.cycles).strip()}" for name, c in spent.items())))
            rows += [("Most expensive line", f"{one.origin}, {one.share:.1%}") for one in self.operations(1)]
        except ProfileError as error:
            rows.append(("Cycles", f"unknown: {error.what}"))
        full = f"{size(memory.max_tile_bytes)} of {size(self.target.bytes_per_tile)}"
        return table((), [*rows, ("Fullest tile", f"{memory.worst_tile:,} with {full}")], self.title)

    def save(self, path: FilePath) -> None:
        """Writes all figures to a file, from which `load` makes a profile again, on any machine.

        Args:
            path: the file; one that exists is replaced.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: a path that cannot be written, or a figure that no file can have, such as NaN.
        """
        checked_path(path)
        data = saved_data(self)
        try:
            check_profile(data, VERSION)
        except FieldError as error:
            what = f"the profile cannot be saved: no file can have its {error.path}"
            raise ProfileError(what, expected=error.expected, got=error.got) from error
        write_profile(path, data)

    @staticmethod
    def load(path: FilePath) -> Profile:
        """The profile that was saved: with the same figures, text and reports, without executable and timeline.

        Args:
            path: a file of `save`.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: a file that is not there, is no profile, is damaged, or is of another version; of a damaged
                one it names the first field that is not as it must be.
        """
        version, data = read_profile(path)
        try:
            check_profile(data, version)
        except FieldError as error:
            raise not_a_profile(path, error.path, error.got, error.expected) from error
        return SavedProfile(data)

    def scalars(self) -> dict[str, float]:
        """The figures of the run as a flat dict, for loggers such as TensorBoard's; see `many_runs.scalars`."""
        return scalars(self)

    def to_json(self, where: Where, *, pretty: bool = False) -> None:
        """Writes both profiles as JSON: {"graphProfile": …, "executionProfile": …}.

        Args:
            where: a path, or a file open for text or bytes.
            pretty: whether to indent it.

        Raises:
            ProfileError: as `execution()`; nothing is written then.
        """
        write_json(self._both(), where, pretty=pretty)

    def to_cbor(self, where: Where) -> None:
        """Writes both profiles as CBOR, the same data as `to_json`.

        Args:
            where: a path, or a file open for bytes.

        Raises:
            ProfileError: as `execution()`, or the extra `profile` is not installed; nothing is written then.
        """
        write_cbor(self._both(), where)

    def to_perfetto(self, path: FilePath) -> None:
        """Writes when each IPU does what as a trace, which https://ui.perfetto.dev and chrome://tracing show.

        Args:
            path: the file, JSON of the trace event format; one that exists is replaced.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: as `execution()`, a profile saved by an older version, or a path that cannot be written.
        """
        write_json(perfetto(self), checked_path(path))

    def to_html(self, path: FilePath) -> None:
        """Writes a page that answers what limits the program, and shows time, memory, operations and source.

        Args:
            path: the file; one that exists is replaced. It holds all it needs, and opens without network.

        Raises:
            ArgumentTypeError: something that is no path.
            ProfileError: a path that cannot be written, or the extra `report` is not installed.
        """
        write_file(path, profile_page(self).encode())

    def _both(self) -> dict[str, Any]:
        return {"graphProfile": self.graph(), "executionProfile": self.execution()}

    @checking_calls("profile.summary")
    def summary(
        self,
        operations: int = 5,
        *,
        by: str = "line",
        lines: str = "user",
        show_execution_steps: bool = False,
        show_var_storage: bool = False,
        show_optimizations: bool = False,
        show_per_ipu_memory_usage: bool = False,
        colours: bool | None = None,
    ) -> str:
        """The profile as text for people.

        Args:
            operations: how many of the most expensive source lines, or layers, to list.
            by: "line" for a list of source lines and the eight most expensive layers, "layer" for all layers.
            lines: whose source lines they are, "user" or "library"; see `operations`.
            show_execution_steps: whether to list every step of the run.
            show_var_storage: whether to list what is live at every step of the program.
            show_optimizations: whether to list what compilation measured.
            show_per_ipu_memory_usage: whether to list the memory of each IPU.
            colours: whether to use ANSI colours; not, when None. `CLICOLOR=0` and `CLICOLOR_FORCE=1` in the environment
                go before it.

        Raises:
            ArgumentValueError: for another `by` or other lines, or a number of lines below 0.
        """
        if by not in ("line", "layer"):
            raise ArgumentValueError("a summary by something else", expected="'line' or 'layer'", got=repr(by))
        most_layers = _ALL_LAYERS if by == "layer" else _FEW_LAYERS
        shown: list[tuple[Callable[[Figures], str], bool]] = [
            (sections.headline, True),
            (sections.first_screen, True),
            (sections.target, True),
            (sections.graph, True),
            (sections.optimizations, show_optimizations),
            (sections.memory_totals, True),
            (sections.memory_by_role, True),
            (sections.memory_by_category, True),
            (sections.memory_by_type, True),
            (sections.memory_histogram, True),
            (sections.largest_on_fullest_tile, True),
            (sections.memory_by_ipu, show_per_ipu_memory_usage),
            (sections.variable_storage, show_var_storage),
            (partial(sections.execution, operations=operations, lines=lines), True),
            (partial(sections.layers, most=most_layers), True),
            (stages, True),
            (sections.host_data, True),
            (sections.fallbacks, True),
            (sections.emulated, True),
            (sections.unmet_bounds, True),
            (sections.execution_steps, show_execution_steps),
        ]
        text = "\n\n".join(filter(None, (section(self) for section, is_shown in shown if is_shown))) + "\n"
        return coloured(text) if wants_colours(colours, is_terminal=False) else text


class SavedProfile(SavedFigures, Profile):
    """A profile that was saved; it has no executable and no timeline."""
