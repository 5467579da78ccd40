"""Agreement of replicas on a value: classes of replicas that have provably equal values.

    classes ::= for each replica the lowest number of a replica of its class

All replicas agree if there is one class, `same(n)`; each may have another value in `apart(n)`. On a mesh of axes x and
y, a value that is split along x alone has a class for each coordinate along x: replicas of one class differ in y only.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

Classes = tuple[int, ...]


def same(replicas: int) -> Classes:
    """Return the classes of a value that is equal on all replicas."""
    return (0,) * replicas


def apart(replicas: int) -> Classes:
    """Return the classes of a value that may be another on each replica."""
    return tuple(range(replicas))


def by_key(keys: Iterable[Hashable]) -> Classes:
    """Return the classes of replicas with equal keys; `keys` has that of each replica."""
    first: dict[Hashable, int] = {}
    return tuple(first.setdefault(key, replica) for replica, key in enumerate(keys))


def of_rows(rows: np.ndarray) -> Classes:
    """Return the classes of a constant of each replica, [replicas, …]."""
    return by_key(row.tobytes() for row in np.asarray(rows))


def common(classes: Iterable[Classes], replicas: int) -> Classes:
    """Return the classes of a value computed from values of the given classes: equal where all of them are."""
    distinct = {each for each in classes if any(each)}
    if len(distinct) <= 1:
        return next(iter(distinct), same(replicas))
    return by_key(zip(*distinct, strict=True))


def is_apart_in(classes: Classes, groups: Iterable[Sequence[int]]) -> bool:
    """Check whether the replicas of one of some groups may have unequal values."""
    return any(len({classes[replica] for replica in group}) > 1 for group in groups)


def joined(pairs: Iterable[Sequence[int]], replicas: int) -> list[list[int]]:
    """Return the groups of replicas that pairs, or groups, connect; a replica without others is a group of its own."""
    group_of = {replica: [replica] for replica in range(replicas)}
    for first, *others in pairs:
        for other in others:
            large = group_of[first]
            small = group_of[other]
            if large is not small:
                large += small
                group_of.update(dict.fromkeys(small, large))
    return list({id(group): group for group in group_of.values()}.values())


def of_results(senders: Sequence[Sequence[int]], classes: Classes, *, has_ranks: bool) -> Classes:
    """Return the classes of what replicas compute from operands of others.

    Args:
        senders: for each replica those whose operands it gets, by rank.
        classes: classes of the operands.
        has_ranks: whether the result depends on the rank of a replica among its senders, too.
    """
    # Many replicas share one long group: each group is read once.
    groups = {id(group): group for group in senders}
    keys = by_key(tuple(classes[sender] for sender in group) for group in groups.values())
    key_of = dict(zip(groups, keys, strict=True))
    if not has_ranks:
        return by_key(key_of[id(group)] for group in senders)
    ranks = {number: {sender: rank for rank, sender in enumerate(group)} for number, group in groups.items()}
    return by_key((key_of[id(group)], ranks[id(group)][replica]) for replica, group in enumerate(senders))
