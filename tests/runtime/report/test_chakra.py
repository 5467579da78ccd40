"""Execution traces of Chakra, read by protobuf: bytes, order, messages and times against the profile.

Messages are parsed by a schema that the test makes at run time: the public one where a file `et_def.proto` is named by
IPUJAX_CHAKRA_SCHEMA, else that of the writer's own description.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax.runtime.report.chakra import MESSAGES, NODE_TYPES, message, varint

descriptor_pb2 = pytest.importorskip("google.protobuf.descriptor_pb2")
from google.protobuf import descriptor_pool, message_factory  # noqa: E402

PUBLIC_SCHEMA = os.environ.get("IPUJAX_CHAKRA_SCHEMA")
Struct = jax.ShapeDtypeStruct


def fields_of_public_schema(text: str) -> dict[str, dict[str, tuple[int, str]]]:
    """The messages of a schema as `MESSAGES` has them."""
    enums = set(re.findall(r"enum (\w+)", text))
    return {
        name: {
            field: (int(number), repeated + ("enum" if kind in enums else kind))
            for repeated, kind, field, number in re.findall(r"(repeated )?(\w+) (\w+) = (\d+);", body)
        }
        for name, body in re.findall(r"message (\w+) \{(.*?)\n\}", text, re.DOTALL)
    }


def classes(messages: dict[str, dict[str, tuple[int, str]]]) -> dict[str, Any]:
    """Classes of protobuf for messages."""
    file = descriptor_pb2.FileDescriptorProto(name="trace.proto", package="trace", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in messages.items():
        entry = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            repeated, _, each = kind.rpartition(" ")
            added = entry.field.add(name=field, number=number, label=3 if repeated else 1)
            if each in messages:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".trace.{each}"
            else:
                added.type = kinds.TYPE_INT32 if each == "enum" else getattr(kinds, f"TYPE_{each.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"trace.{name}")) for name in messages}


SCHEMA = fields_of_public_schema(Path(PUBLIC_SCHEMA).read_text(encoding="utf-8")) if PUBLIC_SCHEMA else MESSAGES
CLASSES = classes(SCHEMA)


def read(path: str) -> tuple[Any, list[dict[str, Any]]]:
    """Metadata and nodes of a trace, attributes of nodes by name."""
    content = Path(path).read_bytes()
    place = 0
    parts = []
    while place < len(content):
        length = shift = 0
        while True:
            byte = content[place]
            place += 1
            length |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        parts.append(content[place : place + length])
        place += length
    metadata = CLASSES["GlobalMetadata"].FromString(parts[0])
    nodes = []
    for part in parts[1:]:
        node = CLASSES["Node"].FromString(part)
        row = {field.name: value for field, value in node.ListFields() if field.name != "attr"}
        row |= {"id": node.id, "data_deps": list(node.data_deps), "start_time_micros": node.start_time_micros}
        for attribute in node.attr:
            values = [value for field, value in attribute.ListFields() if field.name != "name"]
            row[attribute.name] = values[0] if values else 0
        nodes.append(row)
    return metadata, nodes


def bytes_of(nodes: list[dict[str, Any]]) -> int:
    """Bytes that arrive."""
    received = sum(node["comm_size"] for node in nodes if node["type"] == NODE_TYPES["COMM_RECV_NODE"])
    return received + sum(node.get("tensor_size", 0) for node in nodes)


def loss(params: Any, batch: Any) -> jax.Array:
    with ipu.stage(0):
        h = jnp.tanh(batch["x"] @ params["a"])
    with ipu.stage(1):
        return jnp.mean((h @ params["b"] - batch["x"]) ** 2)


PARAMS = {"a": Struct((16, 32), "float32"), "b": Struct((32, 16), "float32")}
BATCH = {"x": Struct((32, 16), "float32")}


def pipeline_profile(exchange: str = "lockstep") -> ipu.Profile:
    """The profile of a pipeline over two IPUs."""
    device = ipu.IPUModel(num_ipus=2, tiles_per_ipu=8, global_exchange=exchange)
    step = ipu.pipeline(jax.value_and_grad(loss), micro_batches=4, schedule="1f1b")
    return ipu.jit(step, device=device).profile(PARAMS, BATCH)


@pytest.mark.parametrize("exchange", ["lockstep", "buffered"])
def test_bytes_and_times_of_a_pipeline_are_those_of_the_profile(exchange: str, tmp_path: Path) -> None:
    profile = pipeline_profile(exchange)
    paths = profile.to_chakra(tmp_path / "new" / "traces")
    assert [Path(path).name for path in paths] == ["trace.0.et", "trace.1.et"]
    traces = [read(path) for path in paths]
    assert sum(bytes_of(nodes) for _, nodes in traces) == sum(row.moved_bytes for row in profile.step_costs) > 0
    for metadata, nodes in traces:
        facts = {attribute.name: attribute for attribute in metadata.attr}
        assert facts["cycles"].int64_val == profile.cycles and facts["machine"].string_val == "2 × mk2"
        assert max(node["start_cycle"] + node["cycles"] for node in nodes) <= profile.cycles
        starts = [node["start_cycle"] for node in nodes]
        assert starts == sorted(starts) and [node["id"] for node in nodes] == list(range(len(nodes)))
        assert all(max(node["data_deps"]) < node["id"] for node in nodes if node["data_deps"])
        assert sum(not node["data_deps"] for node in nodes) == 1


def messages_by_pair(traces: list[list[dict[str, Any]]], kind: str) -> dict[tuple[int, int, int], Counter[int]]:
    """Sizes of messages by source, destination and tag."""
    found: dict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
    for rank, nodes in enumerate(traces):
        for node in nodes:
            if node["type"] == NODE_TYPES[kind]:
                assert rank == node["comm_src" if kind == "COMM_SEND_NODE" else "comm_dst"]
                found[node["comm_src"], node["comm_dst"], node["comm_tag"]][node["comm_size"]] += 1
    return found


def test_each_message_is_sent_and_received(tmp_path: Path) -> None:
    """4 micro-batches of 8 × 32 floats go forwards, and their gradients back."""
    traces = [read(path)[1] for path in pipeline_profile().to_chakra(tmp_path)]
    sent, received = (messages_by_pair(traces, f"COMM_{kind}_NODE") for kind in ("SEND", "RECV"))
    assert sent == received and all(count.total() == 1 for count in sent.values())
    sizes = Counter((source, size) for (source, _, _), count in sent.items() for size in count)
    assert sizes[0, 8 * 32 * 4] == 4 and sizes[1, 8 * 32 * 4] == 4


def test_replicas_are_ranks_of_their_own(tmp_path: Path) -> None:
    """A sum over a ring of four replicas: each sends to the next, and the bytes of all are four times the profile's."""
    device = ipu.IPUModel(num_ipus=4, tiles_per_ipu=8)
    summed = ipu.jit(lambda x: jax.lax.psum(x, "replica"), device=device, replicas=4, in_specs=P("replica"))
    profile = summed.profile(Struct((4, 640), "float32"))
    traces = [read(path)[1] for path in profile.to_chakra(tmp_path)]
    assert len(traces) == 4
    sent, received = (messages_by_pair(traces, f"COMM_{kind}_NODE") for kind in ("SEND", "RECV"))
    assert sent == received and sent
    assert sum(map(bytes_of, traces)) == 4 * sum(row.moved_bytes for row in profile.step_costs)


