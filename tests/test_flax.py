"""flax's layers of attention, nnx and linen: jattn inside them is what flax is, and their weights are a MultiHead."""

import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import assert_close
from flax import nnx
from jax.experimental import checkify

from jattn import MultiHead, biases, init_multihead, masks, multihead
from jattn.interop import flax_attention_fn
from jattn.interop.flax import from_flax, to_flax

NAN = np.nan
B, T, S, F, E, N, H = 2, 5, 7, 6, 4, 3, 2


@pytest.fixture(autouse=True)
def as_flax_is_written():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def filled(tree):
    """Other numbers in place of those that flax begins with, so that no bias is 0 and no scale is 1."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [normal([9, i], *x.shape, dtype=x.dtype) / 2 for i, x in enumerate(leaves)])


class Nnx:
    """A layer of nnx, called as one of linen is: a dict of parameters first."""

    def __init__(self, **options):
        options = {"num_heads": N, "in_features": F, "decode": False, "rngs": nnx.Rngs(0)} | options
        self.layer = nnx.MultiHeadAttention(**options)
        self.params = filled(nnx.to_pure_dict(nnx.state(self.layer, nnx.Param)))

    def __call__(self, params, *args, **options):
        layer = nnx.clone(self.layer)
        nnx.update(layer, params)
        if "dropout_rng" in options:
            options["rngs"] = nnx.Rngs(dropout=options.pop("dropout_rng"))
        if not options.get("sow_weights"):
            return layer(*args, **options)
        out, state = nnx.capture(layer, nnx.Intermediate)(*args, **options)
        return out, nnx.to_pure_dict(state)["attention_weights"]


class Linen:
    """A layer of linen."""

    def __init__(self, in_kv_features=F, **options):
        self.layer = nn.MultiHeadDotProductAttention(num_heads=N, **options)
        inputs = jnp.ones((1, 1, F)), jnp.ones((1, 1, in_kv_features))
        variables = self.layer.init(jax.random.key(0), *inputs, deterministic=True)
        self.params = filled(variables["params"])

    def __call__(self, params, *args, **options):
        if not options.get("sow_weights"):
            return self.layer.apply({"params": params}, *args, **options)
        out, state = self.layer.apply({"params": params}, *args, **options, mutable="intermediates")
        return out, state["intermediates"]["attention_weights"]


BOTH = pytest.mark.parametrize("kind", [Nnx, Linen])


def value_and_gradients(fn, *args):
    """The output, and what a random array in its place pulls back."""

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(fn, *args)
        return out, *pull(normal(8, *out.shape, dtype=out.dtype))

    return both(*args)


def assert_same(ours, theirs, dtype="float32", factor=5.0):
    for got, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert_close(got, expected, dtype, factor=factor)


# Weights

LAYERS = {
    "of nnx": (Nnx, {}),
    "of linen": (Linen, {}),
    "without biases": (Linen, {"use_bias": False}),
    "of other sizes": (Nnx, {"qkv_features": 12, "out_features": 5}),
    "with a context of other features": (Linen, {"in_kv_features": E}),
    "with normalised queries and keys": (Nnx, {"normalize_qk": True, "qkv_features": 12}),
}


def seen(*shape):
    """A mask with holes and no empty row."""
    mask = np.random.default_rng(3).random(shape) < 0.7
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("kind, options", LAYERS.values(), ids=LAYERS)
def test_multihead_with_flax_weights_is_the_layer(kind, options):
    layer = kind(**options)
    x, context = normal(1, B, T, F), normal(2, B, S, options.get("in_kv_features", F))
    mask = seen(B, N, T, S)
    theirs = value_and_gradients(lambda p, x, c: layer(p, x, c, mask=mask), layer.params, x, context)
    ours = value_and_gradients(lambda p, x, c: multihead(p, x, c, mask), from_flax(layer.params), x, context)
    assert_same(ours, (theirs[0], from_flax(theirs[1]), *theirs[2:]))


@pytest.mark.parametrize("kind, options", [(Nnx, {"num_kv_heads": 1}), (Linen, {"use_bias": False})])
def test_bfloat16_agrees_loosely_and_heads_may_be_shared(kind, options):
    layer, narrow, x = kind(**options), kind(dtype=jnp.bfloat16, **options), normal(1, B, T, F, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer.params)
    mask = seen(B, 1, T, T)
    ours = value_and_gradients(lambda p, x: multihead(p, x, mask=mask), from_flax(params), x)
    assert {a.dtype for a in jax.tree.leaves(ours)} == {narrow(params, x).dtype}
    wide, x = jax.tree.map(lambda a: a.astype(np.float32), (params, x))
    theirs = value_and_gradients(lambda p, x: layer(p, x, mask=mask), wide, x)
    assert_same(ours, (theirs[0], from_flax(theirs[1]), theirs[2]), "bfloat16", factor=3)


def test_an_nnx_layer_its_state_and_its_gradient_become_a_multihead():
    layer, x = nnx.MultiHeadAttention(N, F, num_kv_heads=1, decode=False, rngs=nnx.Rngs(0)), normal(1, B, T, F)
    params = from_flax(layer)
    assert jax.tree.map(jnp.shape, params) == MultiHead(
        (F, N, H), (F, 1, H), (F, 1, H), (N, H, F), (N, H), (1, H), (1, H), (F,)
    )
    assert_same(from_flax(nnx.state(layer)), params)
    assert_close(multihead(params, x), layer(x), "float32")
    theirs = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
    assert_same(jax.grad(lambda p: (multihead(p, x) ** 2).sum())(params), from_flax(theirs))


@BOTH
def test_a_multihead_becomes_the_parameters_of_a_layer(kind):
    x = normal(1, B, T, F)
    for options in ({}, {"use_bias": False}, {"normalize_qk": True}):
        layer = kind(**options)
        back = to_flax(from_flax(layer.params))
        assert jax.tree.structure(back) == jax.tree.structure(layer.params)
        for got, expected in zip(jax.tree.leaves(back), jax.tree.leaves(layer.params), strict=True):
            np.testing.assert_array_equal(got, expected)
    params = init_multihead(jax.random.key(1), F, N, bias=True, qk_norm=True)
    assert_close(kind(normalize_qk=True)(to_flax(params), x), multihead(params, x), "float32", factor=2)


def test_flax_has_all_biases_or_none():
    x = normal(1, B, T, F)
    params = init_multihead(jax.random.key(1), F, N)._replace(value_bias=normal(2, N, H))
    assert_close(Linen()(to_flax(params), x), multihead(params, x), "float32", factor=2)
    params = params._replace(value_bias=None, out_bias=normal(2, F))
    assert_close(Linen()(to_flax(params), x), multihead(params, x), "float32", factor=2)


# Inside the layers

CAUSAL = nn.make_causal_mask(np.ones((B, T)))
PADDED = np.array(np.arange(T) < np.array([[3], [5]]), np.float32)
# Both layers pass on the mask that they are given.
MASKS = {
    "none": (Nnx, None),
    "flax's causal mask, of floats": (Linen, CAUSAL),
    "flax's mask of padding, of floats": (Nnx, nn.make_attention_mask(np.ones((B, T), np.float32), PADDED)),
    "flax's combined mask": (Linen, nn.combine_masks(CAUSAL, seen(B, N, T, T).astype(np.float32))),
    "of booleans": (Linen, seen(B, N, T, T)),
    "of integers": (Nnx, seen(B, 1, 1, T).astype(int)),
    "of rank 3": (Nnx, seen(N, T, T)),
    "of rank 2": (Linen, seen(T, T)),
}


@pytest.mark.parametrize("kind, mask", MASKS.values(), ids=MASKS)
def test_a_layer_with_jattn_inside_is_the_layer(kind, mask):
    theirs, ours = kind(), kind(attention_fn=flax_attention_fn())
    x = normal(1, B, T, F)

    def step(layer, mask):
        return value_and_gradients(lambda p, x: layer(p, x, mask=mask), layer.params, x)

    expected = step(theirs, mask)
    # Known before the program runs, and traced, as in a model that makes its mask.
    assert_close(ours(ours.params, x, mask=mask), expected[0], "float32", factor=2)
    assert_same(jax.jit(lambda mask: step(ours, mask))(mask), expected)


def test_is_causal_is_honoured():
    x = normal(1, B, T, F)
    theirs, ours = Nnx(num_kv_heads=1), Nnx(num_kv_heads=1, attention_fn=flax_attention_fn())
    expected = theirs(theirs.params, x, is_causal=True)
    assert_close(ours(theirs.params, x, is_causal=True), expected, "float32", factor=2)
    both = {"is_causal": True, "mask": seen(B, N, T, T)}
    assert_close(ours(theirs.params, x, **both), theirs(theirs.params, x, **both), "float32", factor=2)


OWN = {"nnx": nnx.dot_product_attention, "linen": nn.dot_product_attention}
FUNCTIONS = pytest.mark.parametrize("theirs", OWN.values(), ids=OWN)
CALLS = {
    "no batch axes": ((), {"mask": seen(N, T, S), "bias": normal(5, N, T, S)}),
    "two batch axes": ((2, 3), {"mask": seen(2, 3, 1, T, S), "bias": normal(5, 2, 3, N, 1, S)}),
    "mask and bias of rank 2": ((2,), {"mask": seen(T, S), "bias": normal(5, T, S)}),
    "mask and bias of rank 1": ((2,), {"mask": seen(S).astype(np.float32), "bias": normal(5, S)}),
    "a bias of another dtype": ((2,), {"bias": normal(5, 2, 1, T, S).astype(jnp.bfloat16)}),
    "float64 asked for": ((2,), {"dtype": np.float64, "mask": seen(T, S)}),
    "float32 from others": ((2,), {"dtype": np.float32, "given": (jnp.bfloat16, jnp.float32, jnp.float16)}),
    "the widest of the inputs": ((2,), {"given": (np.float32, jnp.bfloat16, np.float32)}),
    "deterministic": ((2,), {"dropout_rate": 0.5, "deterministic": True}),
}


@FUNCTIONS
@pytest.mark.parametrize("lead, options", CALLS.values(), ids=CALLS)
def test_the_function_is_flaxs_own(theirs, lead, options):
    options = dict(options)
    dtypes = options.pop("given", (np.float32,) * 3)
    args = [normal(i, *lead, n, N, H, dtype=d) for i, (n, d) in enumerate(zip((T, S, S), dtypes, strict=True))]
    got, expected = flax_attention_fn()(*args, **options), theirs(*args, **options)
    assert got.dtype == expected.dtype
    # jax.nn, inside nnx, takes the softmax of float64 in float32.
    wide = expected.dtype == np.float64 and theirs is OWN["linen"]
    assert_close(got, expected, "float64" if wide else "float32", factor=2)


@FUNCTIONS
def test_the_function_takes_what_flaxs_own_takes(theirs):
    """linen leaves out what it does not find in the signature: a name that is missing would be ignored in silence."""
    ours, theirs = (inspect.signature(f).parameters for f in (flax_attention_fn(), theirs))
    assert theirs.keys() <= ours.keys()
    assert list(theirs)[:12] == list(ours)[:12]
    assert {n: p.default for n, p in theirs.items() if n != "promote_dtype"}.items() <= {
        n: p.default for n, p in ours.items()
    }.items()


def test_options_are_those_of_attention():
    query, key, value = (normal(i, B, n, N, H, dtype=np.float64) for i, n in enumerate((T, S, S)))
    mask, sink = seen(B, N, T, S), normal(5, N, dtype=np.float64)
    numbers = {"scale": 0.3, "softcap": 1.1, "sink": sink}
    options = {"mask": masks.window(2, 1), "bias": biases.alibi(N), "method": "blockwise", "block_size": (3, 2)}
    got = flax_attention_fn(**options, **numbers)(query, key, value, mask=mask)
    distance = np.arange(T)[:, None] - np.arange(S)
    alibi = -np.abs(distance) * np.array([2.0**-4, 2.0**-8, 2.0**-2])[:, None, None]
    expected = reference.attention(query, key, value, mask & (distance <= 2) & (-distance <= 1), alibi, **numbers)
    assert_close(got, expected.out, factor=10)
    # The mask may be an array, and a rule may be given to the layer.
    for own, given in ((mask, masks.window(2, 1)), (None, masks.array(mask) & masks.window(2, 1))):
        got = flax_attention_fn(mask=own, bias=biases.alibi(N), **numbers)(query, key, value, mask=given)
        assert_close(got, expected.out, factor=10)


@BOTH
def test_a_layer_sows_its_weights(kind):
    options = {"mask": seen(B, 1, T, T), "sow_weights": True}
    theirs, ours = kind(), kind(attention_fn=flax_attention_fn())
    x = normal(1, B, T, F)
    out, (weights,) = ours(theirs.params, x, **options)
    expected, (expected_weights,) = theirs(theirs.params, x, **options)
    assert_close(out, expected, "float32", factor=2)
    assert_close(weights, expected_weights, "float32")
    softer = kind(attention_fn=flax_attention_fn(scale=0.0, method="dense"))
    _, (weights,) = softer(theirs.params, x, **options)
    equal = options["mask"] / options["mask"].sum(-1, keepdims=True)
    assert_close(weights, np.broadcast_to(equal, weights.shape), "float32")


@BOTH
def test_dropout_drops_each_weight_by_itself_where_the_layer_says_so(kind):
    x = normal(1, B, T, F)
    options = {"dropout_rate": 0.5, "attention_fn": flax_attention_fn()}
    layer = kind(broadcast_dropout=False, **options)
    calm = layer(layer.params, x, deterministic=True)
    assert_close(calm, kind()(layer.params, x), "float32", factor=2)
    rngs = jax.random.split(jax.random.key(3), 400)
    drawn = jax.jit(jax.vmap(lambda rng: layer(layer.params, x, deterministic=False, dropout_rng=rng)))(rngs)
    assert (drawn.std(0) > 0).all()
    error = np.asarray(drawn.std(0)) / np.sqrt(len(rngs))
    assert (np.abs(drawn.mean(0) - calm) < 5 * error).all()
    # Sown weights are those before dropout.
    _, (weights,) = layer(layer.params, x, deterministic=False, dropout_rng=rngs[0], sow_weights=True)
    assert_close(weights.sum(-1), np.ones((B, N, T)), "float32", factor=2)
    # flax's default draws one pattern for all heads. Without dropout it asks nothing of jattn.
    layer = kind(**options)
    assert_close(layer(layer.params, x, deterministic=True), calm, "float32")
    text = (
        "flax_attention_fn: broadcast_dropout must be False, got True with rate 0.5. jattn drops each weight by "
        "itself: pass broadcast_dropout=False to the layer."
    )
    with pytest.raises(ValueError, match=rf"^{re.escape(text)}(\n|$)"):
        layer(layer.params, x, deterministic=False, dropout_rng=rngs[0])


def decoded_by_nnx(x, params, **options):
    layer = nnx.MultiHeadAttention(N, F, decode=True, rngs=nnx.Rngs(0), **options)
    nnx.update(layer, params)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, token: layer(token))
    return jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(T)], 1)


def decoded_by_linen(x, params, **options):
    layer = nn.MultiHeadDotProductAttention(num_heads=N, decode=True, **options)
    cache = layer.init(jax.random.key(0), x)["cache"]

    def step(cache, token):
        out, state = layer.apply({"params": params, "cache": cache}, token[:, None], mutable="cache")
        return state["cache"], out[:, 0]

    return jax.lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)


@pytest.mark.parametrize("decoded", [decoded_by_nnx, decoded_by_linen])
def test_decoding_token_by_token_is_flaxs_own(decoded):
    x, params = normal(1, B, T, F), Linen().params
    ours, theirs = decoded(x, params, attention_fn=flax_attention_fn()), decoded(x, params)
    assert_close(ours, theirs, "float32", factor=2)
    # And what the whole sequence gives at once.
    assert_close(ours, Linen()(params, x, mask=CAUSAL), "float32", factor=2)


# Where jattn promises more


@FUNCTIONS
def test_a_query_that_sees_nothing_gets_zeros_where_flax_gives_the_mean(theirs):
    query, key, value = (normal(i, B, n, N, H) for i, n in enumerate((T, S, S)))
    mask = np.broadcast_to(np.arange(T)[:, None] != 2, (B, 1, T, S)).astype(np.float32)
    got, expected = (f(query, key, value, mask=mask) for f in (flax_attention_fn(), theirs))
    others = np.arange(T) != 2
    assert_close(got[:, others], expected[:, others], "float32", factor=2)
    assert (got[:, 2] == 0).all()
    assert_close(expected[:, 2], value.mean(1), "float32", factor=2)


@FUNCTIONS
def test_a_masked_nan_is_not_read(theirs):
    query, key, value = (normal(i, B, n, N, H) for i, n in enumerate((T, S, S)))
    mask = np.arange(S) < 4
    dirty = query, key.at[:, 4:].set(NAN), value.at[:, 4:].set(NAN)
    clean = flax_attention_fn()(query, key, value, mask=mask)
    np.testing.assert_array_equal(flax_attention_fn()(*dirty, mask=mask), clean)
    assert np.isnan(theirs(*dirty, mask=mask)).any()


def test_a_mask_that_is_no_mask_is_an_error_or_nan():
    args = [normal(i, B, n, N, H) for i, n in enumerate((T, S, S))]
    fn = flax_attention_fn()
    scores = np.where(seen(T, S), 0, -1e9).astype(np.float32)
    scores[1] = 0
    text = "flax_attention_fn: mask must be boolean, or 0 and 1 (1 = may attend)"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}, got -1000000000.0. Scores that are added go in `bias`.$"):
        fn(*args, mask=scores)
    # An array of JAX is known inside a jit too, if it comes from outside.
    scores_of_jax = jnp.asarray(scores)
    with pytest.raises(TypeError, match=f"^{re.escape(text)}, got -1000000000.0. "):
        jax.jit(lambda query: fn(query, *args[1:], mask=scores_of_jax))(args[0])
    traced = jax.jit(lambda mask, query: fn(query, *args[1:], mask=mask))
    assert np.isnan(traced(scores, args[0])).all()
    assert np.isnan(jax.grad(lambda query: traced(scores, query).sum())(args[0])).all((0, 2, 3))[[0, 2, 3, 4]].all()
    assert_close(traced(seen(T, S).astype(np.float32), args[0]), fn(*args, mask=seen(T, S)), "float32")
    checked = checkify.checkify(traced, checkify.user_checks)
    assert text in checked(scores, args[0])[0].get()
    assert checked(seen(T, S).astype(np.float32), args[0])[0].get() is None


# Errors, other than those of test_errors.py


def function(**options):
    """A call of the function itself."""
    return lambda: flax_attention_fn()(*(normal(i, B, n, N, H) for i, n in enumerate((T, S, S))), **options)


def in_linen(**options):
    """A call of a layer of linen."""
    return lambda: Linen(attention_fn=flax_attention_fn(), **options)


REST = "It follows the dtype; jax.default_matmul_precision changes it."
PRODUCTS = "jattn has its own products. Leave the einsum classes out of the layer."
ERRORS = {
    "an option that is not there": (
        lambda: flax_attention_fn(rate=0.1),
        TypeError,
        "'rate' is no option. There are mask, bias, scale, softcap, sink, query_positions, key_positions, empty, "
        "method, block_size.",
    ),
    "an option that the layer has": (
        lambda: flax_attention_fn(dropout_rate=0.1),
        TypeError,
        "'dropout_rate' is no option. There are mask, bias, scale, softcap, sink, query_positions, key_positions, "
        "empty, method, block_size.",
    ),
    "a precision": (function(precision="high"), ValueError, f"precision must be None, got 'high'. {REST}"),
    "a precision of a layer": (
        in_linen(precision=jax.lax.Precision.HIGH),
        ValueError,
        f"precision must be None, got {jax.lax.Precision.HIGH!r}. {REST}",
    ),
    "einsums of a layer": (
        in_linen(qk_attn_weights_einsum_cls=lambda: jnp.einsum, attn_weights_value_einsum_cls=lambda: jnp.einsum),
        ValueError,
        f"qk_attn_weights_einsum must be None, got einsum. {PRODUCTS}",
    ),
    "another einsum": (
        function(attn_weights_value_einsum=jnp.einsum),
        ValueError,
        f"attn_weights_value_einsum must be None, got einsum. {PRODUCTS}",
    ),
    "a product": (
        function(einsum_dot_general=jax.lax.dot_general),
        ValueError,
        f"einsum_dot_general must be None, got dot_general. {PRODUCTS}",
    ),
    "a promotion": (
        function(promote_dtype=nn.dtypes.promote_dtype),
        ValueError,
        "promote_dtype must be None, got promote_dtype. Pass dtype: query, key and value are cast to it.",
    ),
    "positions": (
        function(input_positions=jnp.arange(T)),
        ValueError,
        "input_positions must be None, got ArrayImpl. Pass the options query_positions and key_positions; jattn.rotary "
        "turns queries and keys.",
    ),
    "a mask of other heads": (
        function(mask=np.ones((B, 2, T, S), bool)),
        ValueError,
        "mask must be (*B, N, T, S) = (2, 3, 5, 7), got (2, 2, 5, 7).",
    ),
    "two biases": (
        lambda: flax_attention_fn(bias=biases.alibi(N))(*[normal(0, B, T, N, H)] * 3, bias=jnp.zeros((T, T))),
        ValueError,
        "bias must be None where it is an option too, got (5, 5).",
    ),
    "queries without heads": (
        lambda: flax_attention_fn()(*[normal(0, T, H)] * 3),
        ValueError,
        "query must be (*B, T, N, H), got (5, 2).",
    ),
}


@pytest.mark.parametrize("call, kind, text", ERRORS.values(), ids=ERRORS)
def test_a_misuse_is_named(call, kind, text):
    with pytest.raises(kind, match=rf"^{re.escape('flax_attention_fn: ' + text)}(\n|$)"):
        call()


PARAMS = init_multihead(jax.random.key(0), F, N)
WEIGHTS = {
    "a number": (
        lambda: from_flax(3),
        TypeError,
        "from_flax: layer must be an nnx layer or a dict of parameters, got int.",
    ),
    "all variables": (
        lambda: from_flax({"params": Linen().params}),
        ValueError,
        "from_flax: layer must have query, key, value and out, got params. Of linen's variables pass "
        "variables['params'] of this layer.",
    ),
    "a dict": (
        lambda: to_flax({}),
        TypeError,
        "to_flax: params must be a MultiHead, got dict. init_multihead makes one, jattn.interop makes one of another "
        "library's layer.",
    ),
    "values of other features": (
        lambda: to_flax(init_multihead(jax.random.key(0), F, N, D=5)),
        ValueError,
        "to_flax: D = 5 features of a value must be H = 2, as in flax.",
    ),
    "queries alone normalised": (
        lambda: to_flax(PARAMS._replace(query_norm=jnp.ones(H))),
        ValueError,
        "to_flax: query_norm and key_norm must both be there or both be None, as in flax.",
    ),
}


@pytest.mark.parametrize("call, kind, text", WEIGHTS.values(), ids=WEIGHTS)
def test_weights_that_do_not_fit_are_named(call, kind, text):
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call()
