"""One script under every launcher has the weights of one process; processes that are lost or do not fit are named."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.ipujax.distributed.distributed_helpers import ROOT

TRAIN = """
import os, sys
import jax
import ipujax as ipu
{join}
import jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

d = ipu.distributed
N = 4

MESH = jax.sharding.AbstractMesh((2,), ("model",))

def dense(w, x):
    part = lambda w, x: lax.psum(x @ w, "model")
    return jax.shard_map(part, mesh=MESH, in_specs=(P("model"), P(None, "model")), out_specs=P())(w, x)

def loss(params, x, y):
    with ipu.stage(0):
        hidden = jnp.tanh(dense(params["w1"], x))
    with ipu.stage(1):
        return jnp.mean((dense(params["w2"], hidden) - y) ** 2)

@ipu.jit(device=ipu.IPUModel(num_ipus=4 * N, tiles_per_ipu=4), replicas=N,
         in_specs=(P(), P("replica"), P("replica")), out_specs=P(), donate_argnums=0)
def step(params, x, y):
    grads = ipu.pipeline(jax.grad(loss), micro_batches=2, batch_argnums=(1, 2))(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(grads, "replica"))

rng = np.random.default_rng(0)
x = rng.normal(size=(16, 6)).astype(np.float32)
y = np.sin(x.sum(1, keepdims=True))
start = {{"w1": rng.normal(size=(6, 8)), "w2": rng.normal(size=(8, 1))}}
params = d.broadcast(jax.tree.map(lambda w: jnp.asarray(w + d.instance_index(), jnp.float32), start))
for _ in range(3):
    params = step(params, *d.share((x, y)))
np.savez(f"weights.{{d.instance_index()}}.npz", **params)
"""
LOST = """
import os, signal, sys
import ipujax as ipu
ipu.distributed.init()
ipu.distributed.all_reduce(1.0)
if ipu.distributed.instance_index() == 1:
    {end}
ipu.distributed.all_reduce(2.0)
"""
SPLIT = """
import sys
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import ipujax as ipu, numpy as np, pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
x, same = (
    jax.make_array_from_callback((4,), NamedSharding(mesh, spec), np.arange(4.0, dtype=np.float32).__getitem__)
    for spec in (P("x"), P())
)
f = ipu.jit(lambda x: x * 2, device=ipu.IPUModel(num_ipus=2, tiles_per_ipu=4))
for call in (f, f.lower(x).compile()):
    with pytest.raises(ipu.ArgumentError, match=r"several processes[\\s\\S]*float32\\[4\\][\\s\\S]*replicas="):
        call(x)
np.testing.assert_array_equal(f(same), [0, 2, 4, 6])
"""
CUT = """
import os, time
import ipujax as ipu
ipu.distributed.init()
print("sum", float(ipu.distributed.all_reduce(1.0, "sum")), flush=True)
if ipu.distributed.instance_index() == 1:
    print("cut", time.time(), flush=True)
    os.system("ip link set dev ipujax1 down")
