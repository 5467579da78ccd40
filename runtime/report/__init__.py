"""Reports of profiles: text and files of one, changes between two, tables of many."""

from ipujax.runtime.profile import write_csv as write_csv
from ipujax.runtime.report.compare import Comparison as Comparison, compare as compare
from ipujax.runtime.report.many_runs import runs_table as runs_table
from ipujax.runtime.report.profile import Profile as Profile
from ipujax.runtime.report.profile_file import profile_section as profile_section, refused_profile as refused_profile
