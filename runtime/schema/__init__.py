"""Schema of data: kinds of fields, and the table of the fields of saved profiles."""

from ipujax.runtime.schema.kinds import FieldError as FieldError
from ipujax.runtime.schema.profile_fields import check_profile as check_profile
