"""The machine: constants of a target with their sources, presets of real chips, and the page of them."""
