"""What block attention refuses, and how it says so."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dflash_jax.kernels.block_attention import block_attention

NAMES = ("q", "k_block", "v_block", "k_context", "v_context", "starts", "ends")


def abstract_inputs(**changes) -> list[jax.ShapeDtypeStruct]:
    shapes = dict(
        zip(NAMES, [(2, 3, 4, 4, 8), *[(2, 3, 4, 2, 8)] * 2, *[(2, 9, 2, 8)] * 2, (2, 3), (2, 3)], strict=True)
    )
    dtypes = dict.fromkeys(NAMES[:5], jnp.float32) | dict.fromkeys(NAMES[5:], jnp.int32)
    dtypes |= changes.pop("dtypes", {})
    return [jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in (shapes | changes).items()]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q", (2, 3, 4, 8)),
        ("k_block", (2, 3, 4, 8)),
        ("k_block", (2, 3, 5, 2, 8)),
        ("v_block", (2, 2, 4, 2, 8)),
        ("k_context", (1, 9, 2, 8)),
        ("k_context", (2, 9, 2, 4)),
        ("v_context", (2, 8, 2, 8)),
        ("v_context", (2, 9, 1, 8)),
        ("starts", (2, 2)),
        ("ends", (3, 2)),
    ],
)
def test_shape_errors_name_the_array(name, shape):
    op = functools.partial(block_attention, scale=1.0)
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{', '.join(map(str, shape))}"):
        jax.eval_shape(op, *abstract_inputs(**{name: shape}))


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"k_block": (2, 3, 4, 3, 8), "v_block": (2, 3, 4, 3, 8), "k_context": (2, 9, 3, 8), "v_context": (2, 9, 3, 8)},
         {}, "4 query heads are not a multiple of 3"),
        ({}, {"window": 0}, "window=0"),
        ({}, {"backend": "triton"}, "backend='triton'.*xla"),
        ({"dtypes": {"ends": jnp.float32}}, {}, "integers.*float32"),
        ({"k_context": (2, 0, 2, 8), "v_context": (2, 0, 2, 8)}, {}, "k_context"),
    ],
)  # fmt: skip
def test_other_errors_say_what_is_wrong(inputs, options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(block_attention, scale=1.0, **options), *abstract_inputs(**inputs))
