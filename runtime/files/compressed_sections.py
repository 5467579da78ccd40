"""Compressed sections, with a bound of their bytes that is known before they are decompressed.

Input: bytes. Output: compressed bytes, and the bytes again. The bound grows with the file, so that a small file cannot
take much memory; what compresses better than the bound allows is written with less compression, or none.
Format: zlib, RFC 1950.
"""

from __future__ import annotations

import zlib

from ipujax.runtime.files.file_errors import DamagedError
from ipujax.runtime.files.json_text import json_memory_bytes

_LEVEL = 6  # of compression, zlib's own default
# A profile of a training step of BERT-Large on 4 IPUs has 32 MB of JSON, 14 times its 2.2 MB; `json_memory_bytes` of it
# is 116 times the file, and loading it takes 141 MB. Files of less than about half a megabyte share a bound.
_FREE_BYTES = 16 << 20
_MAX_RATIO = 40
_FREE_PARSED_BYTES = 64 << 20
_MAX_PARSED_RATIO = 130


def max_content_bytes(packed_bytes: int) -> int:
    """Return the upper bound of the bytes of a section of so many compressed bytes."""
    return max(_FREE_BYTES, _MAX_RATIO * packed_bytes)


def max_json_memory_bytes(packed_bytes: int) -> int:
    """Return the upper bound of the memory that the JSON of a section of so many compressed bytes takes."""
    return max(_FREE_PARSED_BYTES, _MAX_PARSED_RATIO * packed_bytes)


def compress(content: bytes, level: int = _LEVEL) -> bytes:
    """Return content compressed, no further than the bounds of `decompress` allow; at level 0 they always do."""
    memory_bytes = json_memory_bytes(content)
    for lower_level in (level, 1, 0):
        section = zlib.compress(content, lower_level)
        if len(content) <= max_content_bytes(len(section)) and memory_bytes <= max_json_memory_bytes(len(section)):
            break
    return section


def decompress(section: bytes) -> bytes:
    """Return the content of a compressed section.

    Raises:
        DamagedError: another section, or one that decompresses to more than a file can have.
    """
    limit = max_content_bytes(len(section))
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(section, limit + 1)
    except zlib.error as error:
        raise DamagedError(f"it cannot be decompressed: {error}") from error
    if len(content) > limit:
        problem = f"its {len(section):,} bytes decompress to more than such a file can have"
        raise DamagedError(problem, f"at most {limit:,} bytes", f"more than {limit:,}")
    if not stream.eof or stream.unused_data or stream.unconsumed_tail:
        raise DamagedError("its compressed bytes are cut off, or go on behind their end")
    return content
