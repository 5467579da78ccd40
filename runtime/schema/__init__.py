"""Which fields data must have: kinds of fields, and the table of those of saved profiles."""

from ipujax.runtime.schema.kinds import FieldError as FieldError
from ipujax.runtime.schema.profile_fields import check_profile as check_profile
