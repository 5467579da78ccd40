"""Operators of `ai.onnx.ml`, which exporters of scikit-learn and of boosting libraries write, as JAX functions."""

from ipujax.onnx.machine_learning import (
    features as features,
    linear_models as linear_models,
    tree_ensembles as tree_ensembles,
)
