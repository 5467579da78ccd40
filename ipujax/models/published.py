"""Published networks by name: their shapes, their numbers of parameters, and where both are published.

Input: a name of `PUBLISHED`, and changes. Output: a `Network`.

Published sizes that contradict each other are read as follows: GPT-3 1.3B has 24 heads of 128 features in the paper,
which are more than its width of 2,048, and 16 here; GPT-3 13B is 5,140 wide in the paper, which 40 heads of 128 do not
fill, and 5,120 here. The vocabulary of GPT-3, which the paper does not state, is here the 50,257 tokens of GPT-2 and 47
rows that no text uses, so that up to 128 IPUs can share the table (Megatron-LM does so, option
`--make-vocab-size-divisible-by`). Parameters are those of the source, of the whole network that it describes; heads for
training that are not part of that number are in `Network.num_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import jax.numpy as jnp

from ipujax.arguments import whole_number
from ipujax.models.bert import BertShape, bert
from ipujax.models.conformer import ConformerShape, conformer
from ipujax.models.gpt import GptShape, gpt
from ipujax.models.llama import LlamaShape, llama
from ipujax.models.resnet import ResnetShape, resnet
from ipujax.models.u_net import UNetShape, u_net
from ipujax.models.vision_transformer import VitShape, vit
from ipujax.models.workload import Network
from ipujax.runtime.errors import ArgumentError
from ipujax.runtime.target import nearest

_GPT2 = "Radford et al. 2019, table 2; parameters of huggingface.co/openai-community"
_GPT3 = "Brown et al., arXiv 2005.14165, table 2.1"
_LLAMA = "Touvron et al., arXiv 2302.13971, table 2; parameters of huggingface.co/huggyllama"
_LLAMA2 = "Touvron et al., arXiv 2307.09288, table 1; parameters of huggingface.co/meta-llama"
_LLAMA3 = "Grattafiori et al., arXiv 2407.21783, table 3; parameters of huggingface.co/meta-llama"
_BERT = "Devlin et al., arXiv 1810.04805, section 3; parameters of huggingface.co/google-bert, without heads"
_VIT = "Dosovitskiy et al., arXiv 2010.11929, table 1; parameters of torchvision.models"
_CONFORMER = "Gulati et al., arXiv 2005.08100, table 1, with a decoder of one LSTM layer"
_RESNET = "He et al., arXiv 1512.03385, table 1; parameters of torchvision.models"
_PADDED = 50_304  # tokens of the vocabulary of GPT-2, up to a multiple of 128
_U_NET = "Ronneberger et al., arXiv 1505.04597, figure 1"


@dataclass(frozen=True, slots=True)
class PublishedNetwork:
    """A row of the table.

    Args:
        family: makes the network of a name, a shape, a dtype, and whether layers are recomputed.
        shape: sizes, a frozen dataclass of the family.
        parameters: number of parameters in the source, as exact as it is there; None if it says nothing.
        source: paper, and where the number of parameters is from if not from there.
    """

    family: Callable[[str, Any, Any, bool], Network]
    shape: Any
    parameters: int | None
    source: str


PUBLISHED: Mapping[str, PublishedNetwork] = {
    "gpt2": PublishedNetwork(gpt, GptShape(12, 768, 12), 124_439_808, _GPT2),
    "gpt2-medium": PublishedNetwork(gpt, GptShape(24, 1024, 16), 354_823_168, _GPT2),
    "gpt2-large": PublishedNetwork(gpt, GptShape(36, 1280, 20), 774_030_080, _GPT2),
    "gpt2-xl": PublishedNetwork(gpt, GptShape(48, 1600, 25), 1_557_611_200, _GPT2),
    "gpt-125m": PublishedNetwork(gpt, GptShape(12, 768, 12, _PADDED, 2048), 125_000_000, _GPT3),
    "gpt-350m": PublishedNetwork(gpt, GptShape(24, 1024, 16, _PADDED, 2048), 350_000_000, _GPT3),
    "gpt-760m": PublishedNetwork(gpt, GptShape(24, 1536, 16, _PADDED, 2048), 760_000_000, _GPT3),
    "gpt-1.3b": PublishedNetwork(gpt, GptShape(24, 2048, 16, _PADDED, 2048), 1_300_000_000, _GPT3),
    "gpt-2.7b": PublishedNetwork(gpt, GptShape(32, 2560, 32, _PADDED, 2048), 2_700_000_000, _GPT3),
    "gpt-6.7b": PublishedNetwork(gpt, GptShape(32, 4096, 32, _PADDED, 2048), 6_700_000_000, _GPT3),
    "gpt-13b": PublishedNetwork(gpt, GptShape(40, 5120, 40, _PADDED, 2048), 13_000_000_000, _GPT3),
    "gpt-175b": PublishedNetwork(gpt, GptShape(96, 12_288, 96, _PADDED, 2048), 175_000_000_000, _GPT3),
    "llama-7b": PublishedNetwork(llama, LlamaShape(32, 4096, 32, 32, 11_008), 6_738_415_616, _LLAMA),
    "llama-13b": PublishedNetwork(llama, LlamaShape(40, 5120, 40, 40, 13_824), 13_015_864_320, _LLAMA),
    "llama-70b": PublishedNetwork(llama, LlamaShape(80, 8192, 64, 8, 28_672, length=4096), 68_976_648_192, _LLAMA2),
    "llama-3-8b": PublishedNetwork(
        llama, LlamaShape(32, 4096, 32, 8, 14_336, 128_256, 8192, 500_000.0), 8_030_261_248, _LLAMA3
    ),
    "bert-base": PublishedNetwork(bert, BertShape(12, 768, 12), 109_482_240, _BERT),
    "bert-large": PublishedNetwork(bert, BertShape(24, 1024, 16), 335_141_888, _BERT),
    "vit-b16": PublishedNetwork(vit, VitShape(12, 768, 12, 16), 86_567_656, _VIT),
    "vit-l16": PublishedNetwork(vit, VitShape(24, 1024, 16, 16), 304_326_632, _VIT),
    "vit-h14": PublishedNetwork(vit, VitShape(32, 1280, 16, 14), 632_045_800, _VIT),
    "conformer-s": PublishedNetwork(conformer, ConformerShape(16, 144, 4), 10_300_000, _CONFORMER),
    "conformer-m": PublishedNetwork(conformer, ConformerShape(16, 256, 4), 30_700_000, _CONFORMER),
    "conformer-l": PublishedNetwork(conformer, ConformerShape(17, 512, 8), 118_800_000, _CONFORMER),
    "resnet-18": PublishedNetwork(resnet, ResnetShape((2, 2, 2, 2), is_bottleneck=False), 11_689_512, _RESNET),
    "resnet-34": PublishedNetwork(resnet, ResnetShape((3, 4, 6, 3), is_bottleneck=False), 21_797_672, _RESNET),
    "resnet-50": PublishedNetwork(resnet, ResnetShape((3, 4, 6, 3), is_bottleneck=True), 25_557_032, _RESNET),
    "resnet-101": PublishedNetwork(resnet, ResnetShape((3, 4, 23, 3), is_bottleneck=True), 44_549_160, _RESNET),
    "u-net": PublishedNetwork(u_net, UNetShape((64, 128, 256, 512, 1024)), None, _U_NET),
}


def network(name: str, *, dtype: Any = jnp.float16, recompute: bool = True, **changes: Any) -> Network:
    """Return a published network.

    Args:
        name: of `PUBLISHED`, in any case; "gpt-6.7b" for one.
        dtype: floating-point type of parameters and activations.
        recompute: whether the backward pass computes each layer, or level of a U-Net, again.
        changes: sizes to set otherwise, fields of its shape as `layers` or `length`.

    Raises:
        ArgumentError: a name, or a size, that does not exist, a size that is not above 0, or a dtype that is not a
            floating-point type.

    Example:
        >>> network("gpt2").num_parameters()
        124439808
    """
    row = PUBLISHED.get(str(name).lower())
    if row is None:
        raise ArgumentError(
            f"no published network is called {name!r}",
            expected=f"one of {', '.join(PUBLISHED)}",
            got=repr(name),
            hint=nearest(name, PUBLISHED),
        )
    size_names = [field.name for field in fields(row.shape)]
    if unknown := [change for change in changes if change not in size_names]:
        raise ArgumentError(
            f"the network {name!r} has no size {unknown[0]!r}",
            expected=f"one of {', '.join(size_names)}",
            got=f"{unknown[0]}={changes[unknown[0]]!r}",
            hint=nearest(unknown[0], size_names),
        )
    for size, value in changes.items():
        _check_size(size, value, getattr(row.shape, size))
    return row.family(str(name).lower(), replace(row.shape, **changes), _floating(dtype), recompute)


def _check_size(name: str, value: Any, published: Any) -> None:
    """Refuse a size that is of another kind than the published one, or not above 0."""
    if isinstance(published, tuple):
        if not isinstance(value, tuple) or not value:
            raise ArgumentError(f"size {name} of a network", expected=f"numbers, as {published}", got=repr(value))
        for each in value:
            _check_size(name, each, published[0])
    elif isinstance(published, bool | float):
        is_same = isinstance(value, bool) == isinstance(published, bool) and isinstance(value, int | float)
        if not is_same or value < 0:
            raise ArgumentError(f"size {name} of a network", expected=f"a value like {published}", got=repr(value))
    else:
        whole_number(f"size {name} of a network", value, 1)


def _floating(dtype: Any) -> Any:
    """Return a dtype; refuse one that is not a floating-point type."""
    expected = "a floating-point type, as float16"
    try:
        checked = jnp.dtype(dtype)
    except TypeError as error:
        raise ArgumentError("a network has no such dtype", expected=expected, got=repr(dtype)) from error
    if dtype is None or not jnp.issubdtype(checked, jnp.floating):
        raise ArgumentError("a network computes in a floating-point type", expected=expected, got=repr(dtype))
    return checked
