"""Digests of programs and values: keys of what is stored on disk.

value ── read ──▶ label and values inside ── walk ──▶ digest          jaxpr ──▶ digest
"""

from ipujax.lowering.digests.readings import NoDigestError as NoDigestError
from ipujax.lowering.digests.walk import (
    CALLBACKS as CALLBACKS,
    digest_of as digest_of,
    jaxpr_digest as jaxpr_digest,
    replaced_lowerings as replaced_lowerings,
    value_digests as value_digests,
)
