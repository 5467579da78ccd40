"""Clocks of all IPUs over a program, and the timeline of its phases."""
