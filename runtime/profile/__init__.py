"""Profiles: graph and execution reports under Poplar's names, as data, files and text."""
