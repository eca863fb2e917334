"""Engine: one head, all T x S logits at once, as one tile."""

import jax
import jax.numpy as jnp

from jattn import _tile, _visible


def found(x, pairs, stats):
    """The tile's own inputs, what is visible, the logits and the Rows."""
    x = _tile.cut(x, pairs)
    visible = _tile.visible_pairs(x, pairs)
    logits = _tile.logits(x, visible)
    largest = _tile.peaks(logits, visible)
    ties = jnp.maximum(_tile.tied(x, logits, visible, largest).sum(1), 1).astype(largest.dtype) if stats else None
    alive = None if not stats and _tile.plain(x, visible) else _tile.some(visible, pairs)
    rows = _tile.rows(x, largest, ties, alive)
    if x.operands.rounded:
        p, _ = _tile.weights(x, logits, visible, rows)
        rows = rows._replace(total=jax.lax.stop_gradient(_tile.total(x, rows, p.sum(1))))
    return x, visible, logits, rows


def attend(x, pairs, dtype, stats):
    """(T, D) in `dtype`, and Stats or None."""
    x, visible, logits, rows = found(x, pairs, stats)
    if rows.alive is None and _tile.AS_ONE:
        p, _ = _tile.weights(x, logits, visible, rows)
        out = _visible.mix(_tile.kept(x, pairs, shares(x, rows, p)[0]), x.value, visible, x.operands)
        return (out * _tile.sound(out)[:, None]).astype(dtype), None
    return _tile.results(x, rows, _tile.sums(x, pairs, visible, rows, stats), dtype)


def nothing(x, T, dtype):
    """What `attend` gives T queries without a key: zeros, and the sink alone."""
    zero = _visible.like(jnp.zeros(T, x.query.dtype), x)
    lse = zero - jnp.inf if x.sink is None else zero + x.sink
    return zero[:, None].astype(dtype) * jnp.ones((1, x.value.shape[1]), dtype), _tile.Stats(lse, zero - jnp.inf, zero)


def weights(x, pairs):
    """(T, S), float32 or wider: rows sum to 1, less the sink's share, or to 0 where nothing is visible."""
    x, visible, logits, rows = found(x, pairs, False)
    return shares(x, rows, _tile.weights(x, logits, visible, rows)[0])[0]


def shares(x, rows, p):
    """Each p's share of its row's total, (T, S), and that total, (T,)."""
    total = _tile.total(x, rows, p.sum(1)) * rows.sound
    return p / _tile.seen(rows.alive, total, 1)[:, None], total
