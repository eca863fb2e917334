"""Mask rules: each against a Python loop over its pairs, their algebra, and what transforms and `print` do to them."""

import copy
import dataclasses
import functools
import itertools
import operator
import pickle
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import _plan, attend, attention_weights, biases, masks

T, S = 5, 7
NAN = float("nan")
NOT_BOOLEAN = "Scores that are added go in `bias`; for a 0/1 mask pass `mask != 0`."

# Positions in no order, negative, repeated and equal to no index.
QUERY_POSITIONS = np.array([3, -2, 0, 3, 9])
KEY_POSITIONS = np.array([2, 0, -4, 3, 11, 3, 1])

QUERY_IDS, KEY_IDS = np.array([2, 2, 0, 1, 1]), np.array([0, 2, 2, 1, 0, 1, 3])
FULL = np.random.default_rng(1).random((T, S)) < 0.5
ROW, COLUMN = FULL[:1], FULL[:, :1]


def nearer(q, k, far):
    return (k - q).astype(far.dtype) < far


def modular(q, k, n, table):
    return (q - k + table[2].astype(q.dtype)) % n.astype(q.dtype) == 0


# What is built, each number in it through `n`, and the same in words: may the query stored at i, at position p, attend
# to the key stored at j, at position r?
RULES = {
    "causal": (lambda n: masks.causal(n(0)), lambda i, j, p, r: r <= p),
    "causal, later": (lambda n: masks.causal(offset=n(2)), lambda i, j, p, r: r <= p + 2),
    "causal, earlier": (lambda n: masks.causal(n(-3)), lambda i, j, p, r: r <= p - 3),
    "window": (lambda n: masks.window(n(1), n(2)), lambda i, j, p, r: p - 1 <= r <= p + 2),
    "window of one key": (lambda n: masks.window(n(0), n(0)), lambda i, j, p, r: r == p),
    "window without a left bound": (lambda n: masks.window(None, n(1)), lambda i, j, p, r: r <= p + 1),
    "window without a right bound": (lambda n: masks.window(n(1), None), lambda i, j, p, r: r >= p - 1),
    "window without bounds": (lambda n: masks.window(None, None), lambda i, j, p, r: True),
    "lengths": (lambda n: masks.lengths(key=n(3), query=n(2)), lambda i, j, p, r: j < 3 and i < 2),
    "lengths of keys": (lambda n: masks.lengths(n(4)), lambda i, j, p, r: j < 4),
    "lengths of queries": (lambda n: masks.lengths(query=n(4)), lambda i, j, p, r: i < 4),
    "lengths of 0": (lambda n: masks.lengths(n(0)), lambda i, j, p, r: False),
    "lengths past the end": (lambda n: masks.lengths(n(99), n(99)), lambda i, j, p, r: True),
    "no lengths": (lambda n: masks.lengths(), lambda i, j, p, r: True),
    "segments": (lambda n: masks.segments(QUERY_IDS, KEY_IDS), lambda i, j, p, r: QUERY_IDS[i] == KEY_IDS[j]),
    "segments with padding": (
        lambda n: masks.segments(QUERY_IDS, jnp.asarray(KEY_IDS), padding=n(1)),
        lambda i, j, p, r: QUERY_IDS[i] == KEY_IDS[j] != 1,
    ),
    "prefix": (lambda n: masks.prefix(n(3)), lambda i, j, p, r: r < 3),
    "array": (lambda n: masks.array(FULL), lambda i, j, p, r: FULL[i, j]),
    "array of one row": (lambda n: masks.array(jnp.asarray(ROW)), lambda i, j, p, r: ROW[0, j]),
    "array of one column": (lambda n: masks.array(COLUMN), lambda i, j, p, r: COLUMN[i, 0]),
    "rule": (lambda n: masks.rule(lambda q, k: q + k > 3), lambda i, j, p, r: p + r > 3),
    "rule of queries alone": (lambda n: masks.rule(lambda q, k: q > 1), lambda i, j, p, r: p > 1),
    "rule with arrays": (
        lambda n: masks.rule(modular, n(3), jnp.arange(4), ranks=(0, 1)),
        lambda i, j, p, r: (p - r + 2) % 3 == 0,
    ),
    "and": (lambda n: masks.causal(n(1)) & masks.lengths(n(5)), lambda i, j, p, r: r <= p + 1 and j < 5),
    "or": (lambda n: masks.window(n(0), n(1)) | FULL, lambda i, j, p, r: p <= r <= p + 1 or FULL[i, j]),
    "not": (lambda n: ~masks.window(None, n(1)), lambda i, j, p, r: r > p + 1),
    "composition": (
        lambda n: ~(FULL & masks.causal(n(1))) | (masks.segments(QUERY_IDS, KEY_IDS) & ~masks.prefix(n(2))),
        lambda i, j, p, r: not (FULL[i, j] and r <= p + 1) or (QUERY_IDS[i] == KEY_IDS[j] and r >= 2),
    ),
}
NUMBERS = {
    "an int": lambda x: x,
    "a NumPy scalar": np.int64,
    "a NumPy array": lambda x: np.array(x, np.int16),
    "a JAX array": jnp.int32,
}


def built(name, number=lambda x: x):
    return RULES[name][0](number)


def looped(sees, query_positions=range(T), key_positions=range(S), query_indices=None, key_indices=None):
    """bool (t, s), asked pair by pair."""
    query_indices = range(len(query_positions)) if query_indices is None else query_indices
    key_indices = range(len(key_positions)) if key_indices is None else key_indices
    rows = [
        [bool(sees(i, j, p, r)) for j, r in zip(key_indices, key_positions, strict=True)]
        for i, p in zip(query_indices, query_positions, strict=True)
    ]
    return np.array(rows, bool).reshape(len(query_positions), len(key_positions))


