"""What tests/test_ring.py runs on eight simulated devices, in processes of their own. No tests here."""

import collections
import functools
import re

import conftest  # noqa: F401 (strict JAX)
import jax
import jax.numpy as jnp
import numpy as np
import reference
from battery import made, normal
from conftest import assert_close
from jax.experimental import checkify

from jattn import Cache, _online, attention, biases, cached_attention, masks, merge, ring

P = jax.P
TOKENS, ALL = P(None, "x"), P()
B, T, N, K, H, D = 2, 16, 4, 2, 3, 5
around = functools.partial(ring.attention, axis_name="x", block_size=(2, 3))


def mesh(**sizes):
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


def on(n, f, specs, out=TOKENS):
    return jax.shard_map(f, mesh=mesh(x=n), in_specs=specs, out_specs=out)


def inputs(S=T, dtype=np.float64):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D)
    return [jnp.asarray(normal([9, i], *shape, dtype=np.float64), dtype) for i, shape in enumerate(shapes)]


def close(got, expected, dtype="float64", factor=1):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, dtype, factor)


def same_bits(x, y):
    np.testing.assert_array_equal(np.asarray(x).view(np.uint64), np.asarray(y).view(np.uint64))


def squares(tree):
    """The sum of the squares of what is finite: an empty row's statistics are not."""
    return sum((jnp.where(jnp.isfinite(y), y, 0) ** 2).sum() for y in jax.tree.leaves(tree))


def with_gradient(f, argnums):
    """What f gives, and the gradient of its squares."""
    return jax.jit(lambda *x: (f(*x), jax.grad(lambda *x: squares(f(*x)), argnums)(*x)))


# Every option at once. A segment spans two devices, however many there are, and one is padding: its rows are empty.

IDS = np.repeat([[0, 1, 2, 3], [1, 1, 0, 2]], [2, 5, 6, 3], axis=1)
LENGTHS = np.array([T - 4, 9], np.int32)
MASK = (
    np.tril(np.ones((T, T), bool))
    & (IDS[..., None] == IDS[:, None])
    & (IDS != 3)[:, None]
    & (np.arange(T) < LENGTHS[:, None])[:, None]
)
DISTANCES = abs(np.arange(T)[:, None] - np.arange(T))


def everything(attend):
    def f(query, key, value, sink, slopes, softcap, ids):
        mask = masks.causal() & masks.segments(ids, padding=3) & masks.lengths(key=LENGTHS)
        return attend(query, key, value, mask, biases.alibi(slopes), sink=sink, softcap=softcap, scale=0.7,
                      dropout_rate=0.3, dropout_rng=jax.random.key(1), return_stats=True)  # fmt: skip

    return f


def arguments(dtype):
    numbers = normal(5, N), np.array([0.5, 0.1, 0.3, 0.2]), np.array(1.5)
    return [*inputs(dtype=dtype), *(jnp.asarray(x, dtype) for x in numbers), jnp.asarray(IDS)]


SPECS = (TOKENS,) * 3 + (ALL,) * 3 + (TOKENS,)


def everything_agrees(*devices):
    """In float32, to 1e-6 of the largest number: with one device, and one device's and the ring's with float64."""
    args = arguments("float32")
    wide = [x.astype(np.float64) if x.dtype == np.float32 else x for x in args]

    def of(f):
        def pushed(*x):
            return jax.jvp(lambda *x: f(*x, args[-1]), x, tuple(map(jnp.cos, x)))[1]

        gradient = with_gradient(f, range(6))
        return jax.jit(lambda *x: (*gradient(*x), pushed(*x[:-1])))

    exact, plain = of(everything(attention))(*wide), of(everything(attention))(*args)
    close(plain, exact, "float32", 0.5)
    for n in devices:
        got = of(on(n, everything(around), SPECS))(*args)
        close(got, plain, "float32", 0.5)
        close(got, exact, "float32", 0.5)
    bias = -np.asarray(args[4])[:, None, None] * DISTANCES
    want = reference.attention(*args[:3], MASK[:, None], bias, scale=0.7, softcap=args[5], sink=args[3])
    close(got[0][1], [want.lse, want.max_logit, want.entropy], "float32", 0.5)


