# %% [markdown]
# # 5. Long sequences
#
# Attention compares every query with every key: T x S logits. Here it is computed without ever holding them all,
# forward and backward, and then it is measured what that is worth.

# %%
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from exercises import check, hint

import jattn
from jattn import attend, attention, masks, merge, pictures

jnp.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## What grows
#
# `method="dense"` makes all logits of a head at once. How much memory a compiled program needs beside its inputs and
# outputs, the compiler knows before anything runs.
#
# **Predict.** T doubles. What happens to the memory that the gradient needs?


# %%
def compiled(T, gradient=True, **options):
    """Attention of two heads over T tokens, or the gradient of its sum, as a program; and its inputs."""
    f = partial(attention, **options)
    if gradient:
        f = jax.grad(lambda *x: attention(*x, **options).sum(), (0, 1, 2))
    x = jax.random.normal(jax.random.key(0), (3, T, 2, 64))
    return jax.jit(f).lower(*x).compile(), x


def megabytes(program):
    return program.memory_analysis().temp_size_in_bytes / 1e6


for T in (512, 1024, 2048, 4096):
    need = megabytes(compiled(T, method="dense")[0])
    print(f"T = {T:4}: {need:6.1f} MB")
print(f"at this rate, T = 100 000: {need * (100_000 / T) ** 2 / 1e3:.0f} GB")

# %% [markdown]
# Four times as much, less what the compiler can save on the way: it grows with T squared.

# %% [markdown]
# ## One row, key after key
#
# Softmax seems to need all logits of a row: their peak, then the sum of exp(logit - peak). But what if keys arrive one
# after another, and each is forgotten at once?
#
# **Predict.** Three things are kept: the peak so far, the sum of exp(logit - peak), and the sum of that times the
# values. Now a logit arrives that is larger than all before it. What must happen to the two sums?


# %%
def absorb(peak, total, acc, logit, value):
    """The sums with one key more, and by how much the old ones faded."""
    new = jnp.maximum(peak, logit)
    fade = jnp.exp(peak - new)
    p = jnp.exp(logit - new)
    return new, total * fade + p, acc * fade + p * value, fade


logits, values = jnp.array([1.0, 3.0, 2.0, 5.0, 4.0]), jnp.array([10.0, 20.0, 30.0, 40.0, 50.0])
peak, total, acc = -jnp.inf, 0.0, 0.0
print("logit  value   fade   peak   total      acc  acc / total")
for logit, value in zip(logits, values, strict=True):
    peak, total, acc, fade = absorb(peak, total, acc, logit, value)
    print(f"{logit:5.0f} {value:6.0f} {fade:6.3f} {peak:6.0f} {total:7.4f} {acc:8.4f} {acc / total:12.4f}")
print(f"\nall at once: {jattn.softmax(logits) @ values:.4f}")

# %% [markdown]
# They fade by exp(old peak - new peak), as if they had been taken with the new peak all along. After each key,
# acc / total is the attention over the keys so far. This is the *online softmax*.
#
# **Predict.** The same keys in another order?

# %%
for order in ([4, 3, 2, 1, 0], [3, 0, 4, 1, 2]):
    peak, total, acc = -jnp.inf, 0.0, 0.0
    for i in order:
        peak, total, acc, _ = absorb(peak, total, acc, logits[i], values[i])
    print(f"keys {order}: {acc / total:.4f}")

# %% [markdown]
# ## A tile at a time
#
# The same for many queries, and for a block of keys instead of one: logits exist for one tile, queries x block.


# %%
def blockwise(query, key, value, size):
    T, H = query.shape
    peak, total, acc = jnp.full(T, -jnp.inf), jnp.zeros(T), jnp.zeros((T, value.shape[1]))
    for start in range(0, len(key), size):
        logits = query @ key[start : start + size].T / jnp.sqrt(H)
        new = jnp.maximum(peak, logits.max(1))
        fade, p = jnp.exp(peak - new), jnp.exp(logits - new[:, None])
        peak, total = new, total * fade + p.sum(1)
        acc = acc * fade[:, None] + p @ value[start : start + size]
    return acc / total[:, None]


