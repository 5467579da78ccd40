"""Random number library: operations on PRNG keys, and the bits drawn from them."""

from ipujax.lowering.poprand.keys import per_key as per_key
