"""Plans of lowerings: all that the lowering of a traced function reads, and the lowering itself.

traced function ──▶ LoweringPlan ──▶ key of the cache          LoweringPlan, Choice ──▶ PlannedProgram

`planned_program` imports the compiler, so import it where a function is lowered.
"""

from ipujax.lowering_plan.traced_plan import (
    LoweringPlan as LoweringPlan,
    ProgramSettings as ProgramSettings,
    compilation_steps as compilation_steps,
)
