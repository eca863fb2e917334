"""multihead: a layer is its projections, in NumPy, around the attention of the reference; and what it adds to that."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from conftest import assert_close
from jax import export
from jax.test_util import check_grads

from jattn import Cache, MultiHead, Stats, biases, init_multihead, masks, multihead, rotary

NAN = np.nan
B, T, S, F, E, N, K, H, D, M = 2, 5, 7, 11, 3, 6, 2, 4, 3, 5
SHAPES = MultiHead(
    query=(F, N, H),
    key=(F, K, H),
    value=(F, K, D),
    out=(N, D, M),
    query_bias=(N, H),
    key_bias=(K, H),
    value_bias=(K, D),
    out_bias=(M,),
    query_norm=(H,),
    key_norm=(H,),
)
PLAIN = ("query", "key", "value", "out")
BIASES = ("query_bias", "key_bias", "value_bias", "out_bias")
NORMS = ("query_norm", "key_norm")


def normal(seed, *shape, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def params(*optional, dtype=np.float64, **shapes):
    """Random arrays: the projections, and what is asked for of the rest."""
    names = [what for what in MultiHead._fields if what in (*PLAIN, *optional)]
    shapes = SHAPES._asdict() | shapes
    return MultiHead(**{what: normal([3, i], *shapes[what], dtype=dtype) / 2 for i, what in enumerate(names)})


def tokens(n=T, features=F, seed=1, dtype=np.float64):
    return normal(seed, B, n, features, dtype=dtype)


def turned(x, positions, base=10_000.0):
    """Each pair of features (i, i + H/2) as a complex number, times a turn."""
    n = x.shape[-1] // 2
    speeds = base ** (-np.arange(n) / n)
    z = (x[..., :n] + 1j * x[..., n:]) * np.exp(1j * np.asarray(positions)[..., None, None] * speeds)
    return np.concatenate([z.real, z.imag], -1)


def projected(params, what, x, turn=lambda x: x):
    weights, bias, norm = (getattr(params, name, None) for name in (what, f"{what}_bias", f"{what}_norm"))
    out = np.einsum("btf,fnh->btnh", np.asarray(x, np.float64), np.asarray(weights, np.float64))
    out = out if bias is None else out + np.asarray(bias, np.float64)
    if norm is not None:
        out = (out - out.mean(-1, keepdims=True)) / np.sqrt(out.var(-1, keepdims=True) + 1e-6)
        out = out * np.asarray(norm, np.float64)
    return turn(out)


def layer(params, x, context=None, turn_query=lambda x: x, turn_key=lambda x: x, **options):
    """(B, T, M) and the rest of the reference's result, in float64."""
    context = x if context is None else context
    query, key = projected(params, "query", x, turn_query), projected(params, "key", context, turn_key)
    result = reference.attention(query, key, projected(params, "value", context), **options)
    out = np.einsum("btnd,ndo->bto", result.out, np.asarray(params.out, np.float64))
    return result._replace(out=out if params.out_bias is None else out + np.asarray(params.out_bias, np.float64))


CAUSAL = np.arange(T) <= np.arange(T)[:, None]

LAYERS = {
    "projections alone": (),
    "with biases": BIASES,
    "with one bias": ("value_bias",),
    "with normalised queries and keys": NORMS,
    "with everything": BIASES + NORMS,
}


