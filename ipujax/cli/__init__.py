"""The command line `ipujax`, a file a command.

commands.py            the parser, exit codes, and errors as texts
scripts.py             scripts and modules that are named as arguments
info_command.py        ipujax info
demo_command.py        ipujax demo
profile_command.py     ipujax profile SCRIPT
report_command.py      ipujax report FILE, ipujax compare A B
primitives_command.py  ipujax primitives [NAME]
run_command.py         ipujax run SCRIPT
"""

from ipujax.cli.commands import main as main
