"""Log lines of a compilation by module and level, and its line of progress on a terminal.

step begins ──▶ progress line          step ends ──▶ its seconds, a log line at INFO          Log ──▶ other lines
"""

from ipujax.runtime.logs.early_ends import OutOfTime as OutOfTime, ending_at as ending_at
from ipujax.runtime.logs.log import (
    DEBUG as DEBUG,
    INFO as INFO,
    TRACE as TRACE,
    Log as Log,
    check_environment as check_environment,
    progress_line as progress_line,
)
from ipujax.runtime.logs.step import (
    attempt as attempt,
    compilation_name as compilation_name,
    count_part as count_part,
    step as step,
    watch_compilation as watch_compilation,
)
