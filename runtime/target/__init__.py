"""The machine: constants of a target with their sources, presets of real chips, and the page of them."""

from ipujax.runtime.target.presets import (
    CHIP_NAMES as CHIP_NAMES,
    IPU_VERSIONS as IPU_VERSIONS,
    PRESETS as PRESETS,
    preset as preset,
)
from ipujax.runtime.target.target import GlobalExchange as GlobalExchange, Target as Target, nearest as nearest
