"""Decoders with caches on the device: 64 tokens in a loop equal onnxruntime's, call by call."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import ipujax.onnx
from tests.ipujax.onnx.decoder_models import HEADS, SIZE, STATES, VOCABULARY, decoder

ort = pytest.importorskip("onnxruntime")
TOKENS = 64
PROMPT = np.asarray([[3, 14, 15, 9, 26]])


def expected_tokens(model: onnx.ModelProto) -> tuple[list[int], np.ndarray]:
    """Return the tokens that onnxruntime finds after the prompt, and their scores; caches grow from nothing."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    caches = {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in STATES}
    ids, tokens, scores, total = PROMPT, [], [], 0
    while len(tokens) < TOKENS + 1:
        places = np.arange(total, total + ids.shape[1])[None]
        total += ids.shape[1]
        mask = np.ones((1, total), np.int64)
        logits, *after = session.run(None, {"input_ids": ids, "attention_mask": mask, "position_ids": places, **caches})
        caches = dict(zip(STATES, after, strict=True))
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids[0, 0]))
        scores.append(logits[0, -1])
    return tokens, np.stack(scores)


def grown(inputs: Any, outputs: Any) -> dict[str, Any]:
    """Return the inputs of the next token: the mask moves with the rows of the caches, whose last ones are kept."""
    mask = inputs["attention_mask"]
    return {
        "input_ids": outputs["logits"][:, -1:].argmax(-1),
        "position_ids": inputs["position_ids"] + 1,
        "attention_mask": jnp.concatenate([mask[:, 1:], mask[:, -1:]], axis=1),
    }


def filled(inputs: Any, outputs: Any) -> dict[str, Any]:
    """Return the inputs of the next token: one more place of the buffer stands for a token."""
    places = jnp.arange(inputs["attention_mask"].shape[1])
    return {
        "input_ids": outputs["logits"][:, -1:].argmax(-1),
        "position_ids": inputs["position_ids"] + 1,
        "attention_mask": (places <= inputs["position_ids"] + 1).astype(jnp.int32),
    }


@pytest.mark.parametrize("is_shared", [False, True], ids=["growing", "shared"])
def test_tokens_in_a_loop(is_shared: bool):
    model = decoder(is_shared)
    tokens, scores = expected_tokens(model)
    room = PROMPT.shape[1] + TOKENS
    session = ipujax.onnx.session(model, states=STATES, input_shapes={name: (1, HEADS, room, SIZE) for name in STATES})
    assert [info.name for info in session.inputs] == ["input_ids", "attention_mask", "position_ids"]
    length = PROMPT.shape[1]
    if is_shared:
        masks = [np.arange(room)[None] < size for size in (length, length + 1)]
    else:  # rows of tokens are last, in front of them are those of none
        masks = [np.arange(room + new)[None] >= room + new - size for new, size in ((length, length), (1, length + 1))]
    first, second = (mask.astype(np.int32) for mask in masks)
    logits = session(PROMPT, first, np.arange(length)[None])
    np.testing.assert_allclose(logits[0, -1], scores[0], rtol=1e-4, atol=1e-4)
    token = np.asarray(logits[:, -1:].argmax(-1))
    decode = session.repeat(TOKENS, filled if is_shared else grown)
    stacked, following = decode(token, second, np.asarray([[length]]))
    np.testing.assert_allclose(stacked[:, 0, -1], scores[1:], rtol=1e-3, atol=1e-3)
    assert [int(token[0, 0]), *stacked[:, 0, -1].argmax(-1).tolist()] == tokens
    assert int(following[2][0, 0]) == length + TOKENS
    # What crosses to the host with each token are its scores; caches and weights stay.
    profile = decode.profile(token, second, np.asarray([[length]]))
    one = session.profile(token, second, np.asarray([[length]]))
    inputs_bytes = 4 * (second.size + 2)
    assert host_bytes(profile) == TOKENS * 4 * VOCABULARY + 2 * inputs_bytes
    assert host_bytes(one) == 4 * VOCABULARY + inputs_bytes


def host_bytes(profile: Any) -> int:
    """Return the bytes between host and device."""
    steps = profile.execution()["simulation"]["steps"]
    return sum(step["totalData"] * step["repeats"] for step in steps if step["type"] == "StreamCopy")


def test_refused_loops():
    session = ipujax.onnx.session(
        decoder(True), states=STATES, input_shapes={name: (1, HEADS, 8, SIZE) for name in STATES}
    )
    operands = (np.zeros((1, 1), int), np.ones((1, 8), int), np.zeros((1, 1), int))
    with pytest.raises(ipujax.onnx.OnnxError, match="returns 'ids', which is no input"):
        session.repeat(2, lambda inputs, outputs: {"ids": inputs["input_ids"]})(*operands)
    with pytest.raises(ipujax.onnx.OnnxError, match="changes the shape or the kind of input 'input_ids'"):
        session.repeat(2, lambda inputs, outputs: {"input_ids": outputs["logits"]})(*operands)
    with pytest.raises(ipujax.onnx.OnnxError, match="calls must be a number of calls"):
        session.repeat(0, filled)
