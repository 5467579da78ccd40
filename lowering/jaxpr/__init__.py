"""Analyses of jaxprs: stages of equations, nested jaxprs, counts of operations, layers and roles of values."""

from typing import TYPE_CHECKING

from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.lowering.jaxpr.call_sites import Bodies as Bodies, CallSite as CallSite, CallSites as CallSites
    from ipujax.lowering.jaxpr.control_bodies import (
        CONTROL_FLOW as CONTROL_FLOW,
        HOLDERS as HOLDERS,
        LOOPS as LOOPS,
        Body as Body,
        bodies as bodies,
        scan_body as scan_body,
        sum_carries as sum_carries,
        while_body as while_body,
        while_condition as while_condition,
        with_scan_body as with_scan_body,
    )
    from ipujax.lowering.jaxpr.equation_numbers import EquationNumbers as EquationNumbers
    from ipujax.lowering.jaxpr.nested import (
        Rewrite as Rewrite,
        axes_around as axes_around,
        distinct_jaxprs as distinct_jaxprs,
        equations as equations,
        equations_inside as equations_inside,
        everywhere as everywhere,
        has_64_bit_values as has_64_bit_values,
        once as once,
        primitive_names as primitive_names,
        results_in_memories as results_in_memories,
        spliced as spliced,
        substituted as substituted,
        variables as variables,
        variables_read as variables_read,
        with_equations as with_equations,
        with_inner as with_inner,
    )
    from ipujax.lowering.jaxpr.op_counts import (
        Work as Work,
        elements_of as elements_of,
        value_bytes as value_bytes,
        work_of as work_of,
        work_of_equation as work_of_equation,
    )
    from ipujax.lowering.jaxpr.stage_names import (
        MICRO_BATCHES as MICRO_BATCHES,
        PIPELINE as PIPELINE,
        has_phases as has_phases,
        has_stages as has_stages,
        holds_pipeline as holds_pipeline,
        is_pipeline as is_pipeline,
        is_transposed as is_transposed,
        is_transposed_only as is_transposed_only,
        named_stages as named_stages,
        numbered_scopes as numbered_scopes,
        phase_of as phase_of,
        phase_scope as phase_scope,
        recompute_mode as recompute_mode,
        recompute_scope as recompute_scope,
        stage_name as stage_name,
        stage_scope as stage_scope,
        stages_inside as stages_inside,
    )
    from ipujax.lowering.jaxpr.value_roles import STORES as STORES, ValueRoles as ValueRoles
else:
    __getattr__ = lazy_names(__name__)