query, key, value = jax.random.normal(jax.random.key(1), (3, 100, 16))
for size in (1, 7, 100):
    error = jnp.abs(blockwise(query, key, value, size) - attend(query, key, value)).max()
    print(f"{size:3} keys at a time differs from attend by {error:.0e}")

# %% [markdown]
# **Predict.** Under a mask some tiles hold no visible pair, and some hold only visible ones. What does a tile of
# each kind cost?

# %%
T, size = 256, 16
rule = masks.causal() & masks.window(left=96, right=0) | masks.prefix(16)
tiles = rule.dense(T, T).reshape(T // size, size, T // size, size)
some, every = tiles.any((1, 3)), tiles.all((1, 3))
print(f"{some.size} tiles: {(~some).sum()} empty, {every.sum()} full, {(some & ~every).sum()} in between")
pictures.mask(np.asarray(some))

# %% [markdown]
# An empty tile (blank here) is no work, and a full one needs no mask. So a mask costs the tiles that it touches:


# %%
def milliseconds(program, x):
    def once():
        start = time.perf_counter()
        jax.block_until_ready(program(*x))
        return 1e3 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(5))


T, block = 4096, (256, 256)
run = partial(compiled, T, gradient=False, method="blockwise", block_size=block)
everything = milliseconds(*run())
for rule in (masks.causal(), masks.window(left=1023, right=0), masks.window(left=255, right=0)):
    visible = rule.dense(T, T)
    touched = visible.reshape(T // block[0], block[0], T // block[1], block[1]).any((1, 3)).mean()
    share = milliseconds(*run(mask=rule)) / everything
    print(f"{rule!r:25} {visible.mean():4.0%} of the pairs, {touched:4.0%} of the tiles, {share:4.0%} of the time")

# %% [markdown]
# ## Parts that meet
#
# One half of the keys is here, the other on another machine. Each computes its attention.
#
# **Predict.** Is the whole the mean of the two?

# %%
query, key, value = jax.random.normal(jax.random.key(2), (3, 6, 4))
whole = attend(query, key, value)
first, seen_first = attend(query, key[:2], value[:2], return_stats=True)
second, seen_second = attend(query, key[2:], value[2:], return_stats=True)

merged, lse = merge([first, second], [seen_first.lse, seen_second.lse])
print("off by, the mean: ", jnp.abs((first + second) / 2 - whole).max())
print("off by, merge:    ", jnp.abs(merged - whole).max())
print("shares of the first half, query by query:", jattn.softmax(jnp.stack([seen_first.lse, seen_second.lse]), 0)[0])

# %% [markdown]
# The lse, log of the sum of exp(logits), says how much there was in each part, and a softmax over the parts' lse is how
# they mix. So (out, lse) is a whole state of the online softmax. It does not matter who computed it, or in which order
# parts meet: a block of keys, a cache, another machine.
#
# **Predict.** A part in which a query sees nothing has no attention at all. What does it add?

# %%
nothing, seen_nothing = attend(query, key, value, masks.lengths(key=0), return_stats=True)
again, _ = merge([merged, nothing], [lse, seen_nothing.lse])
print(f"its lse is {seen_nothing.lse[0]}; merged with it, the output moves by {jnp.abs(again - merged).max()}")

# %% [markdown]
# ## Backward
#
# The memory of a gradient is what the forward pass keeps for it.
#
# **Predict.** What does each method keep?


# %%
def kept(T, method):
    """What the forward pass of one head leaves for the backward one; nothing is run."""
    f, x = partial(attention, method=method), [jnp.zeros((T, 1, 64))] * 3
    return jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(f, *x)[1], *x))


for method in ("dense", "blockwise"):
    for T in (1024, 2048):
        arrays = kept(T, method)
        total = sum(array.size * array.dtype.itemsize for array in arrays) / 1e6
        largest = max(arrays, key=lambda array: array.size).shape
        print(f"{method:9} T = {T}: {total:5.1f} MB, the largest array is {largest}")

