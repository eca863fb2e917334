"""The reports of tests/test_field_reports.py on rings of simulated devices, for tests/test_ring.py. No tests here.

A report is an element of a batch where it can be, so that one program, which takes seconds to compile, answers many.
A function says in its docstring which reports it is about.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from battery import normal
from conftest import assert_close
from ring_devices import ALL, TOKENS, P, around, inputs, on

from jattn import Stats, attention, biases, masks

NAN, INF = np.nan, np.inf
LN2, LN3, LN4 = np.log([2, 3, 4])


def results(f, n, specs, differentiable):
    """Of (*args, cotangents): what f gives on n devices, and what it passes back to its first arguments."""

    def g(args, cotangents):
        held, rest = args[:differentiable], args[differentiable:]
        out, pull = jax.vjp(lambda *x: on(n, f, specs)(*x, *rest), *held)
        return out, pull(cotangents)

    return jax.jit(g)


# One head, with a table of its own that says which pairs are visible and what is added to their logits. 20 queries and
# keys, 5 on each of 4 devices, in tiles of 2 x 3. Keys that a case has not are hidden and hold NaN.

L, H, D = 20, 3, 4


def told(query, key, value, bias, visible, scale):
    mask = masks.rule(_looked_up, visible, ranks=(2,))
    return around(query, key, value, mask, biases.rule(_looked_up, bias, ranks=(2,)), scale=scale, return_stats=True)


def _looked_up(q, k, table):
    return table[q, k]


def case(S, T=1, visible=True, query=0.0, key=0.0, value=None, bias=0.0, pull="out", **right):
    """Of T queries and S keys; `query` and `key` are a number or (n, H), `value` (S,) or (S, D), or one-hot.

    `pull` names what is pulled at, with ones, or is what `out` is pulled by. `right` are numbers of the report.
    """
    args = [np.zeros((L, H)), np.full((L, H), NAN), np.full((L, D), NAN), np.zeros((L, L)), np.zeros((L, L), bool)]
    value = np.eye(S, D) if value is None else np.asarray(value, float)
    args[0][:T], args[1][:S] = query, key
    args[2][:S] = value if value.ndim == 2 else value[:, None] * [1, 0, 0, 0]
    args[3][:T, :S], args[4][:T, :S] = bias, visible
    cotangent = reference.Cotangent(np.zeros((L, D)), *(np.zeros(L) for _ in range(3)))
    if isinstance(pull, str):
        for name in pull.split():
            getattr(cotangent, name)[:T] = 1
    else:
        cotangent.out[:T] = pull
    return args, cotangent, right


def first(*logits):
    """(S, H): keys with these logits, for a query that is (1, 0, 0) or ones."""
    return np.array(logits, float)[:, None] * [1, 0, 0]


E0 = np.array([1.0, 0, 0])
STAIRS = np.tril(np.ones((6, 10), bool)) & (np.arange(6) < 5)[:, None]
BAND = (np.abs(2 * (np.arange(4)[:, None] - np.arange(4)) - 1) == 1) & (np.arange(4) < 2)
TRIL = np.tril(np.ones((3, 3), bool))
Q, KEY, V = normal(1, L, H), normal(2, L, H), normal(3, L, D)
LOW = {x: case(2, query=E0, key=first(x, x), out=[[0.5, 0.5]], lse=[x], entropy=[LN2]) for x in (-1e9, -1e30, -1e38)}
SPOILT = [[np.where([[0], [1]], bad, x) for x in (KEY[:2], V[:2])] for bad in (NAN, INF, -INF, 1e38)]
ONLY = {"13": [13], "0": [0], "19": [19], "3 and 14": [3, 14]}
HALF = {"out": [[0.5, 0.5, 0]], "d_bias": [[0.25, -0.25, 0]]}

ONE_HEAD = {
    "C01": case(10, 6, STAIRS, value=np.arange(10) + 1, out=[1, 1.5, 2, 2.5, 3, 0]),
    "C03": case(4, 4, BAND, value=[1, 2, 4, 8], pull=[[1]] * 2 + [[0]] * 2, out=[1, 1.5, 2, 0]),
    "C03, any": case(4, 4, BAND, Q[:4], KEY[:4], V[:4]),
    "C06": case(3, 3, TRIL & [False, True, True], value=[10, 20, 40], out=[0, 20, 30], lse=[-INF, 0, LN2]),
    "C09": case(
        7, 7, np.tril(np.ones((7, 7), bool)) & np.array([0, 1, 1, 0, 0, 1, 0], bool), value=np.arange(7) + 1,
        out=[0, 2, 2.5, 2.5, 2.5, 11 / 3, 11 / 3],
    ),
    "C12": case(3, query=E0, key=first(-100000, -99999, -99998), out=[[0.09003057, 0.24472847, 0.66524096]],
                lse=[-99997.5924]),
    **{f"C12, {x:.0e}": one for x, one in LOW.items()},
    "C20": case(3, visible=[False, True, True], bias=[INF, 0, 0], out=[[0, 0.5, 0.5]]),
    "C20, seen": case(2, bias=[INF, 0], out=[[NAN, NAN]]),
    **{f"C23, {i}": case(2, 2, [[True, False]] * 2, Q[:2], k, v, out=V[[0, 0]]) for i, (k, v) in enumerate(SPOILT)},
    **{f"C25, {x}": case(3, visible=[True, True, False], bias=[1, 1, x], pull=[[1, 0, 0, 0]], **HALF)
       for x in (100, 1e30, INF, NAN)},
    "C25, a product": case(3, visible=[True, True, False], query=E0, key=first(1, 1, 1e30), pull=[[1, 0, 0, 0]],
                           **HALF),
    "C29": case(3, visible=[True, True, False], pull="entropy", entropy=[LN2]),
    "C29, alone": case(2, visible=[True, False], pull="entropy", entropy=[0]),
    "C29, -inf": case(2, bias=[0, -INF], pull="entropy", entropy=[0]),
    "C30": case(3, visible=[True, True, False], bias=[0, LN3, 7], pull="entropy", entropy=[0.562335],
                d_bias=[[0.205990, -0.205990, 0]]),
    "C32": case(2, 5, np.arange(2) <= np.arange(5)[:, None] - 3, value=[1, 2], out=[0, 0, 0, 1, 1.5],
                lse=[-INF, -INF, -INF, 0, LN2]),
    "C33": case(4, lse=[LN4]),
    "C33, of a product": case(2, query=E0, key=first(0, LN3), lse=[LN4]),
    "C34": case(2, query=E0, key=first(0, LN3), value=[5, 9], pull="lse", d_query=[[0.75 * LN3, 0, 0]],
                d_key=[[0.25, 0, 0], [0.75, 0, 0]], d_value=np.zeros((2, D))),
    "C34, and out": case(2, query=E0, key=first(0, LN3), value=[5, 9], pull="out lse entropy max_logit"),
    "C39": case(3, 3, TRIL, value=[1, 2, 4], out=[1, 1.5, 7 / 3]),
    "C39, turned": case(3, 3, ~TRIL, value=[1, 2, 4], out=[3, 4, 0]),
    "C41": case(6, visible=np.arange(6) < 3, bias=[0.43, -0.21, 0.99, 0.32, -0.35, 0.04],
                out=[[0.305067, 0.160860, 0.534073, 0]]),
    **{f"C62, {name}": case(L, L, np.isin(np.arange(L), own), Q, KEY, V) for name, own in ONLY.items()},
    **{f"C64, {x}": case(L, L, query=E0, key=first(*[x] * L), value=V, out=V.mean(0)[None].repeat(L, 0),
                         lse=[x + np.log(L)] * L, d_query=np.zeros((L, H)), d_value=np.ones((L, D)))
       for x in (-120, 120, -10_000)},
    "C64, causal": case(L, L, np.tril(np.ones((L, L), bool)), E0, first(*[-120] * L), V),
}  # fmt: skip
# The same program, with a scale that is no power of 2.
HUGE = {"C19": 1e5, "C19, larger": 1e10}
SCALED = {
    **{name: case(3, query=x, key=x * np.array([[1], [0.9], [0.5]]) * np.ones(H), out=[[1, 0, 0]],
                  d_query=np.zeros((1, H)), d_key=np.zeros((3, H))) for name, x in HUGE.items()},
    "C67": case(2, bias=[-10, 0], out=[[4.5398e-5, 0.9999546]]),
}  # fmt: skip


def one_head_is_as_reported(n):
    """C01 C03 C06 C09 C12 C19 C20 C23 C25 C29 C30 C32 C33 C34 C39 C41 C62 C64 C67 C83 C90"""
    traced = []

    def f(*args):
        traced.append(0)
        return told(*args)

    run = results(f, n, (TOKENS,) * 3 + (ALL,) * 3, 4)
    for cases, scale in ((ONE_HEAD, 1.0), (SCALED, 1 / np.sqrt(H))):
        # As many in both calls, so that nothing is traced again.
        chosen = (list(cases.values()) * len(ONE_HEAD))[: len(ONE_HEAD)]
        args = [np.stack(x) for x in zip(*(args for args, *_ in chosen), strict=True)]
        args = [jnp.asarray(x, x.dtype if x.dtype == bool else np.float32) for x in args]
        query, key, value, bias, visible = args
        given = *(x[:, :, None] for x in (query, key, value)), bias[:, None], visible, jnp.float32(scale)
        out, *rows = (np.stack(x)[:, :, None] for x in zip(*(pulled for _, pulled, _ in chosen), strict=True))
        pulled = jax.tree.map(np.float32, (out, Stats(*rows)))
        found = run(given, pulled)
        same(run(given, pulled), found)
        (out, stats), passed = found
        named = {"out": out, **stats._asdict(), **dict(zip(PASSED, passed, strict=True))}
        for i, (name, one) in enumerate(cases.items()):
            got = {what: np.asarray(x[i, 0] if what == "d_bias" else x[i, :, 0]) for what, x in named.items()}
            is_right(name, got, [np.asarray(x[i], np.float64) for x in args], scale, *one[1:])
    assert len(traced) == 1


PASSED = "d_query", "d_key", "d_value", "d_bias"


def is_right(name, got, args, scale, cotangent, right):
    """As the report says, where it says something, and as the reference has it."""
    query, key, value, bias, visible = args
    visible = visible > 0
    exact = reference.attend(query, key, value, visible, bias, scale=scale)._asdict()
    del exact["weights"]
    if name.startswith("C12"):
        # The reference subtracts what is too large for it.
        del exact["entropy"]
    elif not name.startswith("C19"):
        how = {"scale": scale, "error": np.zeros(L), "eps": 1e-7}
        pulled = reference.gradients(query, key, value, visible, bias, cotangent, **how)
        exact |= {f"d_{what}": pulled[what][0] for what in ("query", "key", "value", "bias")}
    reported = {what: np.asarray(x, float) for what, x in right.items()}
    for what, x in [*exact.items(), *reported.items()]:
        shown = got[what][: len(x)]
        shown = shown[:, 0] if x.ndim < shown.ndim else shown[:, : x.shape[1]] if x.ndim == 2 else shown
        # A derivative of the query is a sum of keys.
        size = max(1, np.abs(key[visible.any(0)]).max(initial=0)) if what == "d_query" else 1
        try:
            assert_close(shown, x, "float32", 3 * size)
        except AssertionError as error:
            raise AssertionError(f"{name}: {what} must be {x}, got {shown}") from error


def same(xs, ys):
    for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(ys), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# All rules at once, each of which the numbers of a batch element can switch off.

M = 8


def ruled(query, key, value, bias, keys, ids, offset, left, length, queries):
    mask = masks.causal(offset) & masks.window(left, None) & masks.array(keys)
    mask = mask & masks.lengths(key=length, query=queries) & masks.segments(ids, padding=-1)
    return around(query, key, value, mask, bias)


def switched(keys=(True,) * M, ids=(0,) * M, offset=M, left=M, length=M, queries=M):
    """The numbers of an element, and what they mean."""
    means = reference.mask(M, M, causal=offset, window=(left, None), key_length=length, query_length=queries,
                           query_ids=ids, padding=-1) & np.array(keys)  # fmt: skip
    return (np.array(keys)[None, None], np.array(ids), offset, left, length, queries), means


KEYS = np.array([1, 1, 0, 1, 0, 1, 1, 0], bool)
SOURCES = {"offset": 0, "left": 2, "keys": KEYS, "length": 6, "ids": np.repeat([0, 1], 4)}
SUBSETS = [{what: x for i, (what, x) in enumerate(SOURCES.items()) if n >> i & 1} for n in range(2 ** len(SOURCES))]
NINE = np.array([0, 1, 1, 0, 0, 1, 0, 0], bool)
# Of queries that like all keys: the numbers, the values, and the mean of those that each query sees.
MEANS = {
    "C09": ({"keys": NINE, "offset": 0}, [1, 2, 3, 4, 5, 6, 7], [0, 2, 2.5, 2.5, 2.5, 11 / 3, 11 / 3]),
    "C42": ({"keys": np.arange(M) < 2}, [2, 4, 60], [3] * M),
    "C42, another": ({"keys": np.arange(M) < 1}, [2, 4, 60], [2] * M),
    "C47": ({"length": 0}, [1, 2, 4, 8], [0] * M),
    "C47, another": ({"length": 4}, [1, 2, 4, 8], [3.75] * M),
    "C48": ({"ids": [1, 1, 2, 2, -1, -1, -1, -1]}, [1, 3, 5, 9, 100, 200], [2, 2, 7, 7, 0, 0]),
    "C48, as any id": ({"ids": [1, 1, 2, 2, 0, 0, 9, 9]}, [1, 3, 5, 9, 100, 200], [2, 2, 7, 7, 150, 150]),
    "C50": ({"offset": 0, "length": 5, "queries": 2}, [1, 2, 4, 8, 16], [1, 1.5, 0]),
    "C50, bottom right": ({"offset": 3, "length": 5, "queries": 2}, [1, 2, 4, 8, 16], [3.75, 6.2, 0]),
    "C50, more queries": ({"offset": 0, "length": 2, "queries": 5}, [1, 2], [1, 1.5, 1.5, 1.5, 1.5, 0]),
    "C50, both": ({"offset": -3, "length": 2, "queries": 5}, [1, 2], [0, 0, 0, 1, 1.5, 0]),
    "C56": ({"offset": 0, "left": 1}, [1, 2, 4, 8, 16], [1, 1.5, 3, 6, 12]),
    "C56, three": ({"offset": 0, "left": 2}, [1, 2, 4, 8, 16], [1, 1.5, 7 / 3, 14 / 3, 28 / 3]),
    "C58": ({"offset": 0, "left": 0}, [1, 2, 4, 8, 16], [1, 2, 4, 8, 16]),
}


def masks_are_as_reported(n):
    """C09 C42 C45 C47 C48 C50 C56 C58"""
    numbers, means = zip(*(switched(**own) for own in (*SUBSETS, *(own for own, *_ in MEANS.values()))), strict=True)
    B, C = len(means), len(SUBSETS)
    query, key, value, bias = (normal(i, B, *x) for i, x in enumerate(((M, 1, H), (M, 1, H), (M, 1, D), (1, 1, M))))
    query[C:], bias[C:] = 0, 0
    for i, (_, own, _) in enumerate(MEANS.values()):
        value[C + i, : len(own), 0, 0] = own
    cotangent = normal(5, B, M, 1, D)
    args = [query, key, value, bias, *(np.stack(x) for x in zip(*numbers, strict=True))]
    args = [jnp.asarray(x, np.int32 if x.dtype.kind == "i" else x.dtype) for x in args]
    run = results(ruled, n, (TOKENS,) * 3 + (ALL,) * 2 + (TOKENS,) + (ALL,) * 4, 4)
    out, (d_query, d_key, d_value, d_bias) = run(args, jnp.asarray(cotangent))
    assert_close(out, reference.attention(query, key, value, np.stack(means)[:, None], bias).out)
    for b in range(C):
        added = np.broadcast_to(bias[b, 0], (M, M))
        pulled = reference.Cotangent(cotangent[b, :, 0], *np.zeros((3, M)))
        exact = reference.gradients(query[b, :, 0], key[b, :, 0], value[b, :, 0], means[b], added, pulled,
                                    scale=1 / np.sqrt(H), error=np.zeros(M), eps=1e-15)  # fmt: skip
        for got, what in ((d_query, "query"), (d_key, "key"), (d_value, "value")):
            assert_close(got[b, :, 0], exact[what][0], factor=10)
        assert_close(d_bias[b, 0, 0], exact["bias"][0].sum(0), factor=10)
    for i, (_, _, wanted) in enumerate(MEANS.values()):
        assert_close(out[C + i, : len(wanted), 0, 0], wanted)


def zeros_are_sizes(n):
    """C58"""

    def f(query, key, value):
        rules = (masks.window(0, 0), 1.0), (masks.window(0, None), 1.0), (masks.window(None, None), 0.0)
        return [around(query, key, value, mask, scale=scale)[0, :, 0, 0] for mask, scale in rules]

    query, value = jnp.zeros((1, 4, 1, 1)), jnp.asarray([1.0, 2, 4, 8]).reshape(1, 4, 1, 1)
    found = jax.jit(on(n, f, (TOKENS,) * 3, [P("x")] * 3))(query, jnp.asarray(normal(1, 1, 4, 1, 1)), value)
    assert_close(jnp.stack(found), [[1, 2, 4, 8], [3.75, 14 / 3, 6, 8], [3.75] * 4])


def tails_that_divide_nothing_are_as_reported(n):
    """C07 C55 C64 C90"""
    T, S, logits = 3 * n, 5 * n, np.array([0, -120, 120, -1e4]).reshape(4, 1, 1, 1)
    query, key = np.zeros((4, T, 1, H)) + E0, logits * (np.zeros((4, S, 1, H)) + E0)
    value = np.stack([np.arange(S)[:, None, None] * np.ones(D), *[normal(3, S, 1, D)] * 3])
    args = [jnp.asarray(x) for x in (query, key, value)]
    rows = jnp.zeros((4, T, 1))
    ones = jnp.ones((4, T, 1, D)), Stats(rows + 1, rows, rows)

    def of(mask):
        f = functools.partial(around, mask=mask, scale=1.0, return_stats=True)
        return results(f, n, (TOKENS,) * 3, 3)

    plain = of(None)
    found = plain(args, ones)
    same(plain(args, ones), found)
    (out, stats), (d_query, d_key, d_value) = found
    assert_close(out, value.mean(1, keepdims=True).repeat(T, 1))
    assert_close(stats.lse, np.broadcast_to(np.log(S) + logits[..., 0], rows.shape))
    assert_close(d_value, np.full(value.shape, T / S))
    assert_close(d_query, logits * (np.zeros(query.shape) + E0))
    # All keys are one, and only lse sees which.
    assert_close(d_key.sum(1), T * np.broadcast_to(E0, (4, 1, H)), factor=10)
    for x, y in zip(*map(jax.tree.leaves, (of(np.ones((1, 1, 1, S), bool))(args, ones), found)), strict=True):
        assert_close(x, y)


def half_precision_is_as_reported(n):
    """C14 C15 C17 C22 C29 C70"""
    F, tril, two = 64, np.tril(np.ones((M, M), bool)), np.arange(M) < 2
    last = np.where((np.arange(M) == 1)[:, None] & (np.arange(F) == F - 1), -0.125, 0)
    for dtype in (np.float16, jnp.bfloat16):
        low = float(jnp.finfo(dtype).min)
        cases = [
            (0, 0, tril, 0),  # C14
            (0, 0, tril & (np.arange(M) > 0), 0),
            (normal(1, M, F), normal(2, M, F), tril, np.where(np.arange(M) < 3, low, 0)),  # C15
            (normal(1, M, F), normal(2, M, F), tril, np.where(np.arange(M) < 3, -INF, 0)),
            (64, 64 + last, two, 0),  # C17
            (100, 100 + last, two, 0),
            (0, 0, two, np.where(np.arange(M) < 1, low, -low)),  # C29
        ]
        shapes = (M, F), (M, F), (M, M), (M, M)
        query, key, visible, bias = (
            jnp.asarray(np.stack([np.broadcast_to(x, shape) for x in own]))
            for own, shape in zip(zip(*cases, strict=True), shapes, strict=True)
        )
        value = jnp.asarray(np.eye(M))[None].repeat(len(cases), 0)
        args = [x.astype(dtype)[:, :, None] for x in (query, key, value)]
        # C70: a bias of another dtype.
        told_so = on(n, functools.partial(told, scale=0.125), (TOKENS,) * 3 + (ALL,) * 2)
        out, stats = jax.jit(told_so)(*args, bias[:, None].astype(np.float32), visible)
        assert out.dtype == dtype and stats.lse.dtype == np.float32
        whole = reference.attention(*args, visible[:, None], bias[:, None], scale=0.125)
        assert_close(out, whole.out, dtype)
        # The reference subtracts what is too large for it in bfloat16.
        if dtype == np.float16:
            assert_close(stats.entropy, whole.entropy, dtype)
    # C22: what the backward pass makes of products of thousands is what the forward pass has made.
    query = jnp.asarray(30 * normal(1, 2, M, 1, 16), jnp.bfloat16)
    key = jnp.concatenate([query, jnp.asarray(30 * normal(2, 2, 200 - M, 1, 16), jnp.bfloat16)], 1)
    value, ones = (jnp.ones((2, length, 1, 1), jnp.bfloat16) for length in (200, M))
    out, (d_query, d_key, d_value) = results(around, n, (TOKENS,) * 3, 3)((query, key, value), ones)
    assert 1e3 < reference.attention(query, key, value).max_logit.max() < 1e4
    for got, right in ((out, ones), (d_value.astype(np.float32).sum(1), M), (d_query, 0), (d_key, 0)):
        assert_close(got, np.broadcast_to(np.float64(right), got.shape), "bfloat16")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def derivatives_are_as_reported(n):
    """C27 C80 C81"""
    # Of the two keys of each device one is hidden, and NaN. All queries are one number.
    hidden, late = np.arange(2 * n) % 2 == 1, np.arange(2 * n) >= n
    key = jnp.asarray(np.where(hidden, NAN, np.where(late, 1.0, -1.0)))
    value = jnp.asarray(np.where(hidden, NAN, late)).reshape(1, -1, 1, 1)
    seen = masks.array(~hidden[None, None, None])
    f = on(n, lambda *x: around(*x, seen, scale=1.0), (TOKENS,) * 3)

    def out(q, key):
        return f(jnp.full((1, n, 1, 1), q), key.reshape(1, -1, 1, 1), value).mean()

    pushed = jax.jit(lambda q, key, dq, d_key: jax.jvp(out, (q, key), (dq, d_key)))

    @jax.jit
    def higher(q):
        once = lambda q: jax.jvp(lambda q: out(q, key), (q,), (1.0,))[1]  # noqa: E731
        twice = lambda q: jax.jvp(once, (q,), (1.0,))  # noqa: E731
        return jnp.stack(jax.jvp(lambda q: twice(q)[1], (q,), (1.0,)))

    p = sigmoid(2)
    zero, of_late = jnp.zeros(2 * n), jnp.asarray(np.where(hidden, 0.0, late))
    assert_close(pushed(0.0, key, 1.0, zero), [0.5, 0.5])
    assert_close(pushed(1.0, key, 0.0, of_late), [p, p * (1 - p)])
    for none in (zero, jnp.asarray(hidden * 1.0)):
        assert pushed(1.0, key, 0.0, none)[1] == 0
    for q in (LN3 / 2, 0.0):
        s = sigmoid(2 * q)
        second, third = 4 * s * (1 - s) * (1 - 2 * s), 8 * s * (1 - s) * (1 - 6 * s + 6 * s * s)
        # In reverse mode, `derivatives_agree`.
        assert_close(higher(q), [second, third])


def softcaps_are_as_reported(n):
    """C65"""
    S = 2 * n

    def f(query, key, value, keys, cap):
        return around(query, key, value, masks.array(keys), scale=1.0, softcap=cap)

    run = results(f, n, (TOKENS,) * 3 + (ALL,) * 2, 3)
    ones = jnp.ones((1, n, 1, 1))
    # The first and the last key are there.
    for logits, visible, value, cap, right in (
        ((0, 0), (1, 0), (0, 1), 1, 0),
        ((10, 0), (1, 1), (1, 0), 5, sigmoid(5 * np.tanh(2))),
        ((1e30, 0), (1, 1), (1, 0), 50, 1),
        ((-1e30, 0), (1, 1), (1, 0), 50, sigmoid(-50)),
    ):
        given = np.zeros((3, S))
        given[:, [0, -1]] = logits, value, visible
        key, value, visible = (jnp.asarray(x) for x in given)
        keys = visible.reshape(1, 1, 1, S) > 0
        out, passed = run((ones, key.reshape(1, S, 1, 1), value.reshape(1, S, 1, 1), keys, jnp.float64(cap)), ones)
        assert_close(out, ones * right)
        assert all(np.isfinite(x).all() for x in passed)


def gradients_of_a_bias_are_as_reported(n=2):
    """C68"""
    right = {(1, 1, 1, 2): [-3, 3], (3, 1, 1, 2): [-1, 1], (1, 1, 2, 1): [0, 0]}
    value = jnp.asarray([0.0, 1]).reshape(1, 2, 1, 1) * jnp.ones((3, 1, 2, 1))
    zero, f = jnp.zeros((3, 2, 2, 1)), on(n, lambda *x: around(*x[:3], bias=x[3]), (TOKENS,) * 3 + (ALL,))
    loss = jax.grad(lambda bias: f(zero, zero, value, bias).sum())
    found = jax.jit(lambda biases: list(map(loss, biases)))([*map(jnp.zeros, right)])
    for (shape, wanted), got in zip(right.items(), found, strict=True):
        assert got.shape == shape
        assert_close(got.reshape(-1, 2), np.broadcast_to(np.float64(wanted), (got.size // 2, 2)))


def heads_are_as_reported(n):
    """C04 C74 C77"""
    S = 2 * n
    zero, value = jnp.zeros((1, S, 6, 2)), jnp.ones((1, S, 2, 3)) * jnp.array([10.0, 20]).reshape(1, 1, 2, 1)
    off = jnp.arange(6).reshape(1, 6, 1, 1) != 2

    def f(query, key, value, off):
        return around(query, key, value, off), around(query, key, value, off, return_stats=True)

    out, (again, stats) = jax.jit(on(n, f, (TOKENS,) * 3 + (ALL,)))(zero, zero[:, :, :2], value, off)
    same(again, out)
    assert_close(out, np.broadcast_to(np.array([10.0, 10, 0, 20, 20, 20])[:, None], (1, S, 6, 3)))
    assert_close(stats.lse, np.broadcast_to(np.where(np.arange(6) == 2, -INF, np.log(S)), (1, S, 6)))


def vmap_is_a_loop(n):
    """C78"""
    query, key, value = inputs()
    queries, bias = query[None] + jnp.asarray(normal(1, 3, *query.shape)), jnp.asarray(normal(2, 3, 1, 4, 1, 16))
    padding = jnp.arange(16).reshape(1, 1, 1, 16) < jnp.array([9, 16]).reshape(2, 1, 1, 1)

    def of(f):
        whole = lambda *x: f(*x[:3], padding, x[3])  # noqa: E731
        return lambda *x: (whole(*x), jax.grad(lambda *x: (whole(*x) ** 2).sum(), range(4))(*x))

    ring = of(on(n, around, (TOKENS,) * 3 + (ALL,) * 2))
    got = jax.jit(jax.vmap(ring, (0, None, None, 0)))(queries, key, value, bias)
    one = jax.jit(of(attention))
    loop = [jax.tree.leaves(one(query, key, value, own)) for query, own in zip(queries, bias, strict=True)]
    for x, *ys in zip(jax.tree.leaves(got), *loop, strict=True):
        assert_close(x, np.stack(ys), factor=10)


def tokens_after_a_past_are_as_reported(n):
    """C53 C54 C60"""
    past, S = 2 * n, 3 * n
    query, key, value = (jnp.asarray(normal(i, 1, S, 2, 3)) for i in range(3))
    slopes = np.array([0.5, 0.1])

    def f(query, key, value, now, where):
        told = {"query_positions": now, "key_positions": where}
        return around(query, key, value, masks.causal(), biases.alibi(slopes), **told)

    run = jax.jit(on(n, f, (TOKENS,) * 3 + (P("x"),) * 2))
    got = run(query[:, past:], key, value, jnp.arange(past, S, dtype=np.int64), jnp.arange(S, dtype=np.uint8))
    added = np.stack([reference.alibi(S, S, slope) for slope in slopes])
    assert_close(got, reference.attention(query, key, value, np.tril(np.ones((S, S), bool)), added).out[:, past:])


def dropout_is_as_reported(n):
    """C87 C89"""
    B, N, S = 4, 3, 4 * n
    zero = jnp.zeros((B, S, N, 1))

    def f(query, key, value, rate, rng):
        return around(query, key, value, dropout_rate=rate, dropout_rng=rng)

    run = results(lambda value, query, *rest: f(query, query, value, *rest), n, (TOKENS,) * 2 + (ALL,) * 2, 1)
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    for rate in (0.0, 0.1, 0.5, 0.9, 1.0):
        weights, (passed,) = run((value, zero, jnp.float64(rate), jax.random.key(5)), jnp.ones((B, S, N, S)))
        drawn = np.asarray(weights) > 0
        assert_close(weights, np.where(drawn, 1 / S / (1 - rate) if rate < 1 else 0, 0), "float32")
        # 4 standard deviations.
        assert abs(drawn.mean() - (1 - rate)) <= 4 * np.sqrt(rate * (1 - rate) / drawn.size)
        assert np.isfinite(passed).all() and (rate < 1 or not np.asarray(passed).any())
        if rate == 0.5:
            heads = drawn.transpose(0, 2, 1, 3).reshape(B * N, -1)
            alike = (heads[:, None] == heads[None]).mean(-1)
            assert (abs(alike - 0.5)[~np.eye(B * N, dtype=bool)] < 4 * 0.5 / np.sqrt(S * S)).all()


def an_axis_may_be_empty(n):
    """C92"""
    for b, T, S, d in ((2, 2, 0, 5), (2, 0, 2, 5), (0, 2, 2, 5), (2, 2, 2, 0)):
        args = [jnp.ones(shape) for shape in ((b, T * n, 2, 3), (b, S * n, 2, 3), (b, S * n, 2, d))]
        f = on(n, functools.partial(around, mask=masks.causal(), return_stats=True), (TOKENS,) * 3)
        f = jax.jit(f)
        out, stats = f(*args)
        assert out.shape == (b, T * n, 2, d) and all(x.shape == out.shape[:3] for x in stats)
        if b == 0:
            # XLA refuses a part whose operands are all empty, as the backward pass is here, whatever is computed.
            continue
        (out, stats), pull = jax.vjp(f, *args)
        passed = pull(jax.tree.map(jnp.ones_like, (out, stats)))
        assert all(np.isfinite(x).all() for x in (out, *passed))
        if S == 0:
            assert not np.asarray(out).any() and (stats.lse == -INF).all() and (stats.entropy == 0).all()
            assert not any(np.asarray(x).any() for x in passed)