def derivatives_agree(n):
    """Forward mode, and second order."""
    args = arguments("float64")

    def of(f):
        total = lambda *x: squares(f(*x, args[-1]))  # noqa: E731
        gradient = jax.grad(total, range(6))

        return jax.jit(lambda *x: (jax.jvp(total, x, x)[1], jax.grad(lambda *x: squares(gradient(*x)), range(6))(*x)))

    close(of(on(n, everything(around), SPECS))(*args[:-1]), of(everything(attention))(*args[:-1]), factor=10)


# Options by position, and tokens that are dealt


def positions_agree(n, dtype, factor):
    """More keys than queries, dealt in a zigzag; positions per batch element; a table that is learned; dropout."""
    S = 2 * T
    query, key, value = inputs(S, dtype)
    table, where = jnp.asarray(normal(3, N, 7), dtype), jnp.asarray(np.stack([np.arange(S), np.arange(S)[::-1]]))
    rest = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(2), "return_stats": True}
    mask = masks.window(9, 0) | masks.prefix(2) & masks.lengths(key=S - 3)

    def zigzag(query, key, value, table, where):
        dealt = [ring.zigzag(x, n, axis=1) for x in (query, key, value, where)]

        def f(query, key, value, where, table):
            return around(query, key, value, mask, biases.relative(table), query_positions=where[:, : T // n] + 1,
                          key_positions=where, zigzag=True, **rest)  # fmt: skip

        # Queries have the positions of some keys: those that lie where the queries do.
        found = on(n, f, (TOKENS,) * 4 + (ALL,))(*dealt, table)
        return jax.tree.map(lambda x: ring.unzigzag(x, n, axis=1), found)

    def plain(query, key, value, table, where):
        dealt = ring.zigzag(where, n, axis=1).reshape(B, n, S // n)[:, :, : T // n].reshape(B, T)
        of_queries = ring.unzigzag(dealt, n, axis=1) + 1
        bias = biases.relative(table)
        return attention(query, key, value, mask, bias, query_positions=of_queries, key_positions=where, **rest)

    args = query, key, value, table, where
    close(*(with_gradient(f, range(4))(*args) for f in (zigzag, plain)), dtype, factor)


def zigzag_keeps_shardings(n):
    """Of a mesh with explicit axes, as JAX makes them."""
    where = jax.NamedSharding(jax.make_mesh((n,), ("x",), devices=jax.devices()[:n]), TOKENS)
    x = jax.device_put(np.arange(2 * 4 * n).reshape(2, 4 * n), where)
    dealt = ring.zigzag(x, n, axis=1)
    assert dealt.sharding.is_equivalent_to(where, 2)
    # The first and the last of 2 n stripes come first.
    np.testing.assert_array_equal(np.asarray(dealt)[0, :4], [0, 1, 4 * n - 2, 4 * n - 1])
    np.testing.assert_array_equal(ring.unzigzag(dealt, n, axis=1), x)


def arrays_agree(n):
    """Masks and biases that are arrays, a rule that looks up an array, and what half precision rounds."""
    query, key, value = inputs()
    padding, bias = jnp.asarray(np.random.default_rng(4).random((B, 1, 1, T)) < 0.7), jnp.asarray(normal(8, 1, N, T, 1))
    odd = masks.rule(lambda q, k, far: (q - k) % far != 1, jnp.int32(3))
    column = jnp.asarray(normal(2, T))
    of_column = lambda column: biases.rule(lambda q, k, column: column[k], column, ranks=(1,))  # noqa: E731

    def f(attend):
        def with_array(query, key, value, padding, bias):
            return attend(query, key, value, masks.array(padding) & ~odd, bias)

        def with_rule(query, key, value, padding, column):
            return attend(query, key, value, padding, of_column(column))

        return with_array, with_rule

    specs = (TOKENS,) * 3 + (ALL, ALL)
    for g, h, last in zip(f(around), f(attention), (bias, column), strict=True):
        args = query, key, value, padding, last
        close(*(with_gradient(f, (0, 1, 2, 4))(*args) for f in (on(n, g, specs), h)), factor=10)
    args = inputs(dtype=jnp.bfloat16)
    got = jax.jit(on(n, around, (TOKENS,) * 3))(*args)
    assert got.dtype == jnp.bfloat16
    close(got, reference.attention(*args).out, "bfloat16")


def bad_tokens_stay_where_they_are_seen(n):
    """NaN and inf in one document, its cotangents too, change no bit of the other's results and derivatives."""
    ids = jnp.asarray(np.repeat([0, 1, 0, 1], [5, 4, 1, 6])[None].repeat(B, 0))
    other = np.asarray(ids)[0] == 1

    @jax.jit
    def results(query, key, value, cotangent):
        f = lambda *x: on(n, lambda *x: around(*x[:3], masks.segments(x[3])), (TOKENS,) * 4)(*x, ids)  # noqa: E731
        out, pull = jax.vjp(f, query, key, value)
        return out, pull(cotangent), jax.jvp(f, (query, key, value), (key[:, :, :1] + query, key, value))[1]

    args = *inputs(), jnp.asarray(normal(7, B, T, N, D))
    clean = results(*args)
    for bad in (np.nan, np.inf):
        spoilt = [x.at[:, np.flatnonzero(other)[1:4]].set(bad) for x in args]
        for x, y in zip(jax.tree.leaves(results(*spoilt)), jax.tree.leaves(clean), strict=True):
            same_bits(x[:, ~other], y[:, ~other])
            assert np.isnan(x[:, other]).any()


def empty_rows_raise_under_checkify(n):
    f = on(n, lambda *x: around(*x, masks.causal(offset=-1), empty="raise"), (TOKENS,) * 3)
    assert "a query has no key" in checkify.checkify(jax.jit(f))(*inputs())[0].get()
    g = on(n, lambda *x: around(*x, masks.causal(), empty="raise", return_stats=True), (TOKENS,) * 3)
    error, (out, stats) = checkify.checkify(jax.jit(g))(*inputs())
    assert error.get() is None and stats.lse.shape == out.shape[:-1]


# What it costs


def visits(n, zigzag):
    """How many tiles each device reads under a causal mask."""
    counts, absorb = collections.Counter(), _online.absorb

    def counted(state, x, pairs, visible):
        jax.debug.callback(lambda p: counts.update([int(p)]), jax.lax.axis_index("x"))
        return absorb(state, x, pairs, visible)

    # What was traced for another count would count there.
    jax.clear_caches()
    _online.absorb = counted
    causal = functools.partial(ring.attention, mask=masks.causal(), axis_name="x", block_size=(2, 2), zigzag=zigzag)
    f = on(n, causal, (TOKENS,) * 3)
    x = jnp.asarray(normal(1, 8 * n, 1, 1))[None]
    jax.block_until_ready(jax.jit(f)(x, x, x))
    jax.effects_barrier()
    jax.clear_caches()
    _online.absorb = absorb
    return [counts[p] for p in range(n)]


def invisible_blocks_are_skipped_and_a_zigzag_is_balanced(n):
    # Tiles of 2 x 2 on blocks of 8: the own block shows 10 of 16 tiles, and every earlier one all of them.
    assert visits(n, False) == [10 + 16 * p for p in range(n)]
    # The own two stripes show 3 + 3 + 4, and of every other device's two and two, two of the four pairs of stripes.
    assert visits(n, True) == [10 + 8 * (n - 1)] * n


def _bodies(jaxpr):
    """The jaxprs inside shard_map."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(getattr(param, "jaxpr", param), "eqns"):
                yield from [param] if eqn.primitive.name == "shard_map" else _bodies(param)


def memory_is_that_of_a_part(n):
    def gradient(T):
        f = on(n, lambda *x: ring.attention(*x, masks.causal(), axis_name="x", block_size=(32, 32)), (TOKENS,) * 3)
        where = jax.NamedSharding(mesh(x=n), TOKENS)
        args = [jax.ShapeDtypeStruct((1, T, 2, 16), np.float32, sharding=where)] * 3
        return jax.jit(jax.grad(lambda *x: squares(f(*x)), (0, 1, 2))), args

    def temporaries(T):
        f, args = gradient(T)
        return f.lower(*args).compile().memory_analysis().temp_size_in_bytes

    T, part = 256 * n, 256 * 2 * 16
    f, args = gradient(T)
    sizes = [x.size for body in _bodies(jax.make_jaxpr(f)(*args)) for _, x in made(body) if hasattr(x, "size")]
    # Nothing is larger than what a device has of queries, keys or values.
    assert max(sizes) == part
    one, two, four = map(temporaries, (T, 2 * T, 4 * T))
    # In proportion to T, and a few times queries, keys, values and results.
    assert abs((four - two) - 2 * (two - one)) < 0.1 * two
    assert two - one < 12 * 4 * part


def blocks_are_sent_in_time_and_no_further_than_they_are_used(n):
    """Keys and values in their own dtype, P - 1 times, and backward P times; their gradients in float32, likewise."""
    f = on(n, lambda *x: around(*x, masks.causal()), (TOKENS,) * 3)
    gradient = jax.grad(lambda *x: squares(f(*x)), (0, 1, 2))
    loops = [eqns for body in _bodies(jax.make_jaxpr(f)(*inputs())) for eqns in _loops(body) if "ppermute" in eqns]
    # Keys, values, and the places where they are stored; then all the work.
    assert [eqns[:3] for eqns in loops] == [["ppermute"] * 3] and "ppermute" not in loops[0][3:]
    for dtype, own in ((np.float32, "f32"), (jnp.bfloat16, "u16")):
        part = B * T // n * K * (H + D)
        forward, backward = (collections.Counter({own: times * part}) for times in (n - 1, n))
        for call, sent in ((f, forward), (gradient, forward + backward + collections.Counter({"f32": n * part}))):
            compiled = jax.jit(call).lower(*inputs(dtype=dtype)).compile().as_text()
            found = sends(compiled)
            # The places where keys are stored.
            del found["s32"]
            assert found == sent
            assert not re.search(r" all-(gather|to-all|reduce)\(", compiled)


def sends(compiled):
    """How many numbers of each dtype a device sends, by the text of its program."""
    times = {body: int(n) for body, n in re.findall(r"body=%?([\w.-]+).*known_trip_count\D*(\d+)", compiled)}
    sent = collections.Counter()
    for computation in compiled.split("\n\n"):
        name = re.match(r"\s*(?:ENTRY )?%?([\w.-]+)", computation)
        for dtype, shape in re.findall(r"= (\w+)\[([\d,]*)\]\S* collective-permute\(", computation):
            sent[dtype] += times.get(name and name[1], 1) * int(np.prod([int(x) for x in shape.split(",")]))
    return sent


def _loops(jaxpr):
    """The primitives in each loop, not looking into its own loops."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from [[e.primitive.name for e in inner.eqns]] if eqn.primitive.name == "scan" else []
                yield from _loops(param)


# Around it


def all_to_all_agrees(n):
    def f(query, key, value):
        there = lambda x: jax.lax.all_to_all(x, "x", x.ndim - 2, x.ndim - 3, tiled=True)  # noqa: E731
        back = lambda x: jax.lax.all_to_all(x, "x", x.ndim - 3, x.ndim - 2, tiled=True)  # noqa: E731
        return back(attention(there(query), there(key), there(value), masks.causal()))

    args = inputs()
    close(jax.jit(on(n, f, (TOKENS,) * 3))(*args), attention(*args, masks.causal()))


def a_sharded_cache_agrees(n):
    """Each device has some slots, attends to them, and merges; slots that are not written hold NaN."""
    query, key, value = inputs()
    sink, lengths = jnp.asarray(normal(5, N)), jnp.array([5, T], np.int32)
    written = np.arange(T) < np.asarray(lengths)[:, None]
    slots = [jnp.where(written[..., None, None], x, np.nan) for x in (key, value)]

    def decode(query, key, value, sink, lengths):
        p, S = jax.lax.axis_index("x"), key.shape[-3]
        out, stats = attention(query, key, value, masks.causal(), query_positions=lengths[:, None] - 1,
                               key_positions=p * S + jnp.arange(S, dtype=np.int32),
                               sink=jnp.where(p == 0, sink, -np.inf), return_stats=True)  # fmt: skip
        return merge(*jax.lax.all_gather((out, stats.lse), "x", to="invarying"))[0]

    sharded = jax.jit(on(n, decode, (ALL, TOKENS, TOKENS, ALL, ALL), ALL))
    got = sharded(query[:, :1], *slots, sink, lengths)
    close(got, reference.attention(query[:, :1], key, value, written[:, None, None], sink=sink).out)


def shardings_of_batch_and_heads_stay(n):
    """By sharding alone: no keys move, results stay where they are, and all is as on one device."""
    two = mesh(b=2, h=n // 2)
    place = lambda x, *axes: jax.device_put(x, jax.NamedSharding(two, P(*axes)))  # noqa: E731
    query, key, value = inputs()
    tokens = "b", None, "h"
    args = (*(place(x, *tokens) for x in (query, key, value)), place(np.arange(T)[None, None, None] < 9, None),
            place(normal(3, 1, N, 1, T), None, "h"), place(normal(5, N), "h"), place(IDS, "b"))  # fmt: skip

    def f(query, key, value, padding, bias, sink, ids, **engine):
        mask = masks.causal() & masks.array(padding) & masks.segments(ids)
        return attention(query, key, value, mask, bias, sink=sink, **engine)

    def g(query, key, value, *rest):
        cache = Cache.create(2 * T, K, H, D, batch=(B,), dtype=np.float64)
        held = [jax.NamedSharding(two, P(*tokens[: x.ndim])) for x in cache[:3]]
        cache = Cache(*map(jax.lax.with_sharding_constraint, cache[:3], held))
        return cached_attention(query, key, value, cache)[0]

    def gradient(*args, **engine):
        return jax.grad(lambda *x: squares(f(*x, *args[3:], **engine)), (0, 1, 2))(*args[:3])

    def pushed(*args, **engine):
        return jax.jvp(lambda *x: f(*x, *args[3:], **engine), args[:3], args[:3])[1]

    dense, blockwise = {"method": "dense"}, {"method": "blockwise", "block_size": (4, 3)}
    calls = (f, dense), (gradient, dense), (gradient, blockwise), (pushed, blockwise), (g, {})
    for call in (functools.partial(h, **engine) for h, engine in calls):
        compiled = jax.jit(call).lower(*args).compile()
        text = compiled.as_text()
        assert not re.search(r"all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast", text)
        # One number says whether anything is not finite, and one integer each what a tile is for the whole batch.
        assert not any(re.search(r"f\d+\[\d", shape) for shape in re.findall(r"= (.+) all-reduce\(", text))
        got, plain = compiled(*args), jax.jit(call)(*map(jnp.asarray, map(np.asarray, args)))
        close(got, plain)
        for x in jax.tree.leaves(got):
            assert x.sharding.is_equivalent_to(jax.NamedSharding(two, P(*tokens)), x.ndim), x.sharding


def two_processes_agree():
    """Forward and gradient over two processes of two devices each; each compares what it holds with one device's."""
    assert (jax.device_count(), jax.local_device_count()) == (4, 2)
    where = jax.NamedSharding(mesh(x=4), TOKENS)
    plain = inputs()
    args = [jax.make_array_from_callback(x.shape, where, x.__getitem__) for x in map(np.asarray, plain)]

    got = with_gradient(on(4, lambda *x: around(*x, masks.causal()), (TOKENS,) * 3), (0, 1, 2))(*args)
    expected = with_gradient(lambda *x: attention(*x, masks.causal()), (0, 1, 2))(*plain)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        for shard in x.addressable_shards:
            close(shard.data, y[shard.index], factor=10)
