"""Stages of models: scopes around calls of layers, assignments of calls, and their number in a trace."""
