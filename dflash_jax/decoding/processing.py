"""The caller's hook on the target's logits, applied to the slots of a block as autoregressive decoding would."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

# (logits_BV float32, tokens_BS int32, lengths_B int32) → logits_BV float32; what it may rely on: `process`.
LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def process(
    processor: LogitsProcessor | None, logits_BWV: jax.Array, tokens_BS: jax.Array, lengths_B: jax.Array
) -> jax.Array:
    """The processed logits [B, W, V].

    The processor is called for one slot of all rows at a time, as `processor(logits_BV, tokens_BS, lengths_B)`:
    logits of the next token, float32, before temperature, top-k and top-p · the row's tokens so far, prompt first,
    followed by V in every slot from lengths_B on, which is no token and which JAX drops when it scatters · how many
    tokens those are. It returns the new logits. It must be a pure function that JAX can trace, treat every row by
    itself, and leave each row a finite logit (−inf bans a token, +inf is no logit). Speculative and autoregressive
    decoding then call it with the same arguments for every token that is kept.

    Args:
        processor: None leaves the logits as they are.
        logits_BWV: of the target, for the W tokens behind lengths_B … lengths_B + W − 1 tokens.
        tokens_BS: the rows' tokens, drafted ones behind the committed ones; junk may follow.
        lengths_B: what the first slot has before it.

    Raises:
        ValueError: the result has another shape or dtype than the logits.
    """
    if processor is None:
        return logits_BWV
    V = logits_BWV.shape[-1]

    def one_slot(logits_BV, slot):
        seen_B = lengths_B + slot
        seen_BS = jnp.where(jnp.arange(tokens_BS.shape[1]) < seen_B[:, None], tokens_BS, V)
        result_BV = processor(logits_BV, seen_BS, seen_B)
        if not hasattr(result_BV, "dtype"):
            raise ValueError(f"logits_processor returned a {type(result_BV).__name__}; it must return an array")
        given, got = (jax.typeof(array_BV) for array_BV in (logits_BV, result_BV))
        if (got.shape, got.dtype) != (given.shape, given.dtype):
            raise ValueError(f"logits_processor returned {got}; it must return logits like those it is given, {given}")
        return result_BV

    return jax.vmap(one_slot, in_axes=(1, 0), out_axes=1)(logits_BWV, jnp.arange(logits_BWV.shape[1]))
