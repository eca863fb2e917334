"""The mathematics of attention, on one tile of queries x keys of one head.

With `visible` what mask and bias allow, and everything in nats,

    logits = softcap(scale * query·key) + bias
    p      = exp(logits - peak) where visible, else 0         peak = the largest visible logit of the row, or the sink
    total  = sum of p over the keys, + exp(sink - peak)
    out    = p @ value / total                                lse = peak + log(total)

An engine finds each row's peak, in any way; no derivative flows through it, since any shift gives the same softmax.
With the peaks fixed, everything else is a sum over tiles of `sums`, and so is its derivative. JAX derives `sums`, and
is right at the edges because every step is: what is not visible is replaced before it is used, never after, and the
products come from `_visible`.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jattn import _dropout, _visible

# Whether XLA:CPU makes a product, a softmax and a product as one if nothing else reads what is in between, and writes
# none of it: twice as fast. In jax 0.10 that takes longer than one after the other, and in 0.11 the gradient does.
AS_ONE = jax.__version_info__ >= (0, 12)


class Inputs(NamedTuple):
    """One head: query (T, H), key (S, H), value (S, D) or None, all float32 or wider; and the options.

    `operands` is what products round to, `_visible.Operands`. The scale is 1/sqrt(H) if None. `query_indices` (T,) and
    `key_indices` (S,) say where each is stored, 0, 1, 2, ... if None.
    """

    query: Any
    key: Any
    value: Any
    operands: Any
    scale: Any = None
    mask: Any = None
    bias: Any = None
    softcap: Any = None
    sink: Any = None
    words: Any = None
    rate: Any = None
    query_positions: Any = None
    key_positions: Any = None
    query_indices: Any = None
    key_indices: Any = None


class Rows(NamedTuple):
    """What is known of each row before its sums, (T,) each. No derivative flows through any of it.

    `peak` is what logits are shifted by, and `largest` is the largest logit of a key; both 0 for an empty row. `sound`
    is 1, and NaN for a row without a largest logit although it sees a key. `ties` keys share the largest logit.
    `total` is that of p, None until it is known. `alive` is None where logits are `plain`; a row without a largest
    logit has a p that is NaN then.
    """

    peak: Any
    largest: Any
    ties: Any
    alive: Any
    sound: Any
    total: Any = None


class Sums(NamedTuple):
    """Sums over keys of p·value (T, D), p, p·(logits - peak), and 0 with the largest logit's derivative, (T,)."""

    acc: Any
    total: Any
    moment: Any
    rise: Any


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


# So that a program that returns them can be exported.
export.register_namedtuple_serialization(Stats, serialized_name="jattn.Stats")


def inputs(query, key, value, bias=None, **options):
    """Inputs, from arrays of any dtype."""
    operands, wide = _visible.Operands(query.dtype), _visible.wide(query.dtype)
    if bias is not None and bias.kind.name != "rule":
        # What pairs share gets the sum of their gradients, tile by tile, in its own dtype: it is made wide first. An
        # array with a number for each pair would only be copied, and what a caller's function reads is the caller's.
        pairs = query.shape[0] * key.shape[0]
        wider = lambda x: x.astype(wide if x.dtype.itemsize < wide.itemsize else x.dtype)  # noqa: E731
        bias = jax.tree.map(lambda x: x if x.size == pairs else wider(x), bias)
    query, key, value = query.astype(wide), key.astype(wide), None if value is None else value.astype(wide)
    return Inputs(query, key, value, operands, bias=bias, **options)


def cut(x, pairs):
    """The part of Inputs that is this tile's own: query (t, H), key (s, H), value (s, D), and the tile of the bias."""
    return x._replace(
        # The one query that there is may be asked for several times.
        query=_visible.shown(jnp.broadcast_to(pairs.rows(x.query, 0), (pairs.shape[0], x.query.shape[1]))),
        key=pairs.columns(x.key, 0),
        value=None if x.value is None else pairs.columns(x.value, 0),
        bias=None if x.bias is None else x.bias.tile(pairs).astype(x.query.dtype),
    )


def visible_pairs(x, pairs):
    """bool (t, s), or None where all is visible, given a tile's own inputs."""
    sources = [] if pairs.inside is None else [pairs.inside]
    if x.mask is not None and not pairs.full:
        sources.append(x.mask.tile(pairs))
    if x.bias is not None:
        # NaN is not -inf: a NaN bias is seen, and shown.
        sources.append(x.bias != -jnp.inf)
    if not sources:
        return None
    visible = sources[0]
    for source in sources[1:]:
        visible = visible & source
    return jnp.broadcast_to(visible, pairs.shape)


