"""Engine: one head, all T x S logits at once.

The mathematics of attention stands here. With `visible` what mask and bias allow, and everything in nats,

    logits = softcap(scale * query·key) + bias
    p      = exp(logits - peak) where visible, else 0
    total  = sum of p over the keys, + exp(sink - peak)
    out    = p @ value / total            lse = peak + log(total)

Derivatives are JAX's own. They are right at the edges because every step is: what is not visible is replaced before
it is used, never after, and the products come from `_visible`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jattn import _dropout, _visible


class Stats(NamedTuple):
    """What a row of attention looked like, float32 or wider, (T,) or (*B, T, N).

    Attributes:
        lse: log of the sum of exp(logits), sink included, in nats; -inf for an empty row.
        max_logit: the largest logit of a key, in nats; -inf for an empty row.
        entropy: of the weights, sink included, in nats: 0 for one key, log(n) for n equal ones.
    """

    lse: Any
    max_logit: Any
    entropy: Any


class Row(NamedTuple):
    """The softmax of each query before it is divided: p (T, S), and (T,) the rest."""

    p: Any
    total: Any
    peak: Any
    logits: Any
    shifted: Any
    alive: Any
    visible: Any


def visible_pairs(mask, bias, pairs):
    """bool (T, S), or None where all is visible. The tile of the bias comes along."""
    visible = None if mask is None else mask.tile(pairs)
    tile = None if bias is None else bias.tile(pairs)
    if tile is not None:
        # NaN is not -inf: a NaN bias is seen, and shown.
        some = tile != -jnp.inf
        visible = some if visible is None else visible & some
    if visible is not None:
        visible = jnp.broadcast_to(visible, pairs.shape)
    return visible, tile


def alive_rows(visible, pairs):
    """bool (T,): whether a query sees any key."""
    T, S = pairs.shape
    return jnp.full(T, S > 0) if visible is None else visible.any(1)


def rows(query, key, poison, *, mask, bias, scale, softcap, sink, pairs):
    """The row of each query: query (T, H), key (S, H), wide, and `poison` (S,), NaN at keys that spoil a row."""
    visible, tile = visible_pairs(mask, bias, pairs)
    alive = alive_rows(visible, pairs)

    def seen(x, other):
        return x if visible is None else jnp.where(visible, x, other)

    # A query that sees nothing is not read either: its product with the scale's tangent would be.
    logits = _visible.scores(jnp.where(alive[:, None], query, 0) * scale, key, visible)
    # Each term goes through a select before it is added, so that no product is fused with the addition: see `below`.
    if softcap is not None:
        logits = seen(softcap * jnp.tanh(logits / softcap), 0)
    if tile is not None:
        logits = logits + seen(tile.astype(logits.dtype), 0)

    # A visible NaN, +inf, or nothing but -inf makes the whole row NaN; an empty row is shifted by 0.
    peak = jax.lax.stop_gradient(seen(logits + poison[None, :], -jnp.inf).max(1, initial=-jnp.inf))
    spoilt = ~jnp.isfinite(peak) | jax.lax.stop_gradient(~jnp.isfinite(query).all(1))
    top = peak
    if sink is not None:
        top = jnp.maximum(peak, jax.lax.stop_gradient(sink))
        spoilt = spoilt | ~jnp.isfinite(top)
    top = jnp.where(alive & spoilt, jnp.nan, jnp.where(jnp.isfinite(top), top, 0))
    shifted = below(seen(logits, 0), top[:, None])
    p = seen(jnp.exp(shifted), 0)
    total = p.sum(1)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    return Row(p, total, top, logits, shifted, alive, visible)


@jax.custom_jvp
def below(logits, peak):
    """logits - peak, 0 at the peak and never above it. Any shift gives the same softmax: the peak has no derivative.

    XLA may compute `c * tanh(x)` twice, once rounded, for the peak, and once fused with the subtraction, unrounded.
    Where logits are larger than 2^31 the two differ by more than exp can bear.
    """
    return jnp.where(logits == peak, 0, jnp.minimum(logits - peak, 0))


@below.defjvp
def _(primals, tangents):
    return below(*primals), tangents[0]


def attend(query, key, value, *, words=None, rate=None, sink, stats, pairs, **options):
    """(T, D) in the dtype of `query`, and Stats or None."""
    q, k, v = (x.astype(_visible.wide(x.dtype)) for x in (query, key, value))
    # A NaN is a NaN in the whole row: a key that is not finite, or whose value is not, spoils every row that sees it.
    poison = jnp.where(jnp.isfinite(k).all(1) & jnp.isfinite(v).all(1), 0, jnp.nan).astype(k.dtype)
    row = rows(q, k, jax.lax.stop_gradient(poison), sink=sink, pairs=pairs, **options)
    p = row.p if words is None else _dropout.dropped(row.p, words, rate, pairs)
    # Where no query is empty, `alive` is a constant and so is the division's guard.
    safe = jnp.where(row.alive, row.total, 1)
    out = jnp.where(row.alive[:, None], _visible.mix(p, v, row.visible) / safe[:, None], 0)
    return out.astype(query.dtype), statistics(row, sink) if stats else None


def weights(query, key, *, sink, pairs, **options):
    """(T, S), float32 or wider: rows sum to 1, less the sink's share, or to 0 where nothing is visible."""
    q, k = (x.astype(_visible.wide(x.dtype)) for x in (query, key))
    poison = jnp.where(jnp.isfinite(k).all(1), 0, jnp.nan).astype(k.dtype)
    row = rows(q, k, jax.lax.stop_gradient(poison), sink=sink, pairs=pairs, **options)
    return row.p / jnp.where(row.alive, row.total, 1)[:, None]


def statistics(row, sink):
    """Stats, with derivatives of every order."""
    counted = row.alive if sink is None else row.alive | (sink != -jnp.inf)
    total = jnp.where(counted, row.total, 1)
    lse = jnp.where(counted, row.peak + jnp.log(total), -jnp.inf)
    visible = True if row.visible is None else row.visible

    # entropy = -sum w ln w with w = p / total and ln w = shifted - log(total)
    def moment(p, logits):
        some = p > 0
        return jnp.where(some, p * jnp.where(some, logits, 0), 0)

    drop = moment(row.p, row.shifted).sum(1)
    if sink is not None:
        drop = drop + moment(jnp.exp(sink - row.peak), sink - row.peak)
    entropy = jnp.where(row.alive, jnp.log(total) - drop / total, 0)

    # The keys alone, without the sink. Equal maxima share the derivative.
    logits = jnp.where(visible, row.logits, -jnp.inf)
    largest = jax.lax.stop_gradient(logits.max(1, initial=-jnp.inf))
    largest = jnp.where(row.alive, largest, 0)
    ties = visible & (jax.lax.stop_gradient(row.logits) == largest[:, None])
    count = jnp.maximum(ties.sum(1), 1).astype(total.dtype)
    rise = jnp.where(ties, row.logits - jax.lax.stop_gradient(row.logits), 0).sum(1) / count
    # The peak of a spoilt row is NaN, and what is added to it is NaN in value and derivative.
    spoilt = row.alive & jnp.isnan(row.peak)
    max_logit = jnp.where(row.alive, jnp.where(spoilt, jnp.nan, largest) + jnp.where(spoilt, total, rise), -jnp.inf)
    return Stats(lse, max_logit, entropy)
