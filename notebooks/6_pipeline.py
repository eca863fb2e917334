# %% [markdown]
# # 6. In a pipeline
#
# All of jattn is functions of arrays. So what JAX does to functions it does to attention: compile it, map it,
# differentiate it in both modes and twice, loop over a cache. One section each, and each checks itself.

# %%
import statistics
import time
from functools import partial

import glassllm
import jax
import jax.numpy as jnp
from exercises import check, hint
from jax.experimental import checkify

import jattn
from jattn import Cache, attend, attention, attention_weights, cached_attention, masks
from jattn import __main__ as demo

jnp.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## jit: what is traced again
#
# JAX runs the Python of a function once, to record what it does to arrays. That is a *trace*; the compiled record
# answers all later calls that fit. Python that counts, counts traces.
#
# **Predict.** Which of the calls below fit the record, and which are traced again?

# %%
traces = 0


@jax.jit
def layer(x, length, scale):
    global traces
    traces += 1
    return attention(x, x, x, masks.causal() & masks.lengths(key=length), scale=scale)


x = jax.random.normal(jax.random.key(0), (64, 2, 8))
layer(x, 64, 0.5)
calls = {
    "the same again": (x, 64, 0.5),
    "other numbers": (x + 1, 64, 0.5),
    "another length": (x, 9, 0.5),
    "another scale": (x, 9, 0.25),
    "a longer sequence": (jnp.concatenate([x, x]), 9, 0.25),
    "another dtype": (x.astype(jnp.bfloat16), 9, 0.25),
}
for what, args in calls.items():
    before = traces
    layer(*args)
    print(f"{what:18} {'traced again' if traces > before else 'fits'}")

# %% [markdown]
# Shapes and dtypes belong to the record, numbers do not. Mask rules, too, go in as arguments: they are pytrees. A
# Python number in a rule belongs to the program, which can then leave out tiles. An array in a rule is data.
#
# **Predict.** Three windows. How many traces with Python numbers, how many with arrays?

# %%
traces = 0


@jax.jit
def masked(x, rule):
    global traces
    traces += 1
    return attention(x, x, x, rule)


for what, kind in {"Python numbers": int, "arrays": jnp.array}.items():
    traces = 0
    for left in (8, 16, 32):
        masked(x, masks.window(kind(left), 0))
    print(f"{what:15} {traces} traces")

# %% [markdown]
# ## vmap: a rule for each
#
# `attend` takes one head of one sequence.
#
# **Predict.** Three sequences, and one rule that holds three lengths. What does `vmap` do with the rule?

# %%
x = jax.random.normal(jax.random.key(1), (3, 5, 8))
rules = masks.lengths(key=jnp.array([5, 2, 0]))
out = jax.vmap(lambda x, rule: attend(x, x, x, rule))(x, rules)

batch = attention(x[:, :, None], x[:, :, None], x[:, :, None], rules)[:, :, 0]  # one head
print("differs from a batch by", jnp.abs(out - batch).max())
print("largest number of each sequence:", jnp.abs(out).max((1, 2)))

# %% [markdown]
# It maps the arrays in it, as in any pytree: each sequence gets its length. The third sees no key and gets zeros.

# %% [markdown]
# ## grad: where the lse goes
#
# The lse of a query is log of the sum of exp(logits): a soft maximum of how well keys match.
#
# **Predict.** The query moves a little. In which direction does the lse grow fastest?

# %%
query = jax.random.normal(jax.random.key(2), (3,))
key = jax.random.normal(jax.random.key(3), (6, 3))
scale = 3**-0.5


def lse(query):
    return attend(query[None], key, key, return_stats=True)[1].lse[0]


weights = attention_weights(query[None, None], key[:, None])[0, 0]
print("gradient of the lse     ", jax.grad(lse)(query))
print("scale * weights @ key   ", scale * weights @ key)

# %% [markdown]
# Towards the mean key, weighted by attention. With the keys for values, and but for the scale, attention *is* the
# gradient of the lse.

# %% [markdown]
# ## Hessian: how sharply it turns
#
# **Predict.** The first derivative is a mean. What is the second?

# %%
hessian = jax.hessian(lse)(query)
mean = weights @ key
covariance = (key - mean).T @ (weights[:, None] * (key - mean))
print(hessian)
print("differs from scale² * covariance of the keys by", jnp.abs(hessian - scale**2 * covariance).max())
print("eigenvalues", jnp.linalg.eigvalsh(hessian))

# %% [markdown]
# The covariance of the keys, under the same weights. It has no negative eigenvalue: the lse is convex. Where one key
# has all the weight, nothing varies:

# %%
for times in (1, 10, 100, 1000):
    most = attention_weights(times * query[None, None], key[:, None]).max()
    curvature = jnp.linalg.eigvalsh(jax.hessian(lse)(times * query)).max()
    print(f"query times {times:4}: most weight {most:.4f}, largest curvature {curvature:.4f}")

# %% [markdown]
# A sharp head learns slowly: where nothing varies, moving the query changes no weight.

# %% [markdown]
# ## jvp: one direction, everything at once
#
# `grad` tells of one number how it depends on all inputs. `jvp` tells of all outputs how they move along one direction.
#
# **Predict.** The query walks towards key 2. What happens to the entropy: does attention get sharper or wider?


# %%
def everything(query):
    out, stats = attend(query[None], key, key, return_stats=True)
    return {"output": out[0], "lse": stats.lse[0], "entropy": stats.entropy[0]}