def some(visible, pairs):
    """bool (t,): whether a query sees any key."""
    t, s = pairs.shape
    return jnp.full(t, s > 0) if visible is None else visible.any(1)


def seen(visible, x, other):
    """x where visible, and `other` elsewhere."""
    return x if visible is None else jnp.where(visible, x, other)


def logits(x, visible):
    """(t, s), 0 where not visible, given a tile's own inputs."""
    # A query that sees nothing is not read: it shares `scale` with the others, whose derivative would meet it.
    query = x.query if visible is None else jnp.where(visible.any(1)[:, None], x.query, 0)
    before, after = _scales(x)
    out = _visible.scores(query * before, x.key, visible, x.operands)
    out = out if after is None else out * after
    # Each term goes through a select before it is added, so that no product is fused with the addition: see `below`.
    if x.softcap is not None:
        out = seen(visible, x.softcap * jnp.tanh(out / x.softcap), 0)
    return out if x.bias is None else out + seen(visible, x.bias, 0)


def _scales(x):
    """What multiplies the query before the product, and what multiplies the product, None for nothing."""
    scale = np.asarray(1 / math.sqrt(x.query.shape[1]), x.query.dtype) if x.scale is None else x.scale
    if not x.operands.rounded or (x.scale is None and math.frexp(scale)[0] == 0.5):
        return scale, None
    # After it, because a scaled query would be rounded; but the power of two in the scale, which rounds nothing, before
    # it, so that the product does not overflow.
    power = jax.lax.reduce_precision(jax.lax.stop_gradient(scale), exponent_bits=8, mantissa_bits=0)
    power = jnp.where(power == 0, 1, power)
    return power, scale / power


def below(logits, peak, once):
    """logits - peak, never above 0, and 0 at the peak, given logits that are rounded `once` or not.

    XLA may compute `c * tanh(x)` twice, once rounded, for the peak, and once fused with the subtraction, unrounded.
    Where logits are larger than 2^31 the two differ by more than exp can bear. What a product has made is there once,
    and is 0 at the peak by itself.
    """
    # -inf - -inf would be NaN.
    shifted = logits - jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    if once:
        above = jnp.maximum(shifted, 0)
    else:
        top = ((logits == peak) | (shifted > 0)) & (logits != -jnp.inf)
        above = jnp.where(top, shifted, 0)
    # 0, with the derivative of a logit. Not a minimum, which halves it; nor a 0 and a `custom_jvp`: jax 0.10 forgets
    # its rule in second derivatives of a scan.
    return shifted - jax.lax.stop_gradient(above)


def peaks(logits, visible):
    """(t,): the largest visible logit, -inf without one, any number where one is NaN.

    XLA:CPU forgets a NaN, and what came before it, in a maximum over 4096 numbers or more. Nothing relies on it here:
    sums keep a NaN.
    """
    return jax.lax.stop_gradient(seen(visible, logits, -jnp.inf).max(1, initial=-jnp.inf))


def plain(x, visible):
    """Whether nothing is hidden, and logits are products and nothing else.

    Of such a tile that holds all keys, XLA:CPU makes product, maximum and exp as one, if no step comes between them.
    """
    return visible is None and x.sink is None and _bare(x) and x.key.shape[0] > 0


def _bare(x):
    """Whether logits are products, each made once. One over one feature is no sum, and XLA makes it twice as any."""
    return x.query.shape[1] > 1 and x.softcap is None and x.bias is None and _scales(x)[1] is None


def rows(x, largest, ties, alive):
    """Rows, from the largest visible logit of each row."""
    if alive is None:
        return Rows(largest, largest, ties, None, 1)
    top, spoilt = largest, ~jnp.isfinite(largest)
    if x.sink is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(x.sink))
        spoilt = spoilt | ~jnp.isfinite(top)
    sound = jnp.where(alive & spoilt, jnp.nan, jnp.ones_like(largest))
    return Rows(jnp.where(jnp.isfinite(top), top, 0), jnp.where(alive, largest, 0), ties, alive, sound)