def same(got, expected):
    assert got.dtype == np.bool_
    np.testing.assert_array_equal(np.asarray(got), expected)


def visible(mask, **options):
    """bool (*B, N, T, S), as attention sees it: with equal logits, what weighs something."""
    B, N = options.pop("B", ()), options.pop("N", 1)
    query, key = np.zeros((*B, T, N, 1), np.float32), np.zeros((*B, S, 1, 1), np.float32)
    return np.asarray(attention_weights(query, key, mask, **options)) > 0


# Each rule is its loop


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", RULES)
def test_dense_is_a_loop_over_pairs(name, number):
    same(built(name, NUMBERS[number]).dense(T, S), looped(RULES[name][1]))


def test_dense_is_a_loop_over_pairs_under_jit():
    rules = [built(name, jnp.int32) for name in RULES]
    dense = jax.jit(lambda rules: [rule.dense(T, S) for rule in rules])(rules)
    for got, (_, sees) in zip(dense, RULES.values(), strict=True):
        same(got, looped(sees))


POSITIONAL = [name for name in RULES if name.split()[0].strip(",") in ("causal", "window", "prefix", "rule", "not")]
assert len(POSITIONAL) == 13


@pytest.mark.parametrize("name", POSITIONAL)
def test_a_tile_may_be_at_any_positions(name):
    expected = looped(RULES[name][1], QUERY_POSITIONS, KEY_POSITIONS)
    same(built(name)(QUERY_POSITIONS, jnp.asarray(KEY_POSITIONS)), expected)


@pytest.mark.parametrize("name", RULES)
def test_a_tile_is_rows_and_columns_of_the_whole(name):
    rows, columns = [4, 0, 1, 1], [6, 2, 5]
    expected = looped(RULES[name][1])[np.ix_(rows, columns)]
    same(built(name)(rows, columns), expected)
    same(jax.jit(lambda rule, q, k: rule(q, k))(built(name), np.array(rows), np.array(columns)), expected)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_tiles_and_masks_may_have_any_size(shape):
    t, s = shape
    mask = (masks.causal() | masks.segments(QUERY_IDS, KEY_IDS)) & ~masks.lengths(2)
    sees = lambda i, j, p, r: (r <= p or QUERY_IDS[i] == KEY_IDS[j]) and j >= 2  # noqa: E731
    same(mask(jnp.arange(t), jnp.arange(s)), looped(sees, range(t), range(s)))
    same(masks.window(1, 0).dense(t, s), looped(lambda i, j, p, r: p - 1 <= r <= p, range(t), range(s)))


@pytest.mark.parametrize("name", RULES)
def test_attention_gives_positions_to_some_rules_and_indices_to_the_others(name):
    got = visible(built(name, jnp.int32), query_positions=QUERY_POSITIONS, key_positions=KEY_POSITIONS)
    same(got[0], looped(RULES[name][1], QUERY_POSITIONS, KEY_POSITIONS))


def test_chosen_rows_keep_their_indices_and_positions():
    rows = np.array([3, 0])
    mask = built("composition") & masks.lengths(query=4)
    sees = lambda i, j, p, r: RULES["composition"][1](i, j, p, r) and i < 4  # noqa: E731
    got = visible(mask, rows=rows, query_positions=QUERY_POSITIONS, key_positions=KEY_POSITIONS)
    same(got[0], looped(sees, QUERY_POSITIONS[rows], KEY_POSITIONS, query_indices=rows))


def test_positions_may_differ_per_batch_element():
    query_positions = np.stack([QUERY_POSITIONS, QUERY_POSITIONS[::-1]])
    mask = masks.causal() & masks.lengths(6)
    got = visible(mask, B=(2,), query_positions=query_positions, key_positions=KEY_POSITIONS)
    for b in range(2):
        same(got[b, 0], looped(lambda i, j, p, r: r <= p and j < 6, query_positions[b], KEY_POSITIONS))


def test_sizes_as_large_as_an_int32_do_not_wrap():
    huge, far = 2**31 - 1, [-(2**20), -5, 0, 2**20]
    for number in (int, np.int32, jnp.int32):
        assert masks.window(number(huge), number(huge))(far, far).all()
        assert masks.causal(number(huge))(far, far).all()
        assert not masks.causal(number(-huge))(far, far).any()
        assert masks.prefix(number(huge))(far, far).all()


# Leaves led by batch and head axes


def _integers(*shape):
    return np.random.default_rng(2).integers(0, 4, shape)