# %% [markdown]
# Dense keeps what is T x S. Blockwise keeps its inputs, the output's sums and some numbers per row. The weights are
# computed again, tile by tile, where the gradient needs them: exp(logit - lse) is a weight at once, without a second
# softmax. By hand:

# %%
query, key, value, d_out = jax.random.normal(jax.random.key(3), (4, 100, 16))
out, stats = attend(query, key, value, return_stats=True)

weights = jnp.exp(query @ key.T / 4 - stats.lse[:, None])  # 4 is the root of 16 features
d_value = weights.T @ d_out
d_logits = weights * (d_out @ value.T - (d_out * out).sum(1, keepdims=True))
d_query, d_key = d_logits @ key / 4, d_logits.T @ query / 4

tiled = partial(attend, method="blockwise", block_size=(32, 32))
for name, by_hand, by_jax in zip(
    ("query", "key", "value"), (d_query, d_key, d_value), jax.vjp(tiled, query, key, value)[1](d_out), strict=True
):
    print(f"gradient of {name:5} differs by {jnp.abs(by_hand - by_jax).max():.0e}")

# %% [markdown]
# Each of these lines is a sum over tiles, too. Kernels that are written by hand stop here: they have this one backward
# pass. jattn writes down the *forward* derivative of a tile, how its sums move when the inputs do, and nothing else. It
# is linear in the tangents, so JAX transposes it into the lines above; and it is a function like any other, so JAX
# differentiates it again.
#
# **Predict.** Forward mode, and a Hessian times a vector, in linear memory: are they those of dense?

# %%
direction = jax.random.normal(jax.random.key(4), query.shape)
dense = partial(attend, method="dense")


def derivatives(f):
    def loss(query):
        return jnp.sin(f(query, key, value)).sum()

    slope = jax.jvp(loss, (query,), (direction,))[1]
    return {"forward mode": slope, "Hessian times a vector": jax.jvp(jax.grad(loss), (query,), (direction,))[1]}


for (what, ours), reference in zip(derivatives(tiled).items(), derivatives(dense).values(), strict=True):
    print(f"{what:23} differs by {jnp.abs(ours - reference).max():.0e}, largest number {jnp.abs(reference).max():.2f}")

# %% [markdown]
# ## Measured
#
# Time and memory on this machine, two heads of 64 features. Both axes are logarithmic: the slope is the power of T.

# %%
lines = {"milliseconds": {}, "megabytes of temporaries": {}}
for method, lengths in {"dense": (512, 1024, 2048, 4096), "blockwise": (512, 1024, 2048, 4096, 8192)}.items():
    for gradient in (False, True):
        for T in lengths:
            program, x = compiled(T, gradient, method=method)
            for what, number in zip(lines, (milliseconds(program, x), megabytes(program)), strict=True):
                lines[what].setdefault((method, gradient), []).append((T, number))
pictures.curves(lines, dashed="gradient")

# %%
print("from T = 2048 to 4096, the gradient needs")
for method in ("dense", "blockwise"):
    more = {what: dict(of[method, True]) for what, of in lines.items()}
    print(f"  {method:9}", ", ".join(f"{of[4096] / of[2048]:.1f} times the {what}" for what, of in more.items()))

# %% [markdown]
# Time stays quadratic for both: every query still meets every key. Memory does not. `method="auto"`, the default, takes
# dense for short sequences and blockwise for long ones.

# %% [markdown]
# ## Exercises
#
# The online softmax, a chunk at a time. For one query come `peak`, `total` and `acc` (D,) of the keys so far, then
# `logits` (s,) and `value` (s, D) of the next chunk. Return the new peak, total and acc. At the start they are -inf, 0
# and zeros.


# %%
def absorb_chunk(peak, total, acc, logits, value): ...


check("absorb_chunk", absorb_chunk)  # hint("absorb_chunk")

# %% [markdown]
# Merge P parts: outs (P, T, D) and lses (P, T) give the output over all keys, (T, D). A part with lse -inf has seen
# nothing, whatever its out holds; a query that no part has seen anything for gets zeros.


# %%
def merge_parts(outs, lses): ...


check("merge_parts", merge_parts)  # hint("merge_parts")
