"""The command line `ipujax`, a file a command.

commands.py            all commands: the parser, exit codes, and errors as texts
command_parts.py       parts that commands share: parser, files and modules as arguments, output
info_command.py        ipujax info
demo_command.py        ipujax demo
profile_command.py     ipujax profile SCRIPT
report_command.py      ipujax report FILE, ipujax compare A B
primitives_command.py  ipujax primitives [NAME]
run_command.py         ipujax run SCRIPT
"""

from ipujax.cli.commands import main as main