LED = {
    # rule of the leaves, their shapes for B = (2,) and N = 3
    "lengths by (*B)": (lambda x: masks.lengths(x), [(2,)]),
    "lengths by (*B, N)": (lambda x, y: masks.lengths(x, query=y), [(2, 3), (2,)]),
    "lengths by (*B, 1)": (lambda x: masks.lengths(x), [(2, 1)]),
    "lengths by (1,)": (lambda x: masks.lengths(x), [(1,)]),
    "causal by (1, N)": (lambda x: masks.causal(x), [(1, 3)]),
    "window by (*B, N)": (lambda x, y: masks.window(x, y), [(2, 3), ()]),
    "prefix by (*B)": (lambda x: masks.prefix(x), [(2,)]),
    "segments by (*B)": (lambda x, y: masks.segments(x, y), [(2, T), (2, S)]),
    "segments by (*B, N) and nothing": (lambda x, y, z: masks.segments(x, y, padding=z), [(2, 3, T), (S,), (2,)]),
    "array by (*B)": (lambda x: masks.array(x > 1), [(2, T, S)]),
    "array by (*B, N)": (lambda x: masks.array(x > 1), [(2, 3, 1, S)]),
    "array by (1, N)": (lambda x: masks.array(x > 1), [(1, 3, T, 1)]),
    "rule by (*B)": (lambda x: masks.rule(lambda q, k, x: abs(q - k) < x, x), [(2,)]),
    "rule by (*B, N)": (
        lambda x, y: masks.rule(lambda q, k, x, y: abs(q - k) < x[(q + k) % 4] + y, x, y, ranks=(1, 0)),
        [(2, 3, 4), (2, 1)],
    ),
    "a composition": (lambda x, y: masks.lengths(x) | ~masks.causal(y), [(2,), (1, 3)]),
}


def _of_head(x, ndim, b, n):
    """The part of a leaf of core rank `ndim` that head n of batch element b sees."""
    for index in (b, n)[: x.ndim - ndim]:
        x = x[index if x.shape[0] > 1 else 0]
    return x


@pytest.mark.parametrize("name", LED)
def test_leaves_may_be_led_by_batch_and_head_axes(name):
    build, shapes = LED[name]
    leaves = [_integers(*shape).astype(np.int32) for shape in shapes]
    rule = build(*leaves)
    ndims = [len(axes) for _, axes in rule.leaf_axes()]
    got = visible(rule, B=(2,), N=3)
    for b in range(2):
        for n in range(3):
            mine = build(*(_of_head(x, ndim, b, n) for x, ndim in zip(leaves, ndims, strict=True)))
            same(got[b, n], mine.dense(T, S))


def test_leaves_may_be_led_by_no_batch_axes_or_by_two():
    got = visible(masks.lengths(np.array([2, 0, 7])), N=3)
    for n, length in enumerate([2, 0, 7]):
        same(got[n], looped(lambda i, j, p, r, length=length: j < length))
    lengths = _integers(2, 1)
    got = visible(masks.lengths(lengths), B=(2, 3), N=1)
    for b in np.ndindex(2, 3):
        same(got[b][0], looped(lambda i, j, p, r, b=b: j < lengths[b[0], 0]))


WRONG_LEADS = {
    "(N,) where (*B) leads": (
        lambda: masks.causal(np.zeros(3, int)),
        "causal(offset=...) must be (*B,) = (2,), got (3,).",
    ),
    "(N, B)": (lambda: masks.lengths(np.zeros((3, 2), int)), "lengths(key=...) must be (*B, N) = (2, 3), got (3, 2)."),
    "too many": (
        lambda: masks.causal() & masks.prefix(np.zeros((2, 3, 1), int)),
        "prefix(length=...) must be () or (*B,) or (*B, N), got (2, 3, 1).",
    ),
    "ids of another length": (
        lambda: masks.segments(np.zeros((2, T), int)),
        f"segments(key_ids=...) must be (*B, S) = (2, {S}), got (2, {T}).",
    ),
    "a transposed array": (
        lambda: ~masks.array(np.ones((2, S, T), bool)),
        f"array(mask=...) must be (*B, T, S) = (2, {T}, {S}), got (2, {S}, {T}).",
    ),
    "an array of a rule that forgot its rank": (
        lambda: masks.rule(modular, np.int32(3), np.arange(4)),
        "rule(array1=...) must be (*B,) = (2,), got (4,).",
    ),
}


@pytest.mark.parametrize("build, text", WRONG_LEADS.values(), ids=WRONG_LEADS)
def test_other_leads_are_refused(build, text):
    with pytest.raises(ValueError) as error:
        visible(build(), B=(2,), N=3)
    assert str(error.value) == f"attention_weights: {text}"


def test_one_head_takes_no_leads():
    x = jnp.ones((T, 2)), jnp.ones((S, 2)), jnp.ones((S, 2))
    with pytest.raises(ValueError) as error:
        attend(*x, masks.lengths(jnp.array([3])))
    assert str(error.value) == "attend: lengths(key=...) must be (), got (1,)."


# rule(fn, *arrays)


def test_a_rules_function_sees_a_column_and_a_row_of_int32():
    seen = []

    def fn(q, k, x, table):
        seen.append([(a.shape, str(a.dtype)) for a in (q, k, x, table)])
        return q > k

    rule = masks.rule(fn, np.float32(1), np.zeros((2, 3), np.int64), ranks=(0, 2))
    rule.dense(2, 3)
    rule(np.arange(4), np.arange(1, dtype=np.uint8))
    visible(rule, query_positions=np.arange(T), key_positions=np.arange(S))
    arrays = [((), "float32"), ((2, 3), "int64")]
    assert [call[:2] for call in seen] == [[((t, 1), "int32"), ((1, s), "int32")] for t, s in ((2, 3), (4, 1), (T, S))]
    assert all(call[2:] == arrays for call in seen)


def test_arrays_of_a_rule_may_be_traced_and_mapped():
    far = jnp.arange(4, dtype=jnp.int32)
    at_most = lambda q, k, far: abs(q - k) < far  # noqa: E731
    got = jax.jit(jax.vmap(lambda far: masks.rule(at_most, far).dense(T, S)))(far)
    for x in range(4):
        same(got[x], looped(lambda i, j, p, r, x=x: abs(p - r) < x))