def test_numbers_have_the_bytes_of_the_specification() -> None:
    """Source: protobuf.dev, "Encoding": 150 in field 1 is 08 96 01, "testing" in field 2 is 12 07 and its letters."""
    assert varint(150) == b"\x96\x01" and varint(0) == b"\x00"
    assert message("Node", {"id": 150, "name": "testing"}) == b"\x08\x96\x01\x12\x07testing"
    assert message("Node", {"data_deps": [3, 270, 86942]}) == b"\x2a\x06\x03\x8e\x02\x9e\xa7\x05"
    assert message("AttributeProto", {"int64_val": -2}) == b"\x48\xfe" + b"\xff" * 8 + b"\x01"


def test_the_description_is_that_of_the_public_schema() -> None:
    if PUBLIC_SCHEMA is None:
        pytest.skip("IPUJAX_CHAKRA_SCHEMA names no file et_def.proto of mlcommons/chakra")
    for name, fields in MESSAGES.items():
        assert fields.items() <= SCHEMA[name].items()
    text = Path(PUBLIC_SCHEMA).read_text(encoding="utf-8")
    assert {f"{name} = {number};" for name, number in NODE_TYPES.items()} <= set(re.findall(r"\w+_NODE = \d+;", text))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    profile = pipeline_profile()
    with pytest.raises(ipu.ProfileError, match=r"too many steps(.|\n)*max_steps=\d+"):
        profile.to_chakra(tmp_path, max_steps=10)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ipu.ProfileError, match="cannot be written"):
        profile.to_chakra(tmp_path / "file")
    (tmp_path / "trace.2.et").write_bytes(b"")
    with pytest.raises(ipu.ProfileError, match="traces of more IPUs"):
        profile.to_chakra(tmp_path)
    assert not list(tmp_path.glob("trace.[01].et"))
    profile.save(tmp_path / "saved.profile")
    with pytest.raises(ipu.ProfileError, match="saved profile has no"):
        ipu.Profile.load(tmp_path / "saved.profile").to_chakra(tmp_path / "other")
    with pytest.raises(TypeError, match=r"os\.PathLike"):
        profile.to_chakra(3)  # type: ignore[arg-type]


def test_times_are_whole_microseconds_that_do_not_overlap(tmp_path: Path) -> None:
    for path in pipeline_profile().to_chakra(tmp_path):
        nodes = read(path)[1]
        ends = [node["start_time_micros"] + node.get("duration_micros", 0) for node in nodes]
        steps = np.array([node["start_cycle"] for node in nodes])
        for n in range(1, len(nodes)):
            assert steps[n] == steps[n - 1] or nodes[n]["start_time_micros"] >= ends[n - 1]