@pytest.mark.parametrize("optional", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_its_projections_around_attention(optional):
    p, x = params(*optional), tokens()
    got = multihead(p, x, mask=masks.causal())
    assert got.shape == (B, T, M) and got.dtype == np.float64
    assert_close(got, layer(p, x, mask=CAUSAL).out, factor=10)


def test_keys_and_values_come_from_the_context():
    p = params(*BIASES, key=(E, K, H), value=(E, K, D))
    x, context = tokens(), tokens(S, E, seed=2)
    assert_close(multihead(p, x, context), layer(p, x, context).out, factor=10)
    seen = np.arange(S) < np.array([7, 2])[:, None, None, None]
    got = multihead(p, x, context, masks.lengths(key=np.array([7, 2])))
    assert_close(got, layer(p, x, context, mask=seen).out, factor=10)


def test_mask_bias_and_options_are_those_of_attention():
    p, x = params(), tokens()
    bias, sink = normal(5, B, N, T, T), normal(6, N)
    mask = np.random.default_rng(7).random((B, N, T, T)) < 0.6
    numbers = {"scale": 0.7, "softcap": 1.3, "sink": sink}
    out, stats = multihead(p, x, None, mask, bias, return_stats=True, method="blockwise", block_size=(3, 2), **numbers)
    expected = layer(p, x, mask=mask, bias=bias, **numbers)
    assert isinstance(stats, Stats)
    assert_close(out, expected.out, factor=10)
    for what in Stats._fields:
        assert_close(getattr(stats, what), getattr(expected, what), factor=10)
    rates = [multihead(p, x, dropout_rate=r, dropout_rng=jax.random.key(0)) for r in (0.0, 0.5)]
    assert_close(rates[0], layer(p, x).out, factor=10)
    assert np.abs(rates[1] - rates[0]).max() > 0.1
    assert_close(multihead(p, x, dropout_rate=1.0, dropout_rng=jax.random.key(0)), np.zeros((B, T, M)))


ROTARY = {
    "where they are stored": (None, None, np.arange(T), np.arange(S)),
    "queries elsewhere": (np.arange(T) + 9, None, np.arange(T) + 9, np.arange(S)),
    "keys of each batch elsewhere": (
        None,
        np.array([np.arange(S) - 2, np.arange(S)[::-1]]),
        np.arange(T),
        np.array([np.arange(S) - 2, np.arange(S)[::-1]]),
    ),
}


@pytest.mark.parametrize("query_positions, key_positions, q, k", ROTARY.values(), ids=ROTARY)
def test_rotary_turns_queries_and_keys_by_their_positions(query_positions, key_positions, q, k):
    p, x, context = params(), tokens(), tokens(S, seed=2)
    positions = {"query_positions": query_positions, "key_positions": key_positions}
    got = multihead(p, x, context, masks.causal(), rotary=rotary, **positions)
    mask = np.broadcast_to(np.asarray(k)[..., None, :] <= np.asarray(q)[..., :, None], (B, T, S))[:, None]
    turns = {"turn_query": lambda x: turned(x, q), "turn_key": lambda x: turned(x, k)}
    assert_close(got, layer(p, x, context, mask=mask, **turns).out, factor=10)


def test_rotary_may_be_any_function_of_heads_and_positions():
    p, x = params(), tokens()
    turn = functools.partial(turned, positions=np.arange(T), base=2.0)
    got = multihead(p, x, rotary=functools.partial(rotary, base=2.0))
    assert_close(got, layer(p, x, turn_query=turn, turn_key=turn).out, factor=10)
    shifted = multihead(p, x, rotary=lambda x, positions: x + np.reshape(positions, (1, T, 1, 1)).astype(x.dtype))
    shift = lambda x: x + np.arange(T)[:, None, None]  # noqa: E731
    assert_close(shifted, layer(p, x, turn_query=shift, turn_key=shift).out, factor=10)


def test_in_self_attention_keys_are_where_their_queries_are():
    p, x = params(), tokens()
    positions = np.array([3, 0, 4, 1, 2])
    got = multihead(p, x, mask=masks.causal(), rotary=rotary, query_positions=positions)
    order = np.argsort(positions)
    assert_close(got[:, order], multihead(p, x[:, order], mask=masks.causal(), rotary=rotary), factor=10)
    own = multihead(p, x, mask=masks.causal(), query_positions=positions, key_positions=np.arange(T))
    mask = np.arange(T) <= positions[:, None]
    assert_close(own, layer(p, x, mask=mask).out, factor=10)


# Edges


def values_and_gradients(p, x, **options):
    """The outputs, and what ones in place of the first two of each sequence pull back to the arrays and the tokens."""
    out, pull = jax.vjp(lambda p, x: multihead(p, x, **options), p, x)
    return out, *pull(jnp.zeros_like(out).at[:, :2].set(1.0))


def test_a_token_that_nothing_sees_is_never_read():
    p, x = params(*BIASES, *NORMS), tokens()
    options = {"mask": masks.lengths(key=2, query=2), "rotary": rotary}
    clean = values_and_gradients(p, x, **options)
    for garbage in (NAN, np.inf, 1e300):
        dirty = values_and_gradients(p, x.at[:, 2:].set(garbage), **options)
        for got, expected in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
            np.testing.assert_array_equal(got, expected)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(clean))
    assert np.abs(clean[1].query).max() > 0
    # A derivative taken forwards does not read it either.
    tangent = jnp.ones_like(x)
    _, got = jax.jvp(lambda x: multihead(p, x, **options), (x.at[:, 2:].set(NAN),), (tangent,))
    _, expected = jax.jvp(lambda x: multihead(p, x, **options), (x,), (tangent,))
    np.testing.assert_array_equal(got, expected)


