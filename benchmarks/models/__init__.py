"""Training steps by which the compiler is judged, one file a model; see `benchmarks/fit.py`.

Each is a `Model` made by a function; published figures are for its default arguments. Smaller sizes are for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .bert import bert_base, bert_large, bert_large_lamb
from .digits import digits
from .gcn import gcn
from .gpt import gpt
from .gpt2 import gpt2_medium
from .graphnet import graphnet
from .hmm import hmm
from .lstm import lstm
from .mlp import mlp
from .model import Model as Model
from .resnet20 import resnet20
from .resnet50 import resnet50
from .transformer import WAYS, transformer
from .vae import vae

# The models whose cycles are compared with those of an earlier version.
COMPARED: dict[str, Callable[..., Model]] = {
    "digits-mlp": partial(digits, "mlp"),
    "digits-cnn": partial(digits, "cnn"),
    "mlp": mlp,
    "vae": vae,
    "lstm": lstm,
    "gpt-4": gpt,
    "resnet-20": resnet20,
    "hmm": hmm,
}

MODELS: dict[str, Callable[..., Model]] = {
    **COMPARED,
    "gpt-block": partial(gpt, layers=1),
    **{f"transformer-{way}": partial(transformer, way) for way in WAYS},
    "graphnet": graphnet,
    "gcn": gcn,
    "resnet-50": resnet50,
    "bert-large": bert_large,
    "bert-base": bert_base,
}

# Further sizes, of which warm steps are compared with those of `jax.jit`.
STEPS: dict[str, Callable[..., Model]] = {
    "gpt-12": partial(gpt, layers=12),
    "gpt-12 no biases": partial(gpt, layers=12, has_biases=False),
    "gpt-4 of width 768": partial(gpt, width=768, heads=12, vocabulary=30_528),  # as BERT-Base, of 4 layers
    "resnet-50 of batch 4": partial(resnet50, micro_batch=4, micro_batches=1),
}

# The models that take a minute or more to compile, and are left out where all are.
LARGE: dict[str, Callable[..., Model]] = {
    "bert-large-lamb": bert_large_lamb,
    "gpt2-medium": gpt2_medium,
}