direction = key[2] / jnp.linalg.norm(key[2])
_, slopes = jax.jvp(everything, (query,), (direction,))
ahead, behind = everything(query + 1e-2 * direction), everything(query - 1e-2 * direction)
print(f"weight of key 2: {weights[2]:.3f}; the largest weight: {weights.max():.3f}")
for name, slope in slopes.items():
    measured = (ahead[name] - behind[name]) / 2e-2
    print(f"{name:8} moves by {jnp.atleast_1d(slope)}, measured {jnp.atleast_1d(measured)}")

# %% [markdown]
# It gets sharper, although key 2 is not the one with the most weight. One pass forward told all of it, and nothing had
# to be kept for a way back.

# %% [markdown]
# ## A cache: one trace for all steps
#
# A decoder reads token by token. `cached_attention` appends the new key and value and attends to all so far. Arrays
# keep their shapes; only a length grows.
#
# **Predict.** 64 tokens, one at a time. How many traces?

# %%
traces = 0


@partial(jax.jit, donate_argnames="cache")
def step(query, key, value, cache):
    global traces
    traces += 1
    return cached_attention(query, key, value, cache)


T, N, K, H = 64, 4, 2, 16
query = jax.random.normal(jax.random.key(4), (T, N, H))
key, value = jax.random.normal(jax.random.key(5), (2, T, K, H))
cache, outs = Cache.create(T, K, H), []
for t in range(T):
    out, cache = step(query[t : t + 1], key[t : t + 1], value[t : t + 1], cache)
    outs.append(out)
error = jnp.abs(jnp.concatenate(outs) - attention(query, key, value, masks.causal())).max()
print(f"{traces} trace for {T} tokens; they differ from attention over the whole by {error:.0e}")

# %% [markdown]
# A step is a function (token, cache) -> (output, cache), and that is what `jax.lax.scan` loops over. The loop is a
# program too, with derivatives of its own.


# %%
def looped(query, key, value):
    def body(cache, token):
        query, key, value = (x[None] for x in token)
        out, cache = cached_attention(query, key, value, cache)
        return cache, out[0]

    return jax.lax.scan(body, Cache.create(T, K, H), (query, key, value))[1]


whole = partial(attention, mask=masks.causal())
one, other = (jax.grad(lambda *x, f=f: jnp.sin(f(*x)).sum(), (0, 1, 2))(query, key, value) for f in (looped, whole))
for name, x, y in zip(("query", "key", "value"), one, other, strict=True):
    print(f"gradient of {name:5} through the loop differs by {jnp.abs(x - y).max():.0e}")

# %% [markdown]
# What is it worth? Without a cache each new token reads all others again.

# %%
T, N, K, H = 2048, 8, 2, 64
query = jax.random.normal(jax.random.key(6), (T, N, H))
key, value = jax.random.normal(jax.random.key(7), (2, T, K, H))
again = jax.jit(whole)
_, cache = cached_attention(query[:-1], key[:-1], value[:-1], Cache.create(T, K, H))


def milliseconds(f):
    def once():
        start = time.perf_counter()
        jax.block_until_ready(f())
        return 1e3 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(7))


last = jax.jit(cached_attention)
print(f"token {T}: everything again {milliseconds(lambda: again(query, key, value)):6.2f} ms")
print(f"           with the cache   {milliseconds(lambda: last(query[-1:], key[-1:], value[-1:], cache)):6.2f} ms")

# %% [markdown]
# And in a real decoder, the same tokens come out:

# %%
model, tokenizer = glassllm.load_pretrained("en")
ids = tokenizer.encode("Alice was beginning to get very tired of")
for what, generate in {"with a cache": demo.with_cache, "without": demo.without_cache}.items():
    tokens, _ = generate(model, ids, 16)
    print(f"{what:13}...{tokenizer.decode(tokens)!r}")

# %% [markdown]
# ## checkify: errors from inside a program
#
# A compiled program cannot raise an error.
#
# **Predict.** A cache has room for 4 tokens, and a jitted loop writes a fifth. What comes out?

# %%
x = jnp.ones((5, 1, 2))


def loop(x):
    def body(cache, token):
        out, cache = cached_attention(token[None], token[None], token[None], cache)
        return cache, out[0, 0, 0]

    return jax.lax.scan(body, Cache.create(4, K=1, H=2), x)[1]


print(jax.jit(loop)(x))

# %% [markdown]
# NaN, where silence would look like an answer. `checkify` makes the program return its error beside its result:

# %%
error, out = checkify.checkify(jax.jit(loop))(x)
print(error.get())

# %% [markdown]
# The same for `empty="raise"`, the policy that forbids queries without a key. Where lengths are known, it is an error
# at once; where they are traced, it is a check.

# %%
strict = partial(attend, x[:, 0], x[:, 0], x[:, 0], empty="raise")
try:
    strict(masks.lengths(key=0))
except ValueError as at_once:
    print("at once: ", at_once)
error, _ = checkify.checkify(jax.jit(lambda n: strict(masks.lengths(key=n))))(0)
print("checkify:", str(error.get()).partition(" (")[0])

# %% [markdown]
# ## Exercises
#
# A step of a decoder, by hand: one query (H,), the slots of a cache, keys (C, H) and values (C, D), and how many of
# them are written, `length`. What is in the others is garbage. Give the attention over the written ones, (D,). It is
# compiled: `length` has no value yet when your Python runs.


# %%
def decode(query, keys, values, length): ...


check("decode", decode)  # hint("decode")

# %% [markdown]
# A Hessian times a vector, without the Hessian: for a function `f` from (n,) to a number, a point `x` (n,) and a vector
# `v` (n,), give the product (n,).


# %%
def hessian_vector(f, x, v): ...


check("hessian_vector", hessian_vector)  # hint("hessian_vector")
