"""The table of operators: domain and type of a node → a function of its inputs and attributes.

An operator is a plain function at the newest opset that onnx has:

    @operator("LeakyRelu")
    def leaky_relu(x, *, alpha=0.01):
        return jnp.where(x >= 0, x, alpha * x)

Positional parameters are the node's inputs in order, None where a node leaves an optional one out; `*inputs` takes any
number. Keyword-only parameters are its attributes, by ONNX's names and with ONNX's defaults; values are int, float,
str, list of these, `numpy.ndarray` for tensors, functions of arrays for subgraphs. An attribute without a parameter is
an error that names it. Attributes of several operators may be a `TypedDict`, as in `**attributes: Unpack[Kernels]`.
A few keyword-only parameters are facts of the node, see NODE_FACTS.

A value is static (`numpy.ndarray`, known while tracing) or traced (`jax.Array`). An operand that is annotated `Array`
comes as an array of JAX. One that decides a shape is annotated `Static`: a traced one is refused, and what it depends
on is no parameter of a model. Sequences are tuples, an empty optional is None. A result is one value, or a tuple of as
many as the node has outputs; an operator that returns a sequence as its only output returns a tuple with that tuple
in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from ipujax.front_end import ArgumentTypeError
from ipujax.onnx.bounded_values import BoundedSequence, TracedOptional
from ipujax.onnx.element_types import Saturated
from ipujax.onnx.onnx_errors import TracedOperandError

# Keyword-only parameters that are not attributes, with the values that the evaluator passes.
NODE_FACTS: Mapping[str, str] = {
    "output_count": "int: outputs of the node, up to the last that has a name",
    "output_dtypes": "tuple of numpy.dtype: of each output, as the graph declares it; None where it does not",
    "max_sizes": "tuple of (str, int or None): name of each output, and the bound on its size from `load(max_sizes=)`",
    "budget": "Budget: bounds on what the model's values may grow to",
    "node_name": "str: name of the node, unique in its graph; seeds random operators",
}
STANDARD_DOMAIN = ""  # ai.onnx; both names mean it in files
MICROSOFT_DOMAIN = "com.microsoft"  # of ONNX Runtime
EARLY_DOMAIN = "ipujax.early"  # operators of early opsets that no node of the newest stands for
_STATIC = ("Static", "Static | None")  # annotations, which are text where their evaluation is postponed
_ALIASES = {"ai.onnx": STANDARD_DOMAIN}

Key = tuple[str, str]  # domain, type of operator
MaxSizes = Sequence[tuple[str, int | None]]  # the fact of that name
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Operator:
    """One implementation: the function, and the parameters it declares.

    Args:
        key: domain and type.
        function: of inputs and attributes.
        max_inputs: number of positional parameters; None: any.
        required_inputs: number of positional parameters without a default.
        attributes: names of keyword-only parameters that are attributes; None: any.
        required_attributes: those without a default.
        node_facts: names of NODE_FACTS among the parameters.
        static_operands: names of positional parameters that must be static, by position.
        array_operands: positions of those that are arrays of JAX, whatever the operand is.
    """

    key: Key
    function: Callable[..., Any]
    max_inputs: int | None
    required_inputs: int
    attributes: frozenset[str] | None
    required_attributes: frozenset[str]
    node_facts: frozenset[str]
    static_operands: Mapping[int, str]
    array_operands: frozenset[int]

    def __call__(self, *operands: Any, **attributes: Any) -> Any:
        """Return the function's results on operands as its annotations have them; refuse traced ones of `Static`."""
        return self.function(*(self._converted(n, x) for n, x in enumerate(operands)), **attributes)

    def _converted(self, position: int, operand: Any) -> Any:
        """Return an operand as the annotation at its position wants it: an array, or a static value."""
        if operand is not None and position in self.array_operands:
            return jnp.asarray(operand)
        name = self.static_operands.get(position)
        return operand if operand is None or name is None else static(operand, name)


OPERATORS: dict[Key, Operator] = {}


def operator_key(domain: str, op_type: str) -> Key:
    """Return the key of an operator in OPERATORS; `ai.onnx` and the empty domain are the same."""
    return _ALIASES.get(domain, domain), op_type


