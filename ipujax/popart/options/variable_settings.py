"""`VariableSettings`: groups of replicas that share the values of a parameter.

    popart.VariableSettings(popart.CommGroup(popart.CommGroupType.Consecutive, 2))    # replicas 0 1 | 2 3
    popart.VariableSettings(stride=2, groupSize=2)                                    # replicas 0 2 | 1 3

Without settings all replicas have the same values. Otherwise each group has its own: the array that a builder takes has
a first axis of groups, and so have the arrays that are read and written, of replicas with `AllReplicas`.

Source: PopART user guide, "Grouping graph replicas"; `willow/include/popart/replicagrouping.hpp`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ipujax.popart.enumerations import CommGroupType, VariableRetrievalMode
from ipujax.popart.exceptions import popart_exception
from ipujax.popart.options.option_groups import CommGroup


@dataclass(frozen=True, slots=True)
class ReplicaGrouping:
    """A division of replicas into groups of equal size.

    Args:
        numReplicas: number of replicas.
        stride: distance of two neighbours in a group.
        groupSize: replicas of a group.

    Raises:
        popart_exception: groups that do not divide the replicas.
    """

    numReplicas: int
    stride: int
    groupSize: int

    def __post_init__(self) -> None:
        smallest = min(self.numReplicas, self.stride, self.groupSize)
        if smallest < 1 or self.numReplicas % (self.stride * self.groupSize):
            expected = "stride times groupSize divides the number of replicas"
            raise popart_exception("groups do not divide the replicas", expected=expected, got=self)

    def getNumGroups(self) -> int:
        """Return the number of groups."""
        return self.numReplicas // self.groupSize

    def getGroupAt(self, replica: int) -> int:
        """Return the group of a replica."""
        return replica // (self.stride * self.groupSize) * self.stride + replica % self.stride

    def getReplicasAt(self, group: int) -> list[int]:
        """Return the replicas of a group."""
        first = group // self.stride * self.stride * self.groupSize + group % self.stride
        return [first + self.stride * index for index in range(self.groupSize)]

    def getReplicaAt(self, group: int, index: int = 0) -> int:
        """Return a replica of a group."""
        return self.getReplicasAt(group)[index]


class VariableSettings:
    """Groups of replicas with equal values of a parameter, and the replicas whose values are read.

    Args:
        settings: a `CommGroup`, a `VariableRetrievalMode`, both, or stride, group size and a retrieval mode.
        keywords: these by PopART's names: sharedVariableDomain_, retrievalMode_, stride, groupSize, mode.

    Raises:
        popart_exception: other values, groups without a size, or AllReduceReplicas, which PopART lacks too.
    """

    def __init__(self, *settings: object, **keywords: object) -> None:
        values = [*settings, *keywords.values()]
        # The types of the settings tell PopART's constructors apart.
        domains = [value for value in values if isinstance(value, CommGroup)]
        modes = [value for value in values if isinstance(value, VariableRetrievalMode)]
        sizes = [n for n in values if isinstance(n, int) and not isinstance(n, VariableRetrievalMode | bool)]
        named = [int(n) for n in map(keywords.get, ("stride", "groupSize")) if isinstance(n, int)]
        sizes = [*sizes[: len(sizes) - len(named)], *named]
        known = len(domains) + len(modes) + len(sizes) == len(values)
        if not known or len(domains) > 1 or len(modes) > 1 or len(sizes) not in (0, 2) or (domains and sizes):
            expected = "a CommGroup, or stride and groupSize; and a VariableRetrievalMode"
            raise popart_exception("unknown VariableSettings", expected=expected, got=values)
        self._strided = (sizes[0], sizes[1]) if sizes else None
        self._domain = domains[0] if domains else CommGroup()
        self._mode = modes[0] if modes else VariableRetrievalMode.OnePerGroup
        self.verify()

    def verify(self) -> None:
        """Refuse groups without a size, and the retrieval that adds replicas.

        Raises:
            popart_exception: these.
        """
        if self._mode is VariableRetrievalMode.AllReduceReplicas:
            raise popart_exception("AllReduceReplicas is not supported", expected="OnePerGroup or AllReplicas")
        needs_size = self._domain.type in (CommGroupType.Consecutive, CommGroupType.Orthogonal)
        size = self._strided[1] if self._strided else self._domain.replicaGroupSize
        if ((needs_size or self._strided) and size < 1) or (self._strided and self._strided[0] < 1):
            raise popart_exception("groups of replicas need a size and a stride", expected="at least 1", got=self)

    def getReplicaGrouping(self, numReplicas: int) -> ReplicaGrouping:
        """Return the groups of a number of replicas."""
        if self._strided:
            return ReplicaGrouping(numReplicas, *self._strided)
        size = self._domain.replicaGroupSize
        by_type = {
            CommGroupType.All: (1, numReplicas),
            CommGroupType.Consecutive: (1, size),
            CommGroupType.Orthogonal: (max(numReplicas // max(size, 1), 1), size),
            CommGroupType.Ungrouped: (1, 1),
        }
        return ReplicaGrouping(numReplicas, *by_type[self._domain.type])

    def getSharedVariableDomain(self) -> CommGroup:
        """Return the group.

        Raises:
            popart_exception: settings with a stride.
        """
        if self._strided:
            raise popart_exception("these VariableSettings have a stride, not a CommGroup", got=self)
        return self._domain

    def isUsingCommGroup(self) -> bool:
        """Return whether the groups are those of a `CommGroup`."""
        return self._strided is None

    def getCommGroupType(self) -> CommGroupType:
        """Return the kind of groups; of no meaning with a stride."""
        return self._domain.type

    def getStride(self) -> int:
        """Return the stride; 0 with a `CommGroup`."""
        return self._strided[0] if self._strided else 0

    def getGroupSize(self) -> int:
        """Return the replicas of a group, as the settings have it."""
        return self._strided[1] if self._strided else self._domain.replicaGroupSize

    def getRealGroupSize(self, replicaCount: int) -> int:
        """Return the replicas of a group, of a number of replicas."""
        return self.getReplicaGrouping(replicaCount).groupSize

    def getRetrievalMode(self) -> VariableRetrievalMode:
        """Return the replicas whose values are read."""
        return self._mode

    def getGroupCount(self, replicaCount: int) -> int:
        """Return the number of groups of a number of replicas."""
        return self.getReplicaGrouping(replicaCount).getNumGroups()

    def numReplicasReturningVariable(self, replicaCount: int) -> int:
        """Return the number of replicas whose values are read."""
        return replicaCount if self._mode is VariableRetrievalMode.AllReplicas else self.getGroupCount(replicaCount)

    def getGroupRepresentative(self, group: int) -> int:
        """Return the replica whose values are those of a group."""
        if self._strided:
            stride, size = self._strided
            return group // stride * stride * size + group % stride
        factors = {CommGroupType.All: 0, CommGroupType.Consecutive: self._domain.replicaGroupSize}
        return group * factors.get(self._domain.type, 1)

    def groups(self, replicaCount: int) -> list[list[int]]:
        """Return the replicas of each group."""
        grouping = self.getReplicaGrouping(replicaCount)
        return [grouping.getReplicasAt(group) for group in range(grouping.getNumGroups())]

    def shapeOnReplica(self, full_shape: Sequence[int], replicaCount: int, name: str) -> list[int]:
        """Return the shape of a parameter on a replica.

        Args:
            full_shape: of the array that a builder takes.
            replicaCount: number of replicas.
            name: of the parameter.

        Raises:
            popart_exception: a first axis of another number than that of groups.
        """
        groups = self.getGroupCount(replicaCount)
        if groups > 1 and (not full_shape or full_shape[0] != groups):
            message = f"the first axis of {name!r} must be that of the groups of replicas"
            raise popart_exception(message, expected=f"{groups} groups", got=list(full_shape))
        return list(full_shape[1:] if groups > 1 else full_shape)

    def shapeOnHost(self, replica_shape: Sequence[int], replicaCount: int) -> list[int]:
        """Return the shape of the array that a builder takes, given that of a replica."""
        groups = self.getGroupCount(replicaCount)
        return [*([groups] if groups > 1 else []), *replica_shape]

    def as_text(self) -> str:
        """Return the settings as text, for the metadata of a model."""
        groups = self._strided or (self._domain.type, self._domain.replicaGroupSize)
        return json.dumps([*map(int, groups), int(self._strided is not None), int(self._mode)])

    @classmethod
    def of_text(cls, text: str) -> VariableSettings:
        """Return the settings of a text of `as_text`.

        Raises:
            popart_exception: another text.
        """
        try:
            first, second, strided, mode = map(int, json.loads(text))
            groups = (first, second) if strided else (CommGroup(CommGroupType(first), second),)
            return cls(*groups, VariableRetrievalMode(mode))
        except (TypeError, ValueError) as error:
            raise popart_exception("the model has damaged variableSettings", got=text) from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VariableSettings) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"VariableSettings({self._strided or self._domain}, {self._mode.name})"
