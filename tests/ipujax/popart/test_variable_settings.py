"""`VariableSettings`: groups of replicas, as the guide's tables have them, and settings that are none."""

from __future__ import annotations

from typing import Any

import pytest

from ipujax import popart
from ipujax.popart import CommGroup, CommGroupType, VariableRetrievalMode, VariableSettings

SIXTEEN = 16
# Settings → the replicas of each group of 16.
GROUPS: list[tuple[VariableSettings, list[list[int]]]] = [
    (VariableSettings(), [list(range(SIXTEEN))]),
    (VariableSettings(CommGroup(CommGroupType.All, 4)), [list(range(SIXTEEN))]),
    (VariableSettings(CommGroup(CommGroupType.Consecutive, 4)), [list(range(4 * g, 4 * g + 4)) for g in range(4)]),
    (VariableSettings(CommGroup(CommGroupType.Orthogonal, 4)), [list(range(g, SIXTEEN, 4)) for g in range(4)]),
    (VariableSettings(CommGroup(CommGroupType.Ungrouped, 0)), [[g] for g in range(SIXTEEN)]),
    (VariableSettings(2, 4), [[8 * (g // 2) + g % 2 + 2 * i for i in range(4)] for g in range(4)]),
    (VariableSettings(stride=4, groupSize=4), [list(range(g, SIXTEEN, 4)) for g in range(4)]),
    (VariableSettings(groupSize=2, stride=1), [[2 * g, 2 * g + 1] for g in range(8)]),
]


@pytest.mark.parametrize(("settings", "groups"), GROUPS, ids=[str(settings) for settings, _ in GROUPS])
def test_groups_are_those_of_the_guide(settings: VariableSettings, groups: list[list[int]]) -> None:
    assert settings.groups(SIXTEEN) == groups
    assert settings.getGroupCount(SIXTEEN) == len(groups) == settings.numReplicasReturningVariable(SIXTEEN)
    assert settings.getRealGroupSize(SIXTEEN) == len(groups[0])
    grouping = settings.getReplicaGrouping(SIXTEEN)
    assert [grouping.getGroupAt(replica) for group in groups for replica in group] == [
        number for number, group in enumerate(groups) for _ in group
    ]
    assert [settings.getGroupRepresentative(number) for number in range(len(groups))] == [g[0] for g in groups]
    shape = settings.shapeOnHost([3, 5], SIXTEEN)
    assert shape == ([len(groups)] if len(groups) > 1 else []) + [3, 5]
    assert settings.shapeOnReplica(shape, SIXTEEN, "w") == [3, 5]


def test_all_replicas_return_a_variable() -> None:
    group = CommGroup(CommGroupType.Consecutive, 2)
    settings = VariableSettings(group, VariableRetrievalMode.AllReplicas)
    assert settings.numReplicasReturningVariable(4) == 4 and settings.getGroupCount(4) == 2
    assert settings.getSharedVariableDomain() == group and settings.isUsingCommGroup()
    assert settings != VariableSettings(group) and settings == VariableSettings(
        retrievalMode_=VariableRetrievalMode.AllReplicas, sharedVariableDomain_=group
    )


BAD: list[tuple[Any, str]] = [
    (lambda: VariableSettings(3), "unknown VariableSettings"),
    (lambda: VariableSettings("All"), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(), CommGroup()), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(), 1, 2), "unknown VariableSettings"),
    (lambda: VariableSettings(CommGroup(CommGroupType.Orthogonal, 0)), "need a size"),
    (lambda: VariableSettings(0, 2), "need a size"),
    (lambda: VariableSettings(VariableRetrievalMode.AllReduceReplicas), "AllReduceReplicas is not supported"),
    (lambda: VariableSettings(CommGroup(CommGroupType.Consecutive, 3)).groups(4), "do not divide the replicas"),
    (lambda: VariableSettings(2, 4).groups(4), "do not divide the replicas"),
    (lambda: VariableSettings(1, 2).shapeOnReplica([3, 5], 4, "w"), "first axis of 'w'"),
    (lambda: VariableSettings(1, 2).shapeOnReplica([], 4, "w"), "first axis of 'w'"),
    (lambda: VariableSettings(1, 2).getSharedVariableDomain(), "have a stride"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[message for _, message in BAD])
def test_other_settings_are_refused(make: Any, message: str) -> None:
    with pytest.raises(popart.popart_exception, match=message):
        make()
