"""Training examples of other repositories under `ipujax profile`, unedited: numbers and time against their own run.

    python benchmarks/zero_edit.py FOLDER [--steps 12] [--only TEXT] [--json PATH]

Input: a folder with a checkout of each repository of `EXAMPLES`, as `FOLDER/google+flax`. Output: a row for each
example: the largest relative difference of the results of the first ten calls of each jitted function, how many numbers
were compared, wall time of its own run, ratios of wall and of processor time, and how many functions were compiled.

Data come from `zero_edit_shims`, one shim a repository; nothing else is replaced. Examples that need more than that to
run, under plain Python too, are in `CANNOT_RUN` with the reason.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNNER = ROOT / "benchmarks" / "zero_edit_shims" / "run_example.py"
TIMEOUT_SECONDS = 240

EXAMPLES: Mapping[str, Sequence[str]] = {
    "google/flax": (
        "examples/nnx_toy_examples/02_lifted_transforms.py",
        "examples/nnx_toy_examples/03_train_state.py",
        "examples/nnx_toy_examples/04_data_parallel_with_jit.py",
        "examples/nnx_toy_examples/05_vae.py",
        "examples/nnx_toy_examples/07_array_leaves.py",
        "examples/nnx_toy_examples/10_fsdp_and_optimizer.py",
        "docs_nnx/guides/performance.ipynb",
        "docs_nnx/guides/optimization_cookbook.ipynb",
        "docs_nnx/guides/view.ipynb",
        "docs/guides/flax_fundamentals/flax_basics.ipynb",
        "docs/guides/flax_fundamentals/rng_guide.ipynb",
        "docs/linen_intro.ipynb",
        "docs_nnx/nnx_basics.ipynb",
        "docs_nnx/guides/randomness.ipynb",
        "docs_nnx/guides/extracting_intermediates.ipynb",
        "docs_nnx/examples/digits_diffusion_model.ipynb",
        "examples/linen_design_test/linear_regression.py",
        "docs_nnx/guides/pytree.ipynb",
    ),
    "google-deepmind/optax": (
        "examples/mlp_mnist.ipynb",
        "examples/lookahead_mnist.ipynb",
        "examples/adversarial_training.ipynb",
        "examples/contrib/reduce_on_plateau.ipynb",
        "examples/contrib/sam.ipynb",
        "examples/contrib/muon.ipynb",
        "examples/contrib/rosenbrock_ademamix.ipynb",
        "examples/lbfgs.ipynb",
        "docs/getting_started.ipynb",
        "examples/flax_example.ipynb",
        "examples/freezing_parameters.ipynb",
        "examples/gradient_accumulation.ipynb",
        "examples/meta_learning.ipynb",
        "examples/nanolm.ipynb",
        "examples/perturbations.ipynb",
    ),
    "patrick-kidger/equinox": (
        "docs/examples/mnist.ipynb",
        "docs/examples/train_rnn.ipynb",
        "docs/examples/frozen_layer.ipynb",
        "docs/examples/parallelism.ipynb",
        "docs/examples/stateful.ipynb",
        "docs/examples/score_based_diffusion.ipynb",
        "docs/examples/vision_transformer.ipynb",
    ),
    "google-deepmind/dm-haiku": (
        "examples/mnist.py",
        "examples/vae.py",
        "examples/mnist_pruning.py",
        "examples/mnist_gan.ipynb",
        "examples/transformer/train.py",
        "examples/vqvae_example.ipynb",
        "docs/notebooks/build_your_own_haiku.ipynb",
        "docs/notebooks/non_trainable.ipynb",
        "docs/notebooks/transforms.ipynb",
    ),
    "keras-team/keras": (
        "examples/demo_functional.py",
        "examples/demo_mnist_convnet.py",
        "examples/demo_subclass.py",
        "examples/demo_custom_layer_backend_agnostic.py",
        "guides/custom_train_step_in_jax.py",
        "guides/sequential_model.py",
        "guides/writing_your_own_callbacks.py",
        "guides/understanding_masking_and_padding.py",
    ),
    "jax-ml/jax": (
        "examples/mnist_classifier.py",
        "examples/mnist_classifier_fromscratch.py",
        "examples/mnist_vae.py",
        "examples/advi.py",
        "docs/notebooks/Common_Gotchas_in_JAX.ipynb",
        "docs/notebooks/Custom_derivative_rules_for_Python_code.ipynb",
        "docs/notebooks/Writing_custom_interpreters_in_Jax.ipynb",
        "docs/notebooks/shard_map.ipynb",
        "docs/notebooks/vmapped_log_probs.ipynb",
        "docs/parallel.ipynb",
    ),
    "patrick-kidger/diffrax": (
        "docs/examples/neural_ode.ipynb",
        "docs/examples/neural_cde.ipynb",
        "docs/examples/neural_sde.ipynb",
        "docs/examples/latent_ode.ipynb",
        "docs/examples/steady_state.ipynb",
        "docs/examples/stiff_ode.ipynb",
        "docs/examples/coupled_odes.ipynb",
        "docs/examples/forcing.ipynb",
        "docs/examples/hessian.ipynb",
        "docs/examples/sde_example.ipynb",
    ),
    "google/jaxopt": (
        "examples/constrained/binary_kernel_svm_with_intercept.py",
        "examples/constrained/nmf.py",
        "examples/fixed_point/plot_anderson_accelerate_gd.py",
        "examples/implicit_diff/ridge_reg_implicit_diff.py",
        "examples/constrained/multiclass_linear_svm.py",
    ),
}
# Reasons by running them (flax 0.12.8, Keras 3.15, jax 0.10.2), else by reading their imports.
CANNOT_RUN: Mapping[str, str] = {
    "google/flax examples/nnx_toy_examples/01_functional_api.py": "refused by this flax: TraceContextError",
    "google/flax examples/nnx_toy_examples/06_scan_over_layers.py": "trains nothing, and jits nothing",
    "google/flax examples/nnx_toy_examples/hijax_basic.py": "refused by this flax: with_vars(is_mutable=)",
    "google/flax examples/nnx_toy_examples/hijax_demo.py": "refused by this flax: with_vars(is_mutable=)",
    "google/flax docs_nnx/guides/demo.ipynb": "refused by this flax: lists of modules in a static attribute",
    "google/flax docs_nnx/guides/transforms.ipynb": "refused by this flax: operations in place on variables",
    "google/flax docs_nnx/guides/bridge_guide.ipynb": "refused by this flax: nnx.with_sharding_constraint",
    "google/flax docs_nnx/guides/flax_gspmd.ipynb": "fails: a shape in place of a dtype",
    "google/flax docs_nnx/guides/surgery.ipynb": "imports TensorFlow by orbax",
    "google/flax docs_nnx/mnist_tutorial.ipynb": "imports tensorboard",
    "google/flax docs/guides/parallel_training/flax_on_pjit.ipynb": "imports TensorFlow by orbax",
    "google/flax docs/guides/quantization/fp8_basics.ipynb": "asserts kernels of a GPU",
    "google/flax docs/quick_start.ipynb": "needs clu",
    "google/flax examples/{imagenet,lm1b,mnist,nlp_seq,sst2,vae,wmt}": "need TensorFlow, clu or both beyond data",
    "google-deepmind/optax examples/cifar10_resnet.ipynb": "imports albumentations",
    "google-deepmind/optax examples/gradient_accumulation_and_microbatching.ipynb": "takes more than 240 s",
    "google-deepmind/optax examples/contrib/differentially_private_sgd.ipynb": "imports dp_accounting",
    "patrick-kidger/equinox docs/examples/bert.ipynb": "fetches weights",
    "patrick-kidger/equinox docs/examples/deep_convolutional_gan.ipynb": "refused by this jax: structures of branches",
    "patrick-kidger/diffrax docs/examples/kalman_filter.ipynb": "refused by this jax: structures of branches",
    "patrick-kidger/diffrax docs/examples/continuous_normalising_flow.ipynb": "imports imageio",
    "google-deepmind/dm-haiku examples/rnn/train.py": "needs TensorFlow beyond data: unicode_split",
    "google-deepmind/dm-haiku examples/{impala,impala_lite}": "import bsuite",
    "google-deepmind/dm-haiku examples/imagenet": "needs TensorFlow beyond data",
    "google-deepmind/dm-haiku examples/haiku_lstms.ipynb": "imports plotnine",
    "keras-team/keras examples/demo_custom_tf_workflow.py": "another backend",
    "keras-team/keras examples/demo_custom_torch_workflow.py": "another backend",
    "keras-team/keras examples/demo_torch_multi_gpu.py": "another backend",
    "keras-team/keras examples/demo_jax_distributed.py": "imports TensorFlow",
    "keras-team/keras examples/demo_custom_jax_workflow.py": "fails: layers of a model called before they are made",
    "keras-team/keras guides/functional_api.py": "needs pydot",
    "keras-team/keras guides/making_new_layers_and_models_via_subclassing.py": "fails in its part on models",
    "keras-team/keras guides/training_with_built_in_methods.py": "imports torch",
    "keras-team/keras guides/writing_a_custom_training_loop_in_jax.py": "imports TensorFlow",
    "keras-team/keras guides/distributed_training_with_jax.py": "imports TensorFlow",
    "jax-ml/jax examples/differentially_private_sgd.py": "imports dp_accounting",
    "jax-ml/jax examples/spmd_mnist_classifier_fromscratch.py": "fetches data",
    "google/jaxopt examples/deep_learning/{plot_sgd_solvers,haiku_vae}.py": "import TensorFlow",
    "pyro-ppl/numpyro examples": "assert another version of numpyro",
}
# Arguments of an example, which its own documentation asks for.
ARGUMENTS: Mapping[str, Sequence[str]] = {"examples/transformer/train.py": ("--dataset_path=shakespeare.txt",)}


@dataclass(frozen=True, slots=True)
class Result:
    """Both runs of an example.

    Args:
        example: repository and file.
        difference: largest relative difference of a noted number; None without any, or if a run failed.
        numbers: how many numbers were compared.
        own_seconds: wall time of its own run.
        profiled_seconds: wall time under `ipujax profile`.
        own_cpu_seconds: processor time of its own run.
        profiled_cpu_seconds: processor time under `ipujax profile`, which other work on the machine disturbs less.
        compiled: functions that were compiled for an IPU.
        failure: last line of the output of a failing run; "" for none.
    """

    example: str
    difference: float | None
    numbers: int
    own_seconds: float
    profiled_seconds: float
    own_cpu_seconds: float
    profiled_cpu_seconds: float
    compiled: int
    failure: str = ""


def measured(repository: str, file: str, sources: Path, steps: int) -> Result:
    """Run an example alone and under `ipujax profile`."""
    path = sources / repository.replace("/", "+") / file
    example = f"{repository} {file}"
    with tempfile.TemporaryDirectory() as folder:
        runs = [_run([], repository, path, Path(folder), steps, file)]
        runs.append(_run(["-m", "ipujax", "profile"], repository, path, Path(folder), steps, file))
    (own, own_seconds, own_text), (profiled, profiled_seconds, text) = runs
    table = text[text.find("Functions of JAX") :]
    compiled = re.findall(r"^  (?!function )\S.* of [\d.,]+ KiB", table.partition("Computed by JAX")[0], re.MULTILINE)
    seconds = own_seconds[0], profiled_seconds[0], own_seconds[1], profiled_seconds[1]
    if own is None or profiled is None:
        last = (own_text if own is None else text).strip().splitlines() or ["no output"]
        who = "its own run" if own is None else "the profiled run"
        return Result(example, None, 0, *seconds, len(compiled), f"{who}: {last[-1][:120]}")
    counts, profiled_counts = ({name: [*map(len, calls)] for name, calls in run.items()} for run in (own, profiled))
    if counts != profiled_counts:
        return Result(example, None, 0, *seconds, len(compiled), "the profiled run: other calls than its own run")
    values, profiled_values = ([x for name in counts for call in run[name] for x in call] for run in (own, profiled))
    difference = max(map(_relative_difference, values, profiled_values), default=None)
    return Result(example, difference, len(values), *seconds, len(compiled))


def _relative_difference(number: float, other: float) -> float:
    """Relative difference of two numbers; 0 of two NaNs, infinite of one NaN and a number."""
    if math.isnan(number) or math.isnan(other):
        return 0.0 if math.isnan(number) and math.isnan(other) else math.inf
    return 0.0 if number == other else abs(number - other) / max(abs(number), 1e-12)


def _run(
    command: list[str], repository: str, path: Path, folder: Path, steps: int, file: str
) -> tuple[dict[str, list[list[float]]] | None, tuple[float, float], str]:
    """Return the numbers of a run, None if it failed, seconds of wall and processor time, and its standard error."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MPLBACKEND": "Agg",
        "KERAS_BACKEND": "jax",
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has byte code
    arguments = [repository, str(path), str(results), str(steps), *ARGUMENTS.get(file, ())]
    start = time.perf_counter()
    cpu_start = _cpu_seconds_of_children()
    try:
        done = subprocess.run(
            [sys.executable, *command, str(RUNNER), *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, (TIMEOUT_SECONDS, TIMEOUT_SECONDS), f"longer than {TIMEOUT_SECONDS} s"
    seconds = time.perf_counter() - start, _cpu_seconds_of_children() - cpu_start
    numbers = json.loads(results.read_text(encoding="utf-8"))["numbers"] if results.exists() else None
    return (numbers if done.returncode == 0 else None), seconds, done.stderr


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure all examples, print a row for each, and their totals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sources", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[Result] = []
    for repository, files in EXAMPLES.items():
        for file in files:
            if not re.search(args.only, f"{repository} {file}"):
                continue
            result = measured(repository, file, args.sources.resolve(), args.steps)
            results.append(result)
            ratio = result.profiled_seconds / result.own_seconds
            difference = "–" if result.difference is None else f"{result.difference:.1e}"
            cpu_ratio = result.profiled_cpu_seconds / max(result.own_cpu_seconds, 0.01)
            times = f"{result.own_seconds:.1f} s", f"{ratio:.2f}", f"{cpu_ratio:.2f}"
            row = (result.example, difference, str(result.numbers), *times, str(result.compiled), result.failure)
            print("  ".join(row), flush=True)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(r) for r in results], indent=1), encoding="utf-8")
    ran = [r for r in results if not r.failure]
    close = [r for r in ran if r.difference is not None and r.difference <= 1e-4]
    fast = [r for r in ran if r.profiled_seconds <= 2 * r.own_seconds]
    print(f"{len(results)} examples: {len(ran)} ran, {sum(r.compiled > 0 for r in ran)} with a profile, ", end="")
    print(f"{len(close)} with equal numbers (1e-4), {len(fast)} in at most twice their own time")


if __name__ == "__main__":
    main()
