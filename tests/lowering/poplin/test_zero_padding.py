"""Supersteps around the vertices of convolutions: zeros that are copied before them, casts of their partials after."""

import jax
import numpy as np
import pytest
from jax import lax

import ipujax as ipu
from ipujax.runtime.graph import Copy, Execute, leaves


def lowered(channels, dtype, kernel=3, arch="mk1"):
    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    device = ipu.IPUModel(arch=arch, tiles_per_ipu=16)
    shapes = (1, 64, 48, channels), (kernel, kernel, channels, channels)
    program = ipu.jit(convolve, device=device).lower(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    steps = list(leaves(program.program))
    zeros = [step.destination for step in steps if isinstance(step, Copy) and step.name.endswith("zero padding")]
    casts = [step for step in steps if isinstance(step, Execute) and step.compute_set.name.endswith("cast")]
    return zeros, casts


@pytest.mark.parametrize(
    ("channels", "dtype", "is_padded"),
    [
        (4, "float16", True),  # a SLIC vertex reads four positions of a row of the kernel
        (4, "float32", True),  # two rows of the kernel fill the eight channels of an AMP pass
        (16, "float16", False),
        (8, "float32", False),
    ],
)
def test_zeros_are_copied_where_vertices_need_them(channels, dtype, is_padded):
    zeros, _ = lowered(channels, dtype)
    assert len(zeros) == is_padded
    if is_padded:
        # A column, or a row, of zeros in the kernel of every tile at least.
        assert zeros[0].shape[1] >= 3 * channels


def test_no_zeros_for_kernels_of_one_element():
    assert lowered(16, "float16", kernel=1)[0] == []


@pytest.mark.parametrize(("dtype", "casts"), [("float16", 1), ("float32", 0)])
def test_float_partials_that_are_not_combined_are_cast(dtype, casts):
    assert len(lowered(4, dtype)[1]) == casts


def test_half_partials_are_not_cast():
    def product(a, b):
        return a @ b

    shapes = (jax.ShapeDtypeStruct((64, 32), "float16"), jax.ShapeDtypeStruct((32, 64), "float16"))
    for partials, casts in (("float16", 0), ("float32", 1)):
        options = ipu.Options(partials=partials)
        program = ipu.jit(product, device=ipu.IPUModel(tiles_per_ipu=16), options=options).lower(*shapes)
        names = [step.compute_set.name for step in leaves(program.program) if isinstance(step, Execute)]
        assert sum(name.endswith("cast") for name in names) == casts


def test_numbers_with_zeros_and_casts():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((1, 9, 7, 4)).astype(np.float16)
    w = generator.standard_normal((3, 3, 4, 4)).astype(np.float16)

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    expected = convolve(x.astype(np.float32), w.astype(np.float32))
    checked = ipu.Options(check=True)  # plain JAX, the program, and the tile interpreter agree
    got = ipu.jit(convolve, device=ipu.IPUModel(tiles_per_ipu=8), options=checked)(x, w)
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-2)