def test_a_token_that_is_seen_and_not_finite_is_shown():
    p, x = params(*BIASES), tokens()
    for bad in (NAN, np.inf):
        dirty = x.at[0, 1, 3].set(bad)
        out, arrays, by_token = values_and_gradients(p, dirty, mask=masks.causal())
        spoilt = np.zeros((B, T), bool)
        spoilt[0, 1:] = True
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(spoilt[..., None], out.shape))
        assert np.isnan(by_token[0, 1]).all() and np.isfinite(by_token[1]).all()
        assert all(np.isnan(getattr(arrays, what)).any() for what in ("query", "key", "value"))


def test_a_token_that_may_attend_to_nothing_gets_the_bias_alone():
    p, x = params(*BIASES), tokens()
    out, arrays, by_token = values_and_gradients(p, x, mask=np.zeros((1, 1, 1, 1), bool))
    np.testing.assert_array_equal(out, np.broadcast_to(p.out_bias, out.shape))
    assert (by_token == 0).all()
    assert (arrays.out_bias == 2 * B).all() and (arrays.value == 0).all() and (arrays.out == 0).all()
    with pytest.raises(ValueError, match="^multihead: a query has no key that it may attend to"):
        multihead(p, x, mask=np.zeros((1, 1, 1, 1), bool), empty="raise")


def test_no_later_token_reaches_an_earlier_one():
    p, x = params(*BIASES, *NORMS), tokens()
    jacobian = jax.jacrev(lambda x: multihead(p, x, mask=masks.causal(), rotary=rotary)[0].sum(-1))(x)[:, 0]
    reach = np.abs(jacobian).max(-1) > 0
    np.testing.assert_array_equal(reach, CAUSAL)


@pytest.mark.parametrize("b, t, s", [((), 5, 7), ((2, 3), 5, 7), ((2,), 0, 7), ((2,), 5, 0), ((0,), 5, 7)])
def test_any_batch_axes_and_lengths(b, t, s):
    p = params(*BIASES)
    x, context = normal(1, *b, t, F), normal(2, *b, s, F)
    got = multihead(p, x, context, rotary=rotary)
    assert got.shape == (*b, t, M)
    if 0 in (t, s):
        np.testing.assert_array_equal(got, np.broadcast_to(p.out_bias, got.shape))
    elif got.size:
        flat = layer(p, x.reshape(-1, t, F), context.reshape(-1, s, F), **turns(t, s)).out
        assert_close(got, flat.reshape(got.shape), factor=10)


def turns(t, s):
    return {"turn_query": lambda x: turned(x, np.arange(t)), "turn_key": lambda x: turned(x, np.arange(s))}


# Numbers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_layers_agree_with_float64(dtype):
    p, x = params(*BIASES, *NORMS, dtype=dtype), tokens(dtype=dtype)
    got = multihead(p, x, mask=masks.causal())
    assert got.dtype == dtype
    assert_close(got, layer(p, x, mask=CAUSAL).out, dtype, factor=5)


def test_features_that_are_all_but_equal_are_normalised():
    # Their squares differ from that of their mean by less than float32 can tell.
    p, x = params(*BIASES, *NORMS, dtype=np.float32), tokens(dtype=np.float32)
    p = p._replace(
        query=p.query / 100, query_bias=300 + p.query_bias / 10, key=p.key / 100, key_bias=300 + p.key_bias / 10
    )
    assert_close(multihead(p, x), layer(p, x).out, "float32", factor=500)


