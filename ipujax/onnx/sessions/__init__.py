"""Inference sessions: a model whose weights, and values that one call hands to the next, are state on the device."""

from ipujax.onnx.sessions.resident_model import RepeatedCalls as RepeatedCalls, Session as Session, session as session
