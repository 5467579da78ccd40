"""Interval sets against Python sets."""

import numpy as np
from hypothesis import given, strategies as st

from ipujax.runtime.verify.undefined import empty_set, intervals

pairs = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=8)


def both(drawn):
    """Drawn (start, length) pairs as an interval set and as a Python set."""
    start = np.array([s for s, _ in drawn], np.int64)
    stop = start + np.array([n for _, n in drawn], np.int64)
    return intervals(start, stop), {i for s, n in drawn for i in range(s, s + n)}


def elements(actual):
    assert np.all(actual.start < actual.stop)
    assert np.all(actual.stop[:-1] < actual.start[1:])
    return {i for s, e in zip(actual.start.tolist(), actual.stop.tolist(), strict=True) for i in range(s, e)}


@given(pairs, pairs)
def test_set_operations(a, b):
    (a, set_a) = both(a)
    (b, set_b) = both(b)
    assert elements(a) == set_a
    assert elements(a | b) == set_a | set_b
    assert elements(a & b) == set_a & set_b
    assert elements(a & empty_set()) == elements(empty_set()) == set()


@given(pairs, st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=4))
def test_find_lacking(a, reference):
    (a, set_a) = both(a)
    start = np.array([s for s, _ in reference], np.int64)
    stop = start + np.array([n for _, n in reference], np.int64)
    lacking = next(
        (i for s, e in zip(start.tolist(), stop.tolist(), strict=True) for i in range(s, e) if i not in set_a), None
    )
    assert a.find_lacking(start, stop) == lacking
