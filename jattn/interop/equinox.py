"""The weights of equinox's layer of attention as a `MultiHead`, and back."""

import jax

from jattn import _checks
from jattn._multihead import MultiHead, checked


def from_equinox(layer):
    """The arrays of an `equinox.nn.MultiheadAttention`, as a `MultiHead`.

    equinox maps one sequence, (T, F), and keeps its weights as (out, in); `multihead` takes (*B, T, F). Dropout is an
    option of `multihead`.

    Args:
        layer: an `equinox.nn.MultiheadAttention`.

    Returns:
        `MultiHead`.

    Raises:
        TypeError: `layer` is another thing.
        ValueError: keys and values come from features of different sizes; `multihead` has one context for both.

    Example:
        >>> import equinox
        >>> from jattn.interop.equinox import from_equinox
        >>> layer = equinox.nn.MultiheadAttention(2, 8, key=jax.random.key(0))
        >>> multihead(from_equinox(layer), jnp.ones((5, 8))).shape
        (5, 8)
    """
    import equinox

    if not isinstance(layer, equinox.nn.MultiheadAttention):
        must = "an equinox.nn.MultiheadAttention"
        raise TypeError(f"from_equinox: layer must be {must}, got {type(layer).__name__}.")
    if layer.key_size != layer.value_size:
        must = f"key_size = {layer.key_size}"
        raise ValueError(f"from_equinox: value_size must be {must}, because multihead has one context for both, "
                         f"got {layer.value_size}.")  # fmt: skip
    N = layer.num_heads
    arrays = {}
    for what in ("query", "key", "value"):
        linear = getattr(layer, f"{what}_proj")
        arrays[what] = linear.weight.T.reshape(linear.weight.shape[1], N, -1)
        arrays[f"{what}_bias"] = None if linear.bias is None else linear.bias.reshape(N, -1)
    out = layer.output_proj
    return MultiHead(**arrays, out=out.weight.T.reshape(N, -1, out.weight.shape[0]), out_bias=out.bias)


def to_equinox(params, **options):
    """A `MultiHead` as an `equinox.nn.MultiheadAttention`.

    Args:
        params: `MultiHead`.
        options: of equinox's layer: `dropout_p` and `inference`.

    Returns:
        An `equinox.nn.MultiheadAttention`.

    Raises:
        TypeError: `params` is no `MultiHead`.
        ValueError: key/value heads are shared, or queries or keys are normalised: equinox has no such layer.

    Example:
        >>> from jattn.interop.equinox import to_equinox
        >>> layer = to_equinox(init_multihead(jax.random.key(0), 8, 2), dropout_p=0.1, inference=True)
        >>> layer(*3 * [jnp.ones((5, 8))]).shape
        (5, 8)
    """
    import equinox

    arrays, sizes = checked("to_equinox", params)
    N, F, E = sizes["N"], sizes["F"], sizes["E"]
    if sizes["K"] != N:
        raise ValueError(f"to_equinox: K = {sizes['K']} key/value heads must be N = {N}, as in equinox.")
    for what in ("query_norm", "key_norm"):
        norm = getattr(params, what)
        if norm is not None:
            got = _checks.tupled(norm.shape)
            raise ValueError(f"to_equinox: params.{what} must be None, as in equinox, got {got}.")
    names = {"query": "query_proj", "key": "key_proj", "value": "value_proj", "out": "output_proj"}
    new = {}
    for ours, theirs in names.items():
        x = arrays[f"params.{ours}"]
        # (F, N, H) -> (N * H, F), and (N, D, M) -> (M, N * D).
        new[theirs, "weight"] = x.reshape(-1, x.shape[-1]).T if ours == "out" else x.reshape(x.shape[0], -1).T
        if f"params.{ours}_bias" in arrays:
            new[theirs, "bias"] = arrays[f"params.{ours}_bias"].reshape(-1)
    biases = {f"use_{theirs[:-5]}_bias": (theirs, "bias") in new for theirs in names.values()}
    layer = equinox.nn.MultiheadAttention(
        N, F, E, E, sizes["M"], sizes["H"], sizes["D"], **biases, **options, key=jax.random.key(0)
    )
    return equinox.tree_at(lambda layer: [getattr(getattr(layer, a), b) for a, b in new], layer, list(new.values()))
