"""Partial softmaxes and how they combine.

The attention of one query over a set of keys is its largest logit, the peak, with sums of p = exp(logits - peak) and
of p·value. For disjoint sets of keys these combine, and combining is associative: the sums of the part with the lower
peak fade by exp(its peak - the common one), and add. `absorb` does so tile by tile, `merge` for whole parts, whose
(out, lse) is such a state with the sums divided: peak lse, sums 1 and out.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jattn import _checks, _tile, _visible


class State(NamedTuple):
    """Rows (t,) after some tiles: the peak so far, the sink included, what `_tile.Rows` will hold, and the sums.

    After a `quick` tile the peak is what the sums are shifted by and no more, until they are `settled`.
    """

    peak: Any
    largest: Any
    ties: Any
    alive: Any
    acc: Any
    total: Any
    moment: Any


def start(x, stats):
    """The state of rows that have seen no key."""
    T, D, dtype = x.query.shape[0], x.value.shape[1], x.query.dtype
    # Made from the inputs, so that inside `shard_map` the state varies over the mesh as they do.
    zero = _visible.like(jnp.zeros(T, dtype), x)
    lowest = zero - jnp.inf
    peak = lowest if x.sink is None else jnp.maximum(lowest, jax.lax.stop_gradient(x.sink))
    tracked = zero if stats else None
    return State(peak, lowest, tracked, zero > 0, jnp.zeros((T, D), dtype) + zero[:, None], zero, tracked)


def absorb(state, x, pairs, visible):
    """`state` of a tile's queries, after the tile, given its own inputs."""
    # Read by several, each of which XLA:CPU would else give a copy of the whole array that this is a part of.
    state = state._replace(peak=jax.lax.optimization_barrier(state.peak))
    logits = _tile.logits(x, visible)
    found = _tile.peaks(logits, visible)
    peak, largest = jnp.maximum(state.peak, found), jnp.maximum(state.largest, found)
    alive = state.alive | _tile.some(visible, pairs)
    p, shifted = _tile.weights(x, logits, visible, _tile.Rows(peak, largest, None, alive, None))
    drop = _tile.below(state.peak, peak, True)
    fade = jnp.exp(drop)
    total = state.total * fade + p.sum(1)
    acc = state.acc * fade[:, None] + _visible.mix(_tile.kept(x, pairs, p), x.value, visible, x.operands)
    ties, moment = state.ties, state.moment
    if moment is not None:
        # Before the first key the peak is -inf, and there is nothing to shift.
        drop = jnp.where(state.total > 0, drop, 0)
        moment = fade * (moment + state.total * drop) + _tile.moment(p, shifted).sum(1)
        count = _tile.tied(x, logits, visible, largest).sum(1).astype(total.dtype)
        ties = jnp.where(_tile.near(state.largest, largest, jnp.abs(largest)), ties, 0) + count
    return State(peak, largest, ties, alive, acc, total, moment)


# In a quick tile, how far a logit may stand above what its row is shifted by, in nats; how large that may be, since the
# same logit of another product differs by its rounding; and how many such tiles sums must be able to hold.
_ROOM, _LARGE, _MANY = 40, 2**16, 2**20


def quick(state, x, pairs):
    """`state` of rows without Stats after a tile that hides nothing, and bool (t,): whether a row of it is right.

    The row stays shifted by its peak so far, or is by its first logit here: any shift gives the same softmax, as long
    as nothing overflows. So sums are all that the tile gives, as one product, [p·value, p·1], and XLA:CPU makes logits,
    p and that product as one, without writing a logit down. It only does so with a maximum between them; here that
    keeps p from overflowing, or not if it is so large that no product agrees with another about it.
    """
    first = _tile.logits(x._replace(key=x.key[:1]), None)[:, 0]
    shift = jnp.where(jnp.isfinite(state.peak), state.peak, first)
    # Read by several: see `absorb`.
    shift = jax.lax.optimization_barrier(shift)
    logits = _tile.logits(x, None)
    p = jnp.exp(logits - jnp.minimum(jnp.maximum(logits.max(1) - _ROOM, shift), _LARGE)[:, None])
    found = _visible.mix(p, jnp.concatenate([x.value, jnp.ones_like(x.value[:, :1])], 1), None, x.operands)
    sure = (jnp.abs(shift) < _LARGE) & (found[:, -1] < math.exp(_ROOM - 1)) & jnp.isfinite((found * _MANY).sum(1))
    state = state._replace(peak=shift, largest=jnp.maximum(state.largest, shift), alive=state.alive | True)
    return state._replace(acc=state.acc + found[:, :-1], total=state.total + found[:, -1]), sure


