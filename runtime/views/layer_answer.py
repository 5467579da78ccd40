"""Answer to the question which layers take most time, and whether one differs from its like.

Input: `Figures`. Output: an `Answer`.
"""

from __future__ import annotations

from collections import Counter

from ipujax.runtime.profile import NO_LAYER, Figures
from ipujax.runtime.views.answer import Answer
from ipujax.runtime.views.layer_view import LayerKind, LayerNode, layer_kinds, tree_of

LAYER = "Which layer takes most?"
_ALL = 0.95  # share of the cycles in layers from which on a layer is the model
_SMALL = 0.01  # share of the cycles below which a difference between layers is not worth a word


def layer_answer(profile: Figures) -> Answer:
    """The kind of layer that takes most, the one inside it that does, and the layer that differs from its like.

    Args:
        profile: of a run.
    """
    root = tree_of(profile)
    total = max(1, root.cycles)
    known = total - (root.children[NO_LAYER].cycles if NO_LAYER in root.children else 0)
    kinds = [kind for kind in layer_kinds(root) if kind.path != NO_LAYER and not _is_model(kind, known)]
    if not kinds or not kinds[0].cycles:
        hint = "name layers by jax.named_scope, or write them as functions"
        return Answer(LAYER, "No layer is known.", hint)
    top = kinds[0]
    if top.cycles < _SMALL * total:
        text = f"No layer takes more than {top.cycles / total:.1%} of the busy cycles; the others are in no layer."
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    innermost = max((kind for kind in kinds if _is_innermost(kind)), key=lambda kind: kind.cycles)
    text = f"{_shown(top, total)}{_parts(top.parts)}."
    if innermost is not top:
        text += f" Of innermost layers most is {_shown(innermost, total)}."
    unlike = max((kind for kind in kinds if kind.unlike), key=_excess, default=None)
    if unlike is None or unlike.unlike is None or _excess(unlike) < _SMALL * total:
        return Answer(LAYER, text, "", top.path, top.cycles / total, "layers")
    layer, times = unlike.unlike, unlike.unlike.cycles / max(1.0, unlike.median_cycles)
    text += f" {layer.path} takes {times:.1f} times the median of the {len(unlike.nodes)} layers of its kind."
    return Answer(LAYER, text, "", layer.path, layer.cycles / total, "layers")


def _shown(kind: LayerKind, total: int) -> str:
    count = f" ({len(kind.nodes)} layers)" if len(kind.nodes) > 1 else ""
    return f"{kind.path}{count} with {kind.cycles / total:.1%} of the busy cycles"


def _parts(parts: Counter[str]) -> str:
    """Parts of training in brackets; nothing where there is one."""
    known = [(part, cycles) for part, cycles in parts.most_common() if part and cycles]
    shares = ", ".join(f"{part} {cycles / max(1, parts.total()):.0%}" for part, cycles in known)
    return f" ({shares})" if len(known) > 1 else ""


def _is_model(kind: LayerKind, known: int) -> bool:
    """Whether a kind is one layer that nearly all that is in a layer is in."""
    return len(kind.nodes) == 1 and bool(kind.nodes[0].children) and kind.cycles > _ALL * known


def _is_innermost(kind: LayerKind) -> bool:
    return not any(node.children for node in kind.nodes)


def _excess(kind: LayerKind) -> float:
    """Cycles of the layer that differs, beyond the median of its kind."""
    layer: LayerNode | None = kind.unlike
    return 0.0 if layer is None else layer.cycles - kind.median_cycles
