"""Softmax and its family over one axis: stable, and never reading what is not visible.

An entry is visible if `where` allows it and it is not -inf. The visible entries of a row are shifted by their peak,
which changes no weight and keeps exp in range; all others are replaced before any arithmetic and left out after it,
so that neither a value nor a derivative of any order can meet them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _checks, _visible


def softmax(x, axis=-1, where=None, *, empty="zero"):
    """Turns every row of scores along one axis into weights that are positive and sum to 1.

    Args:
        x: floating, any shape; scores in nats. -inf is how a score says that its entry is not visible.
        axis: the axis along which a row lies, an integer.
        where: bool, of the rank of `x` with each axis full or 1, or a scalar; True = visible.
        empty: what to do with a row in which nothing is visible: "zero" gives weights 0, whose derivatives are
            exactly 0; "raise" raises.

    Returns:
        Weights, the shape and dtype of `x`; exactly 0 where not visible, whatever stands there. A row that sees a
        NaN or +inf is NaN, and so are its derivatives.

    Raises:
        ValueError: `axis`, the shape of `where` or the name of a policy is wrong. Under `empty="raise"`, a row known
            to be empty; where that is known only when the program runs, a `checkify.check` fails.
        TypeError: `x` is not floating (16 bits or more), `where` is not boolean or `axis` is not an integer.

    Numerics: exponentials and sums in float32, in float64 when `x` is.

    Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", equation 5; shifted by the
    peak as in Blanchard, Higham and Higham 2021, "Accurately computing the log-sum-exp and softmax functions".

    Example:
        >>> softmax(jnp.array([1000.0, 1000.0, -jnp.inf])).tolist()
        [0.5, 0.5, 0.0]
        >>> softmax(jnp.array([[1.0, jnp.nan]]), where=jnp.array([[True, False]])).tolist()
        [[1.0, 0.0]]
    """
    return _softmax(*_checked("softmax", x, axis, where, empty))


def log_softmax(x, axis=-1, where=None, *, empty="zero"):
    """The logarithm of `softmax`, in nats, without the underflow of taking it afterwards.

    Args:
        x: floating, any shape; scores in nats, -inf where not visible.
        axis: the axis along which a row lies, an integer.
        where: bool, of the rank of `x` with each axis full or 1, or a scalar; True = visible.
        empty: what to do with a row in which nothing is visible: "zero" gives -inf, whose derivatives are exactly 0;
            "raise" raises.

    Returns:
        The shape and dtype of `x`; -inf where not visible, whatever stands there. A row that sees a NaN or +inf is
        NaN, and so are its derivatives.

    Raises:
        ValueError: as in `softmax`.
        TypeError: as in `softmax`.

    Numerics: sums and logarithms in float32, in float64 when `x` is.

    Source: as in `softmax`.

    Example:
        >>> log_softmax(jnp.array([5.0, -jnp.inf])).tolist()
        [0.0, -inf]
    """
    return _log_softmax(*_checked("log_softmax", x, axis, where, empty))


def logsumexp(x, axis=-1, where=None, *, empty="zero"):
    """The logarithm of the sum of the exponentials of a row, in nats: what `softmax` divides by.

    Args:
        x: floating, any shape; scores in nats, -inf where not visible.
        axis: the axis along which a row lies, an integer.
        where: bool, of the rank of `x` with each axis full or 1, or a scalar; True = visible.
        empty: what to do with a row in which nothing is visible: "zero" gives -inf, the logarithm of a sum of
            nothing, whose derivatives are exactly 0; "raise" raises.

    Returns:
        The shape of `x` without `axis`, in the dtype of `x`. A row that sees a NaN or +inf is NaN, and so are its
        derivatives.

    Raises:
        ValueError: as in `softmax`.
        TypeError: as in `softmax`.

    Numerics: sums and logarithms in float32, in float64 when `x` is.

    Source: as in `softmax`.

    Example:
        >>> logsumexp(jnp.array([1000.0, -jnp.inf])).item()
        1000.0
    """
    return _logsumexp(*_checked("logsumexp", x, axis, where, empty))


def naive_softmax(x, axis=-1):
    """exp(x) / sum(exp(x)), as the formula is printed: kept to show why `softmax` subtracts the peak first.

    Args:
        x: floating, any shape; scores in nats.
        axis: the axis along which a row lies, an integer.

    Returns:
        The shape and dtype of `x`. NaN where exp overflows, and in rows of -inf.

    Raises:
        ValueError: `axis` is not an axis of `x`.
        TypeError: `x` is not floating (16 bits or more) or `axis` is not an integer.

    Numerics: in the dtype of `x`, with no policy for anything.

    Source: Bridle 1990, as in `softmax`.

    Example:
        >>> naive_softmax(jnp.array([1000.0, 1000.0])).tolist()
        [nan, nan]
    """
    x = _checks.floating("naive_softmax", "x", x)
    return _naive_softmax(x, _checks.axis("naive_softmax", "x", x, axis))


def entropy(weights, axis=-1):
    """How spread out every row of weights is, in nats: 0 for one weight of 1, ln(S) for S equal weights.

    Args:
        weights: floating, any shape; rows that sum to 1, or to 0 where they are empty. Of attention with a sink, whose
            weights sum to less, `Stats` has the entropy.
        axis: the axis along which a row lies, an integer.

    Returns:
        The shape of `weights` without `axis`, float32 or wider; an empty row has entropy 0, a NaN or negative weight
        gives NaN. The derivative with respect to a weight of 0 is 0.

    Raises:
        ValueError: `axis` is not an axis of `weights`.
        TypeError: `weights` is not floating (16 bits or more) or `axis` is not an integer.

    Numerics: in float32, in float64 when `weights` is. Weights below the smallest normal number count as 0.

    Source: Shannon 1948, "A mathematical theory of communication", section 6.

    Example:
        >>> entropy(jnp.array([[1.0, 0.0], [0.0, 0.0]])).tolist()
        [0.0, 0.0]
        >>> f"{entropy(jnp.array([0.5, 0.5])):.4f}"
        '0.6931'
    """
    weights = _checks.floating("entropy", "weights", weights)
    return _entropy(weights, _checks.axis("entropy", "weights", weights, axis))


def rows_normalised(weights, tol=1e-9, axis=-1):
    """Whether every row sums to 1, each on its own: the sum over all rows is the number of rows.

    Args:
        weights: floating, any shape.
        tol: how far from 1 a sum may be. Sums of float32 weights are good to about 1e-6, of bfloat16 to 1e-2.
        axis: the axis along which a row lies, an integer.

    Returns:
        bool (). False if a row sums to 0, as an empty one does, or to NaN.

    Raises:
        ValueError: `axis` is not an axis of `weights`.
        TypeError: `weights` is not floating (16 bits or more) or `axis` is not an integer.

    Numerics: sums in float32, in float64 when `weights` is.

    Source: the axiom of unit measure, Kolmogorov 1933.

    Example:
        >>> rows_normalised(jnp.array([[0.5, 0.5], [0.0, 1.0]])).item()
        True
        >>> rows_normalised(jnp.array([[0.5, 0.5], [0.0, 0.0]])).item()
        False
    """
    weights = _checks.floating("rows_normalised", "weights", weights)
    return _rows_normalised(weights, tol, _checks.axis("rows_normalised", "weights", weights, axis))


def _checked(who, x, axis, where, empty):
    """The arguments of a jitted core."""
    x = _checks.floating(who, "x", x)
    axis = _checks.axis(who, "x", x, axis)
    _checks.choice(who, "empty", empty, ("zero", "raise"))
    if where is not None:
        where = _checks.boolean(who, "where", where, hint="Pass where != 0.")
        if where.ndim > 0:
            hint = "Give it the missing axes, each full or 1, as in where[None, :]." if where.ndim < x.ndim else ""
            _checks.shape(who, "where", where, [f"{n}?" for n in x.shape], {str(n): n for n in x.shape}, hint=hint)
    if empty == "raise":
        _no_empty_rows(who, x, axis, True if where is None else where)
    return x, axis, where


def _no_empty_rows(who, x, axis, where):
    # With NumPy where the values are known: inside a jit, jnp makes tracers even of constants.
    if _checks.known(x):
        x = np.asarray(x)
    if _checks.known(where):
        where = np.broadcast_to(np.asarray(where), x.shape)
        # Rows that `where` or a length of 0 empties are known while x may be traced.
        _checks.no_empty_rows(who, ~where.any(axis))
    else:
        where = jnp.broadcast_to(where, x.shape)
    _checks.no_empty_rows(who, ~(where & (x != -np.inf)).any(axis))


def _parts(x, axis, where):
    """Which entries are visible, and of the visible: the peak, what they are below it, its exp and the sum of that."""
    x = x.astype(_visible.wide(x.dtype))
    visible = x != -jnp.inf if where is None else where & (x != -jnp.inf)

    # Any shift gives the same result, so none of its derivative flows through the peak. It starts at the lowest
    # finite number and not at -inf, because -inf - -inf is NaN.
    lowest = jnp.finfo(x.dtype).min
    peak = jax.lax.stop_gradient(jnp.where(visible, x, lowest)).max(axis, keepdims=True, initial=lowest)

    # No x is above the peak, and yet the comparison must stay. XLA may compute a caller's `x = y * c` twice: rounded
    # for the peak, and fused into the subtraction here, unrounded; then no entry is 0, and from 2^31 on all overflow
    # or vanish. It cannot fuse through a select that it cannot decide. (`~(x > peak)` lets a NaN through, and its
    # derivatives. An optimization_barrier does nothing under jax 0.10, where XLA:CPU drops it before it fuses.)
    below = jnp.where(visible & ~(x > peak), x, peak) - peak
    exps = jnp.where(visible, jnp.exp(below), 0)
    total = jnp.where(visible.any(axis, keepdims=True), exps.sum(axis, keepdims=True), 1)
    return visible, peak, below, exps, total


def _hidden(total, fill):
    """What the entries show that are not visible: `fill`, or NaN, differentiated as such, in a row that is NaN."""
    return jnp.where(jnp.isnan(total), total, fill)


@functools.partial(jax.jit, static_argnums=1)
def _softmax(x, axis, where):
    visible, _, _, exps, total = _parts(x, axis, where)
    return jnp.where(visible, exps / total, _hidden(total, 0)).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _log_softmax(x, axis, where):
    visible, _, below, _, total = _parts(x, axis, where)
    return jnp.where(visible, below - jnp.log(total), _hidden(total, -jnp.inf)).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _logsumexp(x, axis, where):
    visible, peak, _, _, total = _parts(x, axis, where)
    lse = jnp.where(visible.any(axis, keepdims=True), peak + jnp.log(total), -jnp.inf)
    return lse.squeeze(axis).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=1)
def _naive_softmax(x, axis):
    exps = jnp.exp(x)
    return exps / exps.sum(axis, keepdims=True)


@functools.partial(jax.jit, static_argnums=1)
def _entropy(weights, axis):
    weights = weights.astype(_visible.wide(weights.dtype))
    # -w ln w is 0 at w = 0, but its slope -ln w - 1 is +inf there. We say 0, because softmax multiplies what comes
    # back by w, and 0 * inf would be NaN. 1 ln 1 = 0 too, so a 1 stands in for every weight of 0; and for every
    # subnormal one, whose reciprocal, the curvature, would overflow (where they are kept: XLA:CPU reads 0).
    weights = jnp.where(jnp.abs(weights) < jnp.finfo(weights.dtype).tiny, 1, weights)
    return _surprise(weights).sum(axis)


# Left to itself, JAX takes w * (dw / w) for dw, whose derivative holds w^-2: inf from w = 1e-19 on in float32.
@jax.custom_jvp
def _surprise(w):
    return w * -jnp.log(w)


@_surprise.defjvp
def _surprise_jvp(primals, tangents):
    (w,), (dw,) = primals, tangents
    return _surprise(w), (-jnp.log(w) - 1) * dw


@functools.partial(jax.jit, static_argnums=2)
def _rows_normalised(weights, tol, axis):
    total = weights.astype(_visible.wide(weights.dtype)).sum(axis)
    return (jnp.abs(total - 1) <= tol.astype(total.dtype)).all()
