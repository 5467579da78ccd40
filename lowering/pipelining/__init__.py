"""Pipelines: from a function of one micro-batch to a program in which several IPUs work on several of them at once.

jaxpr of one micro-batch ── partition ──▶ parts by stage and task ── lower, with a schedule ──▶ functions, rings, copies
"""
