"""Dropout whose bits belong to a pair (query, key): any tile of any engine makes its own, and T and S don't matter.

The bits of a pair are one threefry block: keyed by the random key of the head, counting the pair's two indices.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from jattn import _checks


def words(who, rng):
    """The random key as uint32 (2,)."""
    rng = _checks.random_key(who, "dropout_rng", rng, "Pass one key; it is split over batch and heads.")
    if rng.size == 2:
        return rng
    # Other generators have wider keys: a block keyed by one half, counting the other.
    return jnp.stack(threefry2x32_p.bind(*rng[:4]))


def folded(words, n):
    """The words of each of `n` heads, (n, 2), as `jax.random.fold_in` makes them from the flat index of the head."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    return jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(jnp.arange(n, dtype=np.uint32))


def dropped(p, words, rate, pairs):
    """p (T, S) with each pair kept with probability 1 - rate and then scaled by 1 / (1 - rate)."""
    i, j = (jnp.broadcast_to(x.astype(np.uint32), pairs.shape) for x in (pairs.query_indices, pairs.key_indices))
    bits, _ = threefry2x32_p.bind(*(jnp.broadcast_to(w, pairs.shape) for w in words), i, j)
    uniform = (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    rate = jax.lax.stop_gradient(rate)
    # Nothing is kept at rate 1, and then there is nothing to scale.
    kept = 1 / jnp.where(rate < 1, 1 - rate, 1)
    return jnp.where(uniform >= rate.astype(np.float32), p * kept, 0)