def settled(state):
    """`state` of rows without Stats, shifted by what no logit exceeds: the logarithm of their sum."""
    up = jnp.maximum(jnp.log(jnp.where(state.total > 0, state.total, 1)), 0)
    peak = jnp.where(jnp.isfinite(state.peak), state.peak + up, state.peak)
    fade = jnp.exp(jnp.where(jnp.isfinite(state.peak), state.peak - peak, 0))
    largest = jnp.where(jnp.isfinite(state.largest), peak, state.largest)
    return state._replace(peak=peak, largest=largest, acc=state.acc * fade[:, None], total=state.total * fade)


def merge(outs, lses):
    """The attention over the union of disjoint key sets, from the attention over each.

    Args:
        outs: arrays (*B, T, N, D), or (T, D), one for each part: a sequence, or stacked on a new leading axis.
        lses: likewise (*B, T, N), or (T,), in nats, as `attention` returns them with `return_stats=True`. A part
            whose lse is -inf has seen nothing and is ignored, whatever its out holds. A sink is carried by exactly
            one part.

    Returns:
        (out, lse) of the whole, in the shapes and dtypes of the parts.

    Raises:
        ValueError: the shapes disagree, or there is no part.
        TypeError: a part is not floating.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.

    Example:
        >>> merge([jnp.array([[1.0]]), jnp.array([[3.0]])], [jnp.zeros(1), jnp.zeros(1)])[0].tolist()
        [[2.0]]
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if outs.shape[0] == 0:
        raise ValueError("merge: outs must hold at least one part, got none.")
    if outs.ndim < 2:
        raise ValueError(f"merge: outs must be (parts, *B, D), got {_checks.tupled(outs.shape)}.")
    _checks.shape("merge", "lses", lses, ("parts", "*B"), {"parts": outs.shape[0], "B": outs.shape[1:-1]})
    return _merge(outs, lses)


def _stacked(what, parts):
    if not isinstance(parts, list | tuple):
        return jnp.asarray(_checks.floating("merge", what, parts))
    parts = [_checks.floating("merge", f"{what}[{i}]", x) for i, x in enumerate(parts)]
    if not parts:
        return jnp.zeros((0, 0))
    for i, x in enumerate(parts):
        like = {str(n): n for n in parts[0].shape}
        axes = [str(n) for n in parts[0].shape]
        _checks.shape("merge", f"{what}[{i}]", x, axes, like, hint="All parts have one shape.")
        one, other = _checks.dtype(parts[0]), _checks.dtype(x)
        if one != other:
            raise TypeError(f"merge: {what} must share one dtype, got {one} and {other}.")
    return jnp.stack(parts)


@jax.jit
def _merge(outs, lses):
    dtype = max(_visible.wide(outs.dtype), _visible.wide(lses.dtype), key=lambda d: d.itemsize)
    parts, wide = outs.astype(dtype), lses.astype(dtype)
    seen = wide != -jnp.inf
    peak = jax.lax.stop_gradient(wide.max(0, keepdims=True))
    # Any shift gives the same result. One part that is NaN or +inf makes the whole NaN.
    peak = jnp.where(jnp.isfinite(peak), peak, jnp.where(peak == -jnp.inf, 0, jnp.nan))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, wide - peak, 0)), 0)
    total = weights.sum(0)
    safe = jnp.where(seen.any(0), total, 1)
    mixed = jnp.where(seen[..., None], weights[..., None] * jnp.where(seen[..., None], parts, 0), 0).sum(0)
    lse = jnp.where(seen.any(0), peak[0] + jnp.log(safe), -jnp.inf)
    return (mixed / safe[..., None]).astype(outs.dtype), lse.astype(lses.dtype)
