"""A drafter that proposes only some of the target's tokens, its draft vocabulary.

To propose, a drafter multiplies with the target's head, which may be larger than all of its layers. Few tokens make up
nearly all of a text, so their rows of the head will do. The target still verifies with its whole vocabulary: the
text is the same, a token that is left out is merely never proposed. (EAGLE-3's drafters do so too.)

U: tokens of the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash_jax.models.drafter import Drafter
from dflash_jax.models.project import project
from dflash_jax.models.proposal import Draw, Proposal
from dflash_jax.models.target import TargetTables
from dflash_jax.sharding import mesh_of, place_parameters, whole


class RestrictedDrafter(nnx.Module):
    """A drafter and its draft vocabulary; to the decoding loop a drafter like any other (models/proposal.py).

    Args:
        drafter: asks its target for `embed`, `dtype` and `logits` only.
        target: whose head it proposes with. Its rows are copied, U · D numbers, so that no round has to gather them.
        token_ids_U: int32, of the target's vocabulary, each at most once.
        head_UD: rows of a head to use in place of the target's; None: the target's own.

    Raises:
        ValueError: token_ids_U has other numbers, some of them twice, or none.
    """

    def __init__(
        self, drafter: Drafter, target: TargetTables, token_ids_U: np.ndarray, head_UD: np.ndarray | None = None
    ):
        self.drafter = drafter
        self.vocab_size = target.head_VD.shape[0]
        check_token_ids(np.asarray(token_ids_U), self.vocab_size)
        ids_U = jnp.asarray(token_ids_U, jnp.int32)
        rows_UD = _rows_of(target.head_VD, ids_U)
        given_UD = None if head_UD is None else np.asarray(head_UD).astype(target.dtype)
        self.has_own_head = given_UD is not None and not np.array_equal(given_UD, whole(rows_UD))
        ours = {"token_ids": ids_U, "head": jnp.asarray(given_UD) if self.has_own_head else rows_UD}
        if (mesh := mesh_of(target)) is not None:
            ours = place_parameters(mesh, ours)
        self.token_ids, self.head = nnx.Variable(ours["token_ids"]), nnx.Param(ours["head"])

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.drafter.tap_layers

    @property
    def max_width(self) -> int:
        return self.drafter.max_width

    def init_cache(self, batch: int, length: int) -> Any:
        return self.drafter.init_cache(batch, length)

    def absorb(self, cache: Any, taps_BTMD: jax.Array, positions_BT: jax.Array, anchors_B: jax.Array) -> Any:
        return self.drafter.absorb(cache, taps_BTMD, positions_BT, anchors_B)

    def propose(
        self, target, cache: Any, anchor_B: jax.Array, position_B: jax.Array, draw: Draw, *, width: int
    ) -> Proposal:
        """As the drafter, with logits and draws over U tokens; what comes out is of the whole vocabulary."""

        def draw_here(logits_BVU: jax.Array, positions_BV: jax.Array) -> Proposal:
            return self._of_target(draw(logits_BVU, positions_BV))

        narrowed = _Narrowed(target, self.head[...])
        return self.drafter.propose(narrowed, cache, anchor_B, position_B, draw_here, width=width)

    def _of_target(self, proposal: Proposal) -> Proposal:
        """Places in the draft vocabulary → the target's ids, and its log-probabilities: −inf outside."""
        token_ids_U = self.token_ids[...]
        if proposal.log_probs is None:
            return Proposal(token_ids_U[proposal.tokens], None)
        none_BVV = jnp.full((*proposal.log_probs.shape[:-1], self.vocab_size), -jnp.inf, proposal.log_probs.dtype)
        return Proposal(token_ids_U[proposal.tokens], none_BVV.at[..., token_ids_U].set(proposal.log_probs))


def unrestricted(model: Drafter | RestrictedDrafter) -> Drafter:
    """The drafter itself, without a draft vocabulary."""
    return model.drafter if isinstance(model, RestrictedDrafter) else model


def check_token_ids(token_ids_U: np.ndarray, vocab_size: int) -> None:
    """Checks a draft vocabulary. No text would tell: with a token twice, sampled ones are of another distribution.

    Raises:
        ValueError: these are not some of the tokens 0 … vocab_size − 1, each once.
    """
    if token_ids_U.ndim != 1 or not token_ids_U.size or token_ids_U.dtype.kind not in "iu":
        raise ValueError(
            f"token_ids must be a list of token ids, got an array of {token_ids_U.dtype}, shape {token_ids_U.shape}"
        )
    if token_ids_U.min() < 0 or token_ids_U.max() >= vocab_size:
        raise ValueError(
            f"token_ids reach from {token_ids_U.min()} to {token_ids_U.max()}; the target has 0 to {vocab_size - 1}"
        )
    if repeated := len(token_ids_U) - len(np.unique(token_ids_U)):
        raise ValueError(f"token_ids has {repeated} ids more than once")


@dataclass(frozen=True)
class _Narrowed:
    """A target as `Drafter.propose` asks for it, with logits [..., U]."""

    target: Any
    head_UD: jax.Array

    @property
    def dtype(self):
        return self.target.dtype

    def embed(self, tokens: jax.Array) -> jax.Array:
        return self.target.embed(tokens)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return project(hidden, self.head_UD, dtype=jnp.float32)


@jax.jit
def _rows_of(head_VD: jax.Array, token_ids_U: jax.Array) -> jax.Array:
    return head_VD[token_ids_U]
