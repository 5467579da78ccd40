"""Work of a function that no plan of it avoids: a jaxpr → the cycles and dependences behind `profile.bound`."""

from ipujax.lowering.least_work.function_floor import least_work as least_work
