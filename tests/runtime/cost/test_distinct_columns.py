"""`distinct_columns` against `np.unique` of columns."""

from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from ipujax.runtime.cost.busiest_tiles import distinct_columns

ROWS = st.tuples(st.integers(1, 4), st.integers(1, 30)).flatmap(
    lambda shape: arrays(np.int64, shape, elements=st.integers(0, 2))
)


@given(ROWS)
def test_distinct_columns_are_those_of_numpy(rows: np.ndarray) -> None:
    columns, number = distinct_columns(rows)
    expected_columns, expected_number = np.unique(rows, axis=1, return_inverse=True)
    np.testing.assert_array_equal(columns, expected_columns)
    np.testing.assert_array_equal(number, expected_number.reshape(-1))


def test_no_tiles_have_no_distinct_columns() -> None:
    columns, number = distinct_columns(np.zeros((3, 0), np.int64))
    assert columns.shape == (3, 0) and number.shape == (0,)
