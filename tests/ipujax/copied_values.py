"""A value of each public class, for `test_copies`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ipujax as ipu
from ipujax import optim, poplar, poplin, popnn, popops, popsolver, popsparse, schedules
from ipujax.poplar import program
from ipujax.popnn import gru, lstm
from ipujax.popops import expr

DEVICE = ipu.IPUModel(arch="mk2", tiles_per_ipu=4)
TWO = ipu.IPUModel(num_ipus=2, arch="mk2", tiles_per_ipu=4)
X = np.ones((8, 8), np.float32)


def square(x: Any) -> Any:
    return x @ x + 1.0


def doubled(x: Any) -> Any:
    return 2 * x


function = ipu.jit(square, device=DEVICE)


def _staged(x: Any) -> Any:
    with ipu.stage(0):
        y = x @ x
    with ipu.stage(1):
        return (y @ y).sum()


@cache
def compiled() -> Any:
    return function.lower(X).compile()


@cache
def saved() -> tuple[Any, Any]:
    """Return the program and the profile of files."""
    with TemporaryDirectory() as folder:
        compiled().save(Path(folder) / "program")
        compiled().profile.save(Path(folder) / "profile")
        return ipu.load(Path(folder) / "program"), ipu.Profile.load(Path(folder) / "profile")


@cache
def profiling_run() -> Any:
    with ipu.profiling(device=DEVICE) as run:
        jax.jit(square)(X)
    return run


@cache
def graph() -> poplar.Graph:
    return poplar.Graph(DEVICE.target)


@cache
def tensor() -> Any:
    variable = graph().add_variable(poplar.FLOAT, [4], "v")
    graph().set_tile_mapping(variable, 0)
    return variable


@cache
def pipeline_plan() -> Any:
    x = np.ones((4, 8, 8), np.float32)
    return ipu.pipeline_plan(_staged, x, micro_batches=2, device=TWO, schedules="1f1b", reduce="sum", show=False)


def _solved() -> tuple[Any, Any, Any]:
    model = popsolver.Model()
    x = model.add_variable(2, 5, "x")
    return model, x, model.minimize(x)


class _Stream(poplar.StreamCallback):
    def fetch(self, *_: Any) -> Any:
        raise AssertionError


COPIED: dict[str, Callable[[], Any]] = {
    "Advice": lambda: ipu.Advice((ipu.AdviceRow("options", 7, 8, True),)),
    "AdviceRow": lambda: ipu.AdviceRow("options", 7, 8, True),
    "Plan": lambda: ipu.Plan(data=2, stages=2, micro_batches=4),
    "Search": lambda: ipu.Search((ipu.SearchRow(ipu.Plan(), 7, 8, True, "compiled"),), abs, {"batch_argnums": 0}, 9),
    "SearchRow": lambda: ipu.SearchRow(ipu.Plan(data=2), None, None, False, "none", "needs 2 IPUs, of 1"),
    "Sweep": lambda: ipu.Sweep(({"clock_hz": 1e9, "cycles": 7, "seconds": 7e-9, "fits": True},)),
    "Sensitivities": lambda: ipu.Sensitivities(7, ({"constant": "clock_hz", "elasticity": 0.5},), (), ()),
    "CPU": ipu.CPU,
    "CheckReport": lambda: ipu.CheckReport("f", (), None, 3, 0, 0, False, ("a note",)),
    "Comparison": lambda: ipu.compare(compiled().profile, compiled().profile),
    "HostData": lambda: ipu.HostData(3, 1.0, 2.0),
    "IPUModel": lambda: DEVICE,
    "Options": lambda: ipu.Options(exact_splits=True, trip_counts={"while[0]": 3}, label="a", io_tiles=2),
    "PipelinePlan": pipeline_plan,
    "Profile": lambda: compiled().profile,
    "Profile of a call": lambda: compiled().profile_call(X)[1],
    "Profile of a file": lambda: saved()[1],
    "Profile of a program": lambda: saved()[0].profile,
    "ProfiledCalls": lambda: profiling_run().functions[0],
    "ShardingPlan": lambda: ipu.ShardingPlan((P("a"),), 1, 2, True, 3),
    "ShardingPlans": lambda: ipu.ShardingPlans((ipu.ShardingPlan((P("a"),), 1, 2, True, 3),), 1),
    "Target": lambda: DEVICE.target,
    "TaskTime": lambda: ipu.TaskTime(0, "forward", 0, 0, 0, 1),
    "jit": lambda: function,
    "jit of replicas": lambda: ipu.jit(
        doubled, device=TWO, replicas=2, in_specs=(P("replica"),), out_specs=P("replica")
    ),
    "jit of a mesh": lambda: ipu.jit(
        square,
        device=TWO,
        in_shardings=(jax.NamedSharding(ipu.make_mesh((2,), ("a",)), P("a")),),
        options=ipu.Options(label="mesh"),
    ),
    "make_mesh": lambda: ipu.make_mesh((2,), ("a",)),
    "phase": lambda: ipu.phase(0),
    "stage": lambda: ipu.stage(0),
    "timings": lambda: compiled().timings,
    "optim.AutomaticLossScaleState": lambda: optim.AutomaticLossScaleState(1.0, 1, 1, ()),
    "optim.Shard": lambda: optim.Shard(jnp.ones(4), (4,), "replica"),
    "optim.StaticLossScaleState": lambda: optim.StaticLossScaleState(1.0, ()),
    "poplar.Device": lambda: poplar.IPUModel().create_device(),
    "poplar.DeviceManager": poplar.DeviceManager,
    "poplar.IPUModel": poplar.IPUModel,
    "poplar.StreamCallback": _Stream,
    "poplar.Target": lambda: poplar.IPUModel().create_device().get_target(),
    "poplin.ConvParams": lambda: poplin.ConvParams(poplar.FLOAT, 1, (4, 4), (3, 3), 2, 2),
    "popnn.PoolParams": lambda: popnn.PoolParams("max", (2, 2), (2, 2)),
    "popnn.gru.GruParams": lambda: gru.GruParams(poplar.FLOAT, 1, 2, [3, 4]),
    "popnn.lstm.LstmParams": lambda: lstm.LstmParams(poplar.FLOAT, 1, 2, [3, 4]),
    "popops.expr.Apply": lambda: expr._1 + expr._2,
    "popops.expr.Cast": lambda: expr.Cast(expr._1, poplar.HALF),
    "popops.expr.Const": lambda: expr.Const(1.0),
    "popops.expr.PlaceHolder": lambda: expr._1,
    "popsolver.Model": lambda: _solved()[0],
    "popsolver.Solution": lambda: _solved()[2],
    "popsolver.Variable": lambda: _solved()[1],
    "popsparse.BlockPattern": lambda: popsparse.BlockPattern((16, 16), 8, (0, 1), (0, 1)),
    "popsparse.COOMatrix": lambda: popsparse.COOMatrix(4, 4, np.ones(2), np.array([0, 1]), np.array([0, 1])),
    "popsparse.CSRMatrix": lambda: popsparse.CSRMatrix(4, 4, np.ones(2), np.array([0, 1]), np.array([0, 1, 2, 2, 2])),
    "popsparse.DynamicPlan": lambda: popsparse.DynamicPlan((16, 16), 8, 2, 4),
    "popsparse.SparseBlocks": lambda: popsparse.SparseBlocks(
        *[jnp.arange(3)] * 4, popsparse.DynamicPlan((8, 8), 4, 2, 4)
    ),
    "schedules.Chimera": schedules.Chimera,
    "schedules.Domain": schedules.Domain,
    "schedules.DualPipeV": schedules.DualPipeV,
    "schedules.EagerOneForwardOneBackward": schedules.EagerOneForwardOneBackward,
    "schedules.GPipe": schedules.GPipe,
    "schedules.Grouped": schedules.Grouped,
    "schedules.Interleaved": schedules.Interleaved,
    "schedules.LoopedOneForwardOneBackward": schedules.LoopedOneForwardOneBackward,
    "schedules.OneForwardOneBackward": schedules.OneForwardOneBackward,
    "schedules.SchedulePlan": lambda: schedules.schedule_plan("1f1b", 2, 4),
    "schedules.Sequential": schedules.Sequential,
    "schedules.Task": lambda: schedules.Task(0, 0, schedules.FORWARD),
    "schedules.TaskList": lambda: schedules.schedule_plan("1f1b", 2, 4).lists[0],
    "schedules.ZeroBubbleH1": schedules.ZeroBubbleH1,
}
# Copies are the object itself; pickles are refused.
SHARED: dict[str, Callable[[], Any]] = {
    "Compiled": compiled,
    "LoadedProgram": lambda: saved()[0],
    "Lowered": lambda: function.lower(X),
    "Traced": lambda: function.trace(X),
    "executable": lambda: compiled().executable,
    "memory": lambda: compiled().profile.memory,
    "memory of a file": lambda: saved()[1].memory,
}
REFUSED: dict[str, Callable[[], Any]] = {
    "ProfilingRun": profiling_run,
    "prefetch": lambda: ipu.prefetch([X], depth=0),
    "poplar.ComputeSet": lambda: graph().add_compute_set("set"),
    "poplar.DataStream": lambda: graph().add_host_to_device_fifo("in", poplar.FLOAT, 4),
    "poplar.Engine": lambda: poplar.Engine(graph(), program.Sequence()),
    "poplar.Function": lambda: graph().add_function(program.Sequence()),
    "poplar.Graph": graph,
    "poplar.RemoteBuffer": lambda: graph().add_remote_buffer("remote", poplar.FLOAT, 4),
    "poplar.ReplicatedGraph": lambda: poplar.Graph(TWO.target).create_replicated_graph(2),
    "poplar.Tensor": tensor,
    "poplar.VirtualGraph": lambda: graph().create_virtual_graph([0]),
    "poplar.program.Call": lambda: program.Call(graph().add_function(program.Sequence())),
    "poplar.program.Execute": lambda: program.Execute(graph().add_compute_set("set")),
    "poplar.program.Program": lambda: program.Copy(tensor()[:2], tensor()[2:]),
    "poplar.program.Sequence": program.Sequence,
    "poplar.program.WriteUndef": lambda: program.WriteUndef(tensor()),
}
# Values that hold a tensor: their deep copies and pickles are refused by it.
OF_TENSORS = {"popops.SingleReduceOp": lambda: popops.SingleReduceOp(tensor(), [0], "add")}
# Classes without values of their own: bases, markers of fields, and handles that only a graph or a session makes.
WITHOUT_VALUES = {
    *("poplar.In", "poplar.InOut", "poplar.Out", "poplar.Vector", "poplar.VectorList", "poplar.Vertex"),
    *("poplar.FieldRef", "poplar.VertexRef", "popnn.gru.GruWeights", "popnn.lstm.LstmWeights", "popnn.lstm.LstmState"),
    *("popnn.gru.RecurrentParams", "popnn.gru.RecurrentWeights", "popnn.gru.Graph", "popnn.lstm.RecurrentParams"),
    *("popops.expr.Expression", "schedules.Schedule"),
}
MODULES = ("", ".optim", ".poplar", ".poplar.program", ".poplin", ".popnn", ".popnn.gru", ".popnn.lstm", ".popops")
MODULES += (".popops.expr", ".poprand", ".popsolver", ".popsparse", ".poputil", ".schedules", ".distributed")
