"""Data of a step: arrays (`PyStepIO`), or functions that are called for them (`PyStepIOCallback`); weights.

Input: the arrays or callbacks of `session.run`. Output: arrays [batches, accumulation, replicas, micro-batch…], and
anchors written into the program's arrays.

A session may make inputs itself, in place of data from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import nearest
from ipujax.onnx.front_end import REMEDY, sides_beyond
from ipujax.popart.enumerations import SyntheticDataMode
from ipujax.popart.exceptions import popart_exception, unknown_name
from ipujax.popart.flow.data_flow import AnchorReturnType, StepShape
from ipujax.popart.tensor_info import TensorInfo


def synthetic_rows(
    inputs: Mapping[str, TensorInfo], step: StepShape, mode: SyntheticDataMode
) -> dict[str, np.ndarray[Any, Any]]:
    """Return inputs of a step; whole numbers are zeros.

    Args:
        inputs: element types and shapes of a micro-batch.
        step: micro-batches of the step.
        mode: zeros, or normal or uniform numbers.
    """
    rng = np.random.default_rng(0)
    rows: dict[str, np.ndarray[Any, Any]] = {}
    for name, info in inputs.items():
        shape = (*step.dims, *info.dims)
        if mode == SyntheticDataMode.Zeros or not jnp.issubdtype(info.dtype, jnp.floating):
            rows[name] = np.zeros(shape, info.dtype)
        else:
            is_normal = mode == SyntheticDataMode.RandomNormal
            rows[name] = (rng.standard_normal(shape) if is_normal else rng.random(shape)).astype(info.dtype)
    return rows


_STEP_DIMS = 3  # batches, accumulation, replicas, as of `StepShape.dims`
# Element types that a program may bring in place of the model's: PopART converts 64 bits to 32 likewise.
_WIDE_BYTES = 8
_CONVERTED = {(np.int64, np.int32), (np.uint64, np.uint32), (np.float64, np.float32)}


class StepIO(Protocol):
    """Data of a step."""

    def read(self, name: str, info: TensorInfo, step: StepShape) -> np.ndarray[Any, Any]:
        """Return an input of shape [batches, accumulation, replicas, *info.shape]."""

    def write(self, name: str, kind: AnchorReturnType, values: np.ndarray[Any, Any]) -> None:
        """Take the values of an anchor, of shape `StepShape.anchor_dims` and its own."""

    def check_anchors(self, infos: Mapping[str, TensorInfo]) -> None:
        """Refuse anchors that have no place, before a step runs."""

    def check_inputs(self, names: Collection[str]) -> None:
        """Refuse arrays of tensors that are not inputs, before a step runs."""


class PyStepIO:
    """Arrays of a step.

    Args:
        inputs: array by name of the input: of any shape with the elements of
            [batches, accumulation, replicas, micro-batch…].
        outputs: array by name of the anchor, which a step writes; `session.initAnchorArrays()`.

    Raises:
        popart_exception: an array whose elements are not contiguous.
    """

    def __init__(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._inputs = {name: np.asarray(array) for name, array in inputs.items()}
        self._outputs = dict(outputs)
        for name, array in self._inputs.items():
            _check_contiguous(f"the array of {name!r} in PyStepIO", array)
        for name, array in self._outputs.items():
            _check_writable(f"the array of {name!r} in PyStepIO", array)

    def enableRuntimeAsserts(self, enable: bool) -> None:
        """Checks are always on."""

    def read(self, name: str, info: TensorInfo, step: StepShape) -> np.ndarray[Any, Any]:
        """Return an input.

        Args:
            name: of the input.
            info: of a micro-batch.
            step: micro-batches of the step.

        Returns:
            An array [batches, accumulation, replicas, *info.shape].

        Raises:
            popart_exception: no such input, another element type, or another number of elements.
        """
        if name not in self._inputs:
            raise unknown_name("a step lacks an input, or has one", name, self._inputs)
        array = as_element_type(f"input {name!r}", self._inputs[name], info)
        if array.size != step.micro_batches * info.nelms():
            raise popart_exception(
                f"input {name!r} has the wrong number of elements",
                expected=f"{step.micro_batches * info.nelms()}: {step.batches} batches × {step.accumulation} "
                f"accumulated × {step.replicas} replicas × {info.shape()}",
                got=f"{array.size}: {list(array.shape)}",
            )
        return array.reshape(*step.dims, *info.dims)

    def check_inputs(self, names: Collection[str]) -> None:
        """Refuse an array of a tensor that is not an input.

        Args:
            names: of the inputs.

        Raises:
            popart_exception: with the nearest.
        """
        for name in self._inputs:
            if name not in names:
                message = (
                    f"The tensor '{name}' has been provided as one of the inputs to the stepIO, but is not an input"
                )
                listed = ", ".join(names) or "no input"
                raise popart_exception(message, expected=listed, got=name, hint=nearest(name, list(names)))

    def write(self, name: str, kind: AnchorReturnType, values: np.ndarray[Any, Any]) -> None:
        """Write the values of an anchor into the program's array.

        Args:
            name: of the anchor.
            kind: of the anchor.
            values: of its leading dimensions and its own.
        """
        if name in self._outputs:
            target = self._outputs[name]
            target[...] = values.reshape(target.shape)

    def check_anchors(self, infos: Mapping[str, TensorInfo]) -> None:
        """Refuse an array of an anchor that has another number of elements, or a type that does not hold them.

        Args:
            infos: element types and shapes by name of the anchor.

        Raises:
            popart_exception: an array for a tensor that is not an anchor, or that its values do not fit.
        """
        for name, array in self._outputs.items():
            if name not in infos:
                raise unknown_name("PyStepIO has an output for an anchor", name, infos)
            label = f"the array of anchor {name!r}"
            if array.size != infos[name].nelms():
                expected = f"{infos[name].shape()}, as session.initAnchorArrays() makes"
                raise popart_exception(
                    f"{label} has the wrong number of elements", expected=expected, got=list(array.shape)
                )
            _check_holds(label, array.dtype, infos[name].dtype)


class PyStepIOCallback:
    """Functions of a step, called once a micro-batch of a replica.

    Args:
        input_callback: name of the input, and whether the call is a prefetch → array of a micro-batch. A prefetch may
            return None: it is asked for again, without the flag, when it is needed.
        input_complete_callback: name; the array was read.
        output_callback: name of the anchor → array to write.
        output_complete_callback: name; the array was written.
    """

    def __init__(
        self,
        input_callback: Callable[[str, bool], Any],
        input_complete_callback: Callable[[str], Any],
        output_callback: Callable[[str], Any],
        output_complete_callback: Callable[[str], Any],
    ) -> None:
        self._input = input_callback
        self._input_complete = input_complete_callback
        self._output = output_callback
        self._output_complete = output_complete_callback

    def read(self, name: str, info: TensorInfo, step: StepShape) -> np.ndarray[Any, Any]:
        """Return an input of all micro-batches; see `PyStepIO.read`.

        The first micro-batch is asked for when it is needed, all others ahead: each with the prefetch flag.
        """
        rows = np.empty((step.micro_batches, *info.dims), info.dtype)
        for row in range(step.micro_batches):
            data = self._input(name, row > 0)
            if data is None and row > 0:
                data = self._input(name, False)
            if data is None:
                raise popart_exception(f"the input callback has no data for {name!r}", got=None)
            _check_contiguous(f"input {name!r} of the callback", data)
            array = as_element_type(f"input {name!r} of the callback", np.asarray(data), info)
            if array.size != info.nelms():
                message = f"input {name!r} of the callback has the wrong number of elements"
                raise popart_exception(message, expected=f"{info.nelms()}: {info.shape()}", got=list(array.shape))
            rows[row] = array.reshape(info.dims)
            self._input_complete(name)
        return rows.reshape(*step.dims, *info.dims)

    def write(self, name: str, kind: AnchorReturnType, values: np.ndarray[Any, Any]) -> None:
        """Hand over the values of an anchor, one micro-batch of a replica a call; all kinds of anchors alike.

        Args:
            name: of the anchor.
            kind: of the anchor.
            values: [batches, accumulation, replicas, …]: calls come in this order, that of the device.
        """
        for row in values.reshape(-1, *values.shape[_STEP_DIMS:]):
            _write_into(f"the array of {name!r} of the callback", self._output(name), row)
            self._output_complete(name)

    def check_anchors(self, infos: Mapping[str, TensorInfo]) -> None:
        """Arrays come when they are asked for; there is nothing to check ahead."""

    def check_inputs(self, names: Collection[str]) -> None:
        """Inputs are asked for by their names; there is nothing to check ahead."""


class PyWeightsIO:
    """Arrays of weights, for `session.readWeights` and `session.writeWeights`.

    Args:
        weights: array by name.

    Raises:
        popart_exception: an array whose elements are not contiguous.
    """

    def __init__(self, weights: Mapping[str, Any]) -> None:
        for name, array in weights.items():
            _check_contiguous(f"the array of {name!r} in PyWeightsIO", array)
        self.weights = dict(weights)

    def read(self, name: str, info: TensorInfo) -> np.ndarray[Any, Any]:
        """Return a copy of the array of a weight.

        Args:
            name: of the weight.
            info: of the weight.

        Raises:
            popart_exception: another element type or size.
        """
        array = as_element_type(f"weight {name!r}", np.asarray(self.weights[name]), info)
        if array.size != info.nelms():
            message = f"the array of weight {name!r} has the wrong number of elements"
            raise popart_exception(message, expected=f"{info.nelms()}: {info.shape()}", got=list(array.shape))
        return array.reshape(info.dims).copy()

    def write(self, name: str, values: np.ndarray[Any, Any]) -> None:
        """Write the value of a weight into the program's array.

        Args:
            name: of the weight.
            values: of its shape.

        Raises:
            popart_exception: an array of another size, or of elements that do not hold the values.
        """
        _write_into(f"the array for weight {name!r}", self.weights[name], values)


def _write_into(label: str, target: Any, values: np.ndarray[Any, Any]) -> None:
    """Write values into an array of the program, which is of another shape perhaps; refuse one that does not fit."""
    _check_writable(label, target)
    if target.size != values.size:
        message = f"{label} has the wrong number of elements"
        raise popart_exception(message, expected=list(values.shape), got=list(target.shape))
    _check_holds(label, target.dtype, values.dtype)
    target[...] = values.reshape(target.shape)


def _check_writable(label: str, target: Any) -> None:
    if not isinstance(target, np.ndarray):
        expected = "an array, which results are written into"
        raise popart_exception(f"{label} is no array of NumPy", expected=expected, got=type(target).__name__)
    if not target.flags.writeable:
        raise popart_exception(f"{label} is read-only", hint="array.copy()")
    _check_contiguous(label, target)


def _check_holds(label: str, dtype: np.dtype[Any], written: np.dtype[Any]) -> None:
    """Refuse an array of the program for values that its element type does not hold: NumPy would cut them off."""
    if not np.can_cast(written, dtype) and (written.type, dtype.type) not in _CONVERTED:
        raise popart_exception(f"{label} has the wrong element type", expected=str(written), got=str(dtype))


def as_element_type(label: str, array: np.ndarray[Any, Any], info: TensorInfo) -> np.ndarray[Any, Any]:
    """Return an array with the element type of a tensor; 64 bits are converted to 32 where they hold all numbers.

    Args:
        label: the array, for the message.
        array: any.
        info: of the tensor.

    Raises:
        popart_exception: another element type, or a number that 32 bits do not hold.
    """
    if array.dtype != info.dtype and (array.dtype.type, info.dtype.type) not in _CONVERTED:
        expected = info.data_type_lcase()
        raise popart_exception(f"{label} has the wrong element type", expected=expected, got=str(array.dtype))
    if array.dtype.itemsize == _WIDE_BYTES:
        _check_held(label, array, info)
    return array.astype(info.dtype, copy=False)


def _check_held(label: str, array: np.ndarray[Any, Any], info: TensorInfo) -> None:
    """Refuse numbers that the device does not hold: without `jax_enable_x64` it has no more than 32 bits."""
    dtype = jax.dtypes.canonicalize_dtype(info.dtype)
    sides = None if dtype == array.dtype else sides_beyond(array, dtype)
    if sides is not None:
        message = f"{label} has the value {array[sides != 0][0]}, which {dtype} does not hold"
        declared = "" if array.dtype == info.dtype else f"declare it as {array.dtype}; "
        raise popart_exception(message, expected=dtype, got=array.dtype, hint=declared + REMEDY)


def _check_contiguous(label: str, array: Any) -> None:
    if isinstance(array, np.ndarray) and not array.flags["C_CONTIGUOUS"]:
        hint = "np.ascontiguousarray(array)"
        raise popart_exception(f"{label} cannot be used, as it is not c-contiguous", hint=hint)