def test_projections_of_half_precision_sum_in_float32():
    # Ones and a last number that only a wide sum of them keeps.
    n = 4096
    x = jnp.ones((1, n), jnp.bfloat16).at[0, -1].set(-(n - 2.0))
    one = jnp.ones((1, 1, 1), jnp.bfloat16)
    p = MultiHead(*(jnp.ones((n, 1, 1), jnp.bfloat16) for _ in range(3)), one)
    assert multihead(p, x).item() == n - 1 - float(jnp.bfloat16(n - 2.0))


def test_derivatives_are_those_of_finite_differences():
    p, x, context = params(*BIASES, *NORMS), tokens(2)[:1], tokens(3, seed=2)[:1]
    fn = jax.jit(lambda p, x, context: multihead(p, x, context, masks.causal(1), rotary=rotary))
    check_grads(fn, (p, x, context), order=1, modes=("fwd", "rev"), rtol=1e-5, atol=1e-5)
    check_grads(lambda x: fn(p, x, x), (x,), order=2, modes=("rev",), rtol=1e-3, atol=1e-3)


# Transforms


def test_jit_is_eager_and_a_new_value_is_not_traced_again():
    p, x = params(*BIASES), tokens()
    count = 0

    @jax.jit
    def fn(p, x, context, length, positions):
        nonlocal count
        count += 1
        mask = masks.causal() & masks.lengths(key=length)
        return multihead(p, x, context, mask, rotary=rotary, query_positions=positions)

    for i in range(3):
        args = jax.tree.map(lambda x, i=i: x * (1 + i), (p, x)), tokens(S, seed=i), np.int32(i), np.arange(T) * (i + 1)
        (own, own_x), context, length, positions = args
        mask = masks.causal() & masks.lengths(key=length)
        eager = multihead(own, own_x, context, mask, rotary=rotary, query_positions=positions)
        assert_close(fn(own, own_x, context, length, positions), eager, factor=10)
    assert count == 1


def test_vmap_over_layers_is_a_loop_and_scan_over_layers_is_a_stack():
    stack = [params(*BIASES, *NORMS, out=(N, D, F), out_bias=(F,)) for _ in range(3)]
    stack = [jax.tree.map(lambda a, i=i: a * (1 + i) / 3, p) for i, p in enumerate(stack)]
    together = jax.tree.map(lambda *a: jnp.stack(a), *stack)
    x = tokens()
    call = functools.partial(multihead, mask=masks.causal())
    for got, p in zip(jax.vmap(call, (0, None))(together, x), stack, strict=True):
        assert_close(got, call(p, x), factor=10)
    got, _ = jax.lax.scan(lambda x, p: (jax.checkpoint(call)(p, x), None), x, together)
    assert_close(got, functools.reduce(lambda x, p: call(p, x), stack, x), factor=100)


def test_a_program_that_takes_a_layer_is_exported_with_its_gradient():
    p, x = params(*BIASES), tokens()
    fn = jax.jit(functools.partial(multihead, mask=masks.causal(), rotary=rotary))
    loaded = export.deserialize(export.export(fn)(p, x).serialize(vjp_order=1))
    assert_close(loaded.call(p, x), fn(p, x))
    got, expected = (jax.grad(lambda p, f=f: (f(p, x) ** 2).sum())(p) for f in (loaded.call, fn))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, factor=10)


def test_shard_map_over_batches_is_plain():
    p, x = params(*BIASES, *NORMS), tokens()
    mesh, spec = jax.make_mesh((1,), ("x",)), (jax.P(), jax.P("x"))
    call = functools.partial(multihead, mask=masks.causal() & masks.lengths(key=4), rotary=rotary)

    def both(f, p, x):
        return jax.jit(jax.value_and_grad(lambda p, x: (f(p, x) ** 2).sum(), (0, 1)))(p, x)

    sharded = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec[1])
    got = both(sharded, *(jax.device_put(a, jax.NamedSharding(mesh, s)) for a, s in zip((p, x), spec, strict=True)))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(both(call, p, x)), strict=True):
        assert_close(a, b, factor=10)


HEADS = MultiHead(*3 * [jax.P(None, "y")], *4 * [jax.P("y")], *3 * [jax.P()])._replace(out_bias=jax.P())


