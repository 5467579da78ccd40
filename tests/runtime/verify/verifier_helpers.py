"""A graph that is sound until a test spoils it."""

import numpy as np

from ipujax.runtime.graph.codelet import Codelet, Field
from ipujax.runtime.graph.graph import Graph
from ipujax.runtime.graph.program import Execute, HostStream, Sequence, StreamIn
from ipujax.runtime.graph.vertex_group import Access, Axis, VertexGroup, element
from ipujax.runtime.target.presets import preset
from ipujax.runtime.tensor.mapping import even_cuts, linear
from ipujax.runtime.tensor.variable import Origin
from ipujax.runtime.verify import verify

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)
BOOL = np.dtype(bool)
HERE = Origin("user.py:7 (step)")


def sum_to_shapes(*arrays, shapes):
    """Any function of the operands in the shapes that are asked for."""
    total = sum(array.sum() for array in arrays)
    results = tuple(np.ones(shape, np.float32) * total for shape in shapes)
    return results if len(results) != 1 else results[0]


def codelet(*directions, dtype=F32):
    fields = tuple(Field(f"f{number}", direction, dtype) for number, direction in enumerate(directions))
    return Codelet("test::Any", fields, sum_to_shapes, lambda shapes, target: np.ones(1), takes=("shapes",))


UNARY = codelet("in", "out")


class Builder:
    """A graph with helpers; everything it makes is sound until a test spoils it."""

    def __init__(self, tiles=4, num_ipus=1):
        self.graph = Graph(preset("mk2").replace(tiles_per_ipu=tiles, num_ipus=num_ipus))
        self.program = Sequence()

    def variable(self, *shape, dtype=F32, name="v"):
        size = int(np.prod(shape))
        mapping = linear(size, np.dtype(dtype).itemsize, self.graph.target.num_tiles)
        return self.graph.add_variable(shape, dtype, name, mapping)

    def given(self, *shape, dtype=F32, name="x"):
        """A variable that the host fills."""
        tensor = self.variable(*shape, dtype=dtype, name=name)
        self.program.add(StreamIn(HostStream(name, shape, dtype), tensor))
        return tensor

    def group(self, code, axes, *accesses, tile=None):
        counts = [axis.blocks for axis in axes]
        tiles = self.graph.target.tiles_per_ipu
        tile = np.arange(int(np.prod(counts)), dtype=np.int32).reshape(counts) % tiles if tile is None else tile
        return VertexGroup(code, tuple(axes), tuple(accesses), np.asarray(tile, np.int32), (), HERE)

    def compute_set(self, *groups, checked=True):
        compute_set = self.graph.add_compute_set("cs")
        for each in groups:
            if checked:
                self.graph.add_vertices(compute_set, each)
            else:
                self.graph.groups[compute_set].append(each)
        return Execute(compute_set)

    def unary(self, source, target, blocks=4, code=UNARY, **kwargs):
        """One group over a one-dimensional tensor."""
        axis = Axis("i", even_cuts(source.shape[0], blocks))
        return self.group(code, [axis], along(source), along(target), **kwargs)

    def run(self, *groups, **kwargs):
        self.program.add(self.compute_set(*groups, **kwargs))

    def verify(self):
        verify(self.graph, self.program)


def along(tensor, offset=0, coeff=1, fill=None):
    """An access of a one-dimensional tensor by axis 0."""
    return Access(tensor, (element(0, coeff, offset),), fill)
