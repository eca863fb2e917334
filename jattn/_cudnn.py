"""Engine: cuDNN's fused kernel, through jax.nn, where it keeps the contract.

The kernel multiplies what is hidden by 0, and 0 * NaN is NaN. Where all numbers are finite and no logit can overflow,
nothing is lost by that, and nothing is gained by reading no more than what is visible. So the kernel answers there, and
where a number is not finite, in the inputs or in the cotangent, the blockwise engine answers for the whole call.
"""

import functools

import jax
import jax.numpy as jnp

from jattn import masks


def refusal(*, platform, dtype, sizes, mask, scale_is_known, others):
    """What cuDNN needs and did not get, (needed, got), or None where it can answer.

    Args:
        platform: JAX's name of it, "gpu".
        dtype: of query, key and value.
        sizes: {"B": (...), "T": ..., "S": ..., "H": ..., "D": ...}.
        mask: a rule or an array, None for none.
        scale_is_known: whether the scale is a number while tracing.
        others: the names of the other options that were given.
    """
    T, S, H, D = (sizes[letter] for letter in "TSHD")
    if platform != "gpu":
        return "a GPU", platform
    if dtype not in (jnp.float16, jnp.bfloat16):
        return "float16 or bfloat16", dtype
    if H != D or H % 8 or H > 128:
        return "H = D, a multiple of 8 and at most 128", f"H = {H}, D = {D}"
    if 0 in (*sizes["B"], T, S):
        return "at least one sequence, query and key", f"B = {sizes['B']}, T = {T}, S = {S}"
    if others:
        return f"calls without {' and '.join(others)}", "it" if len(others) == 1 else "them"
    if not scale_is_known:
        return "a scale that is known while tracing", "a traced one"
    if mask is not None and not (_is_causal(mask) and T == S):
        shown = repr(mask) if isinstance(mask, masks.Mask) else "an array"
        return "no mask, or masks.causal() where T = S", f"{shown} with T = {T}, S = {S}"
    return None


def _is_causal(mask):
    # What is static in a rule is part of its structure, and this one has nothing else.
    return jax.tree.structure(mask) == jax.tree.structure(masks.causal())


def _kernel(query, key, value, *, scale, is_causal, implementation="cudnn"):
    """jax.nn's function, for any number of batch axes."""
    *B, T, N, H = query.shape
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    options = {"scale": scale, "is_causal": is_causal, "implementation": implementation}
    return jax.nn.dot_product_attention(query, key, value, **options).reshape(*B, T, N, H)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def attend(exact, scale, causal, query, key, value):
    """(*B, T, N, H), given `exact(query, key, value, mask, scale=...)`, which keeps the contract with any numbers."""
    return _attend(exact, scale, causal, query, key, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(exact, scale, causal, query, key, value):
    kernel, blockwise = _engines(exact, scale, causal)
    return jax.lax.cond(_harmless(scale, query, key, value), kernel, blockwise, query, key, value)


def _engines(exact, scale, causal):
    mask = masks.causal() if causal else None
    return (
        functools.partial(_kernel, scale=scale, is_causal=causal),
        lambda query, key, value: exact(query, key, value, mask, scale=scale),
    )


def _harmless(scale, query, key, value):
    """Whether all is finite, logits too."""
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    # A sum tells, because XLA:CPU forgets a NaN in a maximum over many numbers.
    finite = jnp.isfinite(sum((x * 0).sum() for x in wide))
    query, key, _ = (jnp.abs(x).sum(-1).max() for x in wide)
    return finite & (query * key * max(1.0, abs(scale)) < jnp.finfo(jnp.float32).max / 2)


def _forward(exact, scale, causal, *arrays):
    kernel, blockwise = _engines(exact, scale, causal)
    fused, pull = jax.vjp(kernel, *arrays)
    harmless = _harmless(scale, *arrays)
    return jax.lax.cond(harmless, lambda: fused, lambda: blockwise(*arrays)), (pull, arrays, harmless)


def _backward(exact, scale, causal, saved, ct):
    pull, arrays, harmless = saved
    harmless = harmless & jnp.isfinite((ct.astype(jnp.float32) * 0).sum())
    _, blockwise = _engines(exact, scale, causal)
    return jax.lax.cond(harmless, lambda: pull(ct), lambda: jax.vjp(blockwise, *arrays)[1](ct))


_attend.defvjp(_forward, _backward)
