"""The contract of `attend` and `attention`, clause by clause, on every engine: see the README's table."""

import functools
import itertools
import os
import subprocess
import sys
import textwrap

import battery
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from battery import STATS, Sizes, inputs, normal
from conftest import assert_close
from jax.experimental import checkify
from jax.test_util import check_grads

from jattn import Cache, attend, attention, attention_weights, biases, cached_attention, masks, merge

NAN, INF = np.nan, np.inf
T, S, H, D = 5, 7, 3, 2
ONE_HEAD = Sizes(B=(), T=T, S=S, N=1, K=1, H=H, D=D)
GROUPED = Sizes(B=(2,), T=T, S=S, N=4, K=2, H=H, D=D)

# Two patterns with rows that see nothing and keys that nobody sees. In ISLANDS documents are packed side by side; in
# BEFORE most keys are seen by some queries only.
QUERIES, KEYS = np.arange(T)[:, None], np.arange(S)[None, :]
ISLANDS = (QUERIES // 2 == KEYS // 3) & (QUERIES < 4)
BEFORE = KEYS < QUERIES


def islands(q, k):
    return (q // 2 == k // 3) & (q < 4)


def one_head(dtype=np.float64, seed=0):
    """query, key, value of `attend`."""
    return tuple(x[:, 0] for x in inputs(ONE_HEAD, seed, dtype))


def frozen(engine):
    return tuple(engine.items())


def leaves_equal(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def leaves_close(got, expected, dtype="float64", factor=10.0):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_close(x, y, dtype, factor)


# Clauses 1, 2, 6, 7: every option with every other, against the reference


CASES = {str(case): case for case in battery.cases()}


def test_every_two_options_meet():
    for (i, a), (j, b) in itertools.combinations(enumerate(battery.Case._fields), 2):
        met = {(case[i], case[j]) for case in CASES.values()}
        assert len(met) == len({x for x, _ in met}) * len({y for _, y in met}), (a, b)
    assert len(CASES) >= 120


def _dictionary(result):
    return {name: np.asarray(getattr(result, name)) for name in ("out", *STATS)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_options_agree_with_the_reference(case, engine):
    args, mask, call, expected = battery.problem(case)
    got = call(args, mask, **engine)
    expected = _dictionary(expected(args))
    out, stats = got if case.stats else (got, None)
    assert_close(out, expected["out"], factor=10)
    for name in STATS if case.stats else ():
        assert_close(getattr(stats, name), expected[name], factor=10)


@pytest.mark.parametrize("case", list(CASES.values())[::11], ids=list(CASES)[::11])
def test_options_have_the_derivatives_of_the_reference_in_both_modes(case, engine):
    case = case._replace(stats=True)
    args, mask, call, expected = battery.problem(case)
    rng = np.random.default_rng(5)
    tangent = {name: rng.normal(size=np.shape(x)) for name, x in args.items()}

    def finite(outs):
        # An empty row has lse = max_logit = -inf; its derivatives are 0 and are proved elsewhere.
        return {name: jnp.where(jnp.isneginf(x), 0, x) for name, x in outs.items()}

    def f(args, mask):
        out, stats = call(args, mask, **engine)
        return finite({"out": out} | {name: getattr(stats, name) for name in STATS})

    @jax.jit
    def both(args, mask, tangent, cotangent):
        out, pushed = jax.jvp(lambda args: f(args, mask), (args,), (tangent,))
        pulled = jax.vjp(lambda args: f(args, mask), args)[1](cotangent)[0]
        return out, pushed, pulled

    cotangent = {name: rng.normal(size=x.shape) for name, x in _dictionary(expected(args)).items()}
    args = jax.tree.map(jnp.asarray, args)
    out, pushed, pulled = both(args, mask, tangent, cotangent)
    step = 1e-6
    moved = [{name: np.asarray(x) + sign * step * tangent[name] for name, x in args.items()} for sign in (1, -1)]
    plus, minus = (finite(_dictionary(expected(args))) for args in moved)
    for name, x in finite(_dictionary(expected(args))).items():
        assert_close(out[name], x, factor=10)
        slope = (plus[name] - minus[name]) / (2 * step)
        np.testing.assert_allclose(pushed[name], slope, rtol=0, atol=1e-7 * max(1, np.abs(slope).max(initial=0)))
    # Both modes see one linear map: <cotangent, J tangent> = <J^T cotangent, tangent>.
    left = sum(np.vdot(cotangent[name], pushed[name]) for name in cotangent)
    right = sum(np.vdot(pulled[name], tangent[name]) for name in tangent)
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-10)


DERIVATIVES = {
    "causal, softcap, bias, sink, dropout, statistics": dict(
        mask=masks.causal(),
        bias=True,
        softcap=1.5,
        sink=0.3,
        stats=True,
        dropout_rate=0.4,
        dropout_rng=jax.random.key(3),
    ),
    "a window with empty rows": dict(mask=masks.window(1, 0) & masks.lengths(key=3)),
}


@pytest.mark.parametrize("options", DERIVATIVES.values(), ids=DERIVATIVES)
def test_first_and_second_derivatives_are_those_of_finite_differences(options, engine):
    options = dict(options)
    stats, bias = options.pop("stats", False), options.pop("bias", False)
    args = [*map(jnp.asarray, one_head())]
    extras = {name: jnp.float64(options.pop(name)) for name in ("softcap", "sink") if name in options}
    if bias:
        extras["bias"] = jnp.asarray(normal(8, T, S))

    @jax.jit
    def f(query, key, value, extras):
        out = attend(query, key, value, return_stats=stats, **options, **extras, **engine)
        return jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), out)

    check_grads(f, (*args, extras), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("given", ["as a number", "as an array", "traced"])
def test_scale_defaults_to_one_over_the_root_of_H(given, engine):
    query, key, value = one_head()
    scale = {"as a number": H**-0.5}.get(given, jnp.float32(H**-0.5))
    f = functools.partial(attend, query, key, value, masks.causal(), **engine)
    got = jax.jit(lambda scale: f(scale=scale))(scale) if given == "traced" else f(scale=scale)
    assert_close(got, f(), "float32" if given != "as a number" else "float64")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_half_precision_logits_neither_overflow_nor_lose_an_ulp(dtype, scale, engine):
    # q·k is about 640 000; float16 ends at 65 504, bfloat16 has 8 bits.
    query = (100 + normal(1, 3, 64)).astype(jnp.dtype(dtype))
    key = (100 + normal(2, 4, 64)).astype(jnp.dtype(dtype))
    value = np.eye(4).astype(jnp.dtype(dtype))
    _, stats = attend(query, key, value, scale=scale, return_stats=True, **engine)
    logits = query.astype(np.float64) @ key.astype(np.float64).T * (64**-0.5 if scale is None else scale)
    assert_close(stats.max_logit, logits.max(1), "float32")
    peak = logits.max(1, keepdims=True)
    assert_close(stats.lse, np.log(np.exp(logits - peak).sum(1)) + peak[:, 0], "float32")


def test_float32_products_ask_for_the_highest_precision(engine):
    # A CPU has no other; elsewhere operands would be rounded.
    x = jnp.zeros((8, 4), np.float32)
    f = jax.grad(lambda q, k, v: attend(q, k, v, masks.causal(), **engine).sum(), (0, 1, 2))
    products = [line for line in jax.jit(f).lower(x, x, x).as_text().splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 5
    assert all("HIGHEST, HIGHEST" in line for line in products)


@pytest.mark.parametrize("count", range(5))
def test_any_subset_of_mask_sources_is_their_conjunction(count, engine):
    q, k = QUERIES, KEYS
    ids = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 0, 1, 1, 0])
    full = np.random.default_rng(4).random((T, S)) < 0.8
    sources = {
        "array": (full, full),
        "causal": (masks.causal(2), k <= q + 2),
        "segments": (masks.segments(*ids), ids[0][:, None] == ids[1]),
        "lengths": (masks.lengths(key=jnp.int32(5)), np.broadcast_to(k < 5, (T, S))),
    }
    holes = np.where(np.random.default_rng(5).random((T, S)) < 0.2, -INF, 0.5)
    for chosen in itertools.combinations(sources, count):
        rules = [sources[name][0] for name in chosen]
        dense = np.logical_and.reduce([np.ones((T, S), bool), *(sources[name][1] for name in chosen)])
        mask = functools.reduce(lambda a, b: a & b, rules) if rules else None
        bias = holes if len(chosen) % 2 else None
        expected = dense & (holes > -INF) if len(chosen) % 2 else dense
        options = dict(dropout_rate=1e-12, dropout_rng=jax.random.key(0)) if chosen[:1] == ("array",) else {}
        _, stats = attend(*one_head(), mask, bias, return_stats=True, **options, **engine)
        np.testing.assert_array_equal(np.isneginf(stats.max_logit), ~expected.any(1))
        weights = attention_weights(*(x[:, None] for x in one_head()[:2]), _led(mask), _led(bias))[0]
        np.testing.assert_array_equal(np.asarray(weights) > 0, expected)


def _led(x):
    """An array mask or bias of one head, as `attention` wants it."""
    return x[None] if isinstance(x, np.ndarray) else x


# Clause 3: rows that see nothing


EMPTY_FORMS = {
    "a mask array": (ISLANDS, None),
    "a rule": (masks.rule(islands), None),
    "segments": (masks.segments(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 3])), None),
    "a bias of -inf": (None, np.where(ISLANDS, 0.5, -INF)),
    "half a mask, half a bias": (masks.lengths(query=4), np.where((QUERIES // 2 == KEYS // 3), 0.5, -INF)),
}


def _everything_of_a_row(engine, **options):
    def f(args):
        out, stats = attend(**args, return_stats=True, **options, **engine)
        return (out, *stats)

    return f


@pytest.mark.parametrize("mask, bias", EMPTY_FORMS.values(), ids=EMPTY_FORMS)
def test_an_empty_row_is_zero_and_so_is_every_derivative_through_it(mask, bias, engine):
    query, key, value = one_head()
    args = {"query": query, "key": key, "value": value, "bias": bias if bias is not None else normal(3, T, S)}
    f = functools.partial(attend, mask=mask, return_stats=True, **engine)

    def row(args, i=4):
        out, stats = f(**args)
        return (out[i], *(x[i] for x in stats))

    @jax.jit
    def run(args, tangent):
        values, pushed = jax.jvp(row, (args,), (tangent,))
        pull = lambda args: jax.vjp(row, args)[1](jax.tree.map(jnp.ones_like, values))[0]  # noqa: E731
        gradient, again = jax.jvp(pull, (args,), (tangent,))
        return values, pushed, gradient, again, jax.vjp(pull, args)[1](tangent)[0]

    values, *derivatives = run(args, jax.tree.map(np.ones_like, args))
    leaves_equal(values, (np.zeros(D), -INF, -INF, 0.0))
    for x in jax.tree.leaves(derivatives):
        np.testing.assert_array_equal(x, np.zeros(x.shape))


def test_a_sink_is_all_that_an_empty_row_has(engine):
    sink = jnp.float64(0.7)
    f = lambda sink: attend(*one_head(), ISLANDS, sink=sink, return_stats=True, **engine)  # noqa: E731
    out, stats = f(sink)
    leaves_equal((out[4], stats.max_logit[4], stats.entropy[4]), (np.zeros(D), -INF, 0.0))
    assert_close(stats.lse[4], 0.7)
    slope = jax.jacfwd(lambda sink: f(sink)[1].lse[4])(sink)
    assert_close(slope, 1.0)
    assert_close(jax.grad(lambda sink: f(sink)[1].lse[4])(sink), 1.0)
    with pytest.raises(ValueError, match="empty='raise'"):
        attend(*one_head(), ISLANDS, sink=sink, empty="raise", **engine)


ALIVE = np.ones((T, S), bool)
NOBODY = {
    "a mask array": (lambda alive: {"mask": ALIVE if alive else ISLANDS}),
    "a rule": (lambda alive: {"mask": masks.rule(causal_fn if alive else islands)}),
    "a static rule": (lambda alive: {"mask": masks.causal(0 if alive else -1)}),
    "a rule with an array": (lambda alive: {"mask": masks.causal(np.array(0 if alive else -1))}),
    "a bias of -inf": (lambda alive: {"bias": np.where(ALIVE if alive else ISLANDS, 0.5, -INF)}),
    "positions": lambda alive: {"mask": masks.causal(), "query_positions": np.arange(T) - (not alive)},
}


def causal_fn(q, k):
    return k <= q


@pytest.mark.parametrize("options", NOBODY.values(), ids=NOBODY)
def test_empty_raise_raises_at_once_where_visibility_is_known(options, engine):
    message = "attend: a query has no key that it may attend to, and empty='raise'. Pass empty='zero' for zeros."
    with pytest.raises(ValueError) as e:
        attend(*one_head(), **options(False), empty="raise", **engine)
    assert str(e.value) == message
    assert_close(attend(*one_head(), **options(True), empty="raise", **engine), attend(*one_head(), **options(True)))


@pytest.mark.parametrize("name", ["a mask array", "a rule", "a static rule", "a bias of -inf"])
def test_empty_raise_raises_while_tracing_where_visibility_is_known(name, engine):
    f = lambda alive: jax.jit(lambda *x: attend(*x, **NOBODY[name](alive), empty="raise", **engine))  # noqa: E731
    with pytest.raises(ValueError, match="^attend: a query has no key"):
        f(False)(*one_head())
    assert f(True)(*one_head()).shape == (T, D)


@pytest.mark.parametrize("S", [0])
def test_empty_raise_knows_that_no_keys_are_no_keys(S, engine):
    with pytest.raises(ValueError, match="^attend: a query has no key"):
        attend(np.zeros((T, H)), np.zeros((S, H)), np.zeros((S, D)), empty="raise", **engine)
    assert attend(np.zeros((0, H)), np.zeros((S, H)), np.zeros((S, D)), empty="raise", **engine).shape == (0, D)


@pytest.mark.parametrize("B, N", [(0, 2), (2, 0)], ids=["no batch", "no heads"])
def test_empty_raise_knows_that_nobody_has_no_empty_row(B, N, engine):
    for S, mask in ((0, None), (3, np.zeros((1, 1, 1, 1), bool))):
        query, key, value = np.zeros((B, T, N, H)), np.zeros((B, S, 2, H)), np.zeros((B, S, 2, D))
        assert attention(query, key, value, mask, empty="raise", **engine).shape == (B, T, N, D)


TRACED = {
    "a mask array": lambda m: {"mask": m},
    "a bias of -inf": lambda m: {"bias": jnp.where(m, 0.0, -INF)},
    "a rule": lambda m: {"mask": masks.causal() & m},
}


@pytest.mark.parametrize("options", TRACED.values(), ids=TRACED)
def test_empty_raise_is_a_check_where_visibility_is_traced(options, engine):
    f = jax.jit(lambda m: attend(*one_head(), **options(m), empty="raise", **engine))
    unseen = ALIVE & (QUERIES > 0)
    checked = checkify.checkify(f)
    error, out = checked(ALIVE)
    assert error.get() is None
    assert_close(out, attend(*one_head(), **options(ALIVE), **engine))
    assert "attend: a query has no key that it may attend to" in checked(unseen)[0].get()
    with pytest.raises(ValueError, match="checkify"):
        f(ALIVE)


def test_empty_raise_under_vmap_checks_each_element(engine):
    f = jax.vmap(lambda m: attend(*one_head(), m, empty="raise", **engine))
    checked = checkify.checkify(f)
    assert checked(np.stack([ALIVE, ALIVE]))[0].get() is None
    assert "attend: a query has no key" in checked(np.stack([ALIVE, ISLANDS]))[0].get()


def test_attention_raises_for_one_empty_row_of_one_head(engine):
    mask = np.ones((2, 4, T, S), bool)
    attention(*inputs(GROUPED), mask, empty="raise", **engine)
    mask[1, 2, 3] = False
    with pytest.raises(ValueError, match="^attention: a query has no key"):
        attention(*inputs(GROUPED), mask, empty="raise", **engine)
    with pytest.raises(ValueError, match="^attention_weights: a query has no key"):
        attention_weights(*inputs(GROUPED)[:2], mask, empty="raise")


# Clause 4: what is not visible is never read. One compiled function gives everything that can be asked of attention;
# it runs on clean and on spoilt inputs, and what no spoilt pair reaches must be the same, bit for bit. What is
# visible and not finite must be seen: those rows, and what depends on them, are NaN.


POISONS = {"NaN": NAN, "+inf": INF, "-inf": -INF, "1e38": 1e38}

RICH = {"softcap": np.float64(2.0), "sink": None, "scale": np.float64(0.8)}
DROPOUT = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(9)}


def _grouped_visible():
    some = np.ones((T, S), bool)
    some[:, 6] = False
    return np.stack([np.stack([ISLANDS] * 4), np.stack([BEFORE, BEFORE, some, ISLANDS])])


def _segment_ids(queries, keys):
    return np.array(queries), np.array(keys)


# surface, sizes, mask, who sees whom (*B, N, T, S), whether the bias holds the -inf that hide
FORMS = {
    "a mask array": ("attend", ONE_HEAD, ISLANDS, ISLANDS[None], False),
    "a rule of positions": ("attend", ONE_HEAD, masks.rule(islands), ISLANDS[None], False),
    "segments": (
        "attend",
        ONE_HEAD,
        masks.segments(np.array([0, 0, 1, 1, 2]), np.array([0, 0, 0, 1, 1, 1, 3])),
        ISLANDS[None],
        False,
    ),
    "causal": ("attend", ONE_HEAD, masks.causal(-1), BEFORE[None], False),
    "a bias of -inf": ("attend", ONE_HEAD, None, ISLANDS[None], True),
    "half causal, half a bias": (
        "attend",
        ONE_HEAD,
        masks.causal(1),
        ((KEYS <= QUERIES + 1) & BEFORE[:, ::-1])[None],
        True,
    ),
    "grouped heads": ("attention", GROUPED, _grouped_visible(), _grouped_visible(), False),
    "grouped heads, causal per batch element": (
        "attention",
        GROUPED,
        masks.causal(np.array([-1, 1])),
        np.stack([np.stack([BEFORE] * 4), np.stack([KEYS <= QUERIES + 1] * 4)]),
        False,
    ),
    "grouped heads by the user's own vmap": ("vmap", GROUPED, _grouped_visible(), _grouped_visible(), False),
}

# Which options, and which arguments are there to be spoilt.
DRESSES = {
    "plain, float64": (np.float64, {}, {}, True),
    "softcap, sink, scale, dropout": (np.float64, RICH, DROPOUT, True),
    "alibi, float32": (np.float32, {}, {}, False),
}

PLAIN, RICHLY, ALIBI = DRESSES
WORN = [(form, PLAIN) for form in FORMS] + [
    ("a mask array", RICHLY),
    ("half causal, half a bias", RICHLY),
    ("grouped heads", RICHLY),
    ("a rule of positions", ALIBI),
    ("grouped heads by the user's own vmap", ALIBI),
]


def _isolation_inputs(form, dress):
    _, n, _, visible, holes = FORMS[form]
    dtype, extras, _, array_bias = DRESSES[dress]
    query, key, value = inputs(n, 6, dtype)
    args = {"query": query, "key": key, "value": value}
    if array_bias or holes:
        args["bias"] = normal(7, *n.B, n.N, n.T, n.S, dtype=dtype)
        if holes:
            args["bias"][~visible] = -INF
    else:
        args["slopes"] = np.linspace(0.1, 0.9, n.N, dtype=dtype)
    for name, x in extras.items():
        args[name] = normal(8, n.N) if x is None else x
    return args


def _surface(form, dress, engine):
    """`args` -> (out, lse, max_logit, entropy) in the layout of `attention`, whatever is called inside."""
    surface, n, mask, _, _ = FORMS[form]
    options = dict(DRESSES[dress][2], return_stats=True, **engine)

    def call(args):
        args = dict(args)
        slopes = args.pop("slopes", None)
        if slopes is not None:
            args["bias"] = biases.alibi(slopes)
        out, stats = attention(mask=mask, **args, **options)
        return {"out": out} | stats._asdict()

    def one(args):
        query, key, value = (args[name][:, 0] for name in ("query", "key", "value"))
        rest = {name: x[0] if name in ("bias", "sink", "slopes") else x for name, x in args.items()}
        rest = {name: x for name, x in rest.items() if name not in ("query", "key", "value")}
        slopes = rest.pop("slopes", None)
        if slopes is not None:
            rest["bias"] = biases.alibi(slopes)
        out, stats = attend(query, key, value, mask, **rest, **options)
        return {"out": out[:, None]} | {name: x[:, None] for name, x in stats._asdict().items()}

    def mapped(args):
        G = n.N // n.K
        query = jnp.moveaxis(args["query"], -2, 1).reshape(2, n.K, G, n.T, n.H)
        key, value = (jnp.moveaxis(args[name], -2, 1) for name in ("key", "value"))
        who = jnp.asarray(mask).reshape(2, n.K, G, n.T, n.S)
        bias = jnp.asarray(args["bias"]).reshape(who.shape) if "bias" in args else args["slopes"].reshape(n.K, G)
        sink = args["sink"].reshape(n.K, G) if "sink" in args else None
        shared = {name: args[name] for name in ("scale", "softcap") if name in args}

        def head(query, key, value, mask, bias, sink):
            bias = biases.alibi(bias) if bias.ndim == 0 else bias
            return attend(query, key, value, mask, bias, sink=sink, **shared, **options)

        by_group = jax.vmap(head, in_axes=(0, None, None, 0, 0, 0))
        by_head = jax.vmap(by_group)
        leaves = 0 if "bias" in args else None
        by_batch = jax.vmap(by_head, in_axes=(0, 0, 0, 0, leaves, None))
        out, stats = by_batch(query, key, value, who, bias, sink)
        together = lambda x: jnp.moveaxis(x.reshape(2, n.N, *x.shape[3:]), 1, 2)  # noqa: E731
        return {"out": together(out)} | {name: together(x) for name, x in stats._asdict().items()}

    return {"attention": call, "attend": one, "vmap": mapped}[surface]


@functools.cache
def _everything(form, dress, engine):
    f = _surface(form, dress, dict(engine))

    def everything(args, tangent, cotangent):
        gradient = lambda args: jax.vjp(f, args)[1](cotangent)[0]  # noqa: E731
        values, pushed = jax.jvp(f, (args,), (tangent,))
        pulled, again = jax.jvp(gradient, (args,), (tangent,))
        pulled_again = jax.vjp(gradient, args)[1](tangent)[0]
        return {"value": values, "jvp": pushed, "vjp": pulled, "hvp": again, "grad of grad": pulled_again}

    return jax.jit(everything)


@functools.cache
def _isolation(form, dress, engine):
    """The function, its clean inputs and its clean results."""
    args = _isolation_inputs(form, dress)
    _, n, _, visible, holes = FORMS[form]
    dtype = DRESSES[dress][0]
    rng = np.random.default_rng(10)
    draw = lambda x: rng.normal(size=np.shape(x)).astype(dtype)  # noqa: E731
    tangent = jax.tree.map(draw, args)
    rows = {"out": np.zeros((*n.B, n.T, n.N, n.D)), **{name: np.zeros((*n.B, n.T, n.N)) for name in STATS}}
    cotangent = jax.tree.map(draw, rows)
    f = _everything(form, dress, engine)
    return f, (args, tangent, cotangent), jax.tree.map(np.asarray, f(args, tangent, cotangent))


def _reached(name, x, n, harmed, visible):
    """Where a result of this name depends on the rows `harmed`, bool (*B, N, T)."""
    if name in ("out", "query"):
        return np.broadcast_to(np.moveaxis(harmed, -1, -2)[..., None], x.shape)
    if name in STATS:
        return np.moveaxis(harmed, -1, -2)
    if name in ("key", "value"):
        keys = (visible & harmed[..., None]).any(-2).reshape(*n.B, n.K, n.N // n.K, n.S).any(-2)
        return np.broadcast_to(np.moveaxis(keys, -1, -2)[..., None], x.shape)
    if name == "bias":
        return visible & harmed[..., None]
    return harmed.any() if x.ndim == 0 else harmed.any(-1).any(tuple(range(len(n.B))))


def _check(form, clean, spoilt, harmed, kinds, shown):
    """`kinds` are the results that may see the harm; `shown` says that they must, as NaN."""
    _, n, _, visible, _ = FORMS[form]
    for kind, results in clean.items():
        for name, before in results.items():
            after = np.asarray(spoilt[kind][name])
            reached = np.asarray(_reached(name, before, n, harmed, visible))
            if kind not in kinds:
                reached = np.zeros_like(reached)
            np.testing.assert_array_equal(after[~reached], before[~reached], err_msg=f"{kind} {name}")
            assert not np.isnan(before).any()
            if shown:
                assert np.isnan(after[reached]).all(), (kind, name)


ALL_KINDS = ("value", "jvp", "vjp", "hvp", "grad of grad")
LINEAR_KINDS = {"cotangent": ("vjp", "hvp", "grad of grad"), "tangent": ("jvp", "hvp", "grad of grad")}


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("form, dress", WORN)
def test_a_bad_key_harms_only_the_queries_that_see_it(form, dress, poison, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    for j, h in itertools.product((6, 4, 2, 0), range(n.K)):
        for name in ("key", "value"):
            spoilt = dict(args, **{name: args[name].copy()})
            spoilt[name][..., j, h, -1] = poison
            seen = visible[..., j] & (np.arange(n.N) // (n.N // n.K) == h)[:, None]
            result = f(spoilt, tangent, cotangent)
            _check(form, clean, result, seen, ALL_KINDS, shown=not np.isfinite(poison))


def test_a_bad_key_harms_only_the_queries_that_see_it_eagerly(engine):
    form, dress = "causal", "plain, float64"
    f, (args, tangent, cotangent), _ = _isolation(form, dress, frozen(engine))
    clean = f.__wrapped__(args, tangent, cotangent)
    spoilt = dict(args, key=args["key"].copy())
    spoilt["key"][2] = NAN
    result = f.__wrapped__(spoilt, tangent, cotangent)
    _check(form, jax.tree.map(np.asarray, clean), result, BEFORE[None, :, 2], ALL_KINDS, shown=True)


@pytest.mark.parametrize("form, dress", WORN)
def test_a_bad_batch_element_or_head_harms_no_other(form, dress, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    spoilt = dict(args, key=np.array(args["key"]), value=np.array(args["value"]))
    bad = (0, slice(None), 0) if n.B else (slice(None), 0)
    spoilt["key"][bad] = spoilt["value"][bad] = NAN
    harmed = visible.any(-1) & (np.arange(n.N) < n.N // n.K)[:, None]
    if n.B:
        harmed = harmed & np.array([True, False])[:, None, None]
    _check(form, clean, f(spoilt, tangent, cotangent), harmed, ALL_KINDS, shown=True)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("form, dress", WORN)
def test_a_bad_query_harms_only_itself_and_the_keys_that_it_sees(form, dress, poison, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    for i in range(n.T):
        spoilt = dict(args, query=args["query"].copy())
        spoilt["query"][..., i, -1, 0] = poison
        harmed = visible.any(-1) & (np.arange(n.T) == i) & (np.arange(n.N) == n.N - 1)[:, None]
        _check(form, clean, f(spoilt, tangent, cotangent), harmed, ALL_KINDS, shown=not np.isfinite(poison))


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("form, dress", [worn for worn in WORN if not FORMS[worn[0]][4] and DRESSES[worn[1]][3]])
def test_a_bad_bias_harms_only_the_row_that_sees_it(form, dress, poison, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    hidden = dict(args, bias=np.where(visible, args["bias"], poison))
    nobody = np.zeros(visible.shape[:-1], bool)
    _check(form, clean, f(hidden, tangent, cotangent), nobody, (), shown=False)
    if poison in (-INF, 1e38):  # hides a pair, or outweighs its row: no harm to speak of
        return
    for i in range(n.T):
        spoilt = dict(args, bias=args["bias"].copy())
        spoilt["bias"][..., -1, i, 0] = poison
        harmed = visible[..., 0] & (np.arange(n.T) == i) & (np.arange(n.N) == n.N - 1)[:, None]
        _check(form, clean, f(spoilt, tangent, cotangent), harmed, ALL_KINDS, shown=True)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("form, dress", WORN)
def test_a_bad_cotangent_or_tangent_of_a_row_harms_only_what_the_row_sees(form, dress, poison, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    for i in range(n.T):
        touched = np.broadcast_to((np.arange(n.T) == i) & (np.arange(n.N) == 0)[:, None], visible.shape[:-1])
        harmed = touched & visible.any(-1)
        bad = {name: x.copy() for name, x in cotangent.items()}
        for name, x in bad.items():
            # The lse of an empty row with a sink is the sink, which then does see its cotangent.
            rows = harmed if name == "lse" and "sink" in args else touched
            x[np.moveaxis(rows, -1, -2)] = poison
        _check(form, clean, f(args, tangent, bad), harmed, LINEAR_KINDS["cotangent"], shown=np.isnan(poison))
        bad = dict(tangent, query=tangent["query"].copy())
        bad["query"][..., i, 0, -1] = poison
        _check(form, clean, f(args, bad, cotangent), harmed, LINEAR_KINDS["tangent"], shown=False)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("form, dress", WORN)
def test_a_bad_tangent_of_a_key_or_bias_harms_only_the_queries_that_see_it(form, dress, poison, engine):
    f, (args, tangent, cotangent), clean = _isolation(form, dress, frozen(engine))
    _, n, _, visible, _ = FORMS[form]
    for j in (6, 4, 2):
        for name in ("key", "value"):
            bad = dict(tangent, **{name: tangent[name].copy()})
            bad[name][..., j, 0, 0] = poison
            seen = visible[..., j] & (np.arange(n.N) < n.N // n.K)[:, None]
            _check(form, clean, f(args, bad, cotangent), seen, LINEAR_KINDS["tangent"], shown=False)
    if "bias" in args:
        bad = dict(tangent, bias=np.where(visible, tangent["bias"], poison).astype(tangent["bias"].dtype))
        nobody = np.zeros(visible.shape[:-1], bool)
        _check(form, clean, f(args, bad, cotangent), nobody, (), shown=False)


@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS)
def test_what_a_rule_returns_for_a_hidden_pair_is_not_read(poison, engine):
    run = _bumped(frozen(engine))
    leaves_equal(run(0.3, poison), run(0.3, 0.0))


@functools.cache
def _bumped(engine):
    def bump(q, k, a, bad):
        return jnp.where(islands(q, k), a * (q - k).astype(a.dtype), bad)

    def run(a, bad):
        def f(a):
            bias = biases.rule(bump, a, bad)
            out, stats = attend(*one_head(), masks.rule(islands), bias, return_stats=True, **dict(engine))
            return (out, stats.lse[:4], stats.max_logit[:4], stats.entropy)

        g = lambda a: sum(x.sum() for x in f(a))  # noqa: E731
        return jax.jvp(f, (a,), (1.0,)), jax.grad(g)(a), jax.grad(jax.grad(g))(a), jax.jacfwd(jax.grad(g))(a)

    return jax.jit(run)


def test_a_bad_table_entry_that_no_visible_pair_reads_is_harmless(engine):
    # Distances of visible pairs are -1, 0 and 1; the table's ends are for 3 and beyond.
    mask, table = masks.window(1, 1), normal(3, 7)
    bad = np.where(abs(np.arange(7) - 3) > 1, NAN, table)

    @jax.jit
    def run(table):
        f = lambda table: attend(*one_head(), mask, biases.relative(table), **engine)  # noqa: E731
        g = lambda table: (f(table) ** 2).sum()  # noqa: E731
        hvp = jax.jvp(jax.grad(g), (table,), (jnp.ones(7),))[1]
        return f(table), jax.jvp(f, (table,), (jnp.ones(7),))[1], jax.grad(g)(table), hvp

    leaves_equal(run(bad), run(table))


# Clause 4: what is visible and not finite is shown


@functools.cache
def _row_2(name, engine):
    """One result of row 2 alone, its gradient and its tangent."""

    def run(args):
        def f(args):
            out, stats = attend(**args, mask=masks.causal(), return_stats=True, **dict(engine))
            return (out if name == "out" else getattr(stats, name))[2]

        value, pull = jax.vjp(f, args)
        return value, pull(jnp.ones_like(value))[0], jax.jvp(f, (args,), (jax.tree.map(jnp.ones_like, args),))[1]

    return jax.jit(run)


@pytest.mark.parametrize("name", ["lse", "max_logit", "entropy", "out"])
@pytest.mark.parametrize("bad", ["key", "value", "query", "bias"])
def test_each_result_alone_shows_a_bad_row_in_value_and_derivatives(name, bad, engine):
    args = dict(zip(("query", "key", "value"), one_head(), strict=True), bias=normal(7, T, S))
    args[bad] = args[bad].copy()
    args[bad][2, 0] = NAN
    value, gradient, pushed = _row_2(name, frozen(engine))(args)
    assert np.isnan(value).all() and np.isnan(pushed).all()
    assert np.isnan(gradient["query"][2]).all()
    assert np.isnan(gradient["key"][:3]).all()
    assert np.isnan(gradient["bias"][2, :3]).all()
    if bad in ("key", "value"):
        return  # later rows see that key too, and show it
    # What row 2 does not see or is not, gets nothing from it.
    assert not np.asarray(gradient["key"][3:]).any()
    assert not np.asarray(gradient["bias"][2, 3:]).any()
    assert not np.delete(np.asarray(gradient["query"]), 2, axis=0).any()


BIG = 1e200  # its square is no float64
OVERFLOWS = {
    "logits that overflow to +inf make the row NaN": ([[BIG, 1.0]], [[BIG, 0.0], [0.0, 1.0]], None, NAN),
    "a logit that overflows to -inf weighs 0": ([[BIG, 1.0]], [[-BIG, 0.0], [0.0, 1.0], [0.0, 2.0]], [1, 2], None),
    "nothing but -inf is NaN, not empty": ([[BIG, 1.0]], [[-BIG, 0.0], [-BIG, 1.0]], None, NAN),
    "a -inf key is shown, although its logit is -inf": ([[1.0, 1.0]], [[-INF, 0.0], [0.0, 1.0]], None, NAN),
    "a -inf key is shown, although its logit is finite": ([[0.0, 1.0]], [[-INF, 0.0], [0.0, 1.0]], None, NAN),
    "an infinite query is shown": ([[INF, 1.0]], [[-1.0, 0.0], [-2.0, 1.0]], None, NAN),
}


@pytest.mark.parametrize("query, key, deleted, row", OVERFLOWS.values(), ids=OVERFLOWS)
def test_overflow(query, key, deleted, row, engine):
    query, key = np.array(query), np.array(key)
    value = normal(1, len(key), D)
    f = functools.partial(attend, scale=1.0, return_stats=True, **engine)
    for g in (f, jax.jit(f)):
        out, stats = g(query, key, value)
        if deleted is None:
            assert np.isnan(out).all() and all(np.isnan(x).all() for x in stats)
        else:
            leaves_close((out, stats), f(query, key[deleted], value[deleted]))


def test_an_overflow_that_nobody_sees_is_harmless(engine):
    query, key = np.array([[BIG, 1.0], [1.0, 1.0]]), np.array([[BIG, 0.0], [0.0, 1.0]])
    f = jax.jit(lambda key: attend(query, key, np.eye(2), masks.rule(_only_the_second), scale=1.0, **engine))
    leaves_equal(f(key), np.array([[0.0, 1.0], [0.0, 1.0]]))
    leaves_equal(jax.jacrev(f)(key), np.zeros((2, 2, 2, 2)))


def _only_the_second(q, k):
    return (k == 1) & (q >= 0)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_an_infinite_visible_value_makes_its_whole_row_nan(poison, softcap, engine):
    query, key, value = one_head()
    value = value.copy()
    value[3, 1] = poison
    out, stats = attend(query, key, value, masks.causal(), softcap=softcap, return_stats=True, **engine)
    for x in (out, *stats):
        assert np.isnan(np.asarray(x)[3:]).all() and np.isfinite(np.asarray(x)[:3]).all()


# XLA:CPU reduces 4096 floats or more with another library, whose maximum forgets NaN.
MANY = {"dense": {"method": "dense"}, "blockwise": {"method": "blockwise", "block_size": (80, 64)}}


@pytest.mark.parametrize("method", MANY)
@pytest.mark.parametrize("bad", ["query", "key", "value"])
def test_a_nan_among_many_numbers_is_shown_by_its_rows_and_read_by_no_other(bad, method):
    args = {name: normal(i, 80, 64).astype(np.float32) for i, name in enumerate(("query", "key", "value"))}
    spoilt = args | {bad: args[bad].copy()}
    spoilt[bad][70, 63] = NAN

    @jax.jit
    def run(args):
        options = {"mask": masks.causal(), "return_stats": True} | MANY[method]
        result, pull = jax.vjp(lambda args: attend(**args, **options), args)
        return jax.tree.leaves(result), pull(jax.tree.map(jnp.ones_like, result))[0]

    (results, gradients), (good_results, good_gradients) = run(spoilt), run(args)
    rows = slice(70, 71) if bad == "query" else slice(70, None)
    for got, expected in zip([*results, gradients["query"]], [*good_results, good_gradients["query"]], strict=True):
        assert np.isnan(got[rows]).all()
        leaves_equal(np.delete(got, rows, 0), np.delete(expected, rows, 0))
    assert np.isnan(gradients["key"][:71]).all() and np.isnan(gradients["value"][:71]).all()
    if bad == "query":
        # No other row is spoilt, so that the keys that row 70 does not see get nothing from it.
        for name in ("key", "value"):
            leaves_equal(gradients[name][71:], good_gradients[name][71:])


@pytest.mark.parametrize("S", [300, 1500])
@pytest.mark.parametrize("hides", ["lengths", "array", None])
def test_one_query_over_many_keys_reads_none_that_is_hidden_and_shows_each_that_is_bad(S, hides):
    query, key, value = (normal(i, 2, n, h, 16).astype(np.float32) for i, n, h in ((0, 1, 4), (1, S, 2), (2, S, 2)))
    there = np.random.default_rng(3).random((2, S)) < 0.5 if hides == "array" else np.ones((2, S), bool)
    if hides == "lengths":
        there = np.arange(S) < np.array([S // 10, S // 3])[:, None]
    mask = {"lengths": masks.lengths(key=there.sum(1)), "array": there[:, None, None], None: None}[hides]

    @jax.jit
    def run(*arrays):
        result, pull = jax.vjp(lambda *arrays: attention(*arrays, mask, return_stats=True), *arrays)
        return result, pull(jax.tree.map(jnp.ones_like, result))

    good = run(query, key, value)
    logits = np.where(there[:, None], np.einsum("bnh,bsnh->bns", query[:, 0], np.repeat(key, 2, 2)) / 4.0, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("bns,bsnd->bnd", weights / weights.sum(-1, keepdims=True), np.repeat(value, 2, 2))
    assert_close(good[0][0][:, 0], expected, "float32")
    hidden = [np.where(there[..., None, None], x, bad).astype(np.float32) for x, bad in ((key, np.inf), (value, NAN))]
    leaves_equal(run(query, *hidden), good)
    for spoilt, bad in itertools.product((0, 1), (NAN, np.inf, -np.inf)):
        arrays = [key.copy(), value.copy()]
        arrays[spoilt][0, np.flatnonzero(there[0])[3], 0, 5] = bad
        result = run(query, *arrays)[0]
        for got, was in zip(jax.tree.leaves(result), jax.tree.leaves(good[0]), strict=True):
            assert np.isnan(got[0, 0, :2]).all()
            leaves_equal([got[0, 0, 2:], got[1]], [was[0, 0, 2:], was[1]])


def test_a_softcap_does_not_hide_an_infinite_key(engine):
    query, key, value = one_head()
    key = key.copy()
    key[3, 1] = INF
    out = attend(query, key, value, masks.causal(), softcap=5.0, **engine)
    assert np.isnan(out[3:]).all() and np.isfinite(out[:3]).all()


# Clause 5: precision


DTYPES = ("float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize(
    "dtype, bias_dtype", [*zip(DTYPES, DTYPES, strict=True), *zip(DTYPES, DTYPES[::-1], strict=True)]
)
def test_results_and_gradients_have_their_dtypes(dtype, bias_dtype, engine):
    query, key, value = (x.astype(jnp.dtype(dtype)) for x in one_head())
    bias = jnp.asarray(normal(3, 1, S)).astype(jnp.dtype(bias_dtype))
    run = jax.jit(lambda *x: attend(*x[:3], masks.causal(-1), x[3], return_stats=True, **engine))
    (out, stats), pull = jax.vjp(run, query, key, value, bias)
    assert out.dtype == dtype
    wide = "float64" if dtype == "float64" else "float32"
    assert all(x.dtype == wide for x in stats)
    gradients = pull(jax.tree.map(jnp.ones_like, (out, stats)))
    assert [x.dtype for x in gradients] == [dtype, dtype, dtype, bias_dtype]
    assert [x.shape for x in gradients] == [(T, H), (S, H), (S, D), (1, S)]
    exact = reference.attention(
        *(np.asarray(x, np.float64)[:, None] for x in (query, key, value)),
        mask=BEFORE[None],
        bias=np.broadcast_to(np.asarray(bias, np.float64), (1, T, S)),
    )
    assert_close(out, np.asarray(exact.out)[:, 0], dtype)
    for name in STATS:
        assert_close(getattr(stats, name), np.asarray(getattr(exact, name))[:, 0], wide, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_merge_have_their_dtypes(dtype):
    query, key, value = (x.astype(jnp.dtype(dtype)) for x in inputs(GROUPED))
    wide = "float64" if dtype == "float64" else "float32"
    assert attention_weights(query, key).dtype == wide
    out, stats = attention(query, key, value, return_stats=True)
    out, lse = merge([out, out], [stats.lse, stats.lse])
    assert (out.dtype, lse.dtype) == (dtype, wide)


def test_long_half_precision_sums_are_taken_in_float32(engine):
    value = np.ones((4099, 1), np.float16)
    _, stats = attend(np.zeros((1, 2), np.float16), np.zeros((4099, 2), np.float16), value, return_stats=True, **engine)
    assert_close(stats.lse, [np.log(4099)], "float32")
    assert_close(
        attend(np.zeros((1, 2), np.float16), np.zeros((4099, 2), np.float16), value, **engine), [[1]], "float16"
    )


@pytest.mark.parametrize("how", [{"method": "dense"}, {"method": "blockwise", "block_size": (4, 3)}], ids=str)
def test_what_flows_back_to_a_bfloat16_value_is_rounded_once(how):
    query, key, value = (normal(i, *shape).astype(jnp.bfloat16) for i, shape in enumerate([(1, H), (41, H), (41, D)]))
    gradient = jax.grad(lambda value: attend(query, key, value, sink=0.3, **how).astype(jnp.float32).sum())(value)
    exps = np.exp(np.asarray(key, np.float64) @ np.asarray(query, np.float64)[0] / np.sqrt(H))
    weights = (exps / (exps.sum() + np.exp(0.3))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(gradient.astype(jnp.float32), np.repeat(weights[:, None].astype(np.float32), D, 1))


# Clauses 6, 7: positions and heads


def seen(mask=None, T=4, S=4, **options):
    """Which keys each query saw, by what its output is made of."""
    out = attend(np.zeros((T, 1)), np.zeros((S, 1)), np.eye(S), mask, **options)
    return np.asarray(out) > 0


POSITION_CASES = {
    "causal is top-left": (dict(mask=masks.causal(), T=2, S=4), ["1000", "1100"]),
    "causal(S - T) is bottom-right": (dict(mask=masks.causal(2), T=2, S=4), ["1110", "1111"]),
    "causal leaves early queries empty": (dict(mask=masks.causal(-1), T=3, S=2), ["00", "10", "11"]),
    "a window counts positions on both sides": (
        dict(mask=masks.window(1, 1), T=3, S=4, query_positions=np.array([1, 2, 9])),
        ["1110", "0111", "0000"],
    ),
    "a window of 0 is a size": (dict(mask=masks.window(0, 0), T=3, S=3), ["100", "010", "001"]),
    "None is no bound": (dict(mask=masks.window(None, 0), T=3, S=3), ["100", "110", "111"]),
    "positions are negative and in any order": (
        dict(mask=masks.causal(), T=2, S=3, query_positions=np.array([-1, 1]), key_positions=np.array([2, -1, 0])),
        ["010", "011"],
    ),
    "lengths count stored keys, not positions": (
        dict(mask=masks.lengths(key=1, query=2), T=3, S=3, key_positions=np.array([2, 1, 0])),
        ["100", "100", "000"],
    ),
    "segments belong to stored tokens": (
        dict(
            mask=masks.segments(np.array([1, 2]), np.array([1, 2, 1])),
            T=2,
            S=3,
            query_positions=np.array([1, 0]),
            key_positions=np.array([2, 1, 0]),
        ),
        ["101", "010"],
    ),
    "an array is stored, a prefix is by position": (
        dict(
            mask=masks.prefix(2) & np.array([[True, True, False]]),
            T=2,
            S=3,
            key_positions=np.array([1, 2, 0]),
        ),
        ["100", "100"],
    ),
    "a rule sees positions": (
        dict(mask=masks.rule(lambda q, k: q == k), T=2, S=2, query_positions=np.array([1, 0])),
        ["01", "10"],
    ),
}


@pytest.mark.parametrize("call, expected", POSITION_CASES.values(), ids=POSITION_CASES)
def test_positions(call, expected, engine):
    assert ["".join("01"[x] for x in row.astype(int)) for row in seen(**call, **engine)] == expected


@pytest.mark.parametrize("G", [1, 2, 3])
def test_query_head_n_reads_key_value_head_n_over_G(G, engine):
    query, _, _ = inputs(Sizes((), 2, 3, 2 * G, 2, 1, 1))
    value = np.broadcast_to(np.array([10.0, 20.0])[None, :, None], (3, 2, 1))
    out = attention(query, np.zeros((3, 2, 1)), value, **engine)
    assert_close(out[0, :, 0], [10.0] * G + [20.0] * G)


def test_grouped_heads_are_plain_heads_with_repeated_keys(engine):
    query, key, value = inputs(GROUPED)
    repeated = (np.repeat(x, 2, axis=2) for x in (key, value))
    mask = _grouped_visible()
    got = attention(query, key, value, mask, return_stats=True, **engine)
    leaves_close(got, attention(query, *repeated, mask, return_stats=True, **engine))


# Clause 8: sizes


SIZE_CASES = {
    "no queries": Sizes((2,), 0, 3, 2, 1, 2, 2),
    "no keys": Sizes((2,), 3, 0, 2, 1, 2, 2),
    "no queries and no keys": Sizes((), 0, 0, 2, 2, 1, 2),
    "an empty batch": Sizes((0,), 3, 5, 2, 1, 2, 2),
    "an empty inner batch": Sizes((2, 0), 3, 5, 2, 1, 2, 2),
    "values without features": Sizes((2,), 3, 5, 2, 1, 2, 0),
    "one feature": Sizes((), 3, 5, 2, 1, 1, 1),
    "one of everything": Sizes((1,), 1, 1, 1, 1, 1, 1),
    "primes": Sizes((2,), 11, 13, 3, 3, 5, 7),
}


@pytest.mark.parametrize("n", SIZE_CASES.values(), ids=SIZE_CASES)
def test_any_sizes(n, engine):
    args = dict(zip(("query", "key", "value"), inputs(n), strict=True))
    args["bias"] = normal(3, *n.B, n.N, 1, n.S)
    args["sink"] = normal(4, n.N)

    def f(args):
        out, stats = attention(mask=masks.causal(), return_stats=True, **args, **engine)
        return out, stats.lse, stats.entropy

    @jax.jit
    def run(args):
        out, pushed = jax.jvp(f, (args,), (jax.tree.map(jnp.ones_like, args),))
        gradient = jax.grad(lambda args: sum(x.sum() for x in f(args)))(args)
        return out, pushed, gradient

    (out, lse, entropy), pushed, gradient = run(args)
    exact = reference.attention(
        **dict(args, bias=np.broadcast_to(args["bias"], (*n.B, n.N, n.T, n.S))),
        mask=np.broadcast_to(np.arange(n.S) <= np.arange(n.T)[:, None], (*n.B, n.N, n.T, n.S)),
    )
    assert out.shape == (*n.B, n.T, n.N, n.D) and lse.shape == entropy.shape == (*n.B, n.T, n.N)
    for got, name in zip((out, lse, entropy), ("out", "lse", "entropy"), strict=True):
        assert_close(got, getattr(exact, name), factor=10)
    assert jax.tree.map(np.shape, gradient) == jax.tree.map(np.shape, args)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((pushed, gradient)))
    weights = attention_weights(args["query"], args["key"], masks.causal(), args["bias"], sink=args["sink"])
    assert weights.shape == (*n.B, n.N, n.T, n.S)
    assert f(args)[0].shape == out.shape


def test_an_empty_batch_may_have_lengths_and_positions_of_its_own(engine):
    n = Sizes(B=(0,), T=5, S=7, N=2, K=1, H=2, D=3)
    mask = masks.causal() & masks.lengths(key=np.zeros(n.B, np.int32))
    positions = {"query_positions": np.zeros((*n.B, n.T), np.int32)}
    f = jax.jit(jax.grad(lambda query, *x: attention(query, *x, mask, **positions, **engine).sum()))
    assert f(*inputs(n)).shape == (0, 5, 2, 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_no_keys_make_every_row_empty(dtype, engine):
    def ones(*shape):
        return jnp.ones(shape, dtype)

    out, stats = attend(ones(T, H), ones(0, H), ones(0, D), return_stats=True, **engine)
    assert out.dtype == dtype and stats.lse.dtype == (jnp.float32 if dtype == jnp.bfloat16 else dtype)
    leaves_equal((out, *stats), (np.zeros((T, D)), np.full(T, -INF), np.full(T, -INF), np.zeros(T)))


@pytest.mark.parametrize(
    "shape", [(2, 4, T, S), (1, 4, T, 1), (2, 1, 1, S), (1, 1, T, S), (2, 4, 1, 1), (1, 1, 1, 1)], ids=str
)
def test_each_axis_of_a_mask_and_bias_array_is_full_or_one(shape, engine):
    mask = np.random.default_rng(1).random(shape) < 0.7
    bias = normal(2, *shape)
    full = (2, 4, T, S)
    got = attention(*inputs(GROUPED), mask, bias, return_stats=True, **engine)
    whole = attention(
        *inputs(GROUPED), np.broadcast_to(mask, full), np.broadcast_to(bias, full), return_stats=True, **engine
    )
    leaves_close(got, whole)
    gradient = jax.grad(lambda bias: (attention(*inputs(GROUPED), mask, bias, **engine) ** 2).sum())(bias)
    assert gradient.shape == shape


# Clause 11: every transform against plain


ARGUMENTS = dict(
    query=lambda r: r.normal(size=(T, H)),
    key=lambda r: r.normal(size=(S, H)),
    value=lambda r: r.normal(size=(S, D)),
    array=lambda r: r.random((T, S)) < 0.8,
    offset=lambda r: r.integers(0, 4),
    length=lambda r: r.integers(3, 8),
    query_ids=lambda r: r.integers(0, 2, T),
    key_ids=lambda r: r.integers(0, 2, S),
    slopes=lambda r: r.random(),
    sink=lambda r: r.normal(),
    scale=lambda r: r.random() + 0.5,
    softcap=lambda r: r.random() + 1.0,
    query_positions=lambda r: r.integers(0, 5, T),
    key_positions=lambda r: r.integers(0, 5, S),
    rng=lambda r: jax.random.key(r.integers(0, 99)),
)
FLOATS = ("query", "key", "value", "slopes", "sink", "scale", "softcap")


def arguments(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(draw(rng)) if name != "rng" else draw(rng) for name, draw in ARGUMENTS.items()}


def with_everything(args, engine):
    """(out, stats), finite, of one head with every kind of leaf."""
    causal, lengths = masks.causal(args["offset"]), masks.lengths(key=args["length"])
    mask = causal & lengths & ~masks.segments(args["query_ids"], args["key_ids"]) & args["array"]
    options = {name: args[name] for name in ("sink", "scale", "softcap", "query_positions", "key_positions")}
    out, stats = attend(
        args["query"],
        args["key"],
        args["value"],
        mask,
        biases.alibi(args["slopes"]),
        dropout_rate=0.3,
        dropout_rng=args["rng"],
        return_stats=True,
        **options,
        **dict(engine),
    )
    return out, stats.lse, stats.entropy


def differentiated(args, engine):
    """The same, and the gradient of its squares."""

    def loss(floats):
        out = with_everything(args | floats, engine)
        return sum((x**2).sum() for x in out), out

    (_, out), gradient = jax.value_and_grad(loss, has_aux=True)({name: args[name] for name in FLOATS})
    return out, gradient


@functools.cache
def _plain(engine):
    return jax.jit(functools.partial(differentiated, engine=engine))


def test_without_any_jit_everything_is_the_same(engine):
    # As one sets a breakpoint in a program.
    mask = masks.causal() & masks.lengths(key=jnp.int32(5))
    query, key, value = map(jnp.asarray, one_head())
    f = jax.value_and_grad(lambda key: attend(query[:4], key[:3], value[:3], mask, **engine).sum())
    expected = f(key)
    with jax.disable_jit():
        leaves_close(f(key), expected)



def test_jit_is_eager(engine):
    args = arguments(0)
    leaves_close(_plain(frozen(engine))(args), differentiated(args, engine))


MAPPED = {name: {name} for name in ARGUMENTS} | {
    "all": set(ARGUMENTS),
    "all but the query": set(ARGUMENTS) - {"query"},
    "all but key and value": set(ARGUMENTS) - {"key", "value"},
    "the mask": {"array", "offset", "length", "query_ids", "key_ids"},
}


@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
def test_vmap_is_a_loop(mapped, engine):
    each = [arguments(0) | {name: arguments(i)[name] for name in mapped} for i in range(1, 4)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    args = {name: stacked[name] if name in mapped else arguments(0)[name] for name in ARGUMENTS}
    axes = {name: 0 if name in mapped else None for name in ARGUMENTS}
    f = functools.partial(with_everything, engine=engine)
    if len(mapped) > 1:  # differentiating each would take its time
        f = functools.partial(differentiated, engine=engine)
    got = jax.jit(jax.vmap(f, in_axes=(axes,)))(args)
    loop = [_plain(frozen(engine))(args) for args in each]
    loop = loop if len(mapped) > 1 else [out for out, _ in loop]
    leaves_close(got, jax.tree.map(lambda *x: jnp.stack(x), *loop))


def test_vmap_maps_other_axes_and_nests(engine):
    query, key, value = inputs(Sizes((2, 3), T, S, 1, 1, H, D))
    query, key, value = query[..., 0, :], key[..., 0, :], value[..., 0, :]
    f = functools.partial(attend, mask=masks.causal(), **engine)
    inner = jax.vmap(f, in_axes=(2, 0, None), out_axes=1)  # query (T, H, 3), key (3, S, H), value (S, D)
    outer = jax.vmap(inner, in_axes=(0, None, 2))
    got = outer(np.moveaxis(query, 1, 3), key[0], np.moveaxis(value[:, 0], 0, 2))
    loop = np.stack([[f(query[i, j], key[0, j], value[i, 0]) for j in range(3)] for i in range(2)])
    assert_close(np.moveaxis(np.asarray(got), 2, 1), loop, factor=10)


def test_rules_are_pytrees_that_a_users_vmap_maps(engine):
    mask = masks.causal(jnp.arange(3)) & masks.lengths(key=4)
    axes = jax.tree.map(lambda x: 0, mask)
    f = lambda mask: attend(*one_head(), mask, **engine)  # noqa: E731
    got = jax.vmap(f, in_axes=(axes,))(mask)
    loop = np.stack([f(masks.causal(i) & masks.lengths(key=4)) for i in range(3)])
    assert_close(got, loop, factor=10)


def test_attention_is_attend_under_vmap(engine):
    query, key, value = (np.moveaxis(x, 2, 1) for x in inputs(Sizes((2,), T, S, 3, 3, H, D)))
    mask, bias, sink = _array(2, 3, T, S), normal(4, 2, 3, T, S), normal(5, 3)
    f = lambda q, k, v, m, b, s: attend(q, k, v, m, b, sink=s, return_stats=True, **engine)  # noqa: E731
    out, stats = jax.vmap(jax.vmap(f), in_axes=(0, 0, 0, 0, 0, None))(query, key, value, mask, bias, sink)
    got = attention(*inputs(Sizes((2,), T, S, 3, 3, H, D)), mask, bias, sink=sink, return_stats=True, **engine)
    leaves_close(got, jax.tree.map(lambda x: np.moveaxis(np.asarray(x), 1, 2), (out, stats)))


def _array(*shape):
    return np.random.default_rng(6).random(shape) < 0.7


@functools.cache
def _one_head_loss(engine):
    def loss(query, key, value):
        out, stats = attend(
            query, key, value, masks.causal(-1), softcap=2.0, sink=0.2, return_stats=True, **dict(engine)
        )
        return (out**3).sum() + (stats.lse**2).sum() + (stats.entropy[1:] ** 2).sum()

    return loss


def test_jacfwd_is_jacrev_and_every_hessian_is_the_same(engine):
    loss, args = _one_head_loss(frozen(engine)), [*map(jnp.asarray, one_head())]

    @jax.jit
    def run(*args):
        n = (0, 1, 2)
        return (
            (jax.jacfwd(loss, n)(*args), jax.jacrev(loss, n)(*args)),
            (jax.hessian(loss, n)(*args), jax.jacrev(jax.jacrev(loss, n), n)(*args)),
            (jax.jacfwd(jax.jacfwd(loss, n), n)(*args), jax.jacrev(jax.jacfwd(loss, n), n)(*args)),
        )

    (forward, reverse), (a, b), (c, d) = run(*args)
    leaves_close(forward, reverse)
    for other in (b, c, d):
        leaves_close(a, other)
    transposed = [[block for block in row] for row in zip(*a, strict=True)]
    for i, j in itertools.product(range(3), repeat=2):
        assert_close(np.transpose(a[i][j], (2, 3, 0, 1)), transposed[i][j], factor=10)


def test_checkpoint_scan_while_and_cond_are_plain(engine):
    loss, args = _one_head_loss(frozen(engine)), [*map(jnp.asarray, one_head())]

    def scanned(query, key, value):
        step = lambda total, q: (total + loss(q, key, value), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(step), 0.0, jnp.stack([query, query]))[0] / 2

    def looped(query, key, value):
        body = lambda state: (state[0] + 1, state[1] + loss(query, key, value))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, 0.0))[1] / 3

    def branched(query, key, value):
        return jax.lax.cond(query[0, 0] < 1e9, loss, lambda *x: 0.0, query, key, value)

    @jax.jit
    def run(*args):
        n = (0, 1, 2)
        plain = jax.value_and_grad(loss, n)(*args)
        others = [jax.value_and_grad(f, n)(*args) for f in (jax.checkpoint(loss), scanned, branched)]
        tangents = jax.tree.map(jnp.ones_like, args)
        return plain, others, jax.jvp(loss, args, tangents), jax.jvp(looped, args, tangents)

    plain, others, pushed, loop = run(*args)
    for other in others:
        leaves_close(other, plain)
    leaves_close(loop, pushed)


def test_second_derivatives_through_a_scan_are_those_of_a_loop(engine):
    """jax 0.10 forgets the rule of a custom_jvp in them."""

    def step(query, key, value):
        return (attend(query, key, value, masks.causal(), softcap=3.0, **engine) ** 2).sum()

    def scanned(query, key, value):
        return jax.lax.scan(lambda total, q: (total + step(q, key, value), None), 0.0, query)[0]

    def looped(query, key, value):
        return sum(step(q, key, value) for q in query)

    query, key, value = map(jnp.asarray, one_head())
    args = jnp.stack([query, 2 * query]), key, value
    tangents = jax.tree.map(jnp.ones_like, args)

    def curvature(f):
        return jax.jit(lambda *args: jax.jvp(jax.grad(f, (0, 1, 2)), args, tangents)[1])(*args)

    leaves_close(curvature(scanned), curvature(looped))


def test_linearize_and_its_transpose_are_jvp_and_vjp(engine):
    loss, args = _one_head_loss(frozen(engine)), [*map(jnp.asarray, one_head())]
    out, linear = jax.linearize(loss, *args)
    tangents = [jnp.ones_like(x) for x in args]
    leaves_close((out, linear(*tangents)), jax.jvp(loss, args, tangents))
    pulled = jax.linear_transpose(linear, *args)(1.0)
    leaves_close(pulled, jax.grad(loss, (0, 1, 2))(*args))


def test_checkify_finds_nothing_where_rows_are_empty(engine):
    f = lambda *x: jax.value_and_grad(lambda *x: attend(*x, ISLANDS, **engine).sum(), (0, 1, 2))(*x)  # noqa: E731
    args = one_head()
    error, got = checkify.checkify(jax.jit(f), errors=checkify.user_checks | checkify.float_checks)(*args)
    assert error.get() is None
    leaves_close(got, f(*args))


@pytest.mark.parametrize("softcap", [-1.0, 0.0, NAN, INF])
def test_a_traced_bad_softcap_is_nan_rows_and_an_error_under_checkify(softcap, engine):
    f = jax.jit(lambda softcap: attend(*one_head(), ISLANDS, softcap=softcap, **engine))
    out = np.asarray(f(softcap))
    assert np.isnan(out[:4]).all()
    assert not out[4].any()
    error, _ = checkify.checkify(f)(softcap)
    assert "attend: softcap must be finite and > 0." in error.get()
    assert checkify.checkify(f)(2.0)[0].get() is None


def test_export_and_reload_with_a_gradient(engine):
    pytest.importorskip("flatbuffers")
    from jax import export

    f = jax.jit(functools.partial(differentiated, engine=engine))
    g = jax.jit(lambda *x: attend(*x, masks.causal() & ISLANDS, softcap=2.0, **engine))
    args = [*map(jnp.asarray, one_head())]
    loaded = export.deserialize(export.export(g)(*args).serialize(vjp_order=2))
    leaves_close(loaded.call(*args), g(*args))
    leaves_close(
        jax.grad(lambda *x: (loaded.call(*x) ** 2).sum(), (0, 1, 2))(*args),
        jax.grad(lambda *x: (g(*x) ** 2).sum(), (0, 1, 2))(*args),
    )
    args = arguments(0)
    args["rng"] = jax.random.key_data(args["rng"])
    h = jax.jit(lambda args: f(dict(args, rng=jax.random.wrap_key_data(args["rng"]))))
    leaves_close(export.deserialize(export.export(h)(args).serialize()).call(args), h(args))


def _python(code, **env):
    """Runs a program of its own, because flags of XLA are read once."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([os.path.dirname(here), here])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_shard_map_over_batch_heads_and_queries_is_plain(engine):
    code = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        import conftest
        from battery import Sizes, inputs
        from conftest import assert_close
        from jattn import attention, masks

        mesh = jax.make_mesh((2,), ("x",))
        n = Sizes((2,), 4, 6, 4, 2, 3, 2)
        query, key, value = map(jnp.asarray, inputs(n))
        positions = jnp.arange(4)

        def f(query, key, value, positions):
            mask = masks.causal() & masks.lengths(key=4)
            out, stats = attention(
                query, key, value, mask, query_positions=positions, softcap=2.0, return_stats=True, **{engine!r}
            )
            return out, stats.lse, stats.entropy

        def loss(f):
            return lambda *x: sum((y**2).sum() for y in f(*x, positions))

        specs = {{
            "batch": (P("x"), P("x"), P("x"), P(None)),
            "heads": (P(None, None, "x"), P(None, None, "x"), P(None, None, "x"), P(None)),
            "queries": (P(None, "x"), P(None), P(None), P("x")),
        }}
        for name, spec in specs.items():
            sharded = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=(spec[0],) * 3)
            args = [jax.device_put(x, jax.NamedSharding(mesh, s)) for x, s in zip((query, key, value), spec)]
            where = jax.device_put(positions, jax.NamedSharding(mesh, spec[3]))
            got = jax.jit(sharded)(*args, where)
            for x, y in zip(got, f(query, key, value, positions)):
                assert_close(x, y, factor=10)
            total = lambda *x: sum((y**2).sum() for y in sharded(*x, where))
            gradient = jax.jit(jax.grad(total, (0, 1, 2)))(*args)
            for x, y in zip(gradient, jax.grad(loss(f), (0, 1, 2))(query, key, value)):
                assert_close(x, y, factor=10)
            tangents = tuple(args)
            pushed = jax.jit(lambda *x: jax.jvp(total, x, x)[1])(*args)
            assert_close(pushed, jax.jvp(loss(f), (query, key, value), (query, key, value))[1], factor=10)
            print(name, "done")
    """
    ran = _python(code, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert ran.stdout.split() == ["batch", "done", "heads", "done", "queries", "done"], ran.stderr[-3000:]


def test_on_a_mesh_with_explicit_axes_it_is_plain(engine):
    code = f"""
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        import conftest
        from battery import Sizes, inputs
        from conftest import assert_close
        from jattn import attention, attention_weights, masks, trace

        # The kind of axes that JAX's meshes have by default: an operation must know where its result shall be.
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        arrays = [jnp.asarray(x) for x in (*inputs(Sizes((2,), 4, 6, 4, 2, 4, 2)), np.array([3, 0]))]

        def f(query, key, value, lengths):
            mask = masks.causal(offset=1) & masks.lengths(key=lengths)
            out, stats = attention(query, key, value, mask, softcap=2.0, return_stats=True, **{engine!r})
            return out, stats.lse, stats.entropy

        def loss(query, key, value, lengths):
            return (f(query, key, value, lengths)[0] ** 2).sum()

        def weights(query, key, value, lengths, rows=None):
            return attention_weights(query, key, masks.lengths(key=lengths), rows=rows)

        gradients = jax.grad(loss, (0, 1, 2))
        second = lambda *x: jax.jvp(gradients, x, (*x[:3], np.zeros(2, jax.dtypes.float0)))[1]
        mapped = jax.vmap(f)
        some_rows = lambda *x: weights(*x, rows=jnp.array([2, 0, 3]))
        steps = lambda q, k, v, n: trace(q.mean((0, 2)), k.mean((0, 2)), v.mean((0, 2))).out
        functions = f, weights, gradients, second, mapped, some_rows, steps
        expected = [jax.tree.leaves(jax.jit(g)(*arrays)) for g in functions]

        batch, heads, both = P("x"), P(None, None, "y"), P("x", None, "y")
        for spec, of_keys in ((both, both), (heads, heads), (P("x", "y"), batch), (batch, P("x", "y"))):
            where = [NamedSharding(mesh, s) for s in (spec, of_keys, of_keys, P(spec[0]))]
            placed = [jax.device_put(x, s) for x, s in zip(arrays, where, strict=True)]
            programs = [jax.jit(g).lower(*placed).compile() for g in functions]
            if spec == both:
                assert "all-gather" not in programs[0].as_text() and "all-to-all" not in programs[0].as_text()
            got = [jax.tree.leaves(program(*placed)) for program in programs]
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
                assert_close(jax.device_get(a), b, factor=10)
            b, t, n = (*spec, None, None)[:3]
            found = [(x, (b, t, n)) for x in got[0]] + [(got[1][0], (b, n, t))]
            assert all(x.sharding.is_equivalent_to(NamedSharding(mesh, P(*axes)), x.ndim) for x, axes in found)
            assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in zip(got[2], where[:3], strict=True))
        print("done")
    """
    ran = _python(code, XLA_FLAGS="--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0")
    assert ran.stdout == "done\n", ran.stderr[-3000:]


# Clause 12: determinism and dropout


def dropped(T=T, S=S, rng=3, rate=0.5, **options):
    """Which pairs dropout keeps, by equal weights and one-hot values."""
    rng = jax.random.key(rng) if isinstance(rng, int) else rng
    out = attend(np.zeros((T, 1)), np.zeros((S, 1)), np.eye(S), dropout_rate=rate, dropout_rng=rng, **options)
    return np.asarray(out) > 0


def test_the_same_call_gives_the_same_bits(engine):
    args = arguments(0)
    leaves_equal(_plain(frozen(engine))(args), _plain(frozen(engine))(args))
    leaves_equal(with_everything(args, engine), with_everything(args, engine))


def test_dropout_bits_are_the_same_however_they_are_asked_for(engine):
    plain = dropped(**engine)
    assert 0.2 < plain.mean() < 0.8
    key = jax.random.key(3)
    value = np.eye(S)
    f = lambda q, key: attend(q, np.zeros((S, 1)), value, dropout_rate=0.5, dropout_rng=key, **engine)  # noqa: E731
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(np.zeros((T, 1)), key)) > 0, plain)
    mapped = jax.vmap(f, in_axes=(0, None))(np.zeros((2, T, 1)), key)
    np.testing.assert_array_equal(np.asarray(mapped) > 0, np.stack([plain, plain]))
    np.testing.assert_array_equal(dropped(rng=jax.random.PRNGKey(3), **engine), plain)
    half = attend(np.zeros((T, 1), np.float16), np.zeros((S, 1), np.float16), value.astype(np.float16),
                  dropout_rate=0.5, dropout_rng=key, **engine)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(half) > 0, plain)
    assert (dropped(rng=4, **engine) != plain).any()


def test_the_bits_of_a_key_are_its_own_whatever_jax_makes_keys_of(engine):
    how = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(3), **engine}
    args = np.zeros((T, 2, 1)), np.zeros((S, 2, 1)), np.ones((S, 2, S)) * np.eye(S)[:, None]
    plain = attention(*args, **how)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(attention(*args, **how), plain)


def test_dropout_bits_do_not_depend_on_how_many_queries_and_keys_there_are(engine):
    small, large = dropped(4, 5, **engine), dropped(11, 13, **engine)
    np.testing.assert_array_equal(large[:4, :5], small)


def test_dropout_bits_do_not_depend_on_masks_positions_or_values(engine):
    plain = dropped(rate=0.3, **engine)
    masked = dropped(rate=0.3, mask=masks.causal(2), query_positions=np.arange(T)[::-1], softcap=1.0, **engine)
    np.testing.assert_array_equal(masked, plain & (KEYS <= QUERIES[::-1] + 2))


def test_attention_drops_as_attend_does_with_the_flat_index_folded_in(engine):
    n, rng = Sizes((2, 3), T, S, 4, 2, H, D), jax.random.key(5)
    query, key, value = inputs(n)
    got = attention(query, key, value, masks.causal(), dropout_rate=0.4, dropout_rng=rng, **engine)

    def one(flat, query, key, value):
        own = jax.random.fold_in(rng, flat)
        return attend(query, key, value, masks.causal(), dropout_rate=0.4, dropout_rng=own, **engine)

    by_head = jax.vmap(one, in_axes=(0, 1, 1, 1), out_axes=1)
    flat = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    repeated = (np.repeat(x, 2, axis=-2) for x in (key, value))
    assert_close(got, jax.vmap(jax.vmap(by_head))(flat, query, *repeated), factor=10)


def test_dropout_keeps_the_mean_and_the_share_that_it_is_told_to(engine):
    kept = dropped(128, 128, rate=0.25, **engine)
    assert abs(kept.mean() - 0.75) < 0.02  # 16384 draws: six standard deviations
    assert abs(kept[:, 1:][kept[:, :-1]].mean() - 0.75) < 0.03 and abs(kept[1:][kept[:-1]].mean() - 0.75) < 0.03
    options = dict(dropout_rate=0.25, dropout_rng=jax.random.key(3), **engine)
    out = attend(np.zeros((T, 1)), np.zeros((S, 1)), np.eye(S), **options)
    assert_close(np.unique(np.round(out, 12)), np.round([0, 1 / (S * 0.75)], 12), factor=10)


def test_dropout_at_rate_0_is_no_dropout_and_at_rate_1_is_nothing(engine):
    def f(rate, rng):
        def g(*x):
            out, stats = attend(*x, masks.causal(), dropout_rate=rate, dropout_rng=rng, return_stats=True, **engine)
            return out, stats

        out, pull = jax.vjp(g, *one_head())
        return (
            out,
            pull((jnp.ones((T, D)), jax.tree.map(jnp.zeros_like, out[1]))),
            jax.jvp(g, one_head(), one_head())[1],
        )

    leaves_equal(f(0.0, jax.random.key(0)), f(0.0, None))
    (out, stats), gradient, (pushed, _) = f(1.0, jax.random.key(0))
    for x in jax.tree.leaves((out, gradient, pushed)):
        np.testing.assert_array_equal(x, np.zeros(x.shape))
    leaves_equal(stats, f(0.0, None)[0][1])


def test_statistics_are_those_before_dropout(engine):
    f = functools.partial(attention, *inputs(GROUPED), masks.causal(), return_stats=True, **engine)
    leaves_close(f(dropout_rate=0.5, dropout_rng=jax.random.key(0))[1], f()[1])


# Clause 13: no retrace


TRACES = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: TRACES.append(event) if event.startswith("/jax/core/compile/") else None
)


def _changed(x):
    return x + 1 if isinstance(x, int | float) or jnp.issubdtype(x.dtype, np.number) else ~x


NEW_VALUES = {
    "scale": lambda i: dict(scale=0.5 + i),
    "scale as an array": lambda i: dict(scale=jnp.float64(0.5 + i)),
    "softcap": lambda i: dict(softcap=1.0 + i),
    "sink": lambda i: dict(sink=0.1 * i),
    "sink as an array": lambda i: dict(sink=jnp.float64(i)),
    "bias": lambda i: dict(bias=normal(i, T, S)),
    "a bias with holes": lambda i: dict(bias=np.where(normal(i, T, S) > 0, 0.5, -INF)),
    "dropout rng": lambda i: dict(dropout_rate=0.5, dropout_rng=jax.random.key(i)),
    "mask array": lambda i: dict(mask=normal(i, T, S) > 0),
    "causal offset": lambda i: dict(mask=masks.causal(np.int32(i))),
    "lengths": lambda i: dict(mask=masks.lengths(key=jnp.int32(i))),
    "segments": lambda i: dict(mask=masks.segments(np.arange(T) // i, np.arange(S) // i)),
    "a rule's array": lambda i: dict(mask=masks.rule(_at_most, np.int32(i)) | masks.causal()),
    "alibi slopes": lambda i: dict(bias=biases.alibi(np.float64(i))),
    "relative table": lambda i: dict(bias=biases.relative(normal(i, 5))),
    "query positions": lambda i: dict(mask=masks.causal(), query_positions=np.arange(T) + i),
    "key positions": lambda i: dict(mask=masks.causal(), key_positions=np.arange(S)[::-1] - i),
    "a static rule made anew": lambda i: dict(mask=masks.causal(2) & masks.window(3, 0)),
}


def _at_most(q, k, far):
    return k - q <= far


@pytest.mark.parametrize("options", NEW_VALUES.values(), ids=NEW_VALUES)
def test_a_new_value_is_not_traced_again(options, engine):
    args = one_head()
    calls = [options(i) for i in (1, 2, 3)]
    first = attend(*args, **calls[0], **engine)
    attend(*args, **calls[1], **engine)
    before = len(TRACES)
    third = attend(*args, **calls[2], **engine)
    assert TRACES[before:] == []
    assert calls[0].keys() != {"mask"} or "static" in str(options) or first.shape == third.shape


def test_a_new_function_is_traced(engine):
    """The counter of the tests above counts."""
    before = len(TRACES)
    attend(*one_head(), masks.rule(lambda q, k: k <= q), **engine)
    assert TRACES[before:]


def test_a_decode_loop_over_a_fixed_cache_traces_once(engine):
    n = Sizes((2,), 1, 8, 4, 2, H, D)
    query, key, value = map(jnp.asarray, inputs(n))
    count = 0

    @jax.jit
    def step(query, key, value, length, position):
        nonlocal count
        count += 1
        mask = masks.causal() & masks.lengths(key=length)
        return attention(query, key, value, mask, query_positions=position, **engine)

    for i in range(8):
        got = step(query, key, value, jnp.full(2, i + 1), jnp.full((2, 1), i))
        assert_close(got, attention(query, key[:, : i + 1], value[:, : i + 1], **engine), factor=10)
    assert count == 1


def test_a_rules_function_runs_once_a_trace(engine):
    count = 0

    def fn(q, k, far):
        nonlocal count
        count += isinstance(far, jax.core.Tracer)
        return k - q <= far

    f = jax.jit(lambda far, query: attend(query, *one_head()[1:], masks.rule(fn, far), **engine))
    for far in range(4):
        f(far, one_head(seed=far)[0])
    once = count
    f(9, one_head()[0])
    assert count == once > 0


# Clause 14: strict settings


STRICT = [("segments", True), ("a rule", False), ("half a mask, half a bias", True), ("a bias of -inf", False)]


@pytest.mark.parametrize("form, x64", STRICT)
def test_debug_flags_find_nothing(form, x64, engine):
    mask, bias = EMPTY_FORMS[form]
    with jax.enable_x64(x64), jax.debug_nans(True), jax.debug_infs(True):
        query, key, value = one_head(np.float64 if x64 else np.float32)
        options = dict(softcap=2.0, dropout_rate=0.2, dropout_rng=jax.random.key(1), **engine)
        key[6] = 1e30  # nobody sees it

        def f(query, key, value):
            return attend(query, key, value, mask, bias, **options)

        def entropy(query, key, value):  # lse, which is -inf, does not leave the jit
            return attend(query, key, value, mask, bias, return_stats=True, **options)[1].entropy

        loss = lambda *x: (f(*x) ** 2).sum()  # noqa: E731
        gradient = jax.grad(loss, (0, 1, 2))
        results = [
            f(query, key, value),
            gradient(query, key, value),
            jax.jvp(gradient, (query, key, value), (query, key * 0, value)),
            jax.jit(jax.value_and_grad(lambda *x: loss(*x) + entropy(*x).sum(), (0, 1, 2)))(query, key, value),
        ]
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


def test_debug_flags_find_what_the_contract_shows(engine):
    query, key, value = one_head()
    out = functools.partial(attend, **engine)
    for i, f in itertools.product(range(3), (out, jax.jit(out), jax.grad(lambda *x: out(*x).sum()))):
        spoilt = [x * NAN if i == j else x for j, x in enumerate((query, key, value))]
        with jax.debug_nans(True), pytest.raises(FloatingPointError):
            f(*spoilt)
    with jax.debug_infs(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(attend(query, key, value, ISLANDS, return_stats=True, **engine))


def test_everything_holds_without_x64(engine):
    with jax.enable_x64(False):
        query, key, value = one_head()  # float64 of NumPy, which JAX makes float32
        positions = np.arange(T)  # int64 likewise
        mask = masks.causal(np.arange(1)[0]) & masks.lengths(key=np.int64(4))

        def f(query, key, value):
            return attend(
                query, key, value, mask, normal(7, T, S), query_positions=positions, return_stats=True, **engine
            )

        out, stats = f(query, key, value)
        exact = reference.attention(
            query[:, None],
            key[:, None],
            value[:, None],
            mask=((KEYS <= QUERIES) & (KEYS < 4))[None],
            bias=normal(7, T, S)[None],
        )
        assert {x.dtype.name for x in (out, *stats)} == {"float32"}
        assert_close(out, exact.out[:, 0], "float32")
        gradient = jax.grad(lambda *x: (f(*x)[0] ** 2).sum(), (0, 1, 2))(*map(jnp.asarray, (query, key, value)))
        assert {x.dtype.name for x in gradient} == {"float32"}
        bits = dropped(**engine)
    np.testing.assert_array_equal(bits, dropped(**engine))


def test_without_x64_numpy_float64_meets_float32(engine):
    args = one_head()
    with jax.enable_x64(False):
        query, key, value = one_head()
        out, stats = attend(query, jnp.asarray(key), jnp.asarray(value), return_stats=True, **engine)
        assert out.dtype == jnp.float32
        merged, _ = merge([out, np.asarray(out, np.float64)], [stats.lse, np.asarray(stats.lse, np.float64)])
        cache = Cache.create(T, 1, H, D)
        tokens = query[:, None], query[:, None], value[:T, None]
        assert cached_attention(*tokens, cache, **engine)[0].dtype == jnp.float32
    assert_close(out, reference.attend(*args).out, "float32")
    assert_close(merged, reference.attend(*args).out, "float32")


# Weights


def test_rows_of_weights_sum_to_1_or_0():
    query, key, _ = inputs(GROUPED)
    weights = attention_weights(query, key, _grouped_visible())
    alive = _grouped_visible().any(-1)
    assert_close(weights.sum(-1), alive.astype(float))
    np.testing.assert_array_equal(np.asarray(weights) > 0, _grouped_visible())


def test_with_a_sink_weights_sum_to_what_the_sink_leaves():
    query, key, value = inputs(GROUPED)
    sink = normal(3, 4)
    _, stats = attention(query, key, value, ISLANDS[None, None], sink=sink, return_stats=True)
    weights = attention_weights(query, key, ISLANDS[None, None], sink=sink)
    assert_close(weights.sum(-1), np.moveaxis(1 - np.exp(sink - np.asarray(stats.lse)), -1, -2), factor=10)


@pytest.mark.parametrize("case", list(CASES.values())[::12], ids=list(CASES)[::12])
def test_weights_times_values_are_the_output(case):
    case = case._replace(dropout=False, stats=True)
    n = battery.SIZES[case.sizes]
    args, mask, _, expected = battery.problem(case)
    leaf, build, _ = battery.BIASES[case.bias](n)
    positions, _, _ = battery.POSITIONS[case.positions](n)
    exact = expected(args)
    value = args.pop("value")
    weights = attention_weights(**args | {"bias": build(leaf)}, mask=mask, **positions)
    assert_close(weights, exact.weights, factor=10)
    repeated = np.moveaxis(np.repeat(value, n.N // n.K, axis=-2), -2, -3)
    assert_close(np.moveaxis(np.asarray(weights) @ repeated, -3, -2), exact.out, factor=10)


ROWS = {
    "a list": [3, 0, 3],
    "an array": np.array([4, 1]),
    "none": np.array([], np.int32),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_chosen_rows_are_rows_of_the_whole(rows):
    query, key, _ = inputs(GROUPED)
    positions = np.array([3, -1, 2, 7, 0])
    options = dict(bias=biases.alibi(4), query_positions=positions, sink=normal(3, 4))
    masks_ = {
        "positions": masks.causal() & masks.window(4, None),
        "stored": masks.segments(np.arange(T) % 2, np.arange(S) % 2) & masks.lengths(query=4),
        "array": _grouped_visible(),
    }
    for mask in masks_.values():
        whole = np.asarray(attention_weights(query, key, mask, **options))
        for r in (rows, np.asarray(rows, np.int64)):
            got = attention_weights(query, key, mask, rows=r, **options)
            assert_close(got, whole[..., np.asarray(rows, int), :], factor=10)
        traced = jax.jit(lambda rows, mask=mask: attention_weights(query, key, mask, rows=rows, **options))
        assert_close(traced(np.asarray(rows, np.int32)), whole[..., np.asarray(rows, int), :], factor=10)


def test_the_one_query_can_be_chosen_twice():
    query, key, _ = inputs(Sizes((), 1, 4, 2, 1, 2, 1))
    options = dict(mask=masks.lengths(key=3), bias=biases.alibi(2), query_positions=np.array([2]))
    whole = attention_weights(query, key, **options)
    assert_close(attention_weights(query, key, rows=[0, 0, 0], **options), np.repeat(whole, 3, axis=-2))


def test_weights_have_derivatives_of_both_modes():
    query, key, _ = map(jnp.asarray, inputs(Sizes((), 3, 4, 2, 1, 2, 1)))
    f = jax.jit(lambda query, key: attention_weights(query, key, masks.causal(-1), rows=np.array([0, 2])))
    check_grads(f, (query, key), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


# merge


def _part(args, mask, **options):
    out, stats = attention(*args, mask, return_stats=True, **options)
    return out, stats.lse


def test_merging_disjoint_keys_is_attending_to_all():
    query, key, value = inputs(GROUPED)
    parts = [_part((query, key[:, a:b], value[:, a:b]), None) for a, b in ((0, 2), (2, 3), (3, 7))]
    whole = _part((query, key, value), None)
    outs, lses = zip(*parts, strict=True)
    leaves_close(merge(outs, lses), whole)
    leaves_close(merge(list(outs), list(lses)), whole)
    leaves_close(merge(jnp.stack(outs), jnp.stack(lses)), whole)
    leaves_close(jax.jit(merge)(jnp.stack(outs), jnp.stack(lses)), whole)
    leaves_close(merge(outs[::-1], lses[::-1]), whole)
    pair = merge(outs[:2], lses[:2])
    leaves_close(merge([pair[0], outs[2]], [pair[1], lses[2]]), whole)
    pair = merge(outs[1:], lses[1:])
    leaves_close(merge([outs[0], pair[0]], [lses[0], pair[1]]), whole)
    leaves_close(merge(outs[:1], lses[:1]), parts[0])


def test_merging_has_the_derivatives_of_attending_to_all():
    query, key, value = map(jnp.asarray, inputs(Sizes((), 3, 5, 2, 1, 2, 2)))
    sink = jnp.asarray(normal(3, 2))

    def merged(query, key, value, sink):
        # Row 0 sees nothing of the second part, and exactly one part carries the sink.
        first = _part((query, key, value), masks.causal() & masks.prefix(1), sink=sink)
        second = _part((query, key, value), masks.causal() & ~masks.prefix(1))
        return merge(*zip(first, second, strict=True))

    def whole(query, key, value, sink):
        return _part((query, key, value), masks.causal(), sink=sink)

    @jax.jit
    def run(*args):
        out = []
        for f in (merged, whole):
            loss = lambda *x, f=f: sum((y**3).sum() for y in f(*x))  # noqa: E731
            gradient = jax.grad(loss, (0, 1, 2, 3))
            out.append((f(*args), jax.jvp(f, args, args)[1], gradient(*args), jax.jvp(gradient, args, args)[1]))
        return out

    leaves_close(*run(query, key, value, sink))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e300])
def test_a_part_that_saw_nothing_is_ignored_whatever_it_holds(garbage):
    query, key, value = inputs(GROUPED)
    out, lse = _part((query, key, value), None)
    empty = np.full_like(out, garbage), np.full_like(lse, -INF)

    @jax.jit
    def run(out, lse, bad, tangent):
        f = lambda out, bad: merge([out, bad], [lse, jnp.full(lse.shape, -INF)])  # noqa: E731
        g = lambda lse: merge([out, bad], [lse, jnp.full(lse.shape, -INF)])  # noqa: E731
        pushed = jax.jvp(f, (out, bad), (out, tangent))[1]
        pulled = jax.vjp(f, out, bad)[1]((out, lse))
        return f(out, bad), pushed, pulled, jax.jvp(g, (lse,), (lse,))[1], jax.vjp(g, lse)[1]((out, lse))

    clean = run(out, lse, np.zeros_like(out), np.zeros_like(out))
    leaves_close(clean[0], (out, lse))
    leaves_equal(run(out, lse, empty[0], empty[0]), clean)
    np.testing.assert_array_equal(clean[2][1], np.zeros_like(out))


def test_parts_that_all_saw_nothing_make_an_empty_row():
    f = lambda outs, lses: merge(outs, lses)  # noqa: E731
    outs, lses = np.full((2, 3, D), NAN), np.full((2, 3), -INF)
    leaves_equal(f(outs, lses), (np.zeros((3, D)), np.full(3, -INF)))
    pulled = jax.vjp(f, outs, lses)[1]((np.ones((3, D)), np.ones(3)))
    leaves_equal(pulled, (np.zeros((2, 3, D)), np.zeros((2, 3))))
    leaves_equal(jax.jvp(f, (outs, lses), (outs, np.ones((2, 3))))[1], (np.zeros((3, D)), np.zeros(3)))


def test_a_nan_part_that_counts_is_shown():
    out, lse = merge(np.array([[[NAN, 1.0]], [[2.0, 3.0]]]), np.array([[0.0], [0.0]]))
    assert np.isnan(out).any() and lse.shape == (1,)
    out, lse = merge(np.array([[[1.0]], [[2.0]]]), np.array([[NAN], [0.0]]))
    assert np.isnan(out).all() and np.isnan(lse).all()


# Properties


def test_masking_a_key_is_deleting_it(engine):
    query, key, value = one_head()
    hidden = np.array([True, False, True, True, False, False, True])
    bias = normal(3, T, S)

    def f(key, value, bias, mask):
        loss = lambda *x: (attend(query, *x[:2], mask, x[2], **engine) ** 2).sum()  # noqa: E731
        out = attend(query, key, value, mask, bias, return_stats=True, **engine)
        return out, jax.grad(loss, (0, 1, 2))(key, value, bias)

    masked, gradients = f(key, value, bias, hidden[None])
    deleted, rest = f(key[hidden], value[hidden], bias[:, hidden], None)
    leaves_close(masked, deleted)
    key_gradient, value_gradient, bias_gradient = map(np.asarray, gradients)
    leaves_close((key_gradient[hidden], value_gradient[hidden], bias_gradient[:, hidden]), rest)
    assert not key_gradient[~hidden].any() and not value_gradient[~hidden].any() and not bias_gradient[:, ~hidden].any()


def test_permuting_keys_with_their_values_changes_nothing(engine):
    query, key, value = one_head()
    order = np.random.default_rng(0).permutation(S)
    f = functools.partial(attend, query, return_stats=True, **engine)
    got = f(
        key[order], value[order], masks.causal() | ISLANDS[:, order], normal(3, T, S)[:, order], key_positions=order
    )
    leaves_close(got, f(key, value, masks.causal() | ISLANDS, normal(3, T, S)))


def test_adding_a_constant_to_a_row_of_logits_only_moves_its_lse(engine):
    shift = np.array([[0.0], [1.0], [-700.0], [1e4], [3.0]])
    f = functools.partial(attend, *one_head(), masks.causal(), return_stats=True, **engine)
    (out, stats), (moved, moved_stats) = f(bias=np.zeros((T, 1))), f(bias=shift)
    assert_close(moved, out, factor=1e5)  # 1e4 + x keeps twelve digits of x
    assert_close(moved_stats.entropy, stats.entropy, factor=1e5)
    assert_close(moved_stats.lse, stats.lse + shift[:, 0], factor=10)


@pytest.mark.parametrize("name", MASKS := [name for name in battery.MASKS if name != "no mask"])
def test_a_rule_is_its_dense_array(name, engine):
    n = Sizes((), T, S, 1, 1, H, D)
    q, k = np.arange(T)[None, :, None], np.arange(S)[None, None, :]
    mask, dense = battery.MASKS[name](n, q, k)
    full = np.broadcast_to(dense, (1, T, S))
    if not isinstance(mask, np.ndarray):
        leaves = jax.tree.leaves(mask)
        if all(x.ndim < 3 for x in leaves) and name != "a window per head":
            np.testing.assert_array_equal(mask.dense(T, S), full[0])
            np.testing.assert_array_equal((~mask).dense(T, S), ~full[0])
    args = inputs(n)
    leaves_close(
        attention(*args, mask, return_stats=True, **engine), attention(*args, full, return_stats=True, **engine)
    )


def test_de_morgan(engine):
    rules = [masks.causal(1), masks.window(2, 0), masks.lengths(key=jnp.int32(4)), masks.rule(islands), masks.prefix(2)]
    for a, b in itertools.combinations(rules, 2):
        np.testing.assert_array_equal((~(a & b)).dense(T, S), (~a | ~b).dense(T, S))
        np.testing.assert_array_equal((~(a | b)).dense(T, S), (~a & ~b).dense(T, S))
        np.testing.assert_array_equal((~~a).dense(T, S), a.dense(T, S))
    a, b = rules[:2]
    f = lambda mask: attend(*one_head(), mask, return_stats=True, **engine)  # noqa: E731
    leaves_close(f(~(a & b)), f(~a | ~b))


def test_statistics_do_not_change_the_output(engine):
    f = functools.partial(attention, *inputs(GROUPED), masks.causal(), **engine)
    assert_close(f(return_stats=True)[0], f())


def test_keys_that_tie_for_the_largest_logit_share_its_derivative(engine):
    query = jnp.array([[1.0, 2.0], [-1.0, 0.5]])
    # The first query's largest logit is that of keys 0, 3 and 5, tiles apart; the second's that of key 1 alone.
    key = jnp.array([[2.0, 1.0], [-3.0, 1.0], [0.0, 0.5], [2.0, 1.0], [1.0, 1.0], [2.0, 1.0]])

    def largest(key):
        return attend(query, key, key, scale=1.0, return_stats=True, **engine)[1].max_logit

    expected = np.zeros((2, 6, 2))
    expected[0, [0, 3, 5]] = np.asarray(query)[0] / 3
    expected[1, 1] = np.asarray(query)[1]
    assert_close(jax.jit(jax.jacrev(largest))(key), expected)
    assert_close(jax.jit(jax.jacfwd(largest))(key), expected)


def test_an_output_has_no_derivative_to_keys_after_it(engine):
    query, key, value = map(jnp.asarray, one_head())
    jacobian = jax.jacrev(lambda key: attend(query, key, value, masks.causal(), **engine).sum(-1))(key)
    reached = (np.asarray(jacobian) != 0).any(-1)
    np.testing.assert_array_equal(reached, (KEYS <= QUERIES) & (QUERIES > 0))


def test_a_traced_row_that_is_not_there_is_nan():
    query, hidden = normal(0, 4, 1, 2), np.arange(4)[None, :, None] < 3
    weights = jax.jit(lambda rows: attention_weights(query, query, hidden, rows=rows))(jnp.array([-1, 3, 4]))
    np.testing.assert_array_equal(weights[0], [[NAN] * 4, [0.0] * 4, [NAN] * 4])


BELOW_ZERO = jnp.float64(-2.0)


def test_known_jax_scalars_are_known_inside_a_jit():
    x, softcap, rate, none = normal(0, 4, 2), jnp.float64(2.0), jnp.float64(0.5), jnp.float64(0.0)
    how = {"softcap": softcap, "dropout_rate": rate, "dropout_rng": jax.random.key(0)}
    np.testing.assert_allclose(jax.jit(lambda x: attend(x, x, x, **how))(x), attend(x, x, x, **how), atol=1e-12)
    np.testing.assert_array_equal(
        jax.jit(lambda x: attend(x, x, x, dropout_rate=none))(x), jax.jit(lambda x: attend(x, x, x))(x)
    )
    with pytest.raises(ValueError, match="softcap must be finite and > 0, got -2.0"):
        jax.jit(lambda x: attend(x, x, x, softcap=BELOW_ZERO))(x)