@pytest.mark.parametrize(
    "where",
    [MultiHead(*10 * [jax.P()]), HEADS, MultiHead(*10 * [jax.P("x")])],
    ids=["batches", "heads too", "all parameters too"],
)
def test_on_a_mesh_with_explicit_axes_it_is_plain(where):
    """Of one device, whose types are those of many."""
    p, x = params(*BIASES, *NORMS), tokens()
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    placed = [jax.tree.map(lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), p, where)]
    placed += [jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))]

    def f(p, x):
        return multihead(p, x, mask=masks.causal() & masks.lengths(key=4), rotary=rotary)

    def both(p, x):
        return f(p, x), jax.grad(lambda p, x: (f(p, x) ** 2).sum(), (0, 1))(p, x)

    got, expected = jax.jit(both)(*placed), jax.jit(both)(p, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, factor=10)
    out, gradients = got
    assert jax.typeof(out).sharding.spec == jax.P("x", None, None)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(placed), strict=True):
        assert jax.typeof(a).sharding.spec == jax.typeof(b).sharding.spec


def test_debug_flags_find_nothing():
    p, x = params(*BIASES, *NORMS), tokens()
    with jax.debug_nans(True), jax.debug_infs(True):
        mask = masks.causal(offset=-1)
        jax.block_until_ready(values_and_gradients(p, x, mask=mask, rotary=rotary))
        jax.block_until_ready(jax.jit(lambda p, x: values_and_gradients(p, x, mask=mask))(p, x))


def test_an_optimizer_trains_a_layer():
    p, x, target = params(*BIASES, out=(N, D, F), out_bias=(F,)), tokens(), tokens(seed=9)
    loss = lambda p: ((multihead(p, x, mask=masks.causal()) - target) ** 2).mean()  # noqa: E731
    optimizer = optax.adam(1e-2)

    def step(state, _):
        p, moments = state
        value, gradient = jax.value_and_grad(loss)(p)
        updates, moments = optimizer.update(gradient, moments)
        return (optax.apply_updates(p, updates), moments), value

    with jax.numpy_dtype_promotion("standard"):
        (trained, _), losses = jax.jit(lambda p: jax.lax.scan(step, (p, optimizer.init(p)), length=50))(p)
    assert isinstance(trained, MultiHead) and trained.query_norm is None
    assert losses[-1] < 0.5 * losses[0]


# Decoding

CACHES = {
    "causal": (dict(mask=masks.causal()), {}),
    "causal by default": (dict(mask=masks.causal()), dict(mask=None)),
    "a window and rotary": (dict(mask=masks.causal() & masks.window(2, None), rotary=rotary), {}),
    "a ring": (dict(mask=masks.causal() & masks.window(2, None), rotary=rotary, rolling=3), {}),
    "options": (dict(mask=masks.causal(), bias=biases.alibi(N), softcap=1.3, return_stats=True), {}),
}


@pytest.mark.parametrize("options, changes", CACHES.values(), ids=CACHES)
def test_decoding_with_a_cache_is_the_whole_sequence_at_once(options, changes):
    p, x = params(*BIASES, *NORMS), tokens()
    options = dict(options)
    rolling = options.pop("rolling", None)
    cache = Cache.create(rolling or 8, K, H, D, batch=(B,), dtype=x.dtype, rolling=rolling is not None)
    whole = multihead(p, x, **options)

    @jax.jit
    def step(x, cache):
        return multihead(p, x, cache=cache, **options | changes)

    parts, start = [], 0
    for n in (2, 1, 1, 1):
        out, cache = step(x[:, start : start + n], cache)
        parts.append(out)
        start += n
    for got, expected in zip(jax.tree.leaves(jax.tree.map(lambda *a: jnp.concatenate(a, 1), *parts)),
                             jax.tree.leaves(whole), strict=True):  # fmt: skip
        assert_close(got, expected, factor=10)
    np.testing.assert_array_equal(cache.lengths, [T, T])


def test_new_lengths_say_which_tokens_are_real():
    p, x = params(*BIASES), tokens()
    cache = Cache.create(8, K, H, D, batch=(B,), dtype=x.dtype)
    call = functools.partial(multihead, p, rotary=rotary)
    out, cache = call(x.at[1, 2:].set(NAN), cache=cache, new_lengths=np.array([4, 2]))
    _, cache = call(x[:, 4:], cache=cache)
    np.testing.assert_array_equal(cache.lengths, [5, 3])
    np.testing.assert_array_equal(out[1, 2:], np.broadcast_to(p.out_bias, (3, M)))
    for b, n in enumerate((4, 2)):
        assert_close(out[b, :n], call(x[b, :n], mask=masks.causal()), factor=10)