def test_floating_arrays_of_a_mask_get_a_gradient_of_zero():
    query, key = jnp.ones((T, 2)), jnp.ones((S, 2))
    f = lambda far: attend(query, key, key, masks.rule(nearer, far)).sum()  # noqa: E731
    assert f(1.5) != f(-9.5) and jax.grad(f)(1.5) == 0


# Combining


def _random_mask(rng, depth):
    """A rule and its loop's answer."""
    if depth == 0:
        name = rng.choice(list(RULES))
        return built(name, rng.choice(list(NUMBERS.values()))), looped(RULES[name][1])
    left, a = _random_mask(rng, rng.randrange(depth))
    right, b = _random_mask(rng, rng.randrange(depth))
    return rng.choice([(left & right, a & b), (left | right, a | b), (~left, ~a)])


LAWS = {
    "De Morgan of and": lambda a, b, c: (~(a & b), ~a | ~b),
    "De Morgan of or": lambda a, b, c: (~(a | b), ~a & ~b),
    "double negation": lambda a, b, c: (~~a, a),
    "idempotence of and": lambda a, b, c: (a & a, a),
    "idempotence of or": lambda a, b, c: (a | a, a),
    "absorption of or": lambda a, b, c: (a & (a | b), a),
    "absorption of and": lambda a, b, c: (a | (a & b), a),
    "commutativity": lambda a, b, c: (a & b, b & a),
    "associativity": lambda a, b, c: ((a | b) | c, a | (b | c)),
    "distributivity": lambda a, b, c: (a & (b | c), (a & b) | (a & c)),
    "contradiction": lambda a, b, c: (a & ~a, masks.lengths(0)),
    "excluded middle": lambda a, b, c: (a | ~a, masks.window(None, None)),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_masks_are_a_boolean_algebra(law):
    rng = random.Random(str(law))
    for depth in (1, 2, 3):
        (a, x), (b, y), (c, z) = (_random_mask(rng, depth) for _ in range(3))
        left, right = law(a, b, c)
        dense = left.dense(T, S)
        same(dense, np.asarray(right.dense(T, S)))
        same(dense, law(x, y, z)[0])


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
@pytest.mark.parametrize("op", [operator.and_, operator.or_], ids=["and", "or"])
@pytest.mark.parametrize("shape", [(T, S), (1, S), (T, 1)], ids=str)
def test_an_array_on_either_side_is_a_rule(make, op, shape):
    given = FULL[: shape[0], : shape[1]]
    expected = op(np.broadcast_to(given, (T, S)), looped(RULES["causal"][1]))
    for mask in (op(make(given), masks.causal()), op(masks.causal(), make(given))):
        assert isinstance(mask, masks.Mask)
        same(mask.dense(T, S), expected)
    traced = jax.jit(lambda x, rule: (op(x, rule).dense(T, S), op(rule, x).dense(T, S)))(given, masks.causal())
    for dense in traced:
        same(dense, expected)


NO_MASK = "mask {}: x must be a rule from jattn.masks or a boolean array, got"
NOT_MASKS = {
    "a float array": (
        np.ones((T, S)),
        f"masks.array: mask must be boolean (True = may attend), got float64. {NOT_BOOLEAN}",
    ),
    "an integer array": (
        jnp.ones((T, S), jnp.int32),
        f"masks.array: mask must be boolean (True = may attend), got int32. {NOT_BOOLEAN}",
    ),
    "a number": (True, f"{NO_MASK} bool."),
    "None": (None, f"{NO_MASK} NoneType."),
    "a list": ([[True]], f"{NO_MASK} list."),
    "a bias": (biases.alibi(0.5), f"{NO_MASK} Bias."),
}


@pytest.mark.parametrize("other, text", NOT_MASKS.values(), ids=NOT_MASKS)
@pytest.mark.parametrize("sign, op", [("&", operator.and_), ("|", operator.or_)], ids=["and", "or"])
def test_a_mask_combines_with_nothing_else(other, text, sign, op):
    for combine in (lambda: op(masks.causal(), other), lambda: op(other, masks.causal())):
        with pytest.raises(TypeError) as error:
            combine()
        assert str(error.value) == text.format(f"{sign} x")


def test_a_boolean_scalar_is_no_mask():
    for combine in (lambda: np.bool_(True) & masks.causal(), lambda: masks.causal() | jnp.bool_(True)):
        with pytest.raises(ValueError) as error:
            combine()
        assert str(error.value) == "masks.array: mask must be (*B, T, S), got ()."


def test_numpy_makes_no_object_array_of_a_rule():
    array = FULL.copy()
    for combine in (operator.iand, operator.ior, np.logical_and, np.bitwise_or, operator.add, operator.xor):
        with pytest.raises(TypeError):
            combine(array, masks.causal())
    same(array, FULL)


def test_a_rule_has_no_truth_value():
    rule = masks.causal()
    text = "causal(offset=0) has no truth value. Combine masks with &, | and ~, not with and, or and not."
    for ask in (
        lambda: bool(rule),
        lambda: rule and rule,
        lambda: rule or rule,
        lambda: operator.not_(rule),
        lambda: all([rule]),
    ):
        with pytest.raises(TypeError) as error:
            ask()
        assert str(error.value) == text
    with pytest.raises(TypeError, match="has no truth value"):
        bool(biases.alibi(0.5))


# Pytrees


@pytest.mark.parametrize("name", RULES)
def test_flattening_and_back_is_the_same_rule(name):
    rule = built(name, jnp.int32)
    leaves, structure = jax.tree.flatten(rule)
    back = jax.tree.unflatten(structure, leaves)
    assert repr(back) == repr(rule)
    assert jax.tree.structure(back) == structure
    assert hash(structure) == hash(jax.tree.structure(back))
    assert all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in leaves)
    same(back.dense(T, S), looped(RULES[name][1]))


