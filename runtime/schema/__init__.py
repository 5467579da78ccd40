"""Schema of saved profiles: their fields, and the relations between them."""

from ipujax.runtime.schema.profile_fields import (
    DATA as DATA,
    PROFILE_FILE as PROFILE_FILE,
    PROFILE_SECTION as PROFILE_SECTION,
    check_profile as check_profile,
    saved_data as saved_data,
)
