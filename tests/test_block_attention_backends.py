"""The choice of a backend, what is saved between the passes, and that there is no second derivative."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_attention_cases import Shape, attend, random_arrays, random_ranges
from jax.experimental.pallas import tpu as pltpu

from dflash_jax.kernels import _backends
from dflash_jax.kernels.block_attention import SAVED, block_attention

SHAPE = Shape(1, 3, 4, 4, 2, S=9)


@pytest.fixture
def messages(caplog):
    """What is logged from here on, also if it has been said before."""
    _backends._say_once.cache_clear()
    caplog.set_level(logging.INFO, logger=_backends.__name__)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == _backends.__name__]
    _backends._say_once.cache_clear()


def loss(*arrays, backend="auto", scale=0.5):
    starts, ends = random_ranges(SHAPE, 1)
    return jnp.sum(jnp.square(block_attention(*arrays, starts, ends, scale=scale, backend=backend)))


def test_auto_is_xla_on_a_cpu_and_says_so_once(messages):
    arrays = random_arrays(SHAPE, 0)
    ours = attend(arrays, *random_ranges(SHAPE, 1), shape=SHAPE, backend="auto")
    theirs = attend(arrays, *random_ranges(SHAPE, 1), shape=SHAPE, backend="xla")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert messages() == ["block attention for cpu: xla backend"]


def test_auto_follows_the_platform_that_a_program_is_exported_for(messages):
    """Not the one it is traced on: the same function holds the kernels for a TPU and none of them for a CPU."""
    arrays = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in random_arrays(SHAPE, 0)[:5]]
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4)))
    texts = {
        platform: jax.export.export(gradients, platforms=[platform])(*arrays).mlir_module()
        for platform in ("tpu", "cpu", "cuda")
    }
    assert {platform: text.count("tpu_custom_call") for platform, text in texts.items()} == {
        "tpu": 3,
        "cpu": 0,
        "cuda": 0,
    }
    assert messages() == [
        "block attention for tpu: tpu backend",
        "block attention for cpu: xla backend",
        "block attention for cuda: xla backend",
    ]


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (SHAPE, jnp.float16, "dtypes ['float16']"),
        (SHAPE._replace(H=12), jnp.float32, "head size 12"),
        (SHAPE._replace(H=512), jnp.bfloat16, "head size 512"),
        (SHAPE._replace(W=130), jnp.float32, "block width 130"),
        (SHAPE._replace(N=64, K=1, H=256), jnp.bfloat16, "64 queries a key head"),
        (SHAPE._replace(A=2**14, W=16, S=2**16), jnp.bfloat16, "tile pairs"),
    ],
)
def test_what_the_tpu_backend_cannot_take_is_left_to_xla(messages, shape, dtype, reason):
    arrays = jax.eval_shape(lambda: random_arrays(shape._replace(A=1, S=1), 0, dtype))
    sizes = [(*a.shape[:1], shape.A if a.ndim == 5 else shape.S, *a.shape[2:]) for a in arrays[:5]]
    arrays = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    bounds = jax.ShapeDtypeStruct((shape.B, shape.A), jnp.int32)
    for backend in ("tpu", "auto"):
        op = functools.partial(block_attention, scale=1.0, backend=backend)
        text = jax.export.export(jax.jit(op), platforms=["tpu"])(*arrays, bounds, bounds).mlir_module()
        assert "tpu_custom_call" not in text
    asked, lowered, chosen = messages()  # a warning for "tpu", a remark for "auto"
    assert reason in asked and reason in chosen
    assert lowered == "block attention for tpu: xla backend"


@pytest.mark.parametrize("head_size", [64, 128])
def test_gpu_kernels_are_exported_where_they_are_asked_for(head_size):
    """Forward and backward, lowered to Mosaic GPU without a GPU or its compiler."""
    shape = SHAPE._replace(H=head_size, W=16)
    arrays = jax.eval_shape(lambda: random_arrays(shape, 0, jnp.bfloat16))[:5]
    gradients = jax.jit(jax.grad(functools.partial(loss, backend="gpu"), argnums=(0, 1, 2, 3, 4)))
    text = jax.export.export(gradients, platforms=["cuda"])(*arrays).mlir_module()
    assert text.count("custom_call @mosaic_gpu") == 3


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        (SHAPE._replace(H=64), jnp.float32, "dtypes ['float32']"),
        (SHAPE._replace(H=80), jnp.bfloat16, "head size 80"),
        (SHAPE._replace(H=64, W=65), jnp.bfloat16, "block width 65"),
    ],
)
def test_what_the_gpu_backend_cannot_take_is_left_to_xla(messages, shape, dtype, reason):
    arrays = jax.eval_shape(lambda: random_arrays(shape, 0, dtype))[:5]
    bounds = jax.ShapeDtypeStruct((shape.B, shape.A), jnp.int32)
    op = functools.partial(block_attention, scale=1.0, backend="gpu")
    text = jax.export.export(jax.jit(op), platforms=["cuda"])(*arrays, bounds, bounds).mlir_module()
    assert "mosaic_gpu" not in text
    asked, lowered = messages()
    assert "the gpu backend cannot take" in asked and reason in asked
    assert lowered == "block attention for cuda: xla backend"


def test_what_fits_is_not_left_to_xla(messages):
    for shape in (SHAPE._replace(H=256), SHAPE._replace(W=32, N=8, K=1, H=80), SHAPE._replace(N=28, K=4, H=128)):
        arrays = jax.eval_shape(lambda shape=shape: random_arrays(shape, 0, jnp.bfloat16))
        assert _backends.choose("tpu", *arrays[:5]) == "tpu"
    for shape in (SHAPE._replace(H=64), SHAPE._replace(W=64, N=28, K=4, H=128)):
        arrays = jax.eval_shape(lambda shape=shape: random_arrays(shape, 0, jnp.bfloat16))
        assert _backends.choose("gpu", *arrays[:5]) == "gpu"
    assert messages() == []


@pytest.mark.parametrize("backend", ["auto", "xla", "tpu"])
@pytest.mark.parametrize(
    "second",
    [
        lambda f, q: jax.grad(lambda q: jax.grad(f)(q).sum())(q),
        lambda f, q: jax.jvp(jax.grad(f), (q,), (q,)),
        lambda f, q: jax.jit(jax.hessian(f))(q),
    ],
    ids=["grad of grad", "jvp of grad", "hessian"],
)
def test_second_derivatives_are_refused_by_name(backend, second):
    q, *others = random_arrays(SHAPE, 0)[:5]
    with (
        pltpu.force_tpu_interpret_mode(True),
        pytest.raises(NotImplementedError, match=r"second derivative.*reference"),
    ):
        second(lambda q: loss(q, *others, backend=backend), q)


def test_the_reference_has_second_derivatives():
    q, *others = random_arrays(SHAPE, 0)[:5]
    gradient = jax.grad(lambda q: loss(q, *others, backend="reference"))
    _, curvature = jax.jit(lambda q: jax.jvp(gradient, (q,), (q,)))(q)
    assert np.any(curvature) and np.all(np.isfinite(curvature))


def test_rematerialisation_that_saves_the_named_results_does_not_run_the_forward_pass_again():
    arrays = random_arrays(SHAPE, 0)[:5]

    def calls(policy) -> int:
        step = jax.checkpoint(lambda *arrays: loss(*arrays, backend="tpu"), policy=policy)
        return str(jax.make_jaxpr(jax.grad(step))(*arrays)).count("name=block_attention_forward")

    assert calls(jax.checkpoint_policies.save_only_these_names(*SAVED)) == 1
    assert calls(jax.checkpoint_policies.nothing_saveable) == 2


def test_rows_may_be_mapped():
    """vmap over the batch gives what the batch axis gives."""
    shape = SHAPE._replace(B=2)
    arrays, (starts, ends) = random_arrays(shape, 3)[:5], random_ranges(shape, 3)

    op = functools.partial(block_attention, scale=0.5, backend="auto")

    def row(*arguments):
        return op(*(x[None] for x in arguments))[0]

    whole, mapped = (jax.jit(f)(*arrays, starts, ends) for f in (op, jax.vmap(row)))
    np.testing.assert_allclose(mapped, whole, rtol=0, atol=1e-6)  # another sum order
