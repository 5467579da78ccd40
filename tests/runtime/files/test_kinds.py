"""Kinds of fields: values that each accepts, and the field that an error names."""

from __future__ import annotations

import pytest

from ipujax.runtime.files.figure_kinds import Either, Nullable, Real, Row, Runs, Tagged, Tree
from ipujax.runtime.files.kinds import EXACT, Anything, FieldError, Flag, Integer, Lengths, List, Map, Record, Text

POINT = Record({"x": Integer()}, {"name": Text(), "a": Flag(), "b": Flag()}, together=("a", "b"))
SHAPES = Tagged("type", {"dot": Record({"type": Text()}), "line": Record({"type": Text(), "to": Integer()})})
NODES = Tree(Record({}, {"in": List(Anything())}), "in", 3)
TABLE = Record({"names": List(Text(), "names"), "name": List(Integer(below="names")), "same": List(Flag(), "names")})
ROWS = Record({"a": List(List(Integer(), "row[]")), "b": List(List(Integer(), "row[]"))})


EITHER = Either("x", Record({"x": Flag()}), Record({"y": Flag()}))
BY_TILE = Record({"a": Runs(Integer(0, 7, total=20), "tiles"), "b": Runs(Integer(), "tiles")})


def checked(kind, value):
    lengths = Lengths()
    kind.check(value, "f", lengths)
    lengths.check_indices()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Integer(), 0),
        (Integer(-1, 3), -1),
        (List(Integer()), [EXACT, 0]),
        (List(Integer(total=5)), [2, 3]),
        (Real(), 1.5),
        (Real(), 3),
        (Text(), "ü\u2028\0"),
        (Text(("a", "b")), "b"),
        (Flag(), True),
        (Nullable(Flag()), None),
        (List(Integer()), (1, 2)),
        (Row((Integer(), Text())), [1, "a"]),
        (Map(Integer(), minimum=1), {"any": 1}),
        (POINT, {"x": 1, "a": True, "b": False}),
        (SHAPES, {"type": "line", "to": 2}),
        (NODES, {"in": [{"in": [{}, {}]}]}),
        (TABLE, {"name": [1, 0], "names": ["p", "q"], "same": [True, True]}),
        (ROWS, {"a": [[1], [2, 3]], "b": [[0], [0, 0]]}),
        (EITHER, {"x": True}),
        (EITHER, {"y": True}),
        (BY_TILE, {"a": "7*2 0 1", "b": f"{EXACT} 0*3"}),
        (BY_TILE, {"a": "", "b": ""}),
        (List(Flag(), maximum=2), [True, True]),
    ],
)
def test_accepts_data_of_a_kind(kind, value):
    checked(kind, value)


@pytest.mark.parametrize(
    ("kind", "value", "path"),
    [
        (Integer(), True, "f"),
        (Integer(), 1.0, "f"),
        (Integer(), "1", "f"),
        (Integer(), -1, "f"),
        (Integer(), EXACT + 1, "f"),
        (List(Integer()), [0, False, 0], "f[1]"),
        (List(Integer()), [0, 0.0], "f[1]"),
        (List(Integer(1)), [1, 0], "f[1]"),
        (List(Integer(1)), [0, 0], "f[0]"),
        (List(Integer()), [1, -1], "f[1]"),
        (List(Integer(total=5)), [3, 3], "f"),
        (Real(), float("nan"), "f"),
        (Real(), float("inf"), "f"),
        (Real(), 10**400, "f"),
        (Real(), False, "f"),
        (Real(), None, "f"),
        (Text(), "\udc80", "f"),
        (Text(), b"a", "f"),
        (Text(("a",)), "b", "f"),
        (Flag(), 1, "f"),
        (Nullable(Flag()), 0, "f"),
        (List(Text()), {"0": "a"}, "f"),
        (List(Text(), minimum=1), [], "f"),
        (Row((Integer(),)), [1, 2], "f"),
        (Map(Integer(), Text(("a",))), {"b": 1}, "f, a name in it"),
        (Map(Integer(), minimum=1), {}, "f"),
        (POINT, {}, "f.x"),
        (POINT, {"x": 1, "y": 2}, "f.y"),
        (POINT, {"x": 1, "a": True}, "f.b"),
        (POINT, [], "f"),
        (SHAPES, {"to": 1}, "f.type"),
        (SHAPES, {"type": ["line"]}, "f.type"),
        (SHAPES, {"type": "line"}, "f.to"),
        (NODES, {"in": [{}, {"in": 3}]}, "f.in[1].in"),
        (NODES, {"in": [{"in": [{"in": [{}]}]}]}, "f"),
        (TABLE, {"name": [1, 2], "names": ["p", "q"], "same": [True, True]}, "f.name[1]"),
        (TABLE, {"name": [], "names": ["p", "q"], "same": [True]}, "f.same"),
        (List(Integer(below="nothing")), [0], "f[0]"),
        (ROWS, {"a": [[1], [2, 3]], "b": [[0], [0]]}, "f.b[1]"),
        (EITHER, {"x": 1}, "f.x"),
        (EITHER, {}, "f.y"),
        (EITHER, [], "f"),
        (BY_TILE, {"a": "1 0*2", "b": "0*4"}, "f.b"),
        (BY_TILE, {"a": "8", "b": "0"}, "f.a"),
        (BY_TILE, {"a": "7*3", "b": "0*3"}, "f.a"),
        (BY_TILE, {"a": "-1", "b": "0"}, "f.a"),
        (BY_TILE, {"a": "1*0", "b": ""}, "f.a"),
        (BY_TILE, {"a": "1  1", "b": "0*2"}, "f.a"),
        (BY_TILE, {"a": "1\n", "b": "0"}, "f.a"),
        (BY_TILE, {"a": "٣", "b": "0"}, "f.a"),
        (BY_TILE, {"a": "0*999999999 0*99999999", "b": ""}, "f.a"),
        (BY_TILE, {"a": [1], "b": "1"}, "f.a"),
        (List(Flag(), maximum=2), [True, True, True], "f"),
    ],
)
def test_refuses_data_of_another_kind(kind, value, path):
    with pytest.raises(FieldError) as error:
        checked(kind, value)
    assert error.value.path == path and error.value.expected and len(error.value.got) < 100