# New layers


def test_a_new_layer_has_the_sizes_that_were_asked_for():
    rng = jax.random.key(0)
    p = init_multihead(rng, 12, 4)
    assert jax.tree.map(jnp.shape, p) == MultiHead((12, 4, 3), (12, 4, 3), (12, 4, 3), (4, 3, 12))
    p = init_multihead(rng, 12, 4, 2, 5, 7, dtype=jnp.bfloat16, bias=True, qk_norm=True)
    assert {a.dtype for a in p} == {np.dtype(jnp.bfloat16)}
    assert jax.tree.map(jnp.shape, p) == MultiHead(
        (12, 4, 5), (12, 2, 5), (12, 2, 7), (4, 7, 12), (4, 5), (2, 5), (2, 7), (12,), (5,), (5,)
    )
    assert all((getattr(p, what) == 0).all() for what in BIASES)
    assert all((getattr(p, what) == 1).all() for what in NORMS)
    assert multihead(p, jnp.ones((2, 12), jnp.bfloat16)).shape == (2, 12)


def test_a_new_layer_keeps_the_variance_of_what_it_projects():
    p = init_multihead(jax.random.key(1), 256, 8, 4, 16, 64)
    for array, summed in ((p.query, 256), (p.key, 256), (p.value, 256), (p.out, 8 * 64)):
        array = np.asarray(array)
        assert array.dtype == np.float32
        assert abs(array.std() * np.sqrt(summed) - 1) < 0.05 and abs(array.mean()) < 0.01
    drawn = [np.asarray(a).ravel()[:64] for a in p if a is not None]
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.5
    other = init_multihead(jax.random.key(2), 256, 8, 4, 16, 64)
    assert (p.query != other.query).all()
    np.testing.assert_array_equal(p.query, init_multihead(jax.random.key(1), 256, 8, 4, 16, 64).query)


# Errors, other than those of test_errors.py

INITS = {
    "features that do not divide": ((10, 3), {}, ValueError, "features = 10 is not a multiple of N = 3 heads. Pass H."),
    "heads that do not group": (
        (12, 6, 4),
        {},
        ValueError,
        "N = 6 query heads is not a multiple of K = 4 key/value heads.",
    ),
    "no heads": ((12, 0), {}, ValueError, "N must be an int >= 1, got 0."),
    "a fractional size": ((12, 4, 2, 1.5), {}, ValueError, "H must be an int >= 1, got 1.5."),
    "no features": ((0, 4, 2, 2), {}, ValueError, "features must be an int >= 1, got 0."),
    "integers": ((12, 4), {"dtype": np.int32}, TypeError, "dtype must be floating, got int32."),
    "no random key": (
        (12, 4),
        {"rng": None},
        TypeError,
        "rng must be a random key, from jax.random.key, got NoneType.",
    ),
    "a number for a random key": (
        (12, 4),
        {"rng": 0},
        TypeError,
        "rng must be a random key, from jax.random.key, got int64().",
    ),
    "several random keys": (
        (12, 4),
        {"rng": jax.random.split(jax.random.key(0), 3)},
        ValueError,
        "rng must be (), got (3,).",
    ),
}


@pytest.mark.parametrize("args, options, kind, text", INITS.values(), ids=INITS)
def test_a_layer_that_cannot_be_is_named(args, options, kind, text):
    options = {"rng": jax.random.key(0)} | options | dict(zip(("features", "N", "K", "H"), args, strict=False))
    with pytest.raises(kind, match=f"^{re.escape('init_multihead: ' + text)}$"):
        init_multihead(**options)