def test_arrays_are_leaves_and_python_numbers_are_not():
    assert jax.tree.leaves(masks.window(2, 3) & masks.causal() & ~masks.lengths(4, 5)) == []
    for number in (np.int64(2), np.array(2), jnp.int32(2)):
        assert [(int(x), x.dtype) for x in jax.tree.leaves(masks.window(number, 3))] == [(2, np.int32)]
    mask = (masks.causal(np.int32(1)) | FULL) & ~masks.window(jnp.int32(2), None)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(mask)]
    assert paths == [".left.left.offset", ".left.right.mask", ".right.mask.left"]


def test_the_structure_is_the_program():
    structure = jax.tree.structure
    fn = lambda q, k: q > k  # noqa: E731
    same_program = [
        (masks.window(1, jnp.int32(2)), masks.window(1, jnp.int32(3))),
        (masks.causal() & FULL, masks.causal() & ~FULL),
        (masks.rule(fn) | masks.prefix(2), masks.rule(fn) | masks.prefix(2)),
    ]
    for a, b in same_program:
        assert structure(a) == structure(b) and hash(structure(a)) == hash(structure(b))
    another = [
        (masks.causal(1), masks.causal(2)),
        (masks.causal(1), masks.prefix(1)),
        (masks.causal(1), masks.causal(jnp.int32(1))),
        (masks.window(None, 1), masks.window(1, None)),
        (masks.rule(fn), masks.rule(lambda q, k: q > k)),
        (masks.causal() & masks.prefix(1), masks.causal() | masks.prefix(1)),
        (masks.rule(modular, 3, FULL, ranks=(0, 1)), masks.rule(modular, 3, FULL, ranks=(0, 2))),
    ]
    for a, b in another:
        assert structure(a) != structure(b)


@pytest.mark.parametrize("placeholder", [None, -1, 0.5, "x", object()], ids=["None", "int", "float", "str", "object"])
def test_unflattening_never_validates(placeholder):
    for name in RULES:
        rule = built(name, jnp.int32)
        n = len(jax.tree.leaves(rule))
        filled = jax.tree.map(lambda _: placeholder, rule)
        assert isinstance(filled, masks.Mask)
        assert jax.tree.leaves(filled, is_leaf=lambda x: x is None) == [placeholder] * n
        assert str(filled) == f"{filled!r}      # no values to draw" if n else str(rule)


def test_new_values_of_arrays_are_not_traced_again_and_new_numbers_are():
    traced = []

    @jax.jit
    def dense(mask):
        traced.append(mask)
        return mask.dense(T, S)

    def build(n):
        ids = masks.segments(QUERY_IDS % (int(n) + 1), KEY_IDS)
        return (masks.causal(n) & ids) | masks.rule(modular, n, KEY_IDS, ranks=(0, 1))

    for n in range(4):
        same(dense(build(jnp.int32(n + 1))), np.asarray(build(n + 1).dense(T, S)))
    assert len(traced) == 1
    same(dense(masks.causal(1)), looped(lambda i, j, p, r: r <= p + 1))
    same(dense(masks.causal(2)), looped(lambda i, j, p, r: r <= p + 2))
    same(dense(masks.causal(1)), looped(lambda i, j, p, r: r <= p + 1))
    assert len(traced) == 3


def test_vmap_maps_a_whole_rule():
    lengths = np.array([0, 3, 9])
    rule = masks.lengths(lengths) & masks.causal(np.array([1, -1, 0])) & masks.window(2, None)
    got = jax.vmap(lambda mask: mask.dense(T, S))(rule)
    for b in range(3):
        expected = lambda i, j, p, r, b=b: j < lengths[b] and r <= p + [1, -1, 0][b] and r >= p - 2  # noqa: E731
        same(got[b], looped(expected))


def test_vmap_maps_the_leaves_it_is_told_to():
    lengths = np.array([0, 3])
    rule = masks.lengths(lengths) | masks.array(FULL)
    in_axes = jax.tree.map(lambda x: 0 if x.ndim == 1 else None, rule)
    ints = jax.tree.map(lambda x: 0, masks.lengths(lengths))
    got = jax.vmap(lambda mask: mask.dense(T, S), in_axes=(in_axes,))(rule)
    alone = jax.vmap(lambda mask: mask.dense(T, S), in_axes=(ints,))(masks.lengths(lengths))
    for b in range(2):
        same(got[b], looped(lambda i, j, p, r, b=b: j < lengths[b] or FULL[i, j]))
        same(alone[b], looped(lambda i, j, p, r, b=b: j < lengths[b]))


def test_a_wrong_in_axes_is_jaxs_own_error():
    wrong = jax.tree.map(lambda x: 0, masks.causal(jnp.int32(1)))
    with pytest.raises(ValueError, match="in_axes"):
        jax.vmap(lambda mask: mask.dense(T, S), in_axes=(wrong,))(masks.lengths(jnp.arange(2)))


def test_vmap_and_jit_return_rules():
    rule = jax.jit(jax.vmap(lambda n: masks.causal(n) & masks.window(3, None)))(jnp.arange(2))
    assert repr(rule) == "(causal(offset=int32[2]) & window(left=3))"
    same(jax.tree.map(lambda x: x[1], rule).dense(T, S), looped(lambda i, j, p, r: p - 3 <= r <= p + 1))


