"""Answer on the costliest layers, and on a layer that takes longer than others of its kind.

Input: `Figures`. Output: an `Answer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ipujax.runtime.profile import NO_LAYER, Figures
from ipujax.runtime.views.answer import Answer
from ipujax.runtime.views.layer_view import LayerKind, LayerNode, layer_kinds, tree_of

LAYER = "Which layer takes most?"
_MODEL_SHARE = 0.95  # of the cycles of all layers: a layer with more is the model, which is no answer
_SMALL_SHARE = 0.01  # of the cycles: a smaller difference between layers is not named
_MAJORITY = 0.5  # of the cycles of a layer
_COARSE = 1.5  # a smaller ratio has two decimals


def layer_answer(profile: Figures) -> Answer:
    """Name the costliest kind of layer, that with most own cycles, and a layer far above the median of its kind."""
    root = tree_of(profile)
    total = max(1, root.cycles)
    in_layers = total - (root.children[NO_LAYER].cycles if NO_LAYER in root.children else 0)
    named = [kind for kind in layer_kinds(root) if kind.path != NO_LAYER]
    kinds = [kind for kind in named if not _is_model(kind, in_layers, named)]
    if not kinds or not kinds[0].cycles:
        hint = "name layers by jax.named_scope, or write them as functions"
        return Answer(LAYER, "No layer is known.", hint)
    top = kinds[0]
    if top.cycles < _SMALL_SHARE * total:
        text = f"No layer takes more than {top.cycles / total:.1%} of the busy cycles; the others are in no layer."
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    of_own = max(named, key=lambda kind: kind.own_cycles)
    text = f"{_describe(top.path, len(top.nodes), top.cycles / total)}{_shares(top.parts)}."
    if of_own is not top:
        without = "innermost layers" if _is_innermost(of_own) else "layers without those inside them"
        text += f" Of {without} most is {_describe(of_own.path, len(of_own.nodes), of_own.own_cycles / total)}."
    uneven = _uneven_kind(kinds)
    if uneven is None or uneven.outlier is None or _excess_cycles(uneven) < _SMALL_SHARE * total:
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    layer = uneven.outlier
    ratio = layer.cycles / max(1.0, uneven.median_cycles)
    form = ".1f" if ratio >= _COARSE else ".2f"
    part = f", most of that in {uneven.excess_part}" if uneven.excess_part else ""
    text += f" {layer.path} takes {ratio:{form}} times the median of the {len(uneven.nodes)} layers of its kind{part}."
    return Answer(LAYER, text, "", layer.path, layer.cycles / total, "layers")


def _uneven_kind(kinds: Sequence[LayerKind]) -> LayerKind | None:
    """Return the kind with the layer farthest above its median: of layers in one another the inner, if it is why."""
    uneven = [kind for kind in kinds if kind.outlier]
    cause = max(uneven, key=_excess_cycles, default=None)
    while cause is not None and cause.outlier is not None:
        least = _MAJORITY * _excess_cycles(cause)
        around = f"{cause.outlier.path}/"
        inside = [kind for kind in uneven if kind.outlier and kind.outlier.path.startswith(around)]
        inner = max((kind for kind in inside if _excess_cycles(kind) > least), key=_excess_cycles, default=None)
        if inner is None:
            break
        cause = inner
    return cause


def _describe(path: str, num_layers: int, share: float) -> str:
    count = f" ({num_layers} layers)" if num_layers > 1 else ""
    return f"{path}{count} with {share:.1%} of the busy cycles"


def _shares(parts: Counter[str]) -> str:
    """List the shares of the parts of training in brackets; "" for a single part."""
    named = [(part, cycles) for part, cycles in parts.most_common() if part and cycles]
    shares = ", ".join(f"{part} {cycles / max(1, parts.total()):.0%}" for part, cycles in named)
    return f" ({shares})" if len(named) > 1 else ""


def _is_model(kind: LayerKind, in_layers: int, kinds: Sequence[LayerKind]) -> bool:
    """Return True for a layer around nearly all others, or around several of one kind that take most of it."""
    if len(kind.nodes) > 1 or not kind.nodes[0].children:
        return False
    inside = f"{kind.path}/"
    repeated = (other for other in kinds if len(other.nodes) > 1 and other.nodes[0].path.startswith(inside))
    return kind.cycles > _MODEL_SHARE * in_layers or any(x.cycles > _MAJORITY * kind.cycles for x in repeated)


def _is_innermost(kind: LayerKind) -> bool:
    return not any(node.children for node in kind.nodes)


def _excess_cycles(kind: LayerKind) -> float:
    layer: LayerNode | None = kind.outlier
    return 0.0 if layer is None else layer.cycles - kind.median_cycles
