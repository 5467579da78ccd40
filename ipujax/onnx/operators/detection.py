"""Selection of bounding boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.onnx.element_types import index_dtype
from ipujax.onnx.operators.operand_types import Array, Optional, Value
from ipujax.onnx.registry import MaxSizes, data_dependent_size, is_static, operator


class Corners(NamedTuple):
    """Boxes as their lower and upper corners, each [boxes]."""

    y1: Array
    x1: Array
    y2: Array
    x2: Array


@operator("NonMaxSuppression")
def non_max_suppression(
    boxes: Value,
    scores: Value,
    max_output_boxes_per_class: Optional = None,
    iou_threshold: Optional = None,
    score_threshold: Optional = None,
    *,
    center_point_box: int = 0,
    max_sizes: MaxSizes,
) -> Array:
    """Best boxes of each class that do not overlap a better one, [selected, (batch, class, box)]."""
    # Boxes [N, boxes, 4] are two opposite corners (y, x), or centre (x, y) and size (w, h); scores [N, classes, boxes].
    # They overlap if intersection over union exceeds the threshold, and scores
    # must exceed theirs. Traced results have rows of zeros up to the bound.
    if not np.shape(boxes)[1]:
        return jnp.zeros((0, 3), index_dtype())
    operands = (boxes, scores, max_output_boxes_per_class, iou_threshold, score_threshold)
    if is_static(operands):
        with jax.ensure_compile_time_eval():
            rows, count = _all_selected(*operands, center_point_box)
            return rows(int(count))
    rows, _ = _all_selected(*operands, center_point_box)
    return rows(data_dependent_size(max_sizes, "the selected boxes"))


def _all_selected(
    boxes: Value, scores: Value, max_boxes: Optional, iou: Optional, score: Optional, centred: int
) -> tuple[Callable[[int], Array], Array]:
    """A function of the number of rows that returns them, and how many are selected."""
    boxes, scores = map(jnp.asarray, (boxes, scores))
    limit = _scalar(max_boxes, 0)
    overlap = _scalar(iou, 0.0)
    # Without a threshold a score of −∞ is one too.
    is_candidate = ~jnp.isnan(scores) if score is None else scores > _scalar(score, 0.0)
    by_class = jax.vmap(lambda corners, row, mask: _selected(corners, row, mask, limit, overlap), (None, 0, 0))
    order, selected = jax.vmap(by_class)(_corner_form(boxes, bool(centred)), scores, is_candidate)
    count = jnp.sum(selected)

    def rows(size: int) -> Array:
        batch, group, rank = jnp.nonzero(selected, size=size)
        indices = jnp.stack([batch, group, order[batch, group, rank]], axis=1)
        return jnp.where(np.arange(size)[:, None] < count, indices, 0).astype(index_dtype())

    return rows, count


def _scalar(value: Optional, default: float) -> Array:
    return jnp.asarray(default) if value is None else jnp.ravel(value)[0]


def _corner_form(boxes: Array, centred: bool) -> Corners:
    a, b, c, d = jnp.moveaxis(boxes, -1, 0)
    if centred:
        return Corners(b - d / 2, a - c / 2, b + d / 2, a + c / 2)
    return Corners(jnp.minimum(a, c), jnp.minimum(b, d), jnp.maximum(a, c), jnp.maximum(b, d))


def _selected(
    corners: Corners, scores: Array, is_candidate: Array, limit: Array, overlap: Array
) -> tuple[Array, Array]:
    """Boxes by falling score, and which of them are selected; of one batch and class."""
    # Stable: of equal scores the first box is selected.
    order = jnp.argsort(-scores, stable=True)
    ranked = Corners(*(each[order] for each in corners))
    area = (ranked.y2 - ranked.y1) * (ranked.x2 - ranked.x1)

    def visit(rank: Array, selected: Array) -> Array:
        # Selects the box of a rank if it overlaps no selected box too much.
        height = jnp.minimum(ranked.y2, ranked.y2[rank]) - jnp.maximum(ranked.y1, ranked.y1[rank])
        width = jnp.minimum(ranked.x2, ranked.x2[rank]) - jnp.maximum(ranked.x1, ranked.x1[rank])
        common = jnp.maximum(height, 0) * jnp.maximum(width, 0)
        union = area + area[rank] - common
        hit = selected & (common > overlap * union)
        good = is_candidate[order[rank]] & ~jnp.any(hit) & (jnp.sum(selected) < limit)
        return selected.at[rank].set(good)

    return order, jax.lax.fori_loop(0, len(scores), visit, jnp.zeros(len(scores), bool))
