"""flax's layers of attention: jattn inside them, and their weights as a `MultiHead`."""

import functools
import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _attention, _checks, biases, masks
from jattn._debug_check import debug_check
from jattn._multihead import MultiHead, checked

_WHO = "flax_attention_fn"
_PROJECTIONS = ("query", "key", "value", "out")


def flax_attention_fn(**options):
    """`attention` as the `attention_fn` of flax's layers, nnx and linen: jattn's contract under flax's signature.

    It honours bias, mask, dropout_rng, dropout_rate, deterministic, dtype, module and is_causal. Bias and mask of lower
    ranks are lifted as flax does. The layers' `decode` works, by the mask that they make of their cache. It differs
    from flax's own function in this:

    - A query that may attend to no key gets zeros, where flax gives the mean of all values.
    - A mask of numbers must be 0 and 1, where flax takes everything but 0 for 1. Others in a traced mask are seen too
      late for an error: then all of the output is NaN, and a `checkify.debug_check` fails. A mask may be a rule.
    - Logits and softmax are float32 or wider, with or without `force_fp32_for_softmax`, and so are the weights that
      `sow_weights` sows.
    - Each weight is dropped by itself: a layer that drops any needs `broadcast_dropout=False`.

    Args:
        options: those of `attention`, but for dropout, which the layer has, and return_stats. A mask must hold as well
            as the layer's. Arrays are constants of the layer: no gradient reaches them.

    Returns:
        A function, to be given to a layer as `attention_fn`.

    Raises:
        TypeError: an option is not there. The function: as in `attention`, or a mask holds other numbers.
        ValueError: the function: as in `attention`, or it is told what it cannot honour, by broadcast_dropout,
            precision, promote_dtype, input_positions or one of the einsums.

    Example:
        >>> from flax import nnx
        >>> from jattn.interop import flax_attention_fn
        >>> fn = flax_attention_fn(mask=masks.window(2, 0), softcap=30.0)
        >>> layer = nnx.MultiHeadAttention(2, 8, attention_fn=fn, decode=False, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((3, 5, 8))).shape
        (3, 5, 8)
    """
    _checks.options(_WHO, options, _attention.attention, but=("dropout_rate", "dropout_rng", "return_stats"))
    own_mask, own_bias = (options.pop(what, None) for what in ("mask", "bias"))
    if own_mask is not None and not isinstance(own_mask, masks.Mask):
        own_mask = masks.array(own_mask)

    # Names, order and defaults are flax's. linen drops what is not named here, so what is refused is named too.
    def attention_fn(
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        *,
        is_causal=False,
        force_fp32_for_softmax=False,
        promote_dtype=None,
        input_positions=None,
        einsum_dot_general=None,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
    ):
        _refuse(
            precision=precision,
            promote_dtype=promote_dtype,
            input_positions=input_positions,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        arrays = {"query": query, "key": key, "value": value}
        for what, x in arrays.items():
            arrays[what] = _checks.array(_WHO, what, x)
            _checks.rank(_WHO, what, arrays[what], _attention.AXES[what], at_least=True)
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*arrays.values()) if dtype is None else dtype
        query, key, value = (x.astype(dtype) for x in arrays.values())

        if bias is None:
            bias = own_bias
        elif own_bias is not None:
            got = _checks.tupled(np.shape(bias))
            raise ValueError(f"{_WHO}: bias must be None where it is an option too, got {got}.")
        else:
            bias = _lifted("bias", _checks.floating(_WHO, "bias", bias, biases.NOT_FLOATING), query, key)
        rules, valid = [own_mask] if own_mask is not None else [], True
        if isinstance(mask, masks.Mask):
            rules.append(mask)
        elif mask is not None:
            mask, valid = _boolean(mask)
            _checks.not_inverted(_WHO, "mask", mask)
            rules.append(masks.array(_lifted("mask", mask, query, key)))
        if _checks.flag(_WHO, "is_causal", is_causal):
            rules.append(masks.causal())
        mask = functools.reduce(operator.and_, rules) if rules else None

        dropout = {}
        if not deterministic and not _checks.zero(dropout_rate):
            if broadcast_dropout:
                hint = "jattn drops each weight by itself: pass broadcast_dropout=False to the layer."
                raise ValueError(f"{_WHO}: broadcast_dropout must be False, got True with rate {dropout_rate}. {hint}")
            dropout = {"dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
        out = _attention.attend_as(_WHO, True, query, key, value, mask, bias, **dropout, **options)
        if valid is not True:
            # A product, because a `where` would pass back a quiet 0.
            out *= jnp.where(valid, 1, jnp.nan).astype(out.dtype)
        if module is not None:
            alike = {what: x for what, x in options.items() if what not in ("method", "block_size")}
            _sow(module, _attention.attention_weights(query, key, mask, bias, **alike))
        return out

    return attention_fn


_OWN_PRODUCTS = "jattn has its own products. Leave the einsum classes out of the layer."
_INSTEAD = {
    "precision": "It follows the dtype; jax.default_matmul_precision changes it.",
    "promote_dtype": "Pass dtype: query, key and value are cast to it.",
    "input_positions": "Pass the options query_positions and key_positions; jattn.rotary turns queries and keys.",
    "einsum_dot_general": _OWN_PRODUCTS,
    "qk_attn_weights_einsum": _OWN_PRODUCTS,
    "attn_weights_value_einsum": _OWN_PRODUCTS,
}


def _refuse(**given):
    for what, x in given.items():
        if x is not None:
            got = getattr(x, "__name__", type(x).__name__) if callable(x) or hasattr(x, "shape") else repr(x)
            raise ValueError(f"{_WHO}: {what} must be None, got {got}. {_INSTEAD[what]}")


def _boolean(mask):
    """flax's mask as bool; and whether it holds nothing but 0 and 1, which may be traced."""
    mask = _checks.array(_WHO, "mask", mask)
    if mask.dtype == np.bool_:
        return mask, True
    must = "mask must be boolean, or 0 and 1 (1 = may attend)"
    if _checks.known(mask):
        # NumPy, because inside a jit jnp makes tracers, of constants too.
        mask = np.asarray(mask)
        others = mask[(mask != 0) & (mask != 1)]
        if others.size:
            raise TypeError(f"{_WHO}: {must}, got {others[0]}. Scores that are added go in `bias`.")
        return mask != 0, True
    valid = ((mask == 0) | (mask == 1)).all()
    debug_check(valid, f"{_WHO}: {must}.")
    return mask != 0, valid


def _lifted(what, x, query, key):
    """`x` (*B, N, T, S), each axis full or 1, with axes of 1 in front for those that it leaves out."""
    sizes = {"B": query.shape[:-3], "T": query.shape[-3], "N": query.shape[-2], "S": key.shape[-3]}
    full = ("*B?", "N?", "T?", "S?")
    if x.ndim <= 3:
        hint = "For a [B, S] padding mask pass mask[:, None, None, :]." * (what == "mask" and x.ndim == 2)
        _checks.shape(_WHO, what, x, full[4 - x.ndim :], sizes, hint=hint)
    x = x.reshape((1,) * (query.ndim - x.ndim) + x.shape)
    _checks.shape(_WHO, what, x, full, sizes)
    return x


def _sow(module, weights):
    """Under the name and in the collection that flax's own functions use."""
    from flax import nnx

    module.sow(nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates", "attention_weights", weights)


def from_flax(layer):
    """The arrays of one of flax's layers of attention, as a `MultiHead`.

    What else a layer is made of (dtype, dropout, attention_fn) is an option of `multihead`, or nothing it has.

    Args:
        layer: a `flax.nnx.MultiHeadAttention`, or its state; or the parameters of a
            `flax.linen.MultiHeadDotProductAttention`, which are `variables["params"]`.

    Returns:
        `MultiHead`.

    Raises:
        TypeError: `layer` is nothing of that.
        ValueError: query, key, value or out is not in it.

    Example:
        >>> from flax import nnx
        >>> from jattn.interop.flax import from_flax
        >>> layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        >>> multihead(from_flax(layer), jnp.ones((3, 5, 8))).shape
        (3, 5, 8)
    """
    from flax import nnx

    if isinstance(layer, nnx.Module):
        layer = nnx.state(layer, nnx.Param)
    if isinstance(layer, nnx.State):
        layer = nnx.to_pure_dict(layer)
    if not isinstance(layer, Mapping):
        raise TypeError(f"from_flax: layer must be an nnx layer or a dict of parameters, got {type(layer).__name__}.")
    if not layer.keys() >= set(_PROJECTIONS):
        hint = "Of linen's variables pass variables['params'] of this layer."
        raise ValueError(f"from_flax: layer must have query, key, value and out, got {', '.join(layer)}. {hint}")
    return MultiHead(
        **{what: layer[what]["kernel"] for what in _PROJECTIONS},
        **{f"{what}_bias": layer[what].get("bias") for what in _PROJECTIONS},
        **{f"{what}_norm": layer.get(f"{what}_ln", {}).get("scale") for what in ("query", "key")},
    )


def to_flax(params):
    """A `MultiHead` as the parameters of flax's layers of attention.

    Args:
        params: `MultiHead`.

    Returns:
        A dict: for linen, `layer.apply({"params": to_flax(params)}, x)`; for nnx, `nnx.update(layer, to_flax(params))`.
        flax has a bias in all four projections or in none: those that are missing are 0.

    Raises:
        TypeError: `params` is no `MultiHead`.
        ValueError: D differs from H, or only one of queries and keys is normalised: flax has no such layer.

    Example:
        >>> from jattn.interop.flax import to_flax
        >>> params = to_flax(init_multihead(jax.random.key(0), 8, 2))
        >>> {name: array["kernel"].shape for name, array in params.items()}
        {'query': (8, 2, 4), 'key': (8, 2, 4), 'value': (8, 2, 4), 'out': (2, 4, 8)}
    """
    _, sizes = checked("to_flax", params)
    if sizes["D"] != sizes["H"]:
        raise ValueError(f"to_flax: D = {sizes['D']} features of a value must be H = {sizes['H']}, as in flax.")
    arrays = params._asdict()
    if (params.query_norm is None) != (params.key_norm is None):
        raise ValueError("to_flax: query_norm and key_norm must both be there or both be None, as in flax.")
    layer = {what: {"kernel": arrays[what]} for what in _PROJECTIONS}
    if any(arrays[f"{what}_bias"] is not None for what in _PROJECTIONS):
        for what, own in layer.items():
            bias, kernel = arrays[f"{what}_bias"], own["kernel"]
            own["bias"] = jnp.zeros(kernel.shape[2 if what == "out" else 1 :], kernel.dtype) if bias is None else bias
    if params.query_norm is not None:
        layer |= {f"{what}_ln": {"scale": arrays[f"{what}_norm"]} for what in ("query", "key")}
    return layer
