"""Several real processes: how `ipujax run` starts instances of a script, lets them meet, and ends them.

launch.py       the launcher: starts instances, relays their output, ends all when one fails
meeting.py      what instances tell the launcher before they act together, and what it answers
output.py       lines with the number of the instance before them
guardian.py     ends the instances of a launcher that was killed
instance.py     runs the script inside an instance
membership.py   an instance's view: who am I, how many are we, may we act together

`guardian.py` and `instance.py` run as scripts and use the standard library alone, so that an instance imports nothing
before the user's own first line.
"""
