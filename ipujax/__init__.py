"""Compile and run JAX programs for a simulated Graphcore IPU.

import ipujax as ipu

@ipu.jit(device=ipu.IPUModel(arch="mk2"), donate_argnums=0)
def step(params, batch): ...

step.lower(params, batch).compile().profile.summary() says what the machine would do; step(params, batch) computes it.
"""

from typing import Any

from ipujax import distributed as distributed
from ipujax import optim as optim
from ipujax.device import CPU as CPU
from ipujax.device import IPUModel as IPUModel
from ipujax.device import default_device as default_device
from ipujax.jit import jit as jit
from ipujax.pipeline import pipeline as pipeline
from ipujax.pipeline import stage as stage
from ipujax.pipeline_plan import PipelinePlan as PipelinePlan
from ipujax.pipeline_plan import pipeline_plan as pipeline_plan
from ipujax.pipeline_tasks import TaskTime as TaskTime
from ipujax.pipeline_tasks import pipeline_tasks as pipeline_tasks
from ipujax.runtime.errors import ArgumentError as ArgumentError
from ipujax.runtime.errors import GraphError as GraphError
from ipujax.runtime.errors import IpuError as IpuError
from ipujax.runtime.errors import MappingError as MappingError
from ipujax.runtime.errors import ProfileError as ProfileError
from ipujax.runtime.errors import ScheduleError as ScheduleError
from ipujax.runtime.errors import TargetError as TargetError
from ipujax.runtime.errors import TensorError as TensorError
from ipujax.runtime.errors import TileMemoryError as TileMemoryError
from ipujax.runtime.errors import VerifyError as VerifyError
from ipujax.runtime.options import Options as Options
from ipujax.runtime.profile import Profile as Profile
from ipujax.runtime.target import Target as Target
from ipujax.stages import Compiled as Compiled
from ipujax.stages import Lowered as Lowered
from ipujax.stages import Traced as Traced


def __getattr__(name: str) -> Any:
    """`codelet_call` lies with codelets in Python, which few programs need and `import ipujax` does not wait for."""
    if name != "codelet_call":
        raise AttributeError(f"module 'ipujax' has no attribute {name!r}")
    from ipujax.poplar.custom_op import codelet_call

    return codelet_call
