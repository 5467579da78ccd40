"""Several real processes: how `ipujax run` starts instances of a script, lets them meet, and ends them.

launch.py       the launcher: what to launch, and how instances are started
watch.py        its loop: sees to instances, and ends all when one fails
started.py      one of them, as the launcher sees it
meeting.py      what instances tell the launcher before they act together, and what it answers
output.py       lines with the number of the instance before them
guardian.py     ends the instances of a launcher that was killed
instance.py     runs the script inside an instance
membership.py   an instance's view: who am I, how many are we, may we act together
mesh.py         instances as devices of JAX
spread.py       a function of several replicas among instances

`guardian.py` and `instance.py` run as scripts and use the standard library alone, so that an instance imports nothing
before the user's own first line.
"""
