"""JAX's `jit` for functions that run once: compiled without XLA's slow optimisations, which takes half of the time."""

from functools import partial

from ipujax.runtime.names_at_import import jax_jit

quick_jit = partial(
    jax_jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    },
)
