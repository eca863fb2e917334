"""jax.nn's name, signature and layouts for `attention`."""

import functools
import operator

from jattn import _checks, _rules, biases, masks
from jattn._attention import attend_as

_WHO = "dot_product_attention"


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    return_residual=False,
):
    """A drop-in for `jax.nn.dot_product_attention` that keeps jattn's promises: see `attention` for what they are.

    Axes: B batch, T queries, S keys, N query heads, K key/value heads, H features of a query or key, D features of a
    value. One sequence may leave out B. It differs from jax.nn in this:

    - A query that may attend to no key gets zeros and passes back zero, where jax.nn gives the mean of all values.
      Its residual is -inf, as is that of the queries from `query_seq_lengths` on, where jax.nn has about -2.4e38.
    - What a query may not attend to is never read: a NaN in padding stays there, derivatives included. A NaN that it
      may attend to makes all features of its row NaN. A key is hidden where `bias` is -inf.
    - Logits, softmax and sums are never rounded below float32, and are float64 for float64 inputs; bfloat16 weights are
      rounded for the product with values. float32 is multiplied at the highest precision. The residual is float32 or
      wider, and has derivatives; jax.nn rounds it and stops them.
    - D may differ from H. Lengths may be integers of any dtype.
    - Refused are integer inputs, a bias that is not floating, negative lengths and windows, a scale that is not a
      scalar, and query, key or value of a rank below 3. A wrong dtype is a TypeError, where jax.nn's is a ValueError.

    Args:
        query: (B, T, N, H) or (T, N, H), floating.
        key: (B, S, K, H) or (S, K, H), the dtype of `query`; N is a multiple of K.
        value: (B, S, K, D) or (S, K, D), the dtype of `query`.
        bias: floating (B, N, T, S), each axis full or 1, in nats. Leading axes may be left out.
        mask: bool (B, N, T, S), likewise; True = may attend.
        scale: multiplies query·key, 1/sqrt(H) if None. A scalar, may be traced.
        is_causal: whether key j is hidden from query i for j > i, also where T and S differ.
        query_seq_lengths: integers (B,): how many queries are real. The output of the others is 0.
        key_value_seq_lengths: integers (B,): how many keys and values are real.
        local_window_size: (left, right), in positions: key j is seen by query i for i - left <= j <= i + right. An
            int stands for both.
        implementation: None for the method that suits the call, "xla" for one within XLA, or "cudnn".
        return_residual: whether to return the residual too, the log-sum-exp of the logits in nats.

    Returns:
        (B, T, N, D) or (T, N, D), as `query`, in its dtype; with `return_residual` a pair of it and (B, T, N) or
        (T, N).

    Raises:
        ValueError: a shape disagrees with the axes above, a length or window is negative, or cuDNN cannot keep the
            contract.
        TypeError: integer arrays, mixed dtypes, a mask that is not boolean, a bias that is not floating.

    Example:
        >>> x = jnp.eye(2)[:, None, :]
        >>> dot_product_attention(x, x, x, is_causal=True, key_value_seq_lengths=jnp.array([1])).tolist()
        [[[1.0, 0.0]], [[1.0, 0.0]]]
    """
    _checks.choice(_WHO, "implementation", implementation, (None, "xla", "cudnn"))
    is_causal = _checks.flag(_WHO, "is_causal", is_causal)
    return_residual = _checks.flag(_WHO, "return_residual", return_residual)
    arrays = _checks.one_floating_dtype(_WHO, query=query, key=key, value=value)
    lead = arrays["query"].shape[:-1]
    sizes = {}
    for what, axes in (("query", "BTNH"), ("key", "BSKH"), ("value", "BSKD")):
        # One sequence may be written with or without its B, by each array for itself.
        arrays[what] = _lifted(what, arrays[what], axes, sizes, at_least=3 if sizes.get("B", 1) == 1 else 4)
        sizes |= dict(zip(axes, arrays[what].shape, strict=True))

    if bias is not None:
        bias = _logits_like("bias", _checks.floating(_WHO, "bias", bias, biases.NOT_FLOATING), sizes)
    if scale is not None:
        scale = _checks.number(_WHO, "scale", scale)
        _checks.shape(_WHO, "scale", scale, (), sizes)

    rules = []
    if isinstance(mask, masks.Mask):
        raise TypeError(f"{_WHO}: mask must be an array, got {mask!r}. jattn.attention takes rules.")
    if mask is not None:
        mask = _checks.boolean(_WHO, "mask", mask, masks.NOT_BOOLEAN)
        hint = "For a [B, S] padding mask pass mask[:, None, None, :] or key_value_seq_lengths." * (mask.ndim == 2)
        rules.append(masks.array(_logits_like("mask", mask, sizes, hint)))
        _checks.not_inverted(_WHO, "mask", mask)
    if is_causal:
        rules.append(masks.causal())
    if local_window_size is not None:
        rules.append(masks.window(*_window(local_window_size)))
    if query_seq_lengths is not None:
        rules.append(masks.lengths(query=_lengths("query_seq_lengths", query_seq_lengths, sizes)))
    if key_value_seq_lengths is not None:
        rules.append(masks.lengths(key=_lengths("key_value_seq_lengths", key_value_seq_lengths, sizes)))

    out = attend_as(
        _WHO,
        True,
        arrays["query"],
        arrays["key"],
        arrays["value"],
        functools.reduce(operator.and_, rules) if rules else None,
        bias,
        scale=scale,
        method="cudnn" if implementation == "cudnn" else "auto",
        return_stats=return_residual,
    )
    if return_residual:
        out, stats = out
        return out.reshape(*lead, sizes["D"]), stats.lse.reshape(lead)
    return out.reshape(*lead, sizes["D"])


def _lifted(what, x, axes, sizes, *, at_least=0, hint=""):
    """`x` with axes of 1 in front for those that it leaves out, down to the rank `at_least`."""
    own = axes[4 - x.ndim :] if at_least <= x.ndim <= 4 else axes
    _checks.shape(_WHO, what, x, own, sizes, hint=hint)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _logits_like(what, x, sizes, hint=""):
    return _lifted(what, x, ("B?", "N?", "T?", "S?"), sizes, hint=hint)


def _lengths(what, x, sizes):
    x = _rules.integer(_WHO, what, _checks.integral(_WHO, what, x), at_least=0)
    _checks.shape(_WHO, what, x, ("B",), sizes)
    return x


def _window(size):
    sizes = size if isinstance(size, tuple | list) else (size, size)
    if len(sizes) != 2:
        raise ValueError(f"{_WHO}: local_window_size must be an int or (left, right), got {size}.")
    for n in sizes:
        n = _rules.integer(_WHO, "local_window_size", n, at_least=0)
        _checks.shape(_WHO, "local_window_size", n, (), {})
    return sizes
