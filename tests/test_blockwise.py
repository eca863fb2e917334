"""The blockwise engine: what it must not make, what it must skip, and that block sizes change nothing.

That it keeps the contract is said elsewhere: the battery runs on every engine of conftest.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from battery import made
from conftest import assert_close

import jattn
from jattn import _online, _plan, _rules, _tile, biases, masks

F32 = jnp.float32


def normal(seed, *shape, dtype=F32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# Sizes ---------------------------------------------------------------------------------------------------------------

T, S, H, D, N, K, BLOCK = 1024, 1000, 8, 4, 4, 2, (64, 64)

OPTIONS = {
    "no mask": lambda a: {},
    "causal": lambda a: {"mask": masks.causal()},
    "a window and traced lengths": lambda a: {"mask": masks.window(70, 3) & masks.lengths(key=a["length"])},
    "traced segments": lambda a: {"mask": masks.segments(a["query_ids"], a["key_ids"], padding=0)},
    "negated rules": lambda a: {"mask": ~(masks.causal() & masks.prefix(100)) | masks.window(2, 2)},
    "positions": lambda a: {"mask": masks.causal(), "query_positions": a["query_ids"], "key_positions": a["key_ids"]},
    "alibi, softcap and sink": lambda a: {"bias": biases.alibi(a["slopes"]), "softcap": 5.0, "sink": a["slopes"]},
    "a relative table": lambda a: {"bias": biases.relative(a["table"])},
    "dropout": lambda a: {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)},
    "statistics": lambda a: {"return_stats": True},
}


@functools.cache
def arrays():
    return {
        "query": normal(0, 1, T, N, H),
        "key": normal(1, 1, S, K, H),
        "value": normal(2, 1, S, K, D),
        "length": jnp.array([777], jnp.int32),
        "query_ids": jnp.arange(T, dtype=jnp.int32)[None] // 100,
        "key_ids": jnp.arange(S, dtype=jnp.int32)[None] // 100,
        "slopes": jnp.linspace(0.1, 1, N, dtype=F32),
        "table": normal(3, N, 31),
    }


def loss(options, query, key, value):
    a = arrays() | {"query": query, "key": key, "value": value}
    out = jattn.attention(query, key, value, **options(a), method="blockwise", block_size=BLOCK)
    return sum((x * 1.5).sum() for x in jax.tree.leaves(out))


def transformed(options, what):
    f = functools.partial(loss, options)
    gradient = jax.grad(f, (0, 1, 2))
    return {
        "forward": f,
        "gradient": gradient,
        "jvp": lambda *x: jax.jvp(f, x, x),
        "Hessian-vector product": lambda *x: jax.jvp(gradient, x, x),
        "gradient of a gradient": jax.grad(lambda *x: sum((g**2).sum() for g in gradient(*x)), (0, 1, 2)),
    }[what]


@pytest.mark.parametrize("what", ["forward", "gradient", "jvp", "Hessian-vector product", "gradient of a gradient"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nothing_of_size_queries_times_keys_is_made(options, what):
    a = arrays()
    jaxpr = jax.make_jaxpr(transformed(options, what))(a["query"], a["key"], a["value"])
    found = [x.size for _, x in made(jaxpr)]
    assert max(found) < T * S / 8
    # The walk did see the tiles.
    assert max(found) >= N * BLOCK[0] * BLOCK[1]


def test_the_walk_sees_what_the_dense_engine_makes():
    a = arrays()
    dense = jax.make_jaxpr(lambda q, k, v: jattn.attention(q, k, v, method="dense"))(a["query"], a["key"], a["value"])
    assert max(x.size for _, x in made(dense)) >= T * S


@functools.cache
def compiled(what, length, layout="(B, T, N, H)", mask=None):
    x = jax.ShapeDtypeStruct((1, length, 8, 64) if layout == "(B, T, N, H)" else (8, length, 64), F32)

    def f(q, k, v):
        if layout == "(B, T, N, H)":
            return jattn.attention(q, k, v, mask, method="blockwise").sum()
        return jax.vmap(lambda q, k, v: jattn.attend(q, k, v, mask, method="blockwise"))(q, k, v).sum()

    program = {
        "gradient": jax.grad(f, (0, 1, 2)),
        "jvp": lambda *x: jax.jvp(f, x, x),
        "Hessian-vector product": lambda *x: jax.jvp(jax.grad(f, (0, 1, 2)), x, x),
        "gradient of a gradient": jax.grad(lambda *x: (jax.grad(f)(*x) ** 2).sum(), (0, 1, 2)),
    }[what]
    return jax.jit(program).lower(x, x, x).compile()


def temporaries(*program):
    return compiled(*program).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["no mask", "causal"])
@pytest.mark.parametrize("layout", ["(B, T, N, H)", "(N, T, H)"])
def test_the_gradient_at_8192_needs_at_most_64_megabytes(layout, mask):
    # The XLA of jax 0.10 and 0.11 also keeps query, key and value with the heads in front.
    copies = 3 * 8192 * 8 * 64 * 4 if layout == "(B, T, N, H)" and jax.__version_info__ < (0, 12) else 0
    assert temporaries("gradient", 8192, layout, mask) <= 64e6 + copies


@pytest.mark.parametrize(
    ("T", "S", "masked", "blockwise"),
    [
        (512, 512, True, False),
        (1024, 1024, False, True),
        (2, 2047, True, False),
        (2, 2048, False, True),
        (2048, 64, False, True),
        # One query without a mask: dense reads each key once.
        (1, 8192, False, False),
        (1, 2048, True, True),
    ],
)
def test_auto_is_blockwise_where_that_is_faster(T, S, masked, blockwise):
    def f(q, k, v, length):
        return jattn.attention(q, k, v, masks.lengths(key=length) if masked else None)

    x = jnp.zeros((T, 1, 2)), jnp.zeros((S, 1, 2)), jnp.zeros((S, 1, 2)), jnp.int32(5)
    assert ("sums_over_keys" in str(jax.make_jaxpr(f)(*x))) == blockwise


def test_what_auto_makes_is_no_larger_than_a_tile_or_the_keys():
    def largest(T, S):
        x = jnp.zeros((T, 1, 2)), jnp.zeros((S, 1, 2)), jnp.zeros((S, 1, 2))
        return max(found.size for _, found in made(jax.make_jaxpr(jattn.attention)(*x)))

    assert largest(512, 512) == 512 * 512
    assert largest(1024, 1024) == largest(2048, 2048) == 512 * 512
    # Decoding: nothing is larger than the keys, (8192, 2), and they are not copied.
    assert largest(1, 8192) <= 2 * 8192


def test_decoding_needs_no_memory_for_the_unused_part_of_a_cache():
    def f(q, k, v, length):
        return jattn.attention(q, k, v, masks.lengths(key=length))

    def temporaries(S):
        x = jnp.zeros((2, 1, 4, 64)), *[jnp.zeros((2, S, 2, 64))] * 2, jnp.zeros(2, jnp.int32)
        return jax.jit(f).lower(*x).compile().memory_analysis().temp_size_in_bytes

    # The keys alone are 67 MB. The plan grows, by some numbers for each tile.
    assert temporaries(65536) < 1.1 * temporaries(4096) < 4e6


def test_dense_logits_go_from_product_to_weights_without_a_guard():
    # XLA:CPU makes product, maximum and exp as one, as long as nothing is chosen in between.
    x = jnp.zeros((48, 1, 2)), jnp.zeros((64, 1, 2)), jnp.zeros((64, 1, 2))

    def chosen(*mask):
        jaxpr = jax.make_jaxpr(lambda *x: jattn.attention(*x, *mask, method="dense"))(*x)
        return [name for name, x in made(jaxpr) if x.size >= 48 * 64 and name in ("select_n", "is_finite", "eq", "gt")]

    assert not chosen()
    assert chosen(masks.causal())


def test_one_query_reads_keys_and_values_as_they_lie():
    x = jnp.zeros((8, 1, 8, 64), F32), *[jnp.zeros((8, 4096, 2, 64), F32)] * 2
    program = jax.jit(jattn.attention).lower(*x)
    # As products, XLA:CPU copies both with heads in front: 34 MB.
    assert "dot_general" not in program.as_text()
    assert program.compile().memory_analysis().temp_size_in_bytes < 8 * 4096 * 2 * 64 * 4 / 4


def test_one_query_finds_the_one_key_that_it_sees():
    S = 1501
    q, k, v = jnp.ones((1, 1, 1), F32), jnp.ones((S, 1, 1), F32), jnp.arange(S, dtype=F32)[:, None, None]
    found = jax.jit(lambda i: jattn.attention(q, k, v, masks.array((jnp.arange(S) == i)[None, None]))[0, 0, 0])
    # The edges of its eighths, and what lies between.
    for i in (0, 1, 2, 100, 187, 188, 189, 375, 376, 750, 1312, 1313, 1499, 1500):
        assert found(i) == i


@pytest.mark.parametrize("what", ["gradient", "jvp", "Hessian-vector product", "gradient of a gradient"])
def test_temporaries_grow_as_the_length_does(what):
    assert temporaries(what, 16384) <= 2.2 * temporaries(what, 8192)


def test_the_program_does_not_grow_with_the_length():
    assert len(compiled("gradient", 16384).as_text().splitlines()) == len(
        compiled("gradient", 8192).as_text().splitlines()
    )


def test_keys_are_never_repeated_for_the_queries_that_share_them():
    q, k = jax.ShapeDtypeStruct((1, 512, 8, 16), F32), jax.ShapeDtypeStruct((1, 700, 1, 16), F32)

    def f(q, k, v):
        return jattn.attention(q, k, v, masks.causal(), method="blockwise", block_size=(64, 64)).sum()

    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(q, k, k)
    repeated = {(8, 700, 16), (1, 8, 700, 16), (8, 64, 16), (1, 8, 64, 16)}
    shapes = [x.shape for name, x in made(jaxpr) if name == "broadcast_in_dim"]
    assert not [shape for shape in shapes if tuple(n for n in shape if n != 1) in {(8, 700, 16)}], repeated


# Tiles ---------------------------------------------------------------------------------------------------------------


def planned(mask, T, S, block, **positions):
    x = _tile.inputs(jnp.zeros((T, 1)), jnp.zeros((S, 1)), None, mask=mask, **positions)
    return _plan.plan(x, block)


def tile_kinds(plan, visible):
    """What each tile is, by looking at all its pairs."""
    kinds = np.zeros((len(plan.queries.first), len(plan.keys.first)), int)
    for i, (q0, q) in enumerate(zip(plan.queries.start, plan.queries.first, strict=True)):
        for j, (k0, k) in enumerate(zip(plan.keys.start, plan.keys.first, strict=True)):
            tile = visible[q0 : q0 + plan.queries.size, k0 : k0 + plan.keys.size]
            whole = q0 == q and k0 == k
            kinds[i, j] = _plan.FULL if tile.all() and whole else _plan.PARTIAL if tile.any() else _plan.EMPTY
    return kinds


IDS = np.array([1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0, 0, 0, 0], np.int32)
EXACT = {
    "causal": masks.causal(),
    "causal, bottom-right": masks.causal(offset=-3),
    "a window": masks.window(4, 1),
    "a window on one side": masks.window(None, 2),
    "lengths": masks.lengths(key=9, query=13),
    "a prefix": masks.prefix(6),
    "traced lengths": masks.lengths(key=jnp.int32(9)),
    "a traced window": masks.window(jnp.int32(4), None),
    "an array": masks.array(np.random.default_rng(0).random((17, 17)) < 0.05),
    "an array for all queries": masks.array((np.arange(17) < 6)[None]),
    "its negation": ~masks.lengths(key=9),
}
SOUND = {
    "segments": masks.segments(IDS),
    "segments with padding": masks.segments(IDS, padding=0),
    "segments in no order": masks.segments(IDS[::-1] * 7 % 5, IDS),
    "causal segments": masks.segments(IDS, padding=0) & masks.causal(),
    "a union": masks.causal(offset=-6) | masks.prefix(3),
    "De Morgan": ~(masks.causal() & ~masks.window(2, 2)),
    "a function": masks.rule(lambda q, k: (q * k) % 3 == 0),
    "a function and more": masks.rule(lambda q, k: (q * k) % 3 == 0) & masks.causal(),
}


@pytest.mark.parametrize("block", [(4, 4), (5, 3), (3, 17), (20, 20)])
@pytest.mark.parametrize("mask", (EXACT | SOUND).values(), ids=EXACT | SOUND)
def test_the_plan_leaves_out_no_visible_pair_and_masks_every_other(mask, block):
    plan = planned(mask, 17, 17, block)
    truth, kinds = tile_kinds(plan, np.asarray(mask.dense(17, 17))), np.asarray(plan.kinds)
    visited = np.zeros(truth.shape, bool)
    visited[plan.steps[:, 0], plan.steps[:, 1]] = True
    assert (visited | (truth == _plan.EMPTY)).all()
    assert ((kinds != _plan.EMPTY) | (truth == _plan.EMPTY)).all()
    assert ((kinds != _plan.FULL) | (truth == _plan.FULL)).all()
    if any(mask is m for m in EXACT.values()):
        # The last tile along an axis begins early; the pairs of an earlier tile in it may make it look needed.
        whole = np.logical_and.outer(plan.queries.first == plan.queries.start, plan.keys.first == plan.keys.start)
        np.testing.assert_array_equal(kinds[whole], truth[whole])


@pytest.mark.parametrize(
    ("mask", "length", "best"),
    [
        (None, 4096, (512, 512)),
        (masks.causal(), 4096, (512, 512)),
        (masks.window(255, 0), 4096, (256, 256)),
        (masks.window(1023, 0), 4096, (512, 512)),
        # What is traced may hide anything.
        (masks.window(jnp.int32(255), 0), 4096, (512, 512)),
        (masks.window(255, 0) & masks.lengths(key=jnp.int32(9)), 4096, (256, 256)),
        # Three tiles of 256 cover 600 more closely than two of 512.
        (None, 600, (256, 256)),
    ],
    ids=lambda x: None,
)
def test_the_tiles_are_those_of_which_the_mask_leaves_least_to_do(mask, length, best):
    x = _tile.inputs(jnp.zeros((length, 1)), jnp.zeros((length, 1)), mask=mask, value=None)
    assert _plan.cheapest(x, ((512, 512), (256, 256))) == best


def test_what_is_static_is_no_part_of_the_program():
    assert len(planned(masks.causal(), 64, 64, (8, 8)).steps) == 36
    assert len(planned(masks.window(7, 0), 64, 64, (8, 8)).steps) == 15
    assert len(planned(masks.lengths(key=9), 64, 64, (8, 8)).steps) == 16
    assert len(planned(masks.causal() & masks.segments(jnp.arange(64) // 8), 64, 64, (8, 8)).steps) == 36


def visits(f, *args):
    """How many tiles `f` reads: it gets a mask that counts them when they are read."""
    count = []

    def counting(q, k):
        jax.debug.callback(lambda: count.append(1))
        return q >= q

    jax.block_until_ready(jax.jit(lambda *args: f(masks.rule(counting), *args))(*args))
    jax.effects_barrier()
    return len(count)


def run(mask, batch=()):
    q = normal(0, *batch, 64, 2, 4)
    return jattn.attention(q, q, q, mask, method="blockwise", block_size=(8, 8))


IDS_OF_EIGHT = jnp.arange(64, dtype=jnp.int32) // 8


@pytest.mark.parametrize(
    ("f", "args", "tiles"),
    {
        "everything": (lambda c: run(c), (), 64),
        "causal": (lambda c: run(c & masks.causal()), (), 36),
        "a traced length": (lambda c, n: run(c & masks.lengths(key=n)), (jnp.int32(9),), 16),
        "traced lengths of a batch, as far as the longest": (
            lambda c, n: run(c & masks.lengths(key=n), (3,)),
            (jnp.array([1, 17, 3], jnp.int32),),
            24,
        ),
        "lengths under vmap": (
            lambda c, n: jax.vmap(lambda n: run(c & masks.lengths(key=n)))(n),
            (jnp.array([1, 17, 3], jnp.int32),),
            24,
        ),
        "one query and a cache of which 600 slots of 4096 are used, where nobody chose an engine": (
            lambda c, n: jattn.attention(normal(0, 1, 2, 4), *[normal(1, 4096, 2, 4)] * 2, c & masks.lengths(key=n)),
            (jnp.int32(600),),
            2,
        ),
        "eight traced segments": (lambda c, ids: run(c & masks.segments(ids)), (IDS_OF_EIGHT,), 8),
        "eight segments of a batch under vmap": (
            lambda c, ids: jax.vmap(lambda ids: run(c & masks.segments(ids)))(ids),
            (jnp.stack([IDS_OF_EIGHT, IDS_OF_EIGHT + 5]),),
            8,
        ),
        "a window over traced positions": (
            lambda c, p: jattn.attention(
                *[normal(0, 64, 1, 4)] * 3, c & masks.window(7, 0), query_positions=p, key_positions=p,
                method="blockwise", block_size=(8, 8),
            ),
            (jnp.arange(64, dtype=jnp.int32) + 1000,),
            15,
        ),
    }.values(),
    ids=lambda x: None,
)
def test_tiles_without_a_visible_pair_are_not_read(f, args, tiles):
    assert visits(f, *args) == tiles


def test_full_tiles_are_read_without_their_mask():
    def cases(mask):
        q = normal(0, 64, 2, 4)
        # With statistics, because there is no quick way for those.
        how = {"method": "blockwise", "block_size": (8, 8), "return_stats": True}
        return jax.jit(lambda q: jattn.attention(q, q, q, mask, **how)).lower(q).as_text().count("stablehlo.case")

    # One more than for a rule of which no tile is known to be full: which kind of tile this is.
    assert cases(masks.causal()) == cases(masks.rule(lambda q, k: q >= k)) + 1


def test_the_backward_pass_skips_them_too():
    def gradient(c, n):
        q = normal(0, 64, 2, 4)
        mask = c & masks.lengths(key=n)
        return jax.grad(lambda q: jattn.attention(q, q, q, mask, method="blockwise", block_size=(8, 8)).sum())(q)

    # Once to fold, once to be recomputed. The callback has no part in what is recomputed for the transpose.
    assert visits(gradient, jnp.int32(9)) % 16 == 0
    assert visits(gradient, jnp.int32(9)) < 64


# Full tiles, the quick way -------------------------------------------------------------------------------------------


def longer(x, row, by):
    return x.at[row].mul(by)


# What of query, key and value, (20, 4), (24, 4), (24, 3), is other than normal, and whether the first of tiles of
# (20, 8) is right the quick way: all logits within 39 nats of the first, above it, and no sum near an overflow.
EXTREMES = {
    "nothing": (lambda q, k, v: (q, k, v), True),
    "the first key is far below": (lambda q, k, v: (jnp.abs(q), k.at[0].set(-100), v), False),
    "the first key is far above": (lambda q, k, v: (jnp.abs(q) + 1, k.at[0].set(100), v), True),
    "one key of the first tile": (lambda q, k, v: (q, longer(k, 5, 200), v), False),
    "one key of the last tile": (lambda q, k, v: (q, longer(k, 20, 200), v), True),
    "one query": (lambda q, k, v: (longer(q, 3, 200), k, v), False),
    "logits of a million": (lambda q, k, v: (q * 1e3, k * 1e3, v), False),
    # Rounding moves them by more than exp can bear.
    "logits of 1e20": (lambda q, k, v: (q * 1e10, k * 1e10, v), False),
    "the last key is 1e20 above": (lambda q, k, v: (jnp.abs(q), k.at[23].set(1e20), v), True),
    "values that a sum can just hold": (lambda q, k, v: (q, k, v * 1e303), False),
    "values that weigh more than they may": (lambda q, k, v: (jnp.abs(q), k.at[0].set(-10), v * 1e299), False),
    "tiny values": (lambda q, k, v: (q, k, v * 1e-300), True),
}


def extreme(what):
    q, k, v = (normal(i, *s, dtype=jnp.float64) for i, s in enumerate([(20, 4), (24, 4), (24, 3)]))
    return EXTREMES[what][0](q, k, v)


@functools.cache
def value_and_gradients(mask, method):
    block = (4, 8) if method == "blockwise" else None

    def f(q, k, v, sink, size):
        out = jattn.attend(q, k, v, mask, sink=sink, method=method, block_size=block) / size
        return (out**2).sum(), out

    return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("sink", [None, -200.0, 0.5, 200.0])
@pytest.mark.parametrize("mask", [None, masks.causal(offset=4)], ids=["no mask", "causal"])
@pytest.mark.parametrize("what", EXTREMES)
def test_extreme_logits_and_values_are_right_the_quick_way_or_another(what, mask, sink):
    x = extreme(what)
    size = max(1.0, float(jnp.abs(x[2]).max()))
    (_, out), gradients = value_and_gradients(mask, "blockwise")(*x, sink, size)
    _, expected = value_and_gradients(mask, "dense")(*x, sink, size)
    # Of logits of a million a ten-thousand-millionth is lost.
    factor = 1e4 if what == "logits of a million" else 10
    visible = None if mask is None else np.asarray(mask(np.arange(20), np.arange(24)))
    assert_close(out, reference.attend(*x, visible, sink=sink).out / size, factor=factor)
    if what == "values that a sum can just hold":
        # The cotangent of such a value is so small that XLA:CPU makes it 0.
        return
    for got, other in zip(gradients, expected, strict=True):
        assert_close(got, other, factor=factor)


@pytest.mark.parametrize("what", EXTREMES)
def test_a_tile_knows_whether_it_was_right(what):
    q, k, v = extreme(what)
    x = _tile.inputs(q, k[:8], v[:8])
    _, sure = _online.quick(_online.start(x, stats=False), x, _rules.all_pairs(20, 8))
    assert bool(sure.all()) == EXTREMES[what][1]


def test_one_row_that_is_not_right_the_quick_way_changes_no_bit_of_another():
    q, k, v = (normal(i, 2, 24, 2, 4) for i in range(3))

    @jax.jit
    def value_and_gradients(q, k, v):
        def f(q, k, v):
            return jattn.attention(q, k, v, masks.causal(), method="blockwise", block_size=(8, 8))

        out, pull = jax.vjp(f, q, k, v)
        return out, pull(jnp.ones_like(out))[0]

    plain = value_and_gradients(q, k, v)
    for bad in (300.0, jnp.nan):
        for x, y in zip(value_and_gradients(q.at[1, 20, 1].set(bad), k, v), plain, strict=True):
            same = np.all(np.asarray(x == y), axis=-1)
            assert not same[1, 20, 1]
            assert same.sum() == same.size - 1
        # A key of head 0, seen by later queries of that head in that sequence.
        for x, y in zip(value_and_gradients(q, k.at[1, 5, 0].set(bad), v), plain, strict=True):
            assert np.asarray(x == y)[0].all()
            assert np.asarray(x == y)[1, :, 1].all()
            assert np.asarray(x == y)[1, :5, 0].all()


# Agreement -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(1, 1), (9, 9), (63, 65), (129, 1), (1, 92)], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (7, 11)], ids=str)
def test_block_sizes_change_nothing(sizes, block):
    (T, S), mask = sizes, masks.causal(offset=1)
    q, k, v = (normal(i, *s, dtype=jnp.float64) for i, s in enumerate([(T, 3), (S, 3), (S, 2)]))

    def value_and_gradients(**how):
        def f(q, k, v):
            out, stats = jattn.attend(q, k, v, mask, return_stats=True, **how)
            return (out**2).sum() + stats.entropy.sum(), (out, stats)

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)

    got = value_and_gradients(method="blockwise", block_size=block)
    expected = value_and_gradients(method="dense")
    jax.tree.map(functools.partial(assert_close, factor=10), got, expected)


def test_dropout_has_the_same_bits_in_every_engine():
    q, v = normal(0, 13, 4), jnp.eye(13, dtype=F32)
    how = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(7)}
    outs = [jattn.attend(q, q, v, **how, method="dense")] + [
        jattn.attend(q, q, v, **how, method="blockwise", block_size=b) for b in [(4, 4), (13, 2), (5, 9)]
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(out == 0, outs[0] == 0)


@pytest.mark.parametrize("order", [3])
def test_the_third_derivative_is_right(order):
    # out = sigmoid(2 q), so out''' = -2^3 (1 - 6 s (1 - s)) s (1 - s) ... at q = 0: -1.
    def out(q):
        k, v = jnp.array([[-1.0], [1.0]]), jnp.array([[0.0], [1.0]])
        return jattn.attend(q[None, None], k, v, scale=1.0, method="blockwise", block_size=(1, 1))[0, 0]

    f = out
    for _ in range(order):
        f = jax.grad(f)
    assert_close(f(jnp.float64(0.0)), -1.0)