def test_scan_slices_and_carries_rules():
    rules = masks.lengths(jnp.array([1, 4, 6])) & masks.window(1, None)

    def step(carry, mask):
        carry = jax.tree.map(lambda offset: offset + 1, carry)
        return carry, (mask & carry).dense(T, S)

    last, dense = jax.lax.scan(step, masks.causal(jnp.int32(-1)), rules)
    assert jax.tree.leaves(last) == [2]
    for b, length in enumerate([1, 4, 6]):
        same(dense[b], looped(lambda i, j, p, r, b=b, n=length: j < n and p - 1 <= r <= p + b))


def test_cond_takes_and_returns_rules():
    @jax.jit
    def either(first, mask):
        mask = jax.lax.cond(first, lambda m: m, lambda m: jax.tree.map(lambda n: n + 1, m), mask)
        return jax.lax.cond(first, lambda m: m.dense(T, S), lambda m: (~m).dense(T, S), mask)

    mask = masks.causal(jnp.int32(1))
    same(either(True, mask), looped(lambda i, j, p, r: r <= p + 1))
    same(either(False, mask), looped(lambda i, j, p, r: r > p + 2))


# Bounds of tiles


def assert_sound(rule, visible, query_positions=None, key_positions=None):
    """Tiles are 2 x 3, and the last ones start early. No pair is visible where none may be; all are where all must."""
    rows, columns = _plan.axis(T, 2), _plan.axis(S, 3)
    tiles = _plan.tiles(rows, columns, query_positions, key_positions)
    for static in (False, True):
        bounds = rule.bounds(tiles, static=static)
        some, every = (np.broadcast_to(np.asarray(x), (len(rows.start), len(columns.start))) for x in bounds)
        for (i, row), (j, column) in itertools.product(enumerate(rows.start), enumerate(columns.start)):
            tile = visible[row : row + 2, column : column + 3]
            assert some[i, j] >= tile.any() and every[i, j] <= tile.all()


@pytest.mark.parametrize("name", RULES)
def test_bounds_are_sound(name):
    build, sees = RULES[name]
    positions = jnp.asarray(QUERY_POSITIONS, np.int32), jnp.asarray(KEY_POSITIONS, np.int32)
    for rule in (build(int), build(jnp.int32)):
        for same_rule in (rule, copy.deepcopy(rule)):
            assert_sound(same_rule, looped(sees))
        assert_sound(rule, looped(sees, QUERY_POSITIONS, KEY_POSITIONS), *positions)


def test_a_copy_is_the_same_rule():
    for name in RULES:
        rule = built(name, jnp.int32)
        assert repr(copy.deepcopy(rule)) == repr(rule)
        assert jax.tree.structure(copy.deepcopy(rule)) == jax.tree.structure(rule)


# JAX's structures of a rule are equal only if the functions in it are the same ones.
@pytest.mark.parametrize("name", [name for name in RULES if name not in ("rule", "rule of queries alone")])
def test_a_rule_can_be_pickled(name):
    rule = built(name, jnp.int32)
    back = pickle.loads(pickle.dumps(rule))
    assert jax.tree.structure(back) == jax.tree.structure(rule)
    same(back.dense(T, S), rule.dense(T, S))


# What is refused

