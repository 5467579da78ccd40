"""`ipujax run`: starts the processes of a run on this machine, shows their output, and ends them.

launch.py       the launcher: its settings, and the start of instances
watch.py        its event loop: follows instances, and ends all when one fails
started.py      a started instance: its process and recorded state, and its output line by line
guardian.py     ends the instances of a launcher that was killed; runs as a script, with the standard library alone
"""

from ipujax.distributed.launcher.launch import Launch as Launch
from ipujax.distributed.launcher.started import DEFAULT_PREFIX as DEFAULT_PREFIX
