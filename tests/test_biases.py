"""Bias rules: each against a Python loop over its pairs, its gradients against sums over pairs, and its edges."""

import dataclasses
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from jax.test_util import check_grads

from jattn import attend, attention, attention_weights, biases, masks

B, T, S, N, H = (2,), 5, 7, 3, 2
NAN, INF = np.nan, np.inf

QUERY_POSITIONS = np.array([3, -2, 0, 3, 9])
KEY_POSITIONS = np.array([2, 0, -4, 3, 11, 3, 1])


def normal(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


FULL, TABLE, DECAY = normal(1, T, S), normal(2, 7), normal(3, 4)


def log_distance(query, key, rate, table):
    return rate * jnp.log1p(abs(query - key).astype(rate.dtype)) + table[query % 4]


def t5_bucket(distance):
    """8 buckets of Raffel et al. 2020: a sign, distances up to 2 exactly, then logarithmically up to 6."""
    far = abs(distance)
    steps = 2 + (jnp.log(jnp.maximum(far, 1) / 2) / math.log(6 / 2) * 2).astype(np.int32)
    return jnp.where(distance > 0, 4, 0) + jnp.where(far < 2, far, jnp.minimum(steps, 3))


# The bucket of each distance, counted by hand: log(d/2) / log(3) * 2 is 0, 0.7, 1.3, 1.7 for d = 2, 3, 4, 5.
T5_BUCKETS = {0: 0, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3, 6: 3, 7: 3}

# What is built of its arrays; those arrays; and in words: what is added to the logit of the query stored at i, at
# position p, and the key stored at j, at position r?
RULES = {
    "alibi": (biases.alibi, [np.float64(0.3)], lambda i, j, p, r: -0.3 * abs(p - r)),
    "array": (biases.array, [FULL], lambda i, j, p, r: FULL[i, j]),
    "array of one row": (biases.array, [FULL[:1]], lambda i, j, p, r: FULL[0, j]),
    "array of one column": (biases.array, [FULL[:, :1]], lambda i, j, p, r: FULL[i, 0]),
    "relative": (biases.relative, [TABLE], lambda i, j, p, r: TABLE[min(max(r - p, -3), 3) + 3]),
    "relative of one number": (biases.relative, [TABLE[:1]], lambda i, j, p, r: TABLE[0]),
    "relative with buckets": (
        lambda table: biases.relative(table, t5_bucket),
        [np.append(TABLE, 0.5)],
        lambda i, j, p, r: np.append(TABLE, 0.5)[4 * (r > p) + T5_BUCKETS[min(abs(r - p), 7)]],
    ),
    "rule": (
        lambda rate, table: biases.rule(log_distance, rate, table, ranks=(0, 1)),
        [np.float64(-0.7), DECAY],
        lambda i, j, p, r: -0.7 * math.log(1 + abs(p - r)) + DECAY[p % 4],
    ),
    "rule of keys alone": (
        lambda: biases.rule(lambda q, k: -(k**2).astype(np.float64)),
        [],
        lambda i, j, p, r: -float(r * r),
    ),
}
BUILDS = {name: (build, arrays) for name, (build, arrays, _) in RULES.items()}


@pytest.mark.parametrize("name", [name for name in BUILDS if name != "rule of keys alone"])
def test_a_rule_can_be_pickled(name):
    build, arrays = BUILDS[name]
    rule = build(*arrays)
    back = pickle.loads(pickle.dumps(rule))
    assert jax.tree.structure(back) == jax.tree.structure(rule)
    np.testing.assert_array_equal(back.dense(T, S), rule.dense(T, S))


def looped(value, query_positions=range(T), key_positions=range(S)):
    """(t, s), asked pair by pair."""
    rows = [[value(i, j, p, r) for j, r in enumerate(key_positions)] for i, p in enumerate(query_positions)]
    return np.array(rows).reshape(len(query_positions), len(key_positions))


def softmax(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def weights(bias, *, B=(), N=1, dtype=np.float64, **options):
    """(*B, N, T, S) under equal scores: the softmax of the bias."""
    query, key = np.zeros((*B, T, N, 1), dtype), np.zeros((*B, S, 1, 1), dtype)
    return attention_weights(query, key, bias=bias, **options)


# Each rule is its loop


@pytest.mark.parametrize("name", RULES)
def test_dense_is_a_loop_over_pairs(name):
    build, arrays, value = RULES[name]
    expected = looped(value)
    for given in (arrays, [jnp.asarray(x) for x in arrays]):
        assert_close(build(*given).dense(T, S), expected)
    assert_close(jax.jit(lambda rule: rule.dense(T, S))(build(*arrays)), expected)


@pytest.mark.parametrize("name", [name for name in RULES if "array" not in name])
def test_a_tile_may_be_at_any_positions(name):
    build, arrays, value = RULES[name]
    assert_close(build(*arrays)(QUERY_POSITIONS, KEY_POSITIONS), looped(value, QUERY_POSITIONS, KEY_POSITIONS))


def test_a_tile_of_an_array_is_rows_and_columns_of_it():
    rows, columns = [4, 0, 1, 1], [6, 2, 5]
    assert_close(biases.array(FULL)(rows, columns), FULL[np.ix_(rows, columns)])
    with pytest.raises(ValueError) as error:
        biases.array(FULL)([-1], [0])
    assert str(error.value) == "array(bias=float64[5,7]): query_positions must be within 0 ... T - 1 = 4, got [-1]."


@pytest.mark.parametrize("name", RULES)
def test_attention_gives_positions_to_rules_and_indices_to_arrays(name):
    build, arrays, value = RULES[name]
    got = weights(build(*arrays), query_positions=QUERY_POSITIONS, key_positions=KEY_POSITIONS)
    assert_close(got[0], softmax(looped(value, QUERY_POSITIONS, KEY_POSITIONS)))


# ALiBi


def test_the_slopes_of_8_heads_are_the_first_eight_halves():
    leaf = jax.tree.leaves(biases.alibi(8))[0]
    assert leaf.dtype == np.float32
    assert leaf.tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_the_slopes_of_12_heads_are_those_of_8_and_every_other_of_16():
    """Press et al. 2022, of their implementation: 2 ** -0.5 is the first slope of 16 heads."""
    slopes = [2**-x for x in (1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5)]
    np.testing.assert_allclose(jax.tree.leaves(biases.alibi(12))[0], slopes, rtol=1e-7)


def published_slopes(N):
    """Built by repeated multiplication, as in the paper's appendix: start at 2^(-8/n), with that same ratio."""
    n = 1
    while 2 * n <= N:
        n *= 2
    geometric = [2.0 ** (-8 / n)]
    while len(geometric) < n:
        geometric.append(geometric[-1] * geometric[0])
    finer = [2.0 ** (-4 / n)]
    while len(finer) < 2 * n:
        finer.append(finer[-1] * finer[0])
    return geometric + [x for i, x in enumerate(finer) if i % 2 == 0][: N - n]


@pytest.mark.parametrize("N", [1, 2, 3, 4, 5, 6, 7, 16, 20, 31, 32, 33, 112])
def test_slopes_are_the_published_ones(N):
    leaf = jax.tree.leaves(biases.alibi(N))[0]
    assert leaf.shape == (N,)
    np.testing.assert_allclose(leaf, published_slopes(N), rtol=1e-6)


def test_alibi_is_zero_at_home_and_the_same_on_both_sides():
    dense = np.asarray(biases.alibi(np.float32(0.25)).dense(T, T))
    assert not np.signbit(np.diag(dense)).any() and (dense == dense.T).all()
    assert dense[0].tolist() == [0, -0.25, -0.5, -0.75, -1]


@pytest.mark.parametrize(
    "slope, dtype",
    [(0.1, "float64"), (np.float64(0.1), "float64"), (np.float32(0.1), "float32"), (jnp.bfloat16(0.1), "bfloat16")],
    ids=["float", "float64", "float32", "bfloat16"],
)
def test_a_slope_keeps_its_precision(slope, dtype):
    rule = biases.alibi(slope)
    assert jax.tree.leaves(rule)[0].dtype == dtype
    # 299 is no bfloat16 number.
    got = float(rule(jnp.array([0]), jnp.array([299]))[0, 0])
    np.testing.assert_allclose(got, -299 * float(slope), rtol=1e-15 if dtype == "float64" else 1e-7)


# Tables


def test_buckets_are_those_of_the_paper():
    distance = jnp.arange(-15, 16, dtype=np.int32)
    expected = [4 * (d > 0) + T5_BUCKETS[min(abs(d), 7)] for d in range(-15, 16)]
    assert t5_bucket(distance).tolist() == expected


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int32, np.int64])
def test_buckets_may_be_any_integers_and_broadcast(integer):
    table = normal(4, 300)
    rule = biases.relative(table, lambda distance: (abs(distance) + 3).astype(integer))
    assert_close(rule.dense(T, S), looped(lambda i, j, p, r: table[abs(p - r) + 3]))
    rows = biases.relative(table, lambda distance: (9 + distance[:, :1]).astype(integer))
    assert_close(rows.dense(2, 3), table[[[9, 9, 9], [8, 8, 8]]])


