"""attention inside a model that is trained: layers in a scan under checkpoint, steps in a scan, Adam, and bfloat16."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jattn import attention, masks, rotary

TEXT = (Path(__file__).parent.parent / "README.md").read_bytes()
LAYERS, B, T, N, K, H, V, STEPS = 2, 8, 37, 4, 2, 8, 128, 30
F = N * H

ATTENTIONS = {
    "jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True),
    "dense": functools.partial(attention, mask=masks.causal(), method="dense"),
    "blockwise": functools.partial(attention, mask=masks.causal(), method="blockwise", block_size=(16, 11)),
}
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3, eps=1e-4))


@pytest.fixture(autouse=True)
def as_optax_is_written():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def new(rng):
    """The arrays of the model, float32; those of the layers stacked."""
    shapes = {
        "query": (F, N, H),
        "key": (F, K, H),
        "value": (F, K, H),
        "out": (F, F),
        "up": (F, 2 * F),
        "down": (2 * F, F),
    }
    rngs = jax.random.split(rng, len(shapes) + 1)
    draw = lambda rng, *shape, over: jax.random.normal(rng, shape, np.float32) / np.float32(over**0.5)  # noqa: E731
    layers = {name: draw(r, LAYERS, *s, over=s[0]) for r, (name, s) in zip(rngs[1:], shapes.items(), strict=True)}
    return {"tokens": draw(rngs[0], V, F, over=F), "layers": layers}


def normalised(x):
    return jax.nn.standardize(x.astype(np.float32)).astype(x.dtype)


def layer(attend, x, p):
    heads = [jnp.einsum("btf,fnh->btnh", normalised(x), p[name]) for name in ("query", "key", "value")]
    query, key = (rotary(x, np.arange(T)) for x in heads[:2])
    x = x + attend(query, key, heads[2]).reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(normalised(x) @ p["up"]) @ p["down"], None


def loss(params, text, attend, dtype):
    """Nats per character, of each one after those before it; float32 arrays are the master of those of `dtype`."""
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    x, _ = jax.lax.scan(
        jax.checkpoint(functools.partial(layer, attend)), params["tokens"][text[:, :-1]], params["layers"]
    )
    logits = (normalised(x) @ params["tokens"].T).astype(np.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


@functools.cache
def losses(name, dtype):
    """Those of each step, (STEPS,)."""
    text = np.frombuffer(TEXT, np.uint8) % V
    starts = np.random.default_rng(0).integers(0, len(text) - T - 1, (STEPS, B, 1))
    batches = text[starts + np.arange(T + 1)].astype(np.int32)

    def step(state, batch):
        params, moments = state
        value, gradient = jax.value_and_grad(loss)(params, batch, ATTENTIONS[name], dtype)
        updates, moments = OPTIMIZER.update(gradient, moments)
        return (optax.apply_updates(params, updates), moments), value

    params = new(jax.random.key(0))
    return np.asarray(jax.jit(functools.partial(jax.lax.scan, step))((params, OPTIMIZER.init(params)), batches)[1])


def test_the_model_learns():
    got = losses("jax.nn", "float32")
    assert got.shape == (STEPS,) and got[-5:].mean() < 0.75 * got[0]


@pytest.mark.parametrize("method", ["dense", "blockwise"])
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 2e-3)])
def test_a_model_learns_the_same_with_jattn_as_with_jax_nn(method, dtype, tolerance):
    np.testing.assert_allclose(losses(method, dtype), losses("jax.nn", dtype), rtol=tolerance)
