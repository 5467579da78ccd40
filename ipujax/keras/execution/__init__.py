"""Calls of the device: steps of a model as functions, loops of them, their time beside that of the host."""