@pytest.mark.parametrize("index", [-1, -7, 7, 8, 2**31 - 1, -(2**31)])
def test_an_index_outside_the_table_makes_its_row_nan(index):
    # Only the pair (0, 6), the one with the longest distance.
    rule = biases.relative(TABLE, lambda d: jnp.where(d == 6, index, abs(d) % 7).astype(np.int32))
    assert np.argwhere(np.isnan(np.asarray(rule.dense(T, S)))).tolist() == [[0, 6]]
    got = np.asarray(weights(rule)[0])
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all()
    # What no query may attend to is not read.
    got = np.asarray(weights(rule, mask=masks.lengths(6))[0])
    assert np.isfinite(got).all()


def test_an_index_outside_the_table_gives_nan_derivatives():
    rule = lambda table: biases.relative(table, lambda d: abs(d) % 7 + jnp.where(d == 6, 9, 0))  # noqa: E731
    slope = jax.grad(lambda table: weights(rule(table))[0, :, 0].sum())(jnp.asarray(TABLE))
    assert np.isnan(np.asarray(slope)[:6]).all()


# Leaves led by batch and head axes, and their gradients


def _far(i, j, p, r):
    return abs(p - r)


def _by_head(shape):
    """The index of each pair (b, n) into the leading axes of a leaf."""
    if len(shape) == 1:
        return lambda b, n: (n if shape[0] > 1 else 0,)
    return lambda b, n: (b if shape[0] > 1 else 0, n if shape[1] > 1 else 0)


