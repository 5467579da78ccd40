"""Published networks as pure JAX functions, with their training steps: `ipujax.models.network("gpt-6.7b")`.

name ──published──▶ `Network` ──training, inference──▶ `Workload`: a function, and shapes of its arguments
"""

from typing import TYPE_CHECKING

from ipujax.public import public_names as _public_names
from ipujax.runtime.lazy_names import lazy_names

if TYPE_CHECKING:
    from ipujax.models.published import PUBLISHED as PUBLISHED, PublishedNetwork as PublishedNetwork, network as network
    from ipujax.models.workload import (
        Network as Network,
        Optimizer as Optimizer,
        Workload as Workload,
        adam as adam,
        inference as inference,
        sgd as sgd,
        training as training,
    )
else:
    __getattr__ = lazy_names(__name__)

__dir__ = _public_names(globals(), has_lazy_names=True)
