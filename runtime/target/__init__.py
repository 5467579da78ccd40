"""The machine: constants of a target with their sources, presets of real chips, and the page of them."""

from ipujax.runtime.target.machines import (
    Machines as Machines,
    TargetArray as TargetArray,
    constants_of as constants_of,
    held_constants as held_constants,
    held_over as held_over,
    machines_of as machines_of,
    perturbed_constants as perturbed_constants,
    program_changes as program_changes,
    program_constants as program_constants,
    recalled_value as recalled_value,
)
from ipujax.runtime.target.presets import (
    CHIP_NAMES as CHIP_NAMES,
    IPU_VERSIONS as IPU_VERSIONS,
    PRESETS as PRESETS,
    Arch as Arch,
    IpuVersion as IpuVersion,
    preset as preset,
)
from ipujax.runtime.target.target import (
    GlobalExchange as GlobalExchange,
    SyncPattern as SyncPattern,
    Target as Target,
    nearest as nearest,
)
from ipujax.runtime.target.target_changes import TargetChanges as TargetChanges
from ipujax.runtime.target.tile_rates import (
    issue_round_cycles as issue_round_cycles,
    larger as larger,
    load_cycles as load_cycles,
    store_cycles as store_cycles,
    whole_cycles as whole_cycles,
    wide_load_cycles as wide_load_cycles,
)