BUCKETS = looped(lambda i, j, p, r: min(max(r - p, -3), 3) + 3)
FAR = looped(_far)

# build, leading axes, core axes; and the dense bias of a head, as a linear map of the leaf's own part.
LED = {
    "slopes for all": (biases.alibi, (), (), lambda x: -x * FAR),
    "slopes by (N,)": (biases.alibi, (N,), (), lambda x: -x * FAR),
    "slopes by (*B, N)": (biases.alibi, (*B, N), (), lambda x: -x * FAR),
    "slopes by (*B, 1)": (biases.alibi, (*B, 1), (), lambda x: -x * FAR),
    "a table for all": (biases.relative, (), (7,), lambda x: x[BUCKETS]),
    "tables by (N,)": (biases.relative, (N,), (7,), lambda x: x[BUCKETS]),
    "tables by (1, N)": (biases.relative, (1, N), (7,), lambda x: x[BUCKETS]),
    "tables by (*B, N)": (biases.relative, (*B, N), (7,), lambda x: x[BUCKETS]),
    "an array for all": (biases.array, (), (T, S), lambda x: x),
    "a row by (N,)": (biases.array, (N,), (1, S), lambda x: x),
    "a column by (*B, 1)": (biases.array, (*B, 1), (T, 1), lambda x: x),
    "a number by (1,)": (biases.array, (1,), (1, 1), lambda x: x),
    "arrays by (*B, N)": (biases.array, (*B, N), (T, S), lambda x: x),
    "a rule's numbers by (N,)": (
        lambda x: biases.rule(lambda q, k, x: x * (q - k).astype(x.dtype), x),
        (N,),
        (),
        lambda x: x * looped(lambda i, j, p, r: p - r),
    ),
    "a rule's arrays by (*B, N)": (
        lambda x: biases.rule(lambda q, k, x: x[q % 2, k % 3], x, ranks=(2,)),
        (*B, N),
        (2, 3),
        lambda x: x[np.arange(T)[:, None] % 2, np.arange(S) % 3],
    ),
}
QUERY, KEY, COTANGENT = normal(5, *B, T, N, H), normal(6, *B, S, N, H), normal(7, *B, T, N, H)


