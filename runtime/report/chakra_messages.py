"""Messages of Chakra's execution traces as bytes of protocol buffers.

Input: the name of a message and a dict of its fields. Output: bytes. `MESSAGES` describes the fields that are written:
their numbers and types. A trace is a file of messages, each after its length: a `GlobalMetadata`, then the `Node`s.
Source: mlcommons/chakra, `schema/protobuf/et_def.proto`; protobuf.dev, "Encoding".
Limits: fields that this project does not write are left out of the description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

VERSION = "0.0.4"  # published: of the schema, as in the traces of its own tests

# Message → field → number and type: a scalar type, "repeated" before one, or the name of a message.
MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "repeated AttributeProto")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "enum"),
        "ctrl_deps": (4, "repeated uint64"),
        "data_deps": (5, "repeated uint64"),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "repeated AttributeProto"),
    },
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
}
NODE_TYPES = {
    "METADATA_NODE": 1,
    "MEM_LOAD_NODE": 2,
    "MEM_STORE_NODE": 3,
    "COMP_NODE": 4,
    "COMM_SEND_NODE": 5,
    "COMM_RECV_NODE": 6,
    "COMM_COLL_NODE": 7,
}
_VARINT, _BYTES = 0, 2  # wire types


def varint(number: int) -> bytes:
    """Return a whole number of at least 0, seven bits a byte, the lowest first."""
    parts = bytearray()
    while number > 0x7F:
        parts.append(0x80 | number & 0x7F)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _number(value: int) -> bytes:
    return varint(int(value) & 0xFFFF_FFFF_FFFF_FFFF)  # negative ones have ten bytes, as of 64 bits


def _prefixed(content: bytes) -> bytes:
    return varint(len(content)) + content


# Type → wire type, and the encoding of a value.
_SCALARS: dict[str, tuple[int, Callable[[Any], bytes]]] = {
    **{kind: (_VARINT, _number) for kind in ("uint64", "int64", "int32", "bool", "enum")},
    "string": (_BYTES, lambda text: _prefixed(text.encode())),
}


def message(kind: str, fields: Mapping[str, Any]) -> bytes:
    """Return a message.

    Args:
        kind: its name in `MESSAGES`.
        fields: values by name: numbers, texts, lists of them, dicts for messages.
    """
    return b"".join(_encoded_field(*MESSAGES[kind][name], value) for name, value in fields.items())


def _encoded_field(number: int, kind: str, value: Any) -> bytes:
    repeated, _, each = kind.rpartition(" ")
    values: Iterable[Any] = value if repeated else (value,)
    if each in MESSAGES:
        tag = varint(number << 3 | _BYTES)
        return b"".join(tag + _prefixed(message(each, part)) for part in values)
    wire_type, encode = _SCALARS[each]
    if repeated and wire_type == _VARINT:  # packed, as proto3 has it
        content = b"".join(map(encode, values))
        return varint(number << 3 | _BYTES) + _prefixed(content) if content else b""
    return b"".join(varint(number << 3 | wire_type) + encode(part) for part in values)


def trace_file(metadata: Mapping[str, Any], nodes: Iterable[Mapping[str, Any]]) -> bytes:
    """Return the content of a trace: fields of its `GlobalMetadata` and of its `Node`s."""
    return b"".join(
        [_prefixed(message("GlobalMetadata", metadata)), *(_prefixed(message("Node", node)) for node in nodes)]
    )