ipu.distributed.all_reduce(2.0)
"""
INIT = "ipu.distributed.init()"
PATIENCE_SECONDS = 300.0  # assumed: what a busy machine may take
Outputs = list[tuple[int, str]]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def environment(**variables: str) -> dict[str, str]:
    names = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return {**os.environ, **names, **variables}


def slurm(index: int, count: int, job: int) -> dict[str, str]:
    """Return the variables that `srun` gives a process on this machine."""
    numbers = {"SLURM_NTASKS": count, "SLURM_PROCID": index, "SLURM_LOCALID": index, "SLURM_JOB_ID": job}
    return {name: str(number) for name, number in numbers.items()} | {"SLURM_STEP_NODELIST": socket.gethostname()}


def outputs(folder: Path, commands: Sequence[Sequence[str]], variables: Sequence[Mapping[str, str]]) -> Outputs:
    """Run processes side by side; their exit codes, and standard outputs with errors."""
    started = [
        subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**names),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command, names in zip(commands, variables, strict=True)
    ]
    try:
        texts = [process.communicate(timeout=PATIENCE_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


def run_by_slurm(folder: Path, source: str, count: int = 2, variables: Sequence[Mapping[str, str]] = ()) -> Outputs:
    """Run a script as processes of one job."""
    (folder / "script.py").write_text(source)
    job = free_port()
    each = [slurm(index, count, job) for index in range(count)]
    for index, names in enumerate(variables):
        each[index] |= names
    return outputs(folder, [[sys.executable, "script.py"]] * count, each)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Weights of one process with all replicas."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(TRAIN.format(join=INIT))
    ((code, text),) = outputs(folder, [[sys.executable, "script.py"]], [{}])
    assert code == 0, text
    return dict(np.load(folder / "weights.0.npz"))


def test_distributed_arrays_over_processes_are_refused_by_all(tmp_path: Path):
    (tmp_path / "script.py").write_text(SPLIT)
    address = f"127.0.0.1:{free_port()}"
    found = outputs(tmp_path, [[sys.executable, "script.py", address, str(n)] for n in range(2)], [{}] * 2)
    assert [code for code, _ in found] == [0, 0], found


@pytest.mark.parametrize("launcher", ["ipujax run", "mpirun", "srun", "by hand"])
def test_distributed_training_under_a_launcher(launcher: str, alone: dict[str, np.ndarray], tmp_path: Path):
    join = 'jax.distributed.initialize(f"127.0.0.1:{os.environ["PORT"]}", 2, int(os.environ["INDEX"]))'
    source = TRAIN.format(join=INIT if launcher != "by hand" else join.replace('["PORT"]', "['PORT']"))
    (tmp_path / "script.py").write_text(source)
    python = [sys.executable, "script.py"]
    if launcher == "ipujax run":
        command = [sys.executable, "-m", "ipujax", "run", "--instances", "2", "--replicas", "4", "script.py"]
        found = outputs(tmp_path, [command], [{}])
    elif launcher == "mpirun":
        if shutil.which("mpirun") is None:
            pytest.skip("needs Open MPI")
        options = ["--allow-run-as-root", "--oversubscribe", "-n", "2"]
        found = outputs(tmp_path, [["mpirun", *options, *python]], [{}])
    elif launcher == "srun":
        found = run_by_slurm(tmp_path, source)
    else:
        port = str(free_port())
        found = outputs(tmp_path, [python] * 2, [{"PORT": port, "INDEX": str(index)} for index in range(2)])
    assert [code for code, _ in found] == [0] * len(found), found
    first, second = (dict(np.load(tmp_path / f"weights.{index}.npz")) for index in range(2))
    for name, weights in alone.items():
        assert np.array_equal(first[name], second[name]), "equal to the bit"
        np.testing.assert_allclose(first[name], weights, rtol=1e-6, atol=1e-6)


def test_distributed_processes_that_call_nothing_are_independent(tmp_path: Path):
    source = """
import ipujax as ipu, numpy as np
print(ipu.jit(lambda x: 2 * x)(np.ones(2)), ipu.distributed.num_instances())
"""
    for code, text in run_by_slurm(tmp_path, source):
        assert code == 0 and "[2. 2.] 1" in text
        assert text.count("this process is independent of the others of srun (SLURM_NTASKS=2)") == 1


@pytest.mark.parametrize(
    ("end", "texts"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["instance 1 ended while this one"]),
        ("raise ValueError('no data')", ["instance 1 ended while this one"]),
        ("sys.exit()", ["instances are not at the same point", "the end of the script on instance 1"]),
    ],
    ids=["killed", "failed", "ended early"],
)
def test_distributed_process_that_ends_is_named_by_those_that_wait(end: str, texts: list[str], tmp_path: Path):
    count = 3 if "kill" in end else 2
    found = run_by_slurm(tmp_path, LOST.format(end=end), count)
    for index, (code, text) in enumerate(found):
        assert code != 0, found
        if index != 1 or "exit" in end:
            assert all(each in text for each in texts), found
            assert "ValueError: UNKNOWN" not in text.split("ArgumentError")[-1]


def test_distributed_versions_and_settings_must_agree(tmp_path: Path):
    source = f"import ipujax as ipu\n{INIT}\nprint(ipu.distributed.all_reduce(1.0))"
    for code, text in run_by_slurm(tmp_path, source, variables=[{}, {"JAX_ENABLE_X64": "1"}]):
        assert code == 1 and "instances disagree on jax_enable_x64" in text
        assert "False on instance 0; True on instance 1" in text


def test_distributed_options_must_agree_and_replicas_divide(tmp_path: Path):
    source = f"""