@jax.jit
def _loss_and_slope(query, key, bias, cotangent):
    def loss(bias):
        out = attention(query, key, key, masks.causal(2), bias).astype(cotangent.dtype)
        return (cotangent * out).sum()

    return jax.value_and_grad(loss)(bias)


@pytest.mark.parametrize("name", LED)
def test_gradients_reach_leaves_and_have_their_shapes(name):
    """The gradient of a leaf is the sum, over heads and pairs, of that of the bias at each pair."""
    build, lead, core, dense = LED[name]
    leaf, index = normal(8, *lead, *core), _by_head(lead) if lead else lambda b, n: ()
    whole = np.zeros((*B, N, T, S))
    for b, n in np.ndindex(*B, N):
        whole[b, n] = dense(leaf[index(b, n)])
    loss, slope = _loss_and_slope(QUERY, KEY, build(jnp.asarray(leaf)), COTANGENT)
    expected_loss, whole_slope = _loss_and_slope(QUERY, KEY, jnp.asarray(whole), COTANGENT)
    assert_close(loss, expected_loss, factor=10)

    expected = np.zeros_like(leaf)
    basis = np.eye(math.prod(core)).reshape(-1, *core)
    for b, n in np.ndindex(*B, N):
        # The bias is linear in the leaf: what each of its numbers does at each pair is the bias of a unit leaf.
        own = [(np.asarray(whole_slope)[b, n] * dense(unit)).sum() for unit in basis]
        expected[index(b, n)] += np.reshape(own, core)
    (got,) = jax.tree.leaves(slope)
    assert got.dtype == np.float64
    assert_close(got, expected, factor=10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", ["slopes by (N,)", "tables by (N,)", "a row by (N,)", "a rule's numbers by (N,)"])
def test_gradients_have_the_dtype_of_the_leaf_and_are_summed_in_float32(name, dtype):
    build, lead, core, _ = LED[name]
    leaf = normal(8, *lead, *core).astype(jnp.dtype(dtype))
    args = [x.astype(np.float32) for x in (QUERY, KEY)]
    # A rule's function computes in the dtypes that its author chose.
    factor = 8 if "rule" in name else 1
    tolerance = factor * (2**-8 if dtype == "bfloat16" else 1e-5)
    _, slope = _loss_and_slope(*args, build(jnp.asarray(leaf)), COTANGENT)
    _, exact_slope = _loss_and_slope(*args, build(jnp.asarray(leaf, np.float32)), COTANGENT)
    (got,), (exact,) = jax.tree.leaves(slope), jax.tree.leaves(exact_slope)
    assert got.dtype == dtype and got.shape == leaf.shape
    atol = (factor - 1 + 1e-5) * np.abs(exact).max() * tolerance
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=tolerance, atol=atol)


