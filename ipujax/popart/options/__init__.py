"""Options of sessions: three tables, and settings in groups."""

from ipujax.popart.options.option_groups import (
    AccumulateOuterFragmentSettings as AccumulateOuterFragmentSettings,
    AutodiffSettings as AutodiffSettings,
    AutomaticLossScalingSettings as AutomaticLossScalingSettings,
    BatchSerializationSettings as BatchSerializationSettings,
    CommGroup as CommGroup,
    ExecutionPhaseSettings as ExecutionPhaseSettings,
    ExperimentalSettings as ExperimentalSettings,
    ReplicatedCollectivesSettings as ReplicatedCollectivesSettings,
    TensorLocation as TensorLocation,
    TensorLocationSettings as TensorLocationSettings,
)
from ipujax.popart.options.session_options import Patterns as Patterns, SessionOptions as SessionOptions
from ipujax.popart.options.tables import (
    ALL_OPTIONS as ALL_OPTIONS,
    FIELDS_WITHOUT_EFFECT as FIELDS_WITHOUT_EFFECT,
    MAPPED as MAPPED,
    REFUSED as REFUSED,
    WARNED as WARNED,
    WITHOUT_EFFECT as WITHOUT_EFFECT,
)
from ipujax.popart.options.variable_settings import (
    ReplicaGrouping as ReplicaGrouping,
    VariableSettings as VariableSettings,
)
