"""Sections of a profile under Poplar's names: programs and their ids, graph, memory, liveness and execution."""
