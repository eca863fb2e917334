"""method="cudnn": what is refused, and that the contract holds around a kernel that reads what is hidden.

No GPU is needed: the kernel is jax.nn's own function all through, here without cuDNN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import Cache, _cudnn, attend, attention, biases, cached_attention, dot_product_attention, masks
from tests import reference
from tests.conftest import assert_close

FITS = {
    "platform": "gpu",
    "dtype": jnp.dtype(jnp.bfloat16),
    "sizes": {"B": (2,), "T": 8, "S": 8, "H": 16, "D": 16},
    "mask": None,
    "scale_is_known": True,
    "others": [],
}


def sizes(**changed):
    return {"sizes": FITS["sizes"] | changed}


WIDTHS = "H = D, a multiple of 8 and at most 128"
SOMETHING = "at least one sequence, query and key"
CAUSAL = "no mask, or masks.causal() where T = S"
REFUSED = {
    "no GPU": ({"platform": "cpu"}, ("a GPU", "cpu")),
    "a TPU": ({"platform": "tpu"}, ("a GPU", "tpu")),
    "float32": ({"dtype": jnp.dtype(jnp.float32)}, ("float16 or bfloat16", "float32")),
    "float64": ({"dtype": jnp.dtype(jnp.float64)}, ("float16 or bfloat16", "float64")),
    "D differs": (sizes(D=8), (WIDTHS, "H = 16, D = 8")),
    "H is no multiple of 8": (sizes(H=12, D=12), (WIDTHS, "H = 12, D = 12")),
    "H is too large": (sizes(H=136, D=136), (WIDTHS, "H = 136, D = 136")),
    "no queries": (sizes(T=0), (SOMETHING, "B = (2,), T = 0, S = 8")),
    "no keys": (sizes(S=0), (SOMETHING, "B = (2,), T = 8, S = 0")),
    "no sequences": (sizes(B=(2, 0)), (SOMETHING, "B = (2, 0), T = 8, S = 8")),
    "one other option": ({"others": ["sink"]}, ("calls without sink", "it")),
    "two other options": ({"others": ["bias", "statistics"]}, ("calls without bias and statistics", "them")),
    "a traced scale": ({"scale_is_known": False}, ("a scale that is known while tracing", "a traced one")),
    "causal with fewer queries": (
        {"mask": masks.causal()} | sizes(T=7),
        (CAUSAL, "causal(offset=0) with T = 7, S = 8"),
    ),
    "causal with an offset": ({"mask": masks.causal(1)}, (CAUSAL, "causal(offset=1) with T = 8, S = 8")),
    "another rule": ({"mask": masks.window(3, 0)}, (CAUSAL, "window(left=3, right=0) with T = 8, S = 8")),
    "causal and another rule": (
        {"mask": masks.causal() & masks.prefix(2)},
        (CAUSAL, "(causal(offset=0) & prefix(length=2)) with T = 8, S = 8"),
    ),
    "an array": ({"mask": np.ones((1, 1, 8, 8), bool)}, (CAUSAL, "an array with T = 8, S = 8")),
}


@pytest.mark.parametrize("changed, expected", REFUSED.values(), ids=REFUSED)
def test_what_cudnn_cannot_do_is_refused(changed, expected):
    assert _cudnn.refusal(**FITS | changed) == expected


@pytest.mark.parametrize("changed", [{}, {"dtype": jnp.dtype(jnp.float16)}, {"mask": masks.causal()}, sizes(T=5)])
def test_what_cudnn_can_do_is_not_refused(changed):
    assert _cudnn.refusal(**FITS | changed) is None


T, N, K, H = 5, 4, 2, 8


def inputs(*lead, dtype=jnp.bfloat16):
    shapes = (*lead, T, N, H), (*lead, T, K, H), (*lead, T, K, H)
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes)]


def test_without_a_gpu_the_error_says_so():
    with pytest.raises(ValueError) as error:
        attention(*inputs(2), method="cudnn")
    assert str(error.value) == "attention: method='cudnn' needs a GPU, got cpu. Pass method='blockwise'."


@pytest.fixture
def on_gpu(monkeypatch):
    """The calls go as they would on a GPU, with XLA's kernel for cuDNN's: it reads what is hidden too."""
    monkeypatch.setattr(_cudnn, "_kernel", functools.partial(_cudnn._kernel, implementation="xla"))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    _cudnn.attend.clear_cache()
    # jax.nn mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        yield
    _cudnn.attend.clear_cache()


OPTIONS = {
    "a bias": ({"bias": biases.alibi(N)}, "bias"),
    "a softcap": ({"softcap": 2.0}, "softcap"),
    "a sink": ({"sink": jnp.zeros(N)}, "sink"),
    "positions of queries": ({"query_positions": np.arange(T)}, "query_positions"),
    "positions of keys": ({"key_positions": np.arange(T)}, "key_positions"),
    "tiles": ({"block_size": (2, 2)}, "block_size"),
    "dropout": ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "dropout"),
    "statistics": ({"return_stats": True}, "statistics"),
}


@pytest.mark.parametrize("option, name", OPTIONS.values(), ids=OPTIONS)
def test_no_option_is_ignored(on_gpu, option, name):
    with pytest.raises(ValueError) as error:
        attention(*inputs(2), method="cudnn", **option)
    assert str(error.value) == f"attention: method='cudnn' needs calls without {name}, got it. Pass method='blockwise'."


def test_a_cache_is_refused(on_gpu):
    with pytest.raises(ValueError, match="needs calls without query_positions and a cache, got them"):
        cached_attention(*inputs(), Cache.create(8, K, H, dtype=jnp.bfloat16), method="cudnn")


def test_a_traced_scale_is_refused(on_gpu):
    with pytest.raises(ValueError, match="needs a scale that is known while tracing, got a traced one"):
        jax.jit(lambda scale: attention(*inputs(2), scale=scale, method="cudnn"))(0.5)


@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_it_is_attention(on_gpu, mask, scale):
    args = inputs(2, 3)
    got = attention(*args, mask, scale=scale, method="cudnn")
    assert got.dtype == jnp.bfloat16
    seen = None if mask is None else np.tri(T, dtype=bool)
    expected = reference.attention(*(np.asarray(x, np.float64) for x in args), seen, scale=scale)
    assert_close(got, expected.out, "bfloat16")


def test_a_drop_in_takes_it_too(on_gpu):
    args = [x[:, :, :K] for x in inputs(2)]
    got = dot_product_attention(*args, is_causal=True, implementation="cudnn")
    expected = reference.attention(*(np.asarray(x, np.float64) for x in args), np.tri(T, dtype=bool))
    assert_close(got, expected.out, "bfloat16")


def test_one_head_is_one_head(on_gpu):
    query, key, value = (x[:, 0] for x in inputs())
    got = attend(query, key, value, masks.causal(), method="cudnn")
    expected = reference.attend(*(x.astype(np.float64) for x in (query, key, value)), np.tri(T, dtype=bool))
    assert_close(got, expected.out, "bfloat16")


def spoilt(bad, query, key, value, ct):
    """The arrays with one number that does harm."""
    match bad:
        case "query":
            query = query.at[0, 2, 1, 3].set(jnp.nan)
        case "key":
            key = key.at[0, 3, 1, 3].set(jnp.inf)
        case "value":
            value = value.at[0, 3, 1, 3].set(jnp.nan)
        case "cotangent":
            ct = ct.at[0, 2, 1, 3].set(jnp.nan)
        case "logit":
            query, key = query.at[0, 3, 1].set(3e38), key.at[0, 3, 0].set(3e38)
    return query, key, value, ct


@pytest.mark.parametrize(
    "scale, size, harmless",
    [
        (1.0, 1e10, True),
        # The product, or with its scale.
        (1e-30, 1e25, False),
        (1e30, 1e10, False),
        (-1e30, 1e10, False),
    ],
)
def test_logits_that_may_overflow_are_none_for_the_kernel(scale, size, harmless):
    x = jnp.full((1, T, K, H), size, jnp.bfloat16)
    assert _cudnn._harmless(scale, x, x, jnp.ones_like(x)) == harmless


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_a_bad_number_goes_where_it_would_go_blockwise(on_gpu, mask):
    """XLA's kernel alone would spread it over all that is hidden from it."""

    def pulled(method):
        def f(*arrays):
            out, pull = jax.vjp(lambda *args: attention(*args, mask, method=method), *arrays[:3])
            return out, *pull(arrays[3])

        return jax.jit(f)

    fused, blockwise = map(pulled, ("cudnn", "blockwise"))
    for bad in (None, "query", "key", "value", "cotangent", "logit"):
        arrays = spoilt(bad, *inputs(2), jnp.ones((2, T, N, H), jnp.bfloat16))
        for got, expected in zip(fused(*arrays), blockwise(*arrays), strict=True):
            assert_close(got, expected, "bfloat16")


def test_vmap_is_a_loop(on_gpu):
    args = inputs(3, 2)
    f = lambda *args: attention(*args, masks.causal(), method="cudnn")  # noqa: E731
    got = jax.vmap(f)(*args)
    for i in range(3):
        assert_close(got[i], f(*(x[i] for x in args)), "bfloat16")


def test_forward_mode_is_an_error(on_gpu):
    args = inputs(2)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda *args: attention(*args, method="cudnn"), args, args)
