"""The figures of a run: graph and execution reports under Poplar's names, as data and in files."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.runtime.profile.attribution import Attribution as Attribution
    from ipujax.runtime.profile.breakdown import NO_LAYER as NO_LAYER, LayerCost as LayerCost, Operation as Operation
    from ipujax.runtime.profile.execution_trace import (
        TRACE_PHASES as TRACE_PHASES,
        ExecutionTrace as ExecutionTrace,
        Slices as Slices,
        TaskTrace as TaskTrace,
        phase_cycles_of_ipus as phase_cycles_of_ipus,
        slices as slices,
    )
    from ipujax.runtime.profile.figures import Figures as Figures
    from ipujax.runtime.profile.handed_values import HandedValues as HandedValues
    from ipujax.runtime.profile.program_costs import (
        EquationKind as EquationKind,
        PassChange as PassChange,
        ProgramNode as ProgramNode,
    )
    from ipujax.runtime.profile.serialise import (
        Where as Where,
        write_cbor as write_cbor,
        write_csv as write_csv,
        write_file as write_file,
        write_json as write_json,
        write_text as write_text,
    )
    from ipujax.runtime.profile.stage_figures import (
        STAGE_PHASES as STAGE_PHASES,
        PipelineCost as PipelineCost,
        StageCost as StageCost,
    )
    from ipujax.runtime.profile.step_costs import (
        StepCost as StepCost,
        has_backward as has_backward,
        origin_of_row as origin_of_row,
    )
    from ipujax.runtime.profile.text import (
        Row as Row,
        coloured as coloured,
        duration as duration,
        out_of_memory as out_of_memory,
        size as size,
        text_table as text_table,
        wants_colours as wants_colours,
    )
else:
    __getattr__ = lazy_names(__name__)