OPTIONS = (
    "mask, bias, scale, softcap, sink, dropout_rate, dropout_rng, query_positions, key_positions, empty, method, "
    "block_size, return_stats"
)
ERRORS = {
    "a dict": (
        lambda p, x: {"params": p._asdict()},
        TypeError,
        "params must be a MultiHead, got dict. init_multihead makes one, jattn.interop makes one of another library's "
        "layer.",
    ),
    "heads that disagree": (
        lambda p, x: {"params": p._replace(out=p.out[1:])},
        ValueError,
        "params.out must be (N, D, M) = (6, 3, M), got (5, 3, 5).",
    ),
    "a bias without heads": (
        lambda p, x: {"params": p._replace(query_bias=jnp.zeros(H))},
        ValueError,
        "params.query_bias must be (N, H) = (6, 4), got (4,).",
    ),
    "no key": (
        lambda p, x: {"params": p._replace(key=None)},
        TypeError,
        "params.key must be an array, got NoneType.",
    ),
    "one token without T": (
        lambda p, x: {"x": x[0, 0]},
        ValueError,
        "x must be (*B, T, F), got (11,).",
    ),
    "a context of another batch": (
        lambda p, x: {"context": x[:1]},
        ValueError,
        "context must be (*B, S, E) = (2, S, 11), got (1, 5, 11).",
    ),
    "no context where it has features of its own": (
        lambda p, x: {"params": p._replace(key=p.key[:3], value=p.value[:3])},
        ValueError,
        "context must be given where E differs from F, got None with F = 11 and E = 3.",
    ),
    "a base in place of a function": (
        lambda p, x: {"rotary": 500_000.0},
        TypeError,
        "rotary must be a function, such as jattn.rotary, got 500000.0. For another base pass "
        "functools.partial(jattn.rotary, base=...).",
    ),
    "positions of another length": (
        lambda p, x: {"query_positions": np.arange(4), "rotary": rotary},
        ValueError,
        "query_positions must be (T,) = (5,), got (4,).",
    ),
    "positions of keys of another length": (
        lambda p, x: {"context": x, "key_positions": np.zeros((3, 5), int), "rotary": rotary},
        ValueError,
        "key_positions must be (*B, S) = (2, 5), got (3, 5).",
    ),
    "a mask in the place of the context": (
        lambda p, x: {"context": masks.causal()},
        TypeError,
        "context must be tokens, got a mask. Pass mask=....",
    ),
    "a mask array in the place of the context": (
        lambda p, x: {"context": np.ones((B, 1, T, T), bool)},
        TypeError,
        "context must be tokens, got a mask. Pass mask=....",
    ),
    "a cache of another batch": (
        lambda p, x: {"cache": Cache.create(8, K, H, D, batch=(3,), dtype=x.dtype)},
        ValueError,
        "cache.lengths must be (*B,) = (2,), got (3,).",
    ),
    "a context beside a cache": (
        lambda p, x: {"cache": Cache.create(8, K, H, D, batch=(B,), dtype=x.dtype), "context": x},
        ValueError,
        "context must be None with a cache, got (2, 5, 11). It knows the tokens before these, and their positions.",
    ),
    "positions beside a cache": (
        lambda p, x: {"cache": Cache.create(8, K, H, D, batch=(B,), dtype=x.dtype), "query_positions": np.arange(T)},
        ValueError,
        "query_positions must be None with a cache, got (5,). It knows the tokens before these, and their positions.",
    ),
    "a cache of other heads": (
        lambda p, x: {"cache": Cache.create(8, 3, H, D, batch=(B,), dtype=x.dtype)},
        ValueError,
        "key must be (*B, T, K, H) = (2, 5, 3, 4), got (2, 5, 2, 4). B, K, H and D are those of the cache.",
    ),
    "a cache that is too small": (
        lambda p, x: {"cache": Cache.create(4, K, H, D, batch=(B,), dtype=x.dtype)},
        ValueError,
        "the lengths after the call must be at most capacity = 4, got [5, 5]. Make a larger cache, or one that rolls.",
    ),
    "an option that is not there": (
        lambda p, x: {"is_causal": True},
        TypeError,
        f"'is_causal' is no option. There are {OPTIONS}.",
    ),
}


@pytest.mark.parametrize("changes, kind, text", ERRORS.values(), ids=ERRORS)
def test_a_misuse_is_named(changes, kind, text):
    p, x = params(), tokens()
    with pytest.raises(kind, match=f"^{re.escape('multihead: ' + text)}$"):
        multihead(**{"params": p, "x": x} | changes(p, x))
