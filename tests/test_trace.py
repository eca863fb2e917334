"""trace: every step of one head, against NumPy and `attend`; and how it reads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from battery import normal
from conftest import assert_close
from jax.experimental import checkify

from jattn import Trace, attend, attention_weights, biases, masks, trace

T, S, H, D = 5, 7, 3, 2
INF, NAN = np.inf, np.nan


def inputs(dtype=np.float64):
    return normal(1, T, H, dtype=dtype), normal(2, S, H, dtype=dtype), normal(3, S, D, dtype=dtype)


# Row 0 sees nothing.
VISIBLE = (np.arange(T)[:, None] + np.arange(S)) % 3 != 0
VISIBLE[0] = False

CALLS = {
    "nothing but scores": {},
    "a mask array": {"mask": VISIBLE},
    "causal": {"mask": masks.causal()},
    "all options": {
        "mask": VISIBLE,
        "bias": np.where(normal(4, T, S) > 1, -INF, normal(5, T, S)),
        "scale": 0.7,
        "softcap": 1.3,
        "sink": 0.4,
    },
    "positions": {
        "mask": masks.causal(),
        "bias": biases.alibi(np.float64(0.3)),
        "query_positions": np.array([4, 0, -1, 9, 2]),
        "key_positions": np.arange(S)[::-1].copy(),
    },
}


def dense(options):
    """Mask, bias, scale, softcap and sink as NumPy has them."""
    o = dict(options)
    q, k = o.pop("query_positions", np.arange(T))[:, None], o.pop("key_positions", np.arange(S))[None]
    mask, bias = o.pop("mask", None), o.pop("bias", 0.0)
    mask = np.ones((T, S), bool) if mask is None else mask if isinstance(mask, np.ndarray) else k <= q
    bias = -0.3 * abs(q - k) if isinstance(bias, biases.Bias) else np.broadcast_to(bias, (T, S))
    return mask & (bias != -INF), bias, {"scale": 1 / np.sqrt(H), "softcap": None, "sink": None} | o


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_every_step_is_what_numpy_makes_of_the_one_before(options):
    query, key, value = inputs()
    t = trace(query, key, value, **options)
    visible, bias, o = dense(options)
    assert_close(t.raw, o["scale"] * query @ key.T)
    assert_close(t.capped, t.raw if o["softcap"] is None else o["softcap"] * np.tanh(t.raw / o["softcap"]))
    assert_close(t.biased, t.capped + bias)
    assert np.asarray(t.visible).tolist() == visible.tolist()
    assert_close(t.masked, np.where(visible, t.biased, -INF))
    sink = -INF if o["sink"] is None else o["sink"]
    top = np.maximum(np.asarray(t.masked).max(1), sink)
    assert_close(t.peak, np.where(top == -INF, 0, top))
    assert_close(t.shifted, t.masked - np.asarray(t.peak)[:, None])
    assert_close(t.exp, np.exp(t.shifted))
    assert_close(t.total, np.asarray(t.exp).sum(1) + np.exp(sink - np.asarray(t.peak)))
    total = np.where(np.asarray(t.total) == 0, 1, t.total)[:, None]
    assert_close(t.weights, t.exp / total)
    assert_close(t.value, value)
    assert_close(t.weighted, np.asarray(t.weights)[:, :, None] * value)
    assert_close(t.out, np.asarray(t.weighted).sum(1))
    assert_close(t.effective, np.exp(t.entropy))


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_the_results_are_those_of_the_reference_and_of_attend_to_the_bit(options):
    query, key, value = inputs()
    t = trace(query, key, value, **options)
    visible, bias, o = dense(options)
    expected = reference.attend(query, key, value, visible, bias, **o)
    for name in ("out", "weights", "lse", "entropy"):
        assert_close(getattr(t, name), getattr(expected, name))
    out, stats = attend(query, key, value, **options, method="dense", return_stats=True)
    for got, same in ((t.out, out), (t.lse, stats.lse), (t.entropy, stats.entropy)):
        np.testing.assert_array_equal(got, same)
    lifted = {name: x[None] if isinstance(x, np.ndarray) and x.ndim == 2 else x for name, x in options.items()}
    lifted = {name: np.array([x]) if name == "sink" else x for name, x in lifted.items()}
    np.testing.assert_array_equal(t.weights, attention_weights(query[:, None], key[:, None], **lifted)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_steps_are_float32_and_out_has_the_dtype_of_the_query(dtype):
    arrays = [jnp.asarray(x, dtype) for x in inputs()]
    t = trace(*arrays, masks.causal())
    dtypes = {name: str(x.dtype) for name, x in vars(t).items() if hasattr(x, "dtype")}
    assert (dtypes.pop("value"), dtypes.pop("out"), dtypes.pop("visible")) == (dtype, dtype, "bool")
    assert set(dtypes.values()) == {"float32"}
    out, stats = attend(*arrays, masks.causal(), method="dense", return_stats=True)
    np.testing.assert_array_equal(np.asarray(t.out, np.float32), np.asarray(out, np.float32))
    np.testing.assert_array_equal(t.lse, stats.lse)


def test_it_is_a_pytree_under_jit_and_vmap():
    query, key, value = inputs()
    plain = trace(query, key, value, masks.causal(), sink=0.1)
    under_jit = jax.jit(trace)(query, key, value, masks.causal(), sink=0.1)
    batched = jax.vmap(functools.partial(trace, sink=0.1), (0, None, 0, None))(
        np.stack([query, 2 * query]), key, np.stack([value, -value]), masks.causal()
    )
    assert isinstance(under_jit, Trace) and isinstance(batched, Trace)
    assert jax.tree.structure(plain) == jax.tree.structure(under_jit) == jax.tree.structure(batched)
    second = jax.tree.map(lambda x: x[1], batched)
    other = trace(2 * query, key, -value, masks.causal(), sink=0.1)
    for a, b in ((plain, under_jit), (second, other)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert_close(x, y)


def test_what_is_hidden_enters_no_sum_and_no_derivative():
    query, key, value = inputs()
    visible = VISIBLE.copy()
    visible[:, 4] = False
    clean = trace(query, key, value, visible)
    # Arrays of their own: JAX may not have read the others yet.
    query, key, value = inputs()
    query[0], key[4], value[4] = NAN, INF, NAN  # an empty row, and a hidden key
    t = trace(query, key, value, visible)
    for name, x in vars(clean).items():
        if name not in ("raw", "capped", "biased", "value", "sink", "empty"):
            np.testing.assert_array_equal(x, getattr(t, name), err_msg=name)
    assert np.isnan(t.raw)[:, 4].all() and np.isfinite(np.delete(t.raw, 4, 1)[1:]).all()
    assert (np.asarray(t.weighted)[:, 4] == 0).all()

    def numbers(query, key, value):
        t = trace(query, key, value, visible)
        return t.weighted.sum() + t.out.sum() + jnp.where(visible, t.shifted + t.exp, 0).sum() + t.entropy.sum()

    for x in jax.grad(numbers, (0, 1, 2))(query, key, value):
        assert np.isfinite(x).all()


def test_what_is_seen_and_not_finite_makes_its_row_nan():
    query, key, value = inputs()
    key[5], value[2, 1] = INF, NAN
    t = trace(query, key, value, masks.causal(offset=2))
    # All rows see value 2, rows 3 and 4 see key 5 too.
    assert np.isnan(np.asarray(t.out)).all() and np.isnan(np.asarray(t.lse)).all()
    for x in (t.peak, t.total, t.weights[:, 0], t.exp[:, 0], t.shifted[:, 0]):
        assert np.isnan(np.asarray(x)).tolist() == [False] * 3 + [True] * 2
    assert np.isnan(t.weighted[0, 2, 1])
    for hidden in (t.weighted[0, 3:], t.weighted[3, 6], t.exp[3, 6]):
        assert (np.asarray(hidden) == 0).all()


def test_a_logit_that_overflows_makes_its_row_nan_and_is_marked():
    t = trace(np.full((1, 1), 1e200), np.array([[1e200], [1e-200]]), np.ones((2, 1)), scale=1.0)
    assert_close(t.raw, [[INF, 1]])
    for x in (t.peak, t.shifted, t.exp, t.total, t.weights, t.weighted, t.out, t.lse, t.entropy):
        assert np.isnan(np.asarray(x)).all()
    line = str(t).split("\n")[3]
    assert line.split()[:3] == ["0", "inf!", "inf!"]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
def test_no_queries_and_no_keys(sizes):
    query, key, value = np.ones((sizes[0], H)), np.ones((sizes[1], H)), np.ones((sizes[1], D))
    t = trace(query, key, value)
    assert t.weighted.shape == (*sizes, D) and (np.asarray(t.out) == 0).all() and (np.asarray(t.lse) == -INF).all()
    assert f"{sizes[0]} queries over {sizes[1]} keys" in str(t)
    assert t.rows() == []


def test_empty_raise_is_the_policy_of_attend():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="trace: a query has no key that it may attend to, and empty='raise'"):
        trace(query, key, value, VISIBLE, empty="raise")
    error, found = checkify.checkify(jax.jit(lambda mask: trace(query, key, value, mask, empty="raise")))(VISIBLE)
    assert "trace: a query has no key" in error.get() and found.empty == "raise"


def test_rows_are_plain_numbers():
    query, key, value = inputs()
    t = trace(query, key, value, VISIBLE)
    rows = t.rows(2)
    assert [row["key"] for row in rows] == list(range(S)) and {row["query"] for row in rows} == {2}
    assert len(t.rows()) == T * S and t.rows()[2 * S : 3 * S] == rows
    kinds = {"visible": bool, "query": int, "key": int}
    for row in rows:
        for name, x in row.items():
            numbers = x if isinstance(x, list) else [x]
            assert {type(n) for n in numbers} == {kinds.get(name, float)}
    assert_close([row["weight"] for row in rows], t.weights[2])
    assert_close([row["weighted"] for row in rows], t.weighted[2])
    assert_close([row["value"] for row in rows], value)
    for name in ("raw", "capped", "biased", "masked", "shifted", "exp"):
        assert_close([row[name] for row in rows], getattr(t, name)[2])


# How it reads


def test_the_table_of_the_lesson():
    key = np.array([[0.7, 1.1, 0.2, 5.0]]).T
    value = np.array([[1, 0], [0, 2], [1, 1], [-1, 1]], float)
    t = trace(np.ones((1, 1)), key, value, np.array([[True, True, True, False]]))
    assert str(t.table(tokens=["the", "cat", "sat", "on"])) == (
        """query 0 over 4 keys
