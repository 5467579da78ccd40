"""What compiling says while it works: log lines by module and level, and one line of progress on a terminal.

step begins ──▶ progress line          step ends ──▶ its seconds, a log line at INFO          Log ──▶ other lines
"""

from ipujax.runtime.logs.log import Log as Log
from ipujax.runtime.logs.log_levels import (
    DEBUG as DEBUG,
    INFO as INFO,
    TRACE as TRACE,
    check_environment as check_environment,
)
from ipujax.runtime.logs.step import (
    attempt as attempt,
    count_part as count_part,
    step as step,
    subject as subject,
    watching as watching,
)