INTEGERS = "must be an int or an array of integers, got"
NOT_HASHABLE = "Pass the arrays that it holds as arrays of a rule."
NO_BOUND = "Pass None for no bound."
NOT_LED = "Map batch and head axes with jax.vmap."
NO_ROW = "query_positions must be within 0 ... T - 1 = 4, got [0, 5]."
NO_COLUMN = "key_positions must be within 0 ... S - 1 = 6, got [-1]."
WRONG_TYPES = {
    f"masks.causal: offset {INTEGERS} 1.0.": lambda: masks.causal(1.0),
    f"masks.causal: offset {INTEGERS} nan.": lambda: masks.causal(NAN),
    f"masks.causal: offset {INTEGERS} float32.": lambda: masks.causal(jnp.float32(1)),
    f"masks.causal: offset {INTEGERS} float64.": lambda: masks.causal(np.float64(1)),
    f"masks.causal: offset {INTEGERS} True.": lambda: masks.causal(True),
    f"masks.causal: offset {INTEGERS} bool.": lambda: masks.causal(np.bool_(True)),
    f"masks.causal: offset {INTEGERS} [1].": lambda: masks.causal([1]),
    f"masks.causal: offset {INTEGERS} None.": lambda: masks.causal(None),
    f"masks.window: right {INTEGERS} 2.5.": lambda: masks.window(1, 2.5),
    f"masks.lengths: key {INTEGERS} float64.": lambda: masks.lengths(jnp.ones(2)),
    f"masks.prefix: length {INTEGERS} None.": lambda: masks.prefix(None),
    "masks.segments: query_ids must be integers, got float64.": lambda: masks.segments(np.ones(3)),
    "masks.segments: key_ids must be integers, got bool.": lambda: masks.segments(QUERY_IDS, np.ones(3, bool)),
    f"masks.segments: padding {INTEGERS} 0.0.": lambda: masks.segments(QUERY_IDS, padding=0.0),
    f"masks.array: mask must be boolean (True = may attend), got float32. {NOT_BOOLEAN}": lambda: masks.array(
        np.ones((2, 2), np.float32)
    ),
    "masks.rule: fn must be a function, got ndarray.": lambda: masks.rule(FULL),
    f"masks.rule: fn must be hashable, got Unhashable. {NOT_HASHABLE}": lambda: masks.rule(Unhashable()),
    "masks.rule: array0 must be an array, got str.": lambda: masks.rule(modular, "x"),
    "masks.rule: fn must return a boolean array (True = may attend), got float64.": lambda: masks.rule(
        lambda q, k: (q + k).astype(float)
    ).dense(2, 3),
    "masks.rule: fn must return a boolean array (True = may attend), got True.": lambda: masks.rule(
        lambda q, k: True
    ).dense(2, 3),
    "masks.rule: fn must return a boolean array (True = may attend), got None.": lambda: masks.rule(
        lambda q, k: None
    ).dense(2, 3),
    "causal(offset=0): query_positions must be integers, got float64.": lambda: masks.causal()(np.ones(2), [0]),
}
WRONG_VALUES = {
    "masks.causal: offset must fit in 32 bits, got 4294967296.": lambda: masks.causal(2**32),
    "masks.causal: offset must fit in 32 bits, got -4294967296.": lambda: masks.causal(np.int64(-(2**32))),
    f"masks.causal: offset must fit in 32 bits, got {2**70}.": lambda: masks.causal(2**70),
    "masks.prefix: length must fit in 32 bits, got 2147483648.": lambda: masks.prefix(np.uint32(2**31)),
    f"masks.window: left must be >= 0, got -1. {NO_BOUND}": lambda: masks.window(-1, 0),
    f"masks.window: right must be >= 0, got -2. {NO_BOUND}": lambda: masks.window(0, np.int32(-2)),
    f"masks.window: left must be >= 0, got -4. {NO_BOUND}": lambda: masks.window(jnp.array([3, -4]), 0),
    f"masks.lengths: key must be >= 0, got -1. {NO_BOUND}": lambda: masks.lengths(-1),
    f"masks.lengths: query must be >= 0, got -1. {NO_BOUND}": lambda: masks.lengths(query=np.array([2, -1])),
    "masks.prefix: length must be >= 0, got -1.": lambda: masks.prefix(-1),
    "masks.segments: query_ids must be (*B, T), got ().": lambda: masks.segments(1),
    "masks.segments: key_ids must be (*B, S), got ().": lambda: masks.segments(QUERY_IDS, np.int32(1)),
    "masks.array: mask must be (*B, T, S), got (3,).": lambda: masks.array(np.ones(3, bool)),
    "masks.rule: ranks must be one int >= 0 for each of 2 arrays, got (0,).": lambda: masks.rule(
        modular, 3, FULL, ranks=(0,)
    ),
    "masks.rule: ranks must be one int >= 0 for each of 0 arrays, got (0,).": lambda: masks.rule(modular, ranks=(0,)),
    "masks.rule: ranks must be one int >= 0 for each of 1 arrays, got (-1,).": lambda: masks.rule(
        modular, FULL, ranks=(-1,)
    ),
    "masks.rule: ranks must be one int >= 0 for each of 1 arrays, got 2.": lambda: masks.rule(modular, FULL, ranks=2),
    "masks.rule: array1 must be (*B, ..., ...), got (7,).": lambda: masks.rule(modular, 3, KEY_IDS, ranks=(0, 2)),
    "masks.rule: fn must return (t, s) = (2, 3), each axis full or 1, got (3,).": lambda: masks.rule(
        lambda q, k: (q > k)[0]
    ).dense(2, 3),
    "masks.rule: fn must return (t, s) = (2, 3), each axis full or 1, got (3, 2).": lambda: masks.rule(
        lambda q, k: (q > k).T
    ).dense(2, 3),
    f"dense: array(mask=...) must be (T, S) = ({S}, {T}), got ({T}, {S}).": lambda: (masks.causal() & FULL).dense(S, T),
    f"dense: lengths(key=...) must be (), got (2,). {NOT_LED}": lambda: masks.lengths(np.array([1, 2])).dense(2, 2),
    f"prefix(length=int32[2]): prefix(length=...) must be (), got (2,). {NOT_LED}": lambda: masks.prefix(
        np.array([1, 2])
    )([0, 1], [0, 1]),
    "causal(offset=0): key_positions must be (s,), got ().": lambda: masks.causal()([0], 0),
    "causal(offset=0): query_positions must be (t,), got (2, 1).": lambda: masks.causal()([[0], [1]], [0]),
    f"array(mask=bool[5,7]): {NO_ROW}": lambda: masks.array(FULL)([0, 5], [0]),
    f"segments(query_ids=int32[5], key_ids=int32[7]): {NO_COLUMN}": lambda: masks.segments(QUERY_IDS, KEY_IDS)(
        [0], [-1]
    ),
}
REFUSED = [(TypeError, text, build) for text, build in WRONG_TYPES.items()]
REFUSED += [(ValueError, text, build) for text, build in WRONG_VALUES.items()]


@dataclasses.dataclass
class Unhashable:
    far: int = 2

    def __call__(self, q, k):
        return q - k < self.far


@pytest.mark.parametrize("kind, text, build", REFUSED, ids=[text for _, text, _ in REFUSED])
def test_what_is_refused_is_refused_in_these_words(kind, text, build):
    with pytest.raises(kind) as error:
        build()
    assert str(error.value) == text


def test_known_values_are_validated_while_tracing():
    size = jnp.int32(-1)
    with pytest.raises(ValueError, match="left must be >= 0, got -1"):
        jax.jit(lambda: masks.window(size, 0).dense(T, S))()
    # Traced ones are as they are: no key is near.
    assert not jax.jit(lambda n: masks.window(n, n).dense(T, S))(-1).any()


# Printing

