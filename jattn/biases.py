"""Bias rules: what is added to the logits, in nats, as a function of positions.

Like mask rules (`jattn.masks`) they are small pytrees, and gradients reach their arrays. In `attention` the axes of a
leaf may be led by nothing, by (N,) or by (*B, N), each of these full or 1. A sum of biases is one `rule`.
"""

import math

import jax.numpy as jnp
import numpy as np

from jattn import _checks, _rules, _visible
from jattn._rules import Kind, Rule

__all__ = ["Bias", "alibi", "array", "relative", "rule"]


class Bias(Rule):
    """A rule that says what is added to the logits. Made by the functions of this module."""


def alibi(slopes):
    """Attention with linear biases: -slope * |query position - key position|.

    Args:
        slopes: floating (), led by (N,) in `attention`. An int N stands for the N standard slopes, (N,) float32.

    Raises:
        TypeError: neither an int nor floating.
        ValueError: an int below 1.

    Source: Press et al. 2022, arXiv:2108.12409; for N that is no power of two, the authors' own interpolation.

    Example:
        >>> biases.alibi(jnp.float32(0.5)).dense(1, 3).tolist()
        [[0.0, -0.5, -1.0]]
    """
    if _rules.is_int(slopes):
        if slopes < 1:
            raise ValueError(f"biases.alibi: N must be >= 1, got {slopes}.")
        slopes = np.array(_standard_slopes(slopes), np.float32)
    return Bias(_ALIBI, {"slopes": _checks.floating("biases.alibi", "slopes", slopes, NOT_FLOATING)})


def _standard_slopes(N):
    # A geometric sequence for a power of two; between two powers, every other slope of the next one fills up.
    n = 2 ** math.floor(math.log2(N))
    slopes = [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return slopes if n == N else slopes + _standard_slopes(2 * n)[::2][: N - n]


def _alibi(pairs, slopes):
    distance = jnp.abs(pairs.query_positions - pairs.key_positions)
    # Distances above 256 are no bfloat16 numbers, and distance 0 is 0.0, not -0.0.
    wide = _visible.wide(slopes.dtype)
    return slopes.astype(wide) * (-distance).astype(wide)


_ALIBI = Kind("alibi", _alibi, (("slopes", ()),))


def relative(table, buckets=None):
    """One learned number for each distance: table[R + clip(key position - query position, -R, R)].

    Args:
        table: floating (L,), L = 2 R + 1, led by (N,) or (*B, N) in `attention`.
        buckets: None, or a function of key position - query position, integers (t, s), to indices into the table
            (any L; an index outside it gives NaN). Static, by identity.

    Raises:
        ValueError: L is even and `buckets` is None.

    Source: Shaw et al. 2018, arXiv:1803.02155; with `buckets`, Raffel et al. 2020, arXiv:1910.10683.

    Example:
        >>> biases.relative(jnp.array([-1.0, 0.0, 1.0])).dense(2, 3).tolist()
        [[0.0, 1.0, 1.0], [-1.0, 0.0, 1.0]]
    """
    table = _checks.floating("biases.relative", "table", table, NOT_FLOATING)
    _checks.rank("biases.relative", "table", table, ("*B", "L"), at_least=True)
    L = np.shape(table)[-1]
    if buckets is None and L % 2 == 0:
        raise ValueError(f"biases.relative: L = 2 R + 1 must be odd, got {L}. Pass buckets for others.")
    if buckets is not None:
        buckets = _rules.function("biases.relative", "buckets", buckets)
    return Bias(_RELATIVE, {"table": table, "buckets": buckets})


def _relative(pairs, table, buckets):
    L = table.shape[0]
    distance = pairs.key_positions - pairs.query_positions
    if buckets is None:
        index = jnp.clip(distance, -(L // 2), L // 2) + L // 2
    else:
        index = _rules.fits("biases.relative: buckets", buckets(distance), pairs, np.integer, "integers")
    # A negative index would count from the end; what is outside the table is shown, as NaN.
    index = jnp.where(index < 0, L, index.astype(np.int32))
    # Wide, because many pairs read one number, and its gradient is their sum.
    table = jnp.asarray(table, _visible.wide(table.dtype))
    return table.at[index].get(mode="fill", fill_value=jnp.nan)


_RELATIVE = Kind("relative", _relative, (("table", ("L",)),))


def array(bias):
    """A bias given as an array.

    Args:
        bias: floating (T, S), each axis full or 1, led by (N,) or (*B, N) in `attention`.

    Raises:
        TypeError: `bias` is not floating.

    Example:
        >>> biases.array(jnp.array([[0.0, -1.0]])).dense(2, 2).tolist()
        [[0.0, -1.0], [0.0, -1.0]]
    """
    bias = _checks.floating("biases.array", "bias", bias, NOT_FLOATING)
    _checks.rank("biases.array", "bias", bias, ("*B", "T", "S"), at_least=True)
    return Bias(_ARRAY, {"bias": bias})


NOT_FLOATING = "A boolean mask goes in `mask`."


def _array(pairs, bias):
    return pairs.columns(pairs.rows(bias, 0), 1)


_ARRAY = Kind("array", _array, (("bias", ("T?", "S?")),))


def rule(fn, *arrays, ranks=()):
    """A bias computed by a function of positions.

    Args:
        fn: `fn(query_positions, key_positions, *arrays)` on integers (t, 1) and (1, s), to return floats (t, s), each
            axis full or 1. Static, by identity: give the same function again and nothing is traced again.
        *arrays: what `fn` needs of arrays; they may be traced and mapped and get gradients, which nothing that `fn`
            closes over can.
        ranks: the rank of each array, for one head; 0 for all if left out. Axes in front of them lead.

    Raises:
        TypeError: `fn` is no function, cannot be hashed, or returns no floating array.
        ValueError: `fn` returns another shape, or `ranks` are not those of the arrays.

    Example:
        >>> decay = biases.rule(lambda query, key, rate: rate * -((query - key) ** 2), jnp.float32(0.5))
        >>> decay.dense(1, 3).tolist()
        [[0.0, -0.5, -2.0]]
    """
    fn = _rules.function("biases.rule", "fn", fn)
    fields, axes = _rules.arrays_with_axes("biases.rule", arrays, ranks)
    return Bias(Kind("rule", _rule, axes), {"fn": fn} | fields)


def _rule(pairs, fn, **arrays):
    out = fn(pairs.query_positions, pairs.key_positions, *arrays.values())
    hint = NOT_FLOATING if getattr(out, "dtype", None) == np.bool_ else ""
    return _rules.fits("biases.rule: fn", out, pairs, np.floating, "floats", hint)
