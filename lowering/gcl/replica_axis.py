"""Axis of replicas in the functions of replicated programs."""

from __future__ import annotations

AXIS = "replica"  # default name