def register(domain: str, op_type: str) -> Callable[[F], F]:
    """Add an operator, or replace it.

    Args:
        domain: domain of the operator, `""` or `"ai.onnx"` for ONNX's own.
        op_type: type of the nodes that it implements, as files spell it.

    Returns:
        A decorator that takes the function described at the top of this module and returns it unchanged. The function
        may call anything that JAX traces, codelets by `ipujax.codelet_call` included.

    Raises:
        ArgumentTypeError: a name that is not text, or something other than a function.

    Example::

        @ipujax.onnx.register("com.example", "ScaledAdd")
        def scaled_add(x, y, *, scale=1.0):
            return x + scale * y
    """
    for label, name in (("domain", domain), ("op_type", op_type)):
        if not isinstance(name, str):
            raise ArgumentTypeError(f"{label} must be text", expected="str", got=type(name).__name__)

    def add(function: F) -> F:
        if not callable(function):
            got = type(function).__name__
            raise ArgumentTypeError(f"operator {op_type} must be a function", expected="a function", got=got)
        OPERATORS[operator_key(domain, op_type)] = _described(operator_key(domain, op_type), function)
        return function

    return add


def operator(op_type: str, domain: str = STANDARD_DOMAIN) -> Callable[[F], F]:
    """Add an operator of this package; `register` with the standard domain as default."""
    return register(domain, op_type)


def static(value: Any, name: str) -> np.ndarray:
    """Return the NumPy array of an operand whose values must be known while tracing; refuse a traced one."""
    # The evaluator adds the node and its operator to the text.
    if is_static(value):
        return np.asarray(value)
    message = f"{name} decides a shape and must be static"
    hint = "name the graph input that it depends on in load(static=…), or give the input's shape in input_shapes"
    raise TracedOperandError(message, expected="a value known while tracing", got=_kind(value), hint=hint)


def as_texts(x: Any, name: str) -> np.ndarray:
    """Return known text as an array of `str`; ONNX's is bytes in UTF-8."""
    flat = [
        each.decode("utf-8", errors="surrogateescape") if isinstance(each, bytes) else str(each)
        for each in np.ravel(static(x, name))
    ]
    texts = np.empty(len(flat), object)
    texts[:] = flat
    return texts.reshape(np.shape(x))


def is_static(value: Any) -> bool:
    """Return whether a value is known while tracing: NumPy, Python numbers, None, and tuples of them."""
    traced = jax.Array | Saturated | BoundedSequence | TracedOptional
    return all(map(is_static, value)) if isinstance(value, tuple) else not isinstance(value, traced)


def data_dependent_size(max_sizes: MaxSizes, result: str) -> int:
    """Return the bound from `load(max_sizes=)` on results whose size depends on traced values; refuse its absence."""
    bound = next((size for _, size in max_sizes if size is not None), None)
    if bound is not None:
        return bound
    name = next((name for name, _ in max_sizes if name), "<output of the node>")
    hint = f"give a bound, load(max_sizes={{{name!r}: n}}), or make the input static, load(static=…)"
    message = f"the size of {result} depends on traced values"
    raise TracedOperandError(message, expected="a static operand or a bound", got="a traced operand", hint=hint)


def _kind(value: Any) -> str:
    array = value.array if isinstance(value, Saturated) else value
    return "a tuple with traced values" if isinstance(value, tuple) else f"traced {jax.typeof(array).str_short()}"


def _described(key: Key, function: Callable[..., Any]) -> Operator:
    parameters = inspect.signature(function).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    required = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    if shared := _shared_attributes(function):
        keywords |= shared.__required_keys__ | shared.__optional_keys__
        required |= shared.__required_keys__
        takes_any = False
    return Operator(
        key=key,
        function=function,
        max_inputs=None if inspect.Parameter.VAR_POSITIONAL in kinds else len(positional),
        required_inputs=sum(p.default is p.empty for p in positional),
        attributes=None if takes_any else frozenset(keywords - set(NODE_FACTS)),
        required_attributes=frozenset(required - set(NODE_FACTS)),
        node_facts=frozenset(keywords & set(NODE_FACTS)),
        static_operands={n: p.name for n, p in enumerate(positional) if p.annotation in _STATIC},
        array_operands=frozenset(n for n, p in enumerate(positional) if p.annotation == "Array"),
    )


def _shared_attributes(function: Callable[..., Any]) -> Any:
    """Return the `TypedDict` of `**name: Unpack[…]`; None without one."""
    name = inspect.getfullargspec(function).varkw
    hint = get_type_hints(function).get(name) if name else None
    return get_args(hint)[0] if get_origin(hint) is Unpack else None
