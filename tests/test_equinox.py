"""equinox's layer of attention and multihead with its weights are one function."""

import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from jattn import MultiHead, init_multihead, multihead
from jattn.interop.equinox import from_equinox, to_equinox

T, S, F, E, N, H, D, M = 5, 7, 6, 4, 3, 2, 5, 8
BIASES = ("use_query_bias", "use_key_bias", "use_value_bias", "use_output_bias")


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def layer(**options):
    return equinox.nn.MultiheadAttention(N, F, key=jax.random.key(0), **{"dtype": np.float32} | options)


LAYERS = {
    "as it comes": {},
    "with biases": dict.fromkeys(BIASES, True),
    "with one bias": {"use_key_bias": True},
    "with every size its own": {
        "key_size": E,
        "value_size": E,
        "output_size": M,
        "qk_size": H,
        "vo_size": D,
        "use_value_bias": True,
        "use_output_bias": True,
    },
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_multihead_with_equinox_weights_is_the_layer(options):
    theirs = layer(**options)
    x, context = normal(1, T, F), normal(2, S, options.get("key_size", F))
    mask = np.random.default_rng(3).random((N, T, S)) < 0.7
    mask[..., 0] = True
    cotangent = normal(8, T, options.get("output_size", F))

    @equinox.filter_jit
    def both(call, weights):
        out, pull = equinox.filter_vjp(call, weights, x, context)
        return out, *pull(cotangent)

    got = both(lambda p, x, c: multihead(p, x, c, mask), from_equinox(theirs))
    expected = both(lambda layer, x, c: layer(x, c, c, mask=mask), theirs)
    assert_close(got[0], expected[0], "float32", factor=2)
    gradients = from_equinox(expected[1]), *expected[2:]
    for a, b in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(gradients), strict=True):
        assert_close(a, b, "float32", factor=5)
    # One mask for all heads.
    shared = multihead(from_equinox(theirs), x, context, mask[:1])
    assert_close(shared, theirs(x, context, context, mask=jnp.asarray(mask[0])), "float32", factor=2)


def test_bfloat16_agrees_loosely():
    theirs, x = layer(dtype=jnp.bfloat16), normal(1, T, F, dtype=jnp.bfloat16)
    got = multihead(from_equinox(theirs), x)
    assert got.dtype == jnp.bfloat16
    assert_close(got, theirs(x, x, x), "bfloat16", factor=3)


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_a_multihead_becomes_a_layer(options):
    theirs = layer(**options)
    back = to_equinox(from_equinox(theirs))
    assert jax.tree.structure(back) == jax.tree.structure(theirs)
    for got, expected in zip(jax.tree.leaves(back), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_new_multihead_is_the_layer_that_it_becomes():
    params = init_multihead(jax.random.key(1), F, N, H=H, D=D, bias=True)
    params = params._replace(query_bias=normal(2, N, H), out_bias=normal(3, F))
    theirs, x = to_equinox(params, dropout_p=0.5, inference=True), normal(1, T, F)
    assert (theirs.dropout.p, theirs.dropout.inference) == (0.5, True)
    assert_close(theirs(x, x, x), multihead(params, x), "float32", factor=2)


PARAMS = init_multihead(jax.random.key(1), F, N)
ERRORS = {
    "another layer": (
        lambda: from_equinox(PARAMS),
        TypeError,
        "from_equinox: layer must be an equinox.nn.MultiheadAttention, got MultiHead.",
    ),
    "values of other features than keys": (
        lambda: from_equinox(layer(value_size=E)),
        ValueError,
        "from_equinox: value_size must be key_size = 6, because multihead has one context for both, got 4.",
    ),
    "a dict": (
        lambda: to_equinox({}),
        TypeError,
        "to_equinox: params must be a MultiHead, got dict. init_multihead makes one, jattn.interop makes one of "
        "another library's layer.",
    ),
    "shared heads": (
        lambda: to_equinox(init_multihead(jax.random.key(1), F, N, 1)),
        ValueError,
        "to_equinox: K = 1 key/value heads must be N = 3, as in equinox.",
    ),
    "normalised keys": (
        lambda: to_equinox(PARAMS._replace(key_norm=jnp.ones(H))),
        ValueError,
        "to_equinox: params.key_norm must be None, as in equinox, got (2,).",
    ),
    "shapes that disagree": (
        lambda: to_equinox(MultiHead(PARAMS.query, PARAMS.key[:, 1:], PARAMS.value, PARAMS.out)),
        ValueError,
        "to_equinox: params.value must be (E, K, D) = (6, 2, D), got (6, 3, 2).",
    ),
}


@pytest.mark.parametrize("call, kind, text", ERRORS.values(), ids=ERRORS)
def test_weights_that_do_not_fit_are_named(call, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()
