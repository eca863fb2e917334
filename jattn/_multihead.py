"""multihead: attention as a layer, from tokens to tokens. Its arrays are a pytree, its options those of attention."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jattn import _checks, _mesh, _visible, masks
from jattn._attention import attend_as, attention
from jattn._cache import Cache, cached_as, cached_attention

_WHO = "multihead"


class MultiHead(NamedTuple):
    """The arrays of a layer of attention, for `multihead`: a pytree, to be trained, mapped and saved like any other.

    Axes: F features of a token, E features of a token of the context (F in self-attention), N query heads, K key/value
    heads, H features of a query or key, D features of a value, M features of a token that comes out.

    Attributes:
        query: (F, N, H).
        key: (E, K, H).
        value: (E, K, D).
        out: (N, D, M).
        query_bias: (N, H) or None.
        key_bias: (K, H) or None.
        value_bias: (K, D) or None.
        out_bias: (M,) or None.
        query_norm: (H,) or None: the scale of a layer normalisation of each query, over H.
        key_norm: (H,) or None: likewise of each key.
    """

    query: Any
    key: Any
    value: Any
    out: Any
    query_bias: Any = None
    key_bias: Any = None
    value_bias: Any = None
    out_bias: Any = None
    query_norm: Any = None
    key_norm: Any = None


# So that a program that takes one can be exported.
export.register_namedtuple_serialization(MultiHead, serialized_name="jattn.MultiHead")

_AXES = MultiHead(
    query=("F", "N", "H"),
    key=("E", "K", "H"),
    value=("E", "K", "D"),
    out=("N", "D", "M"),
    query_bias=("N", "H"),
    key_bias=("K", "H"),
    value_bias=("K", "D"),
    out_bias=("M",),
    query_norm=("H",),
    key_norm=("H",),
)


def init_multihead(rng, features, N, K=None, H=None, D=None, *, dtype: Any = jnp.float32, bias=False, qk_norm=False):
    """The arrays of a new layer, drawn so that what it projects keeps its variance.

    Args:
        rng: a random key.
        features: F, of a token on its way in and out.
        N: query heads.
        K: key/value heads, N if None. N is a multiple of K.
        H: features of a query or key, F / N if None.
        D: features of a value, H if None.
        dtype: of all arrays, floating.
        bias: whether each projection adds a bias. It is 0 at first.
        qk_norm: whether queries and keys are normalised. The scales are 1 at first.

    Returns:
        `MultiHead`.

    Raises:
        ValueError: a size is no int >= 1, N is not a multiple of K, or H is None and F not a multiple of N.
        TypeError: `dtype` is not floating, or `rng` no random key.

    Source: LeCun et al. 1998, Efficient BackProp: a normal distribution with variance 1 / (features that are summed),
    truncated at two standard deviations. Normalised queries and keys, Dehghani et al. 2023, arXiv:2302.05442.

    Example:
        >>> params = init_multihead(jax.random.key(0), 8, 4, K=2)
        >>> params.query.shape, params.key.shape, params.out.shape
        ((8, 4, 2), (8, 2, 2), (4, 2, 8))
    """
    who = "init_multihead"
    _checks.random_key(who, "rng", rng)
    for what, n in (("features", features), ("N", N), ("K", K), ("H", H), ("D", D)):
        if n is not None:
            _checks.size(who, what, n, 1)
    K = N if K is None else K
    if N % K:
        raise ValueError(f"{who}: N = {N} query heads is not a multiple of K = {K} key/value heads.")
    if H is None and features % N:
        raise ValueError(f"{who}: features = {features} is not a multiple of N = {N} heads. Pass H.")
    H = features // N if H is None else H
    sizes = {"F": features, "E": features, "N": N, "K": K, "H": H, "D": H if D is None else D, "M": features}
    dtype = _checks.floating(who, "dtype", np.empty((), dtype)).dtype

    shapes = MultiHead(*(tuple(sizes[a] for a in axes) for axes in _AXES))
    rngs = jax.random.split(rng, 4)
    draw = jax.nn.initializers.lecun_normal
    into_heads = draw(in_axis=0, out_axis=(1, 2))
    return MultiHead(
        query=into_heads(rngs[0], shapes.query, dtype),
        key=into_heads(rngs[1], shapes.key, dtype),
        value=into_heads(rngs[2], shapes.value, dtype),
        out=draw(in_axis=(0, 1), out_axis=2)(rngs[3], shapes.out, dtype),
        **{what: jnp.zeros(getattr(shapes, what), dtype) for what in MultiHead._fields if "bias" in what and bias},
        **{what: jnp.ones(getattr(shapes, what), dtype) for what in MultiHead._fields if "norm" in what and qk_norm},
    )


def multihead(
    params,
    x,
    context=None,
    mask=None,
    bias=None,
    *,
    cache=None,
    rotary=None,
    query_positions=None,
    key_positions=None,
    **options,
):
    """A layer of attention: projects tokens to queries, keys and values, and what they mix back to tokens.

    Axes: B batch, any number of axes, T tokens, S tokens of the context (T in self-attention), and those of
    `MultiHead`.

    Args:
        params: `MultiHead`, from `init_multihead` or from another library (`jattn.interop`).
        x: (*B, T, F), in the dtype of `params`.
        context: (*B, S, E), likewise: the tokens that keys and values come from. None: from `x`.
        mask: as in `attention`. With a cache as in `cached_attention`, and `masks.causal()` if None.
        bias: likewise.
        cache: a `Cache`, for decoding: `x` are the next tokens of its sequences, and see those before them too.
        rotary: what turns queries and keys by their positions: `jattn.rotary`, or any function from heads and positions
            to heads. For another base pass `functools.partial(rotary, base=...)`.
        query_positions: as in `attention`: the positions of `x`. With a cache it has them.
        key_positions: as in `attention`: the positions of the context. Those of `x` in self-attention.
        options: every other option of `attention`, with a cache of `cached_attention`.

    Returns:
        (*B, T, M) in the dtype of `x`; with `return_stats` a pair of it and `Stats`, each (*B, T, N); with a cache a
        pair of that and the cache with the new tokens. What a token gets that may attend to nothing is `out_bias`
        alone. A token that nothing sees, and that sees nothing, is never read, by the derivatives of `params` neither.

    Raises:
        ValueError: a shape disagrees with the axes above, or as in `attention`.
        TypeError: `params` is no `MultiHead`, `rotary` no function, an option is not there, or as in `attention`.

    Numerics: projections and normalisation in float32, float64 when `x` is, then rounded to the dtype of `x`.

    Source: Vaswani et al. 2017, section 3.2.2, arXiv:1706.03762.

    Example:
        >>> params = init_multihead(jax.random.key(0), 8, 4, K=2)
        >>> multihead(params, jnp.ones((3, 5, 8)), mask=masks.causal(), rotary=rotary).shape
        (3, 5, 8)
    """
    _checks.options(_WHO, options, attention if cache is None else cached_attention)
    if isinstance(context, masks.Mask) or getattr(context, "dtype", None) == np.bool_:
        raise TypeError(f"{_WHO}: context must be tokens, got a mask. Pass mask=....")
    params, x, context = _tokens(params, x, context)
    if rotary is not None and not callable(rotary):
        hint = "For another base pass functools.partial(jattn.rotary, base=...)."
        raise TypeError(f"{_WHO}: rotary must be a function, such as jattn.rotary, got {rotary!r}. {hint}")
    if cache is not None:
        _alone_with(cache, x, context=context, query_positions=query_positions, key_positions=key_positions)
        query_positions = cache.next_positions(x.shape[-2])
    if context is None:
        context = x
        key_positions = query_positions if key_positions is None else key_positions

    query = _projected(x, params.query, params.query_bias, params.query_norm)
    key = _projected(context, params.key, params.key_bias, params.key_norm)
    value = _projected(context, params.value, params.value_bias)
    if rotary is not None:
        query = rotary(query, _positions("query_positions", query_positions, x))
        key = rotary(key, _positions("key_positions", key_positions, context))
    if cache is None:
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        out = attend_as(_WHO, True, query, key, value, mask, bias, **positions, **options)
    else:
        mask = masks.causal() if mask is None else mask
        out, cache = cached_as(_WHO, query, key, value, cache, mask, bias, **options)

    out, *stats = out if options.get("return_stats") else (out,)
    out = _projected(out, params.out, params.out_bias, summed=2)
    out = (out, *stats) if stats else out
    return out if cache is None else (out, cache)


def _alone_with(cache, x, **others):
    """Asserts that the cache is one of the batch of `x`, and that none of the others is there."""
    if not isinstance(cache, Cache):
        raise TypeError(f"{_WHO}: cache must be a Cache, got {type(cache).__name__}. Make one with Cache.create.")
    _checks.shape(_WHO, "cache.lengths", cache.lengths, ("*B",), {"B": x.shape[:-2]})
    for what, other in others.items():
        if other is not None:
            got = f"{_checks.tupled(np.shape(other))}. It knows the tokens before these, and their positions."
            raise ValueError(f"{_WHO}: {what} must be None with a cache, got {got}")


def checked(who, params):
    """The arrays of `params`, {"params.query": ...}, and the sizes of their axes, which agree."""
    if not isinstance(params, MultiHead):
        hint = "init_multihead makes one, jattn.interop makes one of another library's layer."
        raise TypeError(f"{who}: params must be a MultiHead, got {type(params).__name__}. {hint}")
    arrays, sizes = {}, {}
    for what, axes in _AXES._asdict().items():
        if getattr(params, what) is not None or not what.endswith(("_bias", "_norm")):
            name = f"params.{what}"
            arrays[name] = _checks.array(who, name, getattr(params, what))
            _checks.shape(who, name, arrays[name], axes, sizes)
            sizes |= dict(zip(axes, arrays[name].shape, strict=True))
    return arrays, sizes


def _tokens(params, x, context):
    """`params`, `x` and `context` as arrays of one dtype, whose shapes agree."""
    arrays, sizes = checked(_WHO, params)
    tokens = {"x": x} if context is None else {"x": x, "context": context}
    arrays = _checks.one_floating_dtype(_WHO, **tokens, **arrays)
    x, context = arrays["x"], arrays.get("context")
    _checks.heads(_WHO, params.query, sizes)
    _checks.rank(_WHO, "x", x, ("*B", "T", "F"), at_least=True)
    sizes["B"] = x.shape[:-2]
    _checks.shape(_WHO, "x", x, ("*B", "T", "F"), sizes)
    if context is not None:
        _checks.shape(_WHO, "context", context, ("*B", "S", "E"), sizes)
    elif sizes["E"] != sizes["F"]:
        F, E = sizes["F"], sizes["E"]
        raise ValueError(f"{_WHO}: context must be given where E differs from F, got None with F = {F} and E = {E}.")
    return MultiHead(*(arrays.get(f"params.{what}") for what in MultiHead._fields)), x, context


def _positions(what, positions, x):
    """`positions` of the tokens in `x`, or where they are stored."""
    *B, n, _ = x.shape
    if positions is None:
        return np.arange(n)
    positions = _checks.integral(_WHO, what, positions)
    axes = ("*B", "T" if what == "query_positions" else "S")
    _checks.shape(_WHO, what, positions, axes[-1 if positions.ndim == 1 else 0 :], {"B": B, axes[1]: n})
    return positions


@jax.custom_jvp
def _cleaned(x):
    """`x` with 0 for what is no finite number. Derivatives are those of `x`."""
    return jnp.where(jnp.isfinite(x), x, 0)


@_cleaned.defjvp
def _(primals, tangents):
    return _cleaned(*primals), *tangents


def _projected(x, weights, bias=None, norm=None, summed=1):
    """(..., F) by (F, ...), F being so many axes, plus a bias, and normalised over the last axis."""
    over = *_mesh.axes(x)[:-summed], *_mesh.axes(weights)[summed:]
    return _mesh.placed(functools.partial(_projection, summed=summed), (x, weights, bias, norm), over)


@functools.partial(jax.jit, static_argnames="summed")
def _projection(x, weights, bias, norm, summed):
    dtype = _visible.wide(x.dtype)
    precision = _visible.precision(x.dtype)
    out = jnp.tensordot(_cleaned(x), weights, summed, precision=precision, preferred_element_type=dtype)
    if bias is not None:
        out += jax.lax.expand_dims(bias.astype(dtype), range(out.ndim - bias.ndim))
    if norm is not None:
        # Its own variance is a difference of squares, which may come out below 0.
        out = jax.nn.standardize(out, variance=out.var(-1, keepdims=True), epsilon=1e-6)
        out *= jax.lax.expand_dims(norm.astype(dtype), range(out.ndim - 1))
    # The derivatives of weights, bias and norm sum over all tokens. A token that is not visible adds 0, but would add
    # NaN, 0 * NaN, if it went in as NaN. So that comes in last, as a constant.
    bad = jnp.where(jnp.isfinite(x).all(tuple(range(-summed, 0))), 0, jnp.nan).astype(dtype)
    return (out + jax.lax.expand_dims(bad, range(bad.ndim, out.ndim))).astype(x.dtype)
