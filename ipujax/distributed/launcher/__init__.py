"""`ipujax run`: starts the processes of a run, lets them meet, and ends them.

launch.py       the launcher: what to launch, and how instances are started
watch.py        its loop: sees to instances, and ends all when one fails
started.py      one of them, as the launcher sees it
meeting.py      what instances tell the launcher before they act together, and what it answers
output.py       lines with the number of the instance before them
guardian.py     ends the instances of a launcher that was killed; runs as a script, with the standard library alone
"""

from ipujax.distributed.launcher.launch import Launch as Launch
from ipujax.distributed.launcher.output import DEFAULT_PREFIX as DEFAULT_PREFIX