def test_a_number_that_many_pairs_read_gets_all_of_their_gradient():
    """257 is no bfloat16 number: a sum of ones in bfloat16 stops at 256."""
    slope = jax.grad(lambda table: biases.relative(table).dense(64, 64).astype(np.float32).sum())
    got = slope(jnp.zeros(3, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    assert got.tolist() == [2016, 64, 2016]


def test_first_and_second_derivatives_are_those_of_finite_differences():
    names = ("alibi", "relative with buckets", "rule")
    builds = [BUILDS[name][0] for name in names]
    arrays = [list(map(jnp.asarray, BUILDS[name][1])) for name in names]

    @jax.jit
    def f(arrays):
        return [jnp.sin(build(*own).dense(T, S)) for build, own in zip(builds, arrays, strict=True)]

    check_grads(f, (arrays,), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


def test_derivatives_through_attention_are_those_of_finite_differences():
    query, key = jnp.asarray(normal(11, T, H)), jnp.asarray(normal(12, S, H))
    f = jax.jit(lambda table: attend(query, key, key, masks.causal(1), biases.relative(table)))
    check_grads(f, (jnp.asarray(TABLE),), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


def test_a_wide_bias_keeps_its_precision_until_it_meets_narrow_logits():
    # In float32, 2^25 + 1 is 2^25: the bias is rounded to the logits, once.
    bias = np.resize([2.0**25, 2.0**25 + 1, 2.0**25 + 4], (1, S))
    got = weights(biases.array(bias), dtype=np.float32)
    assert got.dtype == np.float32
    assert_close(got[0], np.repeat(softmax(bias.astype(np.float32).astype(np.float64)), T, 0), "float32")


# Visibility

HOLES = {
    "an array": lambda: biases.array(np.where(np.arange(S) < 4, 0.5, -INF)[None]),
    "a table": lambda: biases.relative(jnp.array([0.1, 0.2, 0.3, -INF]), lambda d: jnp.where(d < 2, d % 3, 3)),
    "a half-precision table": lambda: biases.relative(jnp.array([0.1, 0.2, -INF], jnp.bfloat16)),
    "a rule": lambda: biases.rule(lambda q, k: jnp.where(k <= q, 0.0, -INF)),
}


@pytest.mark.parametrize("build", HOLES.values(), ids=HOLES)
def test_where_a_bias_is_minus_infinity_no_key_is_visible(build):
    bias = build()
    visible = np.asarray(bias.dense(T, S)) > -INF
    assert 0 < visible.sum() < T * S
    query, key = normal(11, T, H), normal(12, S, H)
    out, stats = attend(query, key, np.eye(S), None, bias, return_stats=True)
    np.testing.assert_array_equal(np.asarray(out) > 0, visible)
    # Bit for bit, whatever the invisible keys hold.
    for t in range(T):
        poisoned = np.where(visible[t][:, None], key, NAN)
        again, _ = attend(query, poisoned, np.eye(S), None, bias, return_stats=True)
        np.testing.assert_array_equal(again[t], out[t])
    rows = np.isneginf(stats.lse)
    np.testing.assert_array_equal(rows, ~visible.any(1))


def test_a_bias_and_a_mask_intersect():
    bias = biases.array(np.where(np.arange(S) > 1, 0.0, -INF)[None])
    got = np.asarray(weights(bias, mask=masks.causal())[0]) > 0
    np.testing.assert_array_equal(got, looped(lambda i, j, p, r: 1 < j <= i))


# rule(fn, *arrays), pytrees, printing


def test_a_rules_function_sees_a_column_and_a_row_of_int32():
    seen = []

    def fn(q, k, x, table):
        seen.append([(a.shape, str(a.dtype)) for a in (q, k, x, table)])
        return (q - k).astype(np.float32)

    rule = biases.rule(fn, 2, np.zeros((2, 3), np.float16), ranks=(0, 2))
    rule.dense(2, 3)
    rule(np.arange(4), np.arange(1, dtype=np.uint8))
    weights(rule, query_positions=np.arange(T), key_positions=np.arange(S))
    arrays = [((), "int64"), ((2, 3), "float16")]
    assert [call[:2] for call in seen] == [[((t, 1), "int32"), ((1, s), "int32")] for t, s in ((2, 3), (4, 1), (T, S))]
    assert all(call[2:] == arrays for call in seen)


def test_new_values_are_not_traced_again():
    traced = []

    @jax.jit
    def dense(rules):
        traced.append(rules)
        return [rule.dense(T, S) for rule in rules]

    for i in range(3):
        rules = [build(*(x + i for x in arrays)) for build, arrays in list(BUILDS.values())[:-1]]
        for got, rule in zip(dense(rules), rules, strict=True):
            assert_close(got, rule.dense(T, S))
    assert len(traced) == 1
    dense([biases.relative(TABLE, lambda d: abs(d) % 7)])
    dense([biases.relative(TABLE, lambda d: abs(d) % 7)])
    assert len(traced) == 3


def test_rules_map_scan_and_flatten():
    slopes, tables = jnp.array([0.5, 0.25]), jnp.asarray(normal(4, 2, 5))
    rules = (biases.alibi(slopes), biases.relative(tables))
    dense = lambda rules: tuple(rule.dense(T, S) for rule in rules)  # noqa: E731
    whole = jax.vmap(dense)(rules)
    told = jax.vmap(dense, in_axes=(jax.tree.map(lambda x: 0, rules),))(rules)
    scanned = jax.lax.scan(lambda carry, rules: (carry, dense(rules)), 0, rules)[1]
    for got in (whole, told, scanned):
        for i in range(2):
            assert_close(got[0][i], looped(lambda i, j, p, r, s=slopes[i]: -s * abs(p - r)))
            assert_close(got[1][i], looped(lambda i, j, p, r, t=tables[i]: t[min(max(r - p, -2), 2) + 2]))
    for placeholder in (None, 0, -1.0, "x"):
        filled = jax.tree.map(lambda _, x=placeholder: x, rules)
        assert jax.tree.leaves(filled, is_leaf=lambda x: x is None) == [placeholder] * 2
        assert str(filled[0]) == repr(filled[0])
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(rules)] == [
        "[0].slopes",
        "[1].table",
    ]


def test_a_gradient_is_a_rule_like_its_rule():
    rule = biases.relative(jnp.asarray(TABLE), t5_bucket)
    slope = jax.grad(lambda rule: (rule.dense(T, S) ** 2).sum())(rule)
    assert jax.tree.structure(slope) == jax.tree.structure(rule)
    assert repr(slope) == "relative(table=float64[7], buckets=t5_bucket)"


REPRS = {
    "alibi(slopes=float32[8])": lambda: biases.alibi(8),
    "alibi(slopes=float64[])": lambda: biases.alibi(0.5),
    "relative(table=float64[7])": lambda: biases.relative(TABLE),
    "relative(table=float64[7], buckets=t5_bucket)": lambda: biases.relative(TABLE, t5_bucket),
    "array(bias=float64[5,7])": lambda: biases.array(FULL),
    "rule(fn=log_distance, array0=float64[], array1=float64[4])": lambda: biases.rule(
        log_distance, np.float64(1), DECAY, ranks=(0, 1)
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_repr_is_the_call(text):
    assert repr(REPRS[text]()) == text == str(REPRS[text]())


# What is refused


@dataclasses.dataclass
class Unhashable:
    rate: float = 0.5

    def __call__(self, q, k):
        return -self.rate * abs(q - k)


NOT_FLOATING = "A boolean mask goes in `mask`."
NOT_HASHABLE = "Pass the arrays that it holds as arrays of a rule."
WRONG_TYPES = {
    f"biases.alibi: slopes must be floating, got bool. {NOT_FLOATING}": lambda: biases.alibi(True),
    f"biases.alibi: slopes must be floating, got int64. {NOT_FLOATING}": lambda: biases.alibi(np.arange(3)),
    "biases.alibi: slopes must be an array, got NoneType.": lambda: biases.alibi(None),
    f"biases.relative: table must be floating, got int64. {NOT_FLOATING}": lambda: biases.relative(np.arange(3)),
    "biases.relative: buckets must be a function, got int.": lambda: biases.relative(TABLE, 32),
    f"biases.relative: buckets must be hashable, got Unhashable. {NOT_HASHABLE}": lambda: biases.relative(
        TABLE, Unhashable()
    ),
    "biases.relative: buckets must return integers, got float32.": lambda: biases.relative(
        TABLE, lambda d: d / 2
    ).dense(2, 3),
    "biases.relative: buckets must return integers, got None.": lambda: biases.relative(TABLE, lambda d: None).dense(
        2, 3
    ),
    f"biases.array: bias must be floating, got bool. {NOT_FLOATING}": lambda: biases.array(FULL > 0),
    f"biases.array: bias must be floating, got complex128. {NOT_FLOATING}": lambda: biases.array(FULL + 1j),
    "biases.rule: fn must be a function, got ndarray.": lambda: biases.rule(FULL),
    f"biases.rule: fn must be hashable, got Unhashable. {NOT_HASHABLE}": lambda: biases.rule(Unhashable()),
    "biases.rule: array0 must be an array, got dict.": lambda: biases.rule(log_distance, {}),
    f"biases.rule: fn must return floats, got bool. {NOT_FLOATING}": lambda: biases.rule(lambda q, k: q < k).dense(
        2, 3
    ),
    "biases.rule: fn must return floats, got int32.": lambda: biases.rule(lambda q, k: q - k).dense(2, 3),
    "biases.rule: fn must return floats, got 0.0.": lambda: biases.rule(lambda q, k: 0.0).dense(2, 3),
}
WRONG_VALUES = {
    "biases.alibi: N must be >= 1, got 0.": lambda: biases.alibi(0),
    "biases.relative: table must be (*B, L), got ().": lambda: biases.relative(1.0),
    "biases.relative: L = 2 R + 1 must be odd, got 4. Pass buckets for others.": lambda: biases.relative(DECAY),
    "biases.relative: L = 2 R + 1 must be odd, got 0. Pass buckets for others.": lambda: biases.relative(np.zeros(0)),
    "biases.relative: buckets must return (t, s) = (2, 3), each axis full or 1, got (3, 2).": lambda: biases.relative(
        TABLE, lambda d: d.T
    ).dense(2, 3),
    "biases.array: bias must be (*B, T, S), got (7,).": lambda: biases.array(FULL[0]),
    "biases.rule: ranks must be one int >= 0 for each of 1 arrays, got (0, 1).": lambda: biases.rule(
        log_distance, 0.5, ranks=(0, 1)
    ),
    "biases.rule: array0 must be (*B, ...), got ().": lambda: biases.rule(log_distance, 0.5, ranks=(1,)),
    "biases.rule: fn must return (t, s) = (2, 3), each axis full or 1, got (2, 1, 1).": lambda: biases.rule(
        lambda q, k: q[:, None].astype(float)
    ).dense(2, 3),
    "dense: alibi(slopes=...) must be (), got (8,). Map batch and head axes with jax.vmap.": lambda: biases.alibi(
        8
    ).dense(2, 3),
    "attention_weights: alibi(slopes=...) must be (N,) = (3,), got (8,).": lambda: weights(biases.alibi(8), B=B, N=N),
    "attention_weights: alibi(slopes=...) must be (*B, N) = (2, 3), got (3, 2).": lambda: weights(
        biases.alibi(np.ones((3, 2))), B=B, N=N
    ),
    "attention_weights: relative(table=...) must be (N, L) = (3, L), got (2, 5).": lambda: weights(
        biases.relative(np.ones((2, 5))), B=B, N=N
    ),
    "attention_weights: array(bias=...) must be (T, S) or (N, T, S) or (*B, N, T, S), got (1, 2, 3, 5, 7).": (
        lambda: weights(biases.array(np.ones((1, 2, 3, T, S))), B=B, N=N)
    ),
    "attend: alibi(slopes=...) must be (), got (1,).": lambda: attend(
        FULL, TABLE[:, None] * FULL[0], FULL[0][:, None], None, biases.alibi(np.ones(1))
    ),
}
REFUSED = [(TypeError, text, build) for text, build in WRONG_TYPES.items()]
REFUSED += [(ValueError, text, build) for text, build in WRONG_VALUES.items()]


@pytest.mark.parametrize("kind, text, build", REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_is_refused_is_refused_in_these_words(kind, text, build):
    with pytest.raises(kind) as error:
        build()
    assert str(error.value) == text


@pytest.mark.parametrize("method", ["dense", "blockwise"])
def test_the_gradient_of_a_narrow_slope_is_summed_wide(method):
    # A sum of bfloat16 numbers, tile by tile, stands still or goes astray.
    T, slope = 128, 2.0**-7
    engine = {"method": method} | ({"block_size": (8, 8)} if method == "blockwise" else {})
    zero, value = jnp.zeros((T, 1), jnp.bfloat16), jnp.arange(T, dtype=jnp.bfloat16)[:, None] / jnp.bfloat16(T)
    f = jax.jit(jax.grad(lambda slope: attend(zero, zero, value, None, biases.alibi(slope), **engine).sum()))
    got = f(jnp.bfloat16(slope))
    distance, v = np.abs(np.subtract.outer(np.arange(T), np.arange(T))), np.arange(T) / T
    p = np.exp(-slope * distance)
    p /= p.sum(1, keepdims=True)
    terms = -p * distance * (v - (p @ v)[:, None])
    np.testing.assert_allclose(np.float64(got), terms.sum(), rtol=0, atol=2e-3 * np.abs(terms).sum())