REPRS = {
    "causal(offset=0)": lambda: masks.causal(),
    "causal(offset=int32[])": lambda: masks.causal(np.int64(3)),
    "window(left=1, right=0)": lambda: masks.window(1, 0),
    "window(left=2)": lambda: masks.window(2, None),
    "window(left=int32[2], right=0)": lambda: masks.window(np.array([1, 2]), 0),
    "window()": lambda: masks.window(None, None),
    "lengths(key=3)": lambda: masks.lengths(3),
    "lengths(query=int32[])": lambda: masks.lengths(query=jnp.int32(3)),
    "segments(query_ids=int32[5], key_ids=int32[7], padding=0)": lambda: masks.segments(QUERY_IDS, KEY_IDS, padding=0),
    "prefix(length=2)": lambda: masks.prefix(2),
    "array(mask=bool[5,7])": lambda: masks.array(FULL),
    "rule(fn=modular, array0=int64[], array1=float32[2,3])": lambda: masks.rule(
        modular, 3, np.ones((2, 3), np.float32), ranks=(0, 2)
    ),
    "rule(fn=functools.partial(<built-in function lt>))": lambda: masks.rule(functools.partial(operator.lt)),
    "~((causal(offset=1) & ~prefix(length=2)) | array(mask=bool[5,7]))": lambda: (
        ~((masks.causal(1) & ~masks.prefix(2)) | FULL)
    ),
}


@pytest.mark.parametrize("text", REPRS)
def test_repr_is_the_call(text):
    assert repr(REPRS[text]()) == text


def drawing(mask, *sizes):
    """The rule's line, and the picture as a bool array."""
    first, *lines = mask.draw(*sizes).splitlines()
    assert first == f"{mask!r}      # ■ = may attend, on the first positions"
    assert {c for line in lines for c in line} <= set("■· ")
    return np.array([[c == "■" for c in line.split(" ")] for line in lines])


@pytest.mark.parametrize("name", RULES)
def test_a_drawing_is_the_dense_mask(name):
    rule = built(name, jnp.int32)
    same(drawing(rule, T, S), looped(RULES[name][1]))


SIZES = {
    "4 positions where nothing is large": (masks.causal(), (4, 4)),
    "two past the largest number": (masks.causal(3) & ~masks.window(5, jnp.int32(1)), (7, 7)),
    "however far back": (masks.causal(-6), (8, 8)),
    "at most 16 for a number": (masks.causal(1000), (16, 16)),
    "what arrays have": (masks.array(np.ones((3, 6), bool)) & masks.causal(9), (3, 6)),
    "what arrays have along the axis that they have": (masks.array(np.ones((1, 6), bool)) & masks.causal(9), (11, 6)),
    "at most 32 of an array": (masks.segments(np.zeros(40, int), np.zeros(20, int)), (32, 20)),
    "one token": (masks.segments(np.zeros(1, int)), (1, 1)),
    "no token": (masks.segments(np.zeros(0, int)), (0, 0)),
    "the smaller of two arrays": (masks.array(np.ones((3, 6), bool)) | np.ones((4, 5), bool), (3, 5)),
    "numbers of a rule's arrays": (masks.rule(lambda q, k, n: q < n, np.int32(8)), (10, 10)),
    "but not those that are no sizes": (masks.rule(nearer, NAN), (4, 4)),
}


@pytest.mark.parametrize("mask, shape", SIZES.values(), ids=SIZES)
def test_a_drawing_shows(mask, shape):
    first, *lines = str(mask).splitlines()
    assert first == f"{mask!r}      # ■ = may attend, on the first positions"
    assert len(lines) == shape[0]
    assert all(len(line.split()) == shape[1] for line in lines)


def test_sizes_of_a_drawing_may_be_given():
    assert drawing(masks.causal(), 2).shape == (2, 4)
    assert drawing(masks.causal(), None, 3).shape == (4, 3)
    with pytest.raises(ValueError, match="query_positions must be within"):
        masks.array(FULL).draw(T + 1, S)


def test_what_has_no_values_prints_what_it_is():
    printed = {}

    def see(mask, name="traced"):
        printed[name] = str(mask)
        return mask.dense(T, S)

    jax.jit(see)(masks.causal(jnp.int32(1)))
    jax.vmap(lambda mask: see(mask, "mapped"))(masks.lengths(jnp.arange(2)) & FULL[None].repeat(2, 0))
    jax.jit(lambda n: see(masks.rule(lambda q, k: q < k + n), "closed over"))(1)
    jax.jit(lambda: see(masks.causal(np.int32(1)) & masks.causal(), "known"))()
    printed["led"] = str(masks.lengths(np.arange(2)) | masks.causal())
    printed["a shape"] = str(jax.eval_shape(lambda: masks.causal(jnp.int32(1))))
    none = "      # no values to draw"
    assert printed.pop("known").count("\n") == 4
    assert printed == {
        "traced": f"causal(offset=int32[]){none}",
        "mapped": f"(lengths(key=int32[]) & array(mask=bool[5,7])){none}",
        "closed over": f"rule(fn=<lambda>){none}",
        "led": "(lengths(key=int32[2]) | causal(offset=0))      # led by batch or head axes: no single drawing",
        "a shape": f"causal(offset=ShapeDtypeStruct(shape=(), dtype=int32)){none}",
    }


def test_ids_that_differ_beyond_32_bits_are_not_taken_for_one_document():
    with pytest.raises(ValueError, match="query_ids must be within 32 bits, got 4294967296"):
        masks.segments(np.array([0, 2**32]))