import ipujax as ipu
{INIT}
options = ipu.Options(exact_splits=bool(ipu.distributed.instance_index()))
for replicas in (3, 2):
    try:
        ipu.jit(lambda x: x, replicas=replicas, device=ipu.IPUModel(num_ipus=4), options=options)(1.0)
    except ipu.IpuError as error:
        print(error)
"""
    for code, text in run_by_slurm(tmp_path, source):
        assert code == 0, text
        assert "3 replicas of <lambda> cannot be shared equally by 2 instances" in text
        assert "instances disagree on the option exact_splits of <lambda>" in text


def test_distributed_host_that_never_comes_and_a_port_in_use(tmp_path: Path):
    """Each process that has come names the one that has not, or the port, in time."""
    (tmp_path / "script.py").write_text("import ipujax as ipu\nipu.distributed.init(timeout_seconds=5)")
    first, second = free_port(), free_port()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        in_use = [slurm(index, 2, 7) | {"JAX_COORDINATOR_PORT": str(port)} for index in (0, 1)]
        late = [slurm(0, 3, first), slurm(1, 3, first), slurm(1, 2, second)]
        found = outputs(tmp_path, [[sys.executable, "script.py"]] * 5, [*in_use, *late])
    texts = [
        f"port {port} of process 0, where it meets the others, is in use",
        f"got: no answer of process 0 at {socket.gethostname()}:{port}\n",
        "process 0 of 3 has waited 5 seconds for process 2",
        "process 1 of 3 has waited 5 seconds for process 2",
        "process 1 of 2 has waited 5 seconds for process 0",
    ]
    for (code, output), text in zip(found, texts, strict=True):
        assert code == 1 and text in output, (text, output)


def test_distributed_joined_after_the_first_compilation(tmp_path: Path):
    source = f"""
import jax, numpy as np, ipujax as ipu
shape = jax.ShapeDtypeStruct((2,), np.float32)
ipu.jit(lambda x: x, device=ipu.IPUModel(num_ipus=2), replicas=2).lower(shape).compile()
{INIT}
try:
    ipu.distributed.num_instances()
except ipu.ArgumentError as error:
    print(error)
"""
    for code, text in run_by_slurm(tmp_path, source):
        assert "JAX has joined this process to others after ipujax compiled for it alone" in text, (code, text)


@pytest.fixture
def networks() -> Iterator[list[str]]:
    """Two network namespaces, each an address of the host's name, which gloo binds to, and a link between them."""
    names = [f"ipujax-{os.getpid()}-{index}" for index in (0, 1)]
    folders = [Path("/etc/netns") / name for name in names]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add ipujax0 netns {names[0]} type veth peer name ipujax1 netns {names[1]}",
        *(f"ip -n {name} addr add 10.9.0.{n + 1}/24 dev ipujax{n}" for n, name in enumerate(names)),
        *(f"ip -n {name} link set {link} up" for n, name in enumerate(names) for link in ("lo", f"ipujax{n}")),
    ]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, text=True)
        for index, folder in enumerate(folders):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.9.0.{index + 1} {socket.gethostname()}\n")
        yield names
    except (subprocess.CalledProcessError, FileNotFoundError, PermissionError) as error:
        pytest.skip(f"no network namespaces: {getattr(error, 'stderr', None) or error}")
    finally:
        for name, folder in zip(names, folders, strict=True):
            shutil.rmtree(folder, ignore_errors=True)
            if shutil.which("ip"):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_distributed_cut_link_ends_all_within_ten_seconds(networks: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CUT)
    job = free_port()
    variables = [slurm(index, 2, job) | {"SLURM_STEP_NODELIST": "10.9.0.1"} for index in (0, 1)]
    first, second = outputs(
        tmp_path, [["ip", "netns", "exec", name, sys.executable, "script.py"] for name in networks], variables
    )
    ended = time.time()
    cut = float(next(line for line in second[1].splitlines() if line.startswith("cut ")).split()[1])
    assert first[0] and second[0] and ended - cut <= 10
    assert all("sum 2.0" in text for _, text in (first, second)), first[1]
