"""Partial softmaxes and how they combine.

The attention of one query over a set of keys is (out, lse): the mixed value, and the log of the sum of exponentials
that divides it. For disjoint sets of keys these combine, and combining is associative: lse adds up as logarithms do,
out is the mean of the parts' out with weights exp(lse).
"""

import jax
import jax.numpy as jnp

from jattn import _checks, _visible


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
        _checks.shape("merge", f"{what}[{i}]", x, ("*B",), {"B": parts[0].shape}, hint="All parts have one shape.")
        if x.dtype != parts[0].dtype:
            raise TypeError(f"merge: {what} must share one dtype, got {parts[0].dtype} and {x.dtype}.")
    return jnp.stack(parts)


@jax.jit
def _merge(outs, lses):
    dtype = max(_visible.wide(outs.dtype), _visible.wide(lses.dtype), key=lambda d: d.itemsize)
    parts, wide = outs.astype(dtype), lses.astype(dtype)
    seen = wide != -jnp.inf
    peak = jax.lax.stop_gradient(wide.max(0))
    # Any shift gives the same result. One part that is NaN or +inf makes the whole NaN.
    peak = jnp.where(jnp.isfinite(peak), peak, jnp.where(peak == -jnp.inf, 0, jnp.nan))
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, wide - peak, 0)), 0)
    total = weights.sum(0)
    safe = jnp.where(seen.any(0), total, 1)
    mixed = jnp.where(seen[..., None], weights[..., None] * jnp.where(seen[..., None], parts, 0), 0).sum(0)
    lse = jnp.where(seen.any(0), peak + jnp.log(safe), -jnp.inf)
    return (mixed / safe[..., None]).astype(outs.dtype), lse.astype(lses.dtype)
