"""Files of models: the cache of a model hub, links, pipes and devices, external data of the wrong place and size."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import ipujax.onnx
from ipujax.onnx import OnnxError, OnnxModelError
from tests.ipujax.onnx.models import info, model_of

VALUES = np.arange(4, dtype=np.float32)


def move_to(location: str, tensor: onnx.TensorProto) -> None:
    """Say that the data of a tensor are in a file."""
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def model_with_data(location: str, dims: tuple[int, ...] = (4,), count: int = 1) -> onnx.ModelProto:
    """Return x + w0, whose initialisers are in a file."""
    model = model_of([helper.make_node("Add", ["x", "w0"], ["y"])], [info("x", shape=(4,))], [info("y", shape=None)])
    for n in range(count):
        row = model.graph.initializer.add(name=f"w{n}", data_type=onnx.TensorProto.FLOAT, dims=dims)
        move_to(location, row)
    return model


def hub(root: Path, target: str = "../../../blobs/bb", location: str = "model.onnx_data") -> Path:
    """Write a repository as a hub's cache has it; return the path of its model."""
    snapshot = root / "snapshots" / "abc" / "onnx"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "blobs" / "aa").write_bytes(model_with_data(location).SerializeToString())
    (root / "blobs" / "bb").write_bytes(VALUES.tobytes())
    (snapshot / "model.onnx").symlink_to("../../../blobs/aa")
    (snapshot / "model.onnx_data").symlink_to(target)
    return snapshot / "model.onnx"


def check_loads(path: Path | str) -> None:
    np.testing.assert_array_equal(ipujax.onnx.load(path).params["w0"], VALUES)


def test_a_model_in_the_cache_of_a_hub_loads(tmp_path, monkeypatch):
    path = hub(tmp_path / "repo")
    check_loads(path)
    monkeypatch.chdir(path.parent)
    check_loads("model.onnx")


def test_links_of_the_users_own_above_the_repository_do_not_matter(tmp_path):
    hub(tmp_path / "disk" / "repo")
    (tmp_path / "home").symlink_to("disk")
    check_loads(tmp_path / "home" / "repo" / "snapshots" / "abc" / "onnx" / "model.onnx")


def test_chains_and_absolute_links_inside_the_repository_load(tmp_path):
    path = hub(tmp_path / "repo", target="second")
    (path.parent / "second").symlink_to(tmp_path / "repo" / "blobs" / "bb")
    check_loads(path)


@pytest.mark.parametrize(
    "target", ["../../../../secret", "/etc/hostname", "loop", "../../../blobs/out", "outside/secret"]
)
def test_links_that_leave_the_repository_are_refused(tmp_path, target):
    (tmp_path / "secret").write_bytes(VALUES.tobytes())
    path = hub(tmp_path / "repo", target)
    (path.parent / "loop").symlink_to("loop")
    (path.parent / "outside").symlink_to(tmp_path)
    (tmp_path / "repo" / "blobs" / "out").symlink_to("../../secret")
    with pytest.raises(OnnxModelError, match="are refused"):
        ipujax.onnx.load(path)


def test_a_chain_that_leaves_the_repository_and_returns_is_refused(tmp_path):
    path = hub(tmp_path / "repo", target="../../../../back")
    (tmp_path / "back").symlink_to("repo/blobs/bb")
    with pytest.raises(OnnxModelError, match="are refused"):
        ipujax.onnx.load(path)


def test_blobs_that_are_a_link_are_none(tmp_path):
    path = hub(tmp_path / "repo")
    (tmp_path / "repo" / "blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "repo" / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OnnxModelError, match="are refused"):
        ipujax.onnx.load(path)


@pytest.mark.parametrize("location", ["../../../blobs/bb", "../bb", "/etc/hostname", "a\0b", "a\\b", "n" * 5000])
def test_locations_in_a_hub_stay_below_the_model(tmp_path, location):
    with pytest.raises(OnnxModelError, match=r"external data of 'w0' (are refused|cannot be read)"):
        ipujax.onnx.load(hub(tmp_path / "repo", location=location))


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def test_pipes_devices_and_folders_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OnnxModelError, match="cannot be read"):
            ipujax.onnx.load(tmp_path / name)
        with pytest.raises(OnnxModelError, match="cannot be read"):
            ipujax.onnx.load(saved(model_with_data(name), tmp_path))
    for path in ("/dev/zero", "/dev/null", "a\0b", "n" * 5000):
        with pytest.raises(OnnxModelError, match=r"cannot be read|is empty"):
            ipujax.onnx.load(path)


def test_a_model_that_is_a_link_loads(tmp_path):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    (tmp_path / "link.onnx").symlink_to(saved(model_with_data("data"), tmp_path).name)
    check_loads(tmp_path / "link.onnx")


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize("text", ["-1", "1e3", "x", "9" * 5000, str(10**18), "²"])
def test_places_that_no_file_has_are_refused(tmp_path, key, text):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    model = model_with_data("data")
    model.graph.initializer[0].external_data.add(key=key, value=text)
    with pytest.raises(OnnxModelError, match="external data of 'w0'"):
        ipujax.onnx.load(saved(model, tmp_path))


def test_declared_sizes_are_checked_before_data_are_read(tmp_path):
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(2**36)
    with pytest.raises(OnnxModelError, match="wrong size"):
        ipujax.onnx.load(saved(model_with_data("holes"), tmp_path))
    with pytest.raises(OnnxError, match="too large"):
        ipujax.onnx.load(saved(model_with_data("holes", (2**34,)), tmp_path))


def test_a_small_file_is_not_read_many_times(tmp_path):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    check_loads(saved(model_with_data("data", count=4), tmp_path))
    with pytest.raises(OnnxModelError, match="overlap"):
        ipujax.onnx.load(saved(model_with_data("data", count=5), tmp_path))


def test_external_data_of_sparse_tensors_are_not_read_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "data").write_bytes(VALUES.tobytes())
    monkeypatch.chdir(tmp_path)
    values = onnx.TensorProto(name="w", data_type=onnx.TensorProto.FLOAT, dims=[4])
    move_to("data", values)
    sparse = helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(np.arange(4)), [4])
    node = helper.make_node("Constant", [], ["w"], sparse_value=sparse)
    model = model_of([node, helper.make_node("Identity", ["w"], ["y"])], [], [info("y", shape=None)])
    with pytest.raises(OnnxModelError, match="external data"):
        ipujax.onnx.load(model.SerializeToString())
