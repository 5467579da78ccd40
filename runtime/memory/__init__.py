"""Memory of each tile: live ranges of variables packed into tile SRAM, frames of functions, code and state."""