key    raw score  after mask  minus max     exp  weight           value   weight·value
--------------------------------------------------------------------------------------
0 the     0.7000      0.7000    -0.4000  0.6703  0.3228   1.0000 0.0000  0.3228 0.0000
1 cat     1.1000      1.1000     0.0000  1.0000  0.4815   0.0000 2.0000  0.0000 0.9630
2 sat     0.2000      0.2000    -0.9000  0.4066  0.1958   1.0000 1.0000  0.1958 0.1958
3 on      5.0000        -inf       -inf  0.0000  0.0000  -1.0000 1.0000  0.0000 0.0000
--------------------------------------------------------------------------------------
sum                                      2.0769  1.0000                  0.5185 1.1587
lse 1.8309 nats, entropy 1.0362 nats: that of 2.8184 equal weights. 3 of 4 keys visible."""
    )
    # One query is its own table.
    assert str(t) == str(t.table())


def test_steps_that_were_taken_have_columns_and_the_sink_has_a_line():
    t = trace(*inputs(), **CALLS["all options"])
    text = str(t.table(1))
    columns = re.split("  +", text.split("\n")[1])
    assert columns[:7] == ["key", "raw score", "softcap", "+ bias", "after mask", "minus max", "exp"]
    sink = next(line for line in text.split("\n") if line.startswith("sink"))
    weight = float(sink.split()[-1])
    assert abs(weight + np.asarray(t.weights)[1].sum() - 1) < 1e-4
    plain = str(trace(*inputs()).table(1))
    assert "softcap" not in plain and "bias" not in plain and "sink" not in plain


def test_large_inputs_are_cut_and_the_rest_is_said():
    query, key, value = normal(1, 40, 3), normal(2, 100, 3), normal(3, 100, 6)
    t = trace(query, key, value)
    text = str(t.table(7))
    kept = [int(line.split()[0]) for line in text.split("\n")[3:19]]
    weights = np.asarray(t.weights)[7]
    assert kept == sorted(np.argsort(-weights)[:16])
    assert f"84 of 100 keys are left out. They hold {weights.sum() - weights[kept].sum():.4f} of the weight." in text
    assert "value (3 of 6)" in text
    lines = str(t).split("\n")
    assert max(map(len, lines)) < 200 and len(lines) < 30
    assert any(line.startswith("28 of 40 queries are left out. Their weights sum to 28.0000.") for line in lines)
    row = [float(x) for x in lines[3].split()]
    assert abs(sum(row[4:13]) - 1) < 1e-3  # eight weights and the others


def test_the_key_that_spoils_a_row_is_shown_and_marked():
    query, key, value = normal(1, 2, 3), normal(2, 100, 3), normal(3, 100, 2)
    key[90] = NAN
    text = str(trace(query, key, value).table())
    line = next(line for line in text.split("\n") if line.startswith("90 "))
    assert "NaN!" in line and text.endswith("! marks what is not finite.")
    value[50, 1], key[90] = INF, 0
    text = str(trace(query, key, value).table())
    assert "inf!" in next(line for line in text.split("\n") if line.startswith("50 "))
    # A hidden key is -inf by intention, and is not marked.
    assert "!" not in str(trace(query, key[:3], value[:3], masks.causal()))


def test_an_empty_row_is_named_with_its_policy():
    t = trace(*inputs(), VISIBLE)
    assert "0 of 7 keys visible: zeros, by empty='zero', lse -inf." in str(t.table(0))
    assert "1 of 5 queries see no key: zeros, by empty='zero'." in str(t)
    assert "0 (empty)" in str(t) and "1 (empty)" not in str(t)


def test_many_heads_and_traced_values_say_what_to_do():
    query, key, value = inputs()
    batched = jax.vmap(jax.vmap(trace, (0, None, None)), (0, None, None))(np.stack([query[None]] * 2), key, value)
    assert str(batched) == (
        "Trace(weights (2, 1, 5, 7), out (2, 1, 5, 2)): many heads. Pick one: jax.tree.map(lambda x: x[0, 0], trace)."
    )
    for show in (Trace.table, Trace.rows):
        with pytest.raises(ValueError, match=r"Trace.\w+: the Trace must be of one head, \(T, S\), got .*many heads"):
            show(batched)
    one = jax.tree.map(lambda x: x[0, 0], batched)
    assert str(one) == str(trace(query, key, value))

    seen = []

    @jax.jit
    def look(query):
        t = trace(query, key, value)
        seen.append(str(t))
        with pytest.raises(ValueError, match="no values yet. Return it from the transformed function"):
            t.rows()
        return t.out

    look(query)
    assert "no values yet" in seen[0]
    # Transforms fill pytrees with placeholders.
    assert "no values yet" in str(jax.tree.map(lambda x: object(), trace(query, key, value)))


def test_the_html_escapes_tokens_and_has_no_script():
    t = trace(*inputs(), masks.causal())
    tokens = ["</table><script>alert(1)</script>", "\"'&", "🙂", "שלום", "\n", "\x1b[31m", "b"]
    page = t.table(1, tokens)._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page and "🙂" in page
    assert "5 queries over 7 keys" in t._repr_html_()
    text = str(t.table(1, tokens))
    assert "\x1b" not in text and len(text.split("\n")) == 3 + S + 3


REFUSED = {
    "too few tokens": (lambda t: t.table(0, ["a"]), ValueError, "Trace.table: tokens must be (S,) = (7,), got (1,)."),
    "one text": (
        lambda t: t.table(0, "abcdefg"),
        TypeError,
        "Trace.table: tokens must be a list of texts, got 'abcdefg'.",
    ),
    "a query too many": (lambda t: t.table(5), ValueError, "Trace.table: query must be within 0 ... T - 1 = 4, got 5."),
    "a negative query": (lambda t: t.rows(-1), ValueError, "Trace.rows: query must be an int >= 0, got -1."),
    "heads": (
        lambda t: trace(np.ones((T, 2, H)), np.ones((S, H)), np.ones((S, D))),
        ValueError,
        "trace: query must be (T, H), got (5, 2, 3). Add heads and batches with jax.vmap, or call attention.",
    ),
    "a float mask": (
        lambda t: trace(*inputs(), np.ones((T, S))),
        TypeError,
        "trace: mask must be boolean (True = may attend), got float64.",
    ),
    "a policy that is not there": (
        lambda t: trace(*inputs(), empty="mean"),
        ValueError,
        "trace: empty must be one of 'zero', 'raise', got 'mean'.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_misuse_is_named(call, kind, message):
    with pytest.raises(kind) as error:
        call(trace(*inputs()))
    assert str(error.value).startswith(message)
