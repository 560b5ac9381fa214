"""Test the refusals of the GPU backends. test_kernels.py tests the launches."""

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import cache_shape

from mie.errors import ConfigError, UnsupportedModelError
from mie.load.backends import load_backend
from mie.ops_gpu.gemm import NumpyGemm


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("auto", 4), ("float32", 4), ("float16", 2), ("bfloat16", 2)]
)
def test_dtypes_of_the_emulated_backend(dtype: str, itemsize: int):
    backend = load_backend("cupy-emulated", dtype)
    assert backend.name == "cupy-emulated"
    assert backend.dtype.itemsize == itemsize


@needs_compiler
def test_other_dtypes_are_refused():
    message = "'float64' is not supported by the cupy-emulated backend; choose auto, float32"
    with pytest.raises(ConfigError, match=message):
        load_backend("cupy-emulated", "float64")


@needs_compiler
@pytest.mark.parametrize("head_dim", [20, 264])
def test_a_head_size_without_a_kernel_is_refused(head_dim: int):
    shape = cache_shape(1, 4, 1, head_dim)
    with pytest.raises(UnsupportedModelError, match=f"head_dim is {head_dim}.*multiples of 8"):
        load_backend("cupy-emulated").new_kv_cache(shape)


@needs_compiler
def test_a_weight_too_large_for_float16_is_refused():
    backend, weight = load_backend("cupy-emulated", "float16"), np.array([[1.0], [7e4]])
    with pytest.raises(ConfigError, match=r"70000 does not fit float16 .*bfloat16"):
        backend.load_linear((2, 1), [weight.astype(np.float32)])


@needs_compiler
def test_a_matrix_with_more_outputs_than_a_grid_is_refused():
    backend = load_backend("cupy-emulated", "float16")
    message = "a matrix has 1,048,561 outputs and 8 inputs; .* takes up to 1,048,560 outputs"
    with pytest.raises(UnsupportedModelError, match=message):
        backend.load_linear((1_048_561, 8), [])
    embedding = np.broadcast_to(np.float16(0), (1_048_561, 8))
    with pytest.raises(UnsupportedModelError, match=message):
        backend.tie_linear(embedding)
    assert len(backend.tie_linear(embedding[1:])) == 1_048_560


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_the_product_of_the_emulator_rounds_once(has_bias: bool, has_residual: bool):
    """The operands are float16 and the sums float32. The result may be in the residual's memory."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 64)), rng.normal(size=(5, 64))
    bias, residual = rng.normal(size=5), rng.normal(size=(3, 5))
    x, weight, bias, residual = (each.astype(np.float16) for each in (x, weight, bias, residual))
    wanted = x.astype(float) @ weight.astype(float).T + has_bias * bias.astype(float)
    wanted += has_residual * residual.astype(float)
    out = residual if has_residual else np.empty((3, 5), np.float16)
    given = bias if has_bias else None
    NumpyGemm().matmul(x, weight, given, out, 0, is_added=has_residual)
    np.testing.assert_allclose(out, wanted, rtol=2**-11 * 1.01, atol=1e-6)
