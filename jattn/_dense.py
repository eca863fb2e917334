"""Engine: one head, all T x S logits at once, as one tile."""

import jax.numpy as jnp

from jattn import _tile


def _found(x, pairs, stats):
    logits, visible = _tile.logits(x, pairs)
    largest = _tile.peaks(logits, visible, _tile.spoils(x.key, x.value))
    ties = jnp.maximum(_tile.tied(logits, visible, largest).sum(1), 1).astype(largest.dtype) if stats else None
    return logits, visible, _tile.rows(x, largest, ties, _tile.some(visible, pairs))


def attend(x, pairs, dtype, stats):
    """(T, D) in `dtype`, and Stats or None."""
    logits, visible, rows = _found(x, pairs, stats)
    return _tile.results(x, rows, _tile.sums(x, pairs, logits, visible, rows, stats), dtype)


def weights(x, pairs):
    """(T, S), float32 or wider: rows sum to 1, less the sink's share, or to 0 where nothing is visible."""
    logits, visible, rows = _found(x, pairs, False)
    p, _ = _tile.weights(logits, visible, rows.peak)
    total = p.sum(1)
    if x.sink is not None:
        total = total + jnp.exp(x.sink - rows.peak)
    return p / jnp.where(rows.alive, total, 1)[:, None]