def tied(x, logits, visible, largest):
    """bool (t, s): the visible keys whose logit is the largest of the row."""
    logits = jax.lax.stop_gradient(logits)
    size = jnp.abs(logits) if x.bias is None else jnp.abs(logits) + jnp.abs(jax.lax.stop_gradient(x.bias))
    return seen(visible, near(logits, largest[:, None], size), False)


def near(x, y, size):
    """Whether x and y, sums of terms of this size, differ by their rounding at most.

    XLA may compute a logit twice, once with a product fused to a sum, and then no logit would equal the largest.
    """
    return (x == y) | (jnp.abs(x - y) < 4 * jnp.finfo(x.dtype).eps * size)


def weights(x, logits, visible, rows):
    """p (t, s), and the shifted logits that it is the exponential of, 0 where not visible."""
    if rows.alive is None:
        shifted = logits - rows.peak[:, None]
        return jnp.exp(shifted), shifted
    # Replaced before exp too: what exp passes back is a product, and 0 * inf would be NaN.
    shifted = seen(visible, below(logits, rows.peak[:, None], _bare(x)), 0)
    return seen(visible, jnp.exp(shifted), 0), shifted


def sums(x, pairs, visible, rows, stats):
    """Sums over this tile's keys, with the peaks of its rows fixed, given the tile's own inputs."""
    own = logits(x, visible)
    p, shifted = weights(x, own, visible, rows)
    mixed = kept(x, pairs, p)
    if rows.total is None or not x.operands.rounded:
        acc = _visible.mix(mixed, x.value, visible, x.operands)
    else:
        # So that what flows back to the product is the cotangent of the output, of the dtype that operands are rounded
        # to, and not its quotient by the total, which would be rounded and cancel less of what else flows back.
        whole = jnp.where(rows.total > 0, rows.total, 1)[:, None]
        acc = whole * _visible.mix(mixed * (1 / whole), x.value, visible, x.operands)
    if not stats:
        return Sums(acc, p.sum(1), None, None)
    rise = jnp.where(tied(x, own, visible, rows.largest), own - jax.lax.stop_gradient(own), 0).sum(1) / rows.ties
    return Sums(acc, p.sum(1), moment(p, shifted).sum(1), rise)


def kept(x, pairs, p):
    """p after dropout."""
    return p if x.words is None else _dropout.dropped(p, x.words, x.rate, pairs)


def moment(p, shifted):
    """p * ln p, with 0 ln 0 = 0, and no derivative there: p is 0 only where exp has no derivative left."""
    some = p > 0
    return jnp.where(some, p * jnp.where(some, shifted, 0), 0)


def total(x, rows, keys):
    """The sum of p over keys and sink, given that over keys."""
    return keys if x.sink is None else keys + jnp.exp(x.sink - rows.peak)


def sound(out):
    """(T,): 1, and NaN for a row that has seen a value that is not finite, given its sums (T, D).

    It is NaN as a whole, and so is what passes back through it.
    """
    # A sum says so, made small to be finite; XLA:CPU has no fast way to ask each number.
    small = (jax.lax.stop_gradient(out) * 2**-64).sum(1)
    return jnp.where(jnp.isnan(small), jnp.nan, jnp.ones_like(small))


def results(x, rows, sums, dtype):
    """(T, D) in `dtype`, and Stats, or None if the sums were made without."""
    whole = total(x, rows, sums.total) * rows.sound * sound(sums.acc)
    alive = rows.alive
    own = None if rows.alive is None else rows.alive[:, None]
    out = seen(own, sums.acc / seen(alive, whole, 1)[:, None], 0).astype(dtype)
    if sums.moment is None:
        return out, None
    # A row with a sink and no visible key has that sink for its lse.
    counted = alive if x.sink is None else alive | (x.sink != -jnp.inf)
    whole = jnp.where(counted, whole, 1)
    lse = jnp.where(counted, rows.peak + jnp.log(whole), -jnp.inf)
    # entropy = -sum w ln w with w = p / whole
    drop = sums.moment
    if x.sink is not None:
        drop = drop + moment(jnp.exp(x.sink - rows.peak), x.sink - rows.peak)
    entropy = jnp.where(alive, jnp.log(whole) - drop / whole, 0)
    spoilt = jnp.isnan(whole)
    # What is added to a spoilt row is NaN in value and derivative.
    largest = jnp.where(spoilt, jnp.nan, rows.largest)
    max_logit = jnp.where(alive, largest + jnp.where(spoilt, whole, sums.rise), -jnp.inf)
    return out, Stats(lse, max_logit, entropy)
