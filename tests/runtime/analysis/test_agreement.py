"""Classes of replicas that agree, against sets of pairs of equal replicas."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ipujax.runtime.analysis import agreement
from ipujax.runtime.analysis.agreement import Classes

RNG = np.random.default_rng(0)
REPLICAS = 6


def random_classes() -> Classes:
    return agreement.by_key(RNG.integers(0, 4, REPLICAS).tolist())


def equal_pairs(classes: Classes) -> set[tuple[int, int]]:
    return {(a, b) for a, b in combinations(range(len(classes)), 2) if classes[a] == classes[b]}


def test_values_of_several_agree_where_all_do() -> None:
    for _ in range(50):
        several = [random_classes() for _ in range(int(RNG.integers(1, 4)))]
        result = agreement.common(several, REPLICAS)
        assert equal_pairs(result) == set.intersection(*map(equal_pairs, several))
        assert agreement.common([*several, result], REPLICAS) == result
    assert agreement.common([], REPLICAS) == agreement.same(REPLICAS)


def test_classes_are_named_by_their_first_replica() -> None:
    assert agreement.of_rows(np.array([[3, 1], [3, 2], [3, 1]])) == (0, 1, 0)
    assert agreement.apart(3) == (0, 1, 2)


@pytest.mark.parametrize("has_ranks", [False, True])
def test_results_of_collectives_agree_where_their_numbers_do(has_ranks: bool) -> None:
    groups = ((0, 2, 4), (1, 3, 5))
    senders = [groups[replica % 2] for replica in range(REPLICAS)]
    for _ in range(50):
        classes = random_classes()
        values = RNG.standard_normal(REPLICAS)[list(classes)]
        results = [(*values[list(senders[r])], senders[r].index(r) if has_ranks else 0) for r in range(REPLICAS)]
        expected = {(a, b) for a, b in combinations(range(REPLICAS), 2) if results[a] == results[b]}
        assert equal_pairs(agreement.of_results(senders, classes, has_ranks=has_ranks)) == expected


class _Reads(tuple[int, ...]):
    """Classes that count how often they are read."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        _Reads.count += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_group_is_read_once_for_all_of_its_replicas(has_ranks: bool) -> None:
    replicas = 512
    group = tuple(range(replicas))
    _Reads.count = 0
    classes = agreement.of_results([group] * replicas, _Reads(agreement.apart(replicas)), has_ranks=has_ranks)
    assert classes == (agreement.apart(replicas) if has_ranks else agreement.same(replicas))
    assert _Reads.count == replicas


def test_pairs_join_groups() -> None:
    groups = agreement.joined([(0, 1), (3, 4), (1, 5)], REPLICAS)
    assert sorted(map(sorted, groups)) == [[0, 1, 5], [2], [3, 4]]
    assert agreement.is_apart_in((0, 0, 2, 2, 2, 0), [[0, 1, 5], [3, 2]]) is False
    assert agreement.is_apart_in((0, 0, 2, 2, 2, 0), [[0, 2]])
