# %% [markdown]
# # 4. Heads
#
# A layer of a model has many heads. Each is one `attend`. Here it is mapped over heads, keys are shared between them,
# two trained models are opened, and then comes the question that every picture of attention should raise: what do the
# weights *not* say?

# %%
import itertools
from functools import partial

import glassllm
import jax
import jax.numpy as jnp
import minilm
import numpy as np
from exercises import check, hint
from scipy.optimize import linprog

import jattn
from jattn import Cache, attend, attention, attention_weights, entropy, masks, pictures
from jattn import __main__ as demo

jnp.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## One head, mapped
#
# Four heads: the arrays get an axis, and `vmap` walks along it. That is all that `attention` does.

# %%
T, N, H = 5, 4, 8
query, key, value = jax.random.normal(jax.random.key(0), (3, T, N, H))

head = partial(attend, mask=masks.causal())
mapped = jax.vmap(head, in_axes=1, out_axes=1)(query, key, value)
together = attention(query, key, value, masks.causal())
print(mapped.shape, "differs from attention by", jnp.abs(mapped - together).max())

# %% [markdown]
# **Predict.** A number in the query of head 1 changes. Which heads give another output?

# %%
jacobian = jax.jacobian(lambda query: attention(query, key, value).sum(0))(query)  # (N, D, T, N, H)
print("how much each head's output (rows) moves with each head's query (columns):")
print(jnp.abs(jacobian).sum((1, 2, 4)))

# %% [markdown]
# Head 1 alone. Heads tell each other nothing; what they found is first brought together by the projection that follows
# attention.

# %% [markdown]
# ## Grouped heads
#
# Heads of queries may share a head of keys and values. With N query heads on K key/value heads, query head n reads
# key/value head n // G, where G = N / K.
#
# **Predict.** 6 query heads, 2 key/value heads. Who reads key/value head 1?

# %%
N, K = 6, 2
query = jax.random.normal(jax.random.key(1), (T, N, H))
key, value = jax.random.normal(jax.random.key(2), (2, T, K, H))

jacobian = jax.jacobian(lambda key: attention(query, key, value).sum(0))(key)  # (N, D, S, K, H)
for n, moves in enumerate(jnp.abs(jacobian).sum((1, 2, 4)) > 0):
    print(f"query head {n} reads key/value head {jnp.flatnonzero(moves).tolist()}")

# %% [markdown]
# Neighbours share. So a group is `attend` mapped over queries alone, and the layer is a group, mapped.

# %%
group = jax.vmap(head, in_axes=(1, None, None), out_axes=1)  # G queries, one key, one value
layer = jax.vmap(group, in_axes=1, out_axes=1)  # K groups
grouped = layer(query.reshape(T, K, N // K, H), key, value).reshape(T, N, H)
print("differs from attention by", jnp.abs(grouped - attention(query, key, value, masks.causal())).max())

# %% [markdown]
# Why share? A decoder keeps the keys and values of everything that it has read.

# %%
for K in (8, 2, 1):
    cache = Cache.create(capacity=4096, K=K, H=64, dtype=jnp.bfloat16)
    megabytes = (cache.key.nbytes + cache.value.nbytes) / 1e6
    print(f"{K} key/value heads: {megabytes:.1f} MB for 4096 tokens of one layer")

# %% [markdown]
# ## A real decoder
#
# The package glassllm brings a small trained language model that records all its steps. `jattn.__main__.decoder` is the
# same model in JAX on jattn's attention.

# %%
model, tokenizer = glassllm.load_pretrained("en")
config = model.cfg
D = config.d_model // config.n_heads
names = [token.replace("▁", " ") for token in tokenizer.vocab]  # ▁ stands for a space


def read(text):
    """The tokens of a text, the logits of what comes next, and query, key and value of all layers."""
    ids = tokenizer.encode(text)
    logits, layers, tracer = demo.both(model, ids)
    assert np.allclose(logits, tracer.get("logits").value, atol=1e-4)  # as the model itself says
    return [names[i] for i in ids], logits, [jnp.stack(x) for x in zip(*layers, strict=True)]


tokens, logits, (query, key, value) = read("The Cat looked at Alice, and Alice looked at the Cat")
print(f"{config.n_layers} layers, {config.n_heads} query heads on {config.n_kv_heads} key/value heads,", D, "features")
print("tokens: " + "|".join(tokens))
for i in jnp.argsort(-logits[-1])[:4]:
    print(f"next, with probability {jattn.softmax(logits[-1])[i]:.2f}: {names[i]!r}")

# %% [markdown]
# The weights of all 16 heads come from one call: layers are a batch axis. Here is layer 1. What weighs exactly 0 is
# blank: it was masked.

# %%
weights = attention_weights(query, key, masks.causal())  # (L, N, T, S)
pictures.weights(weights[1], tokens)

# %% [markdown]
# All layers, to walk through: choose a layer, a head and a query, and see the row step by step.

# %%
jattn.explore(query, key, value, masks.causal(), tokens=tokens)

# %% [markdown]
# How widely does each head look? The entropy says it, in nats, here its mean over queries: 0 is one key, log n is n
# keys with equal weights.

# %%
pictures.entropy(entropy(weights).mean(-1))

# %% [markdown]
# **Predict.** In layer 1, head 0 gives much of its weight to the token before the query. Does it do so in other
# sentences? Do the other heads keep to what they do here?

# %%
sentences = [
    "The Cat looked at Alice, and Alice looked at the Cat",
    "Alice was beginning to get very tired of sitting by her sister",
    "Oh dear! Oh dear! I shall be too late!",
]
print("layer 1, the mean weight on the token before, heads 0 to 3")
for sentence in sentences:
    query, key, _ = read(sentence)[2]
    of = attention_weights(query[1], key[1], masks.causal())
    print(jnp.diagonal(of, offset=-1, axis1=1, axis2=2).mean(-1), sentence)

# %% [markdown]
# Head 0 does. Head 2 is a head for the token before in one sentence, and not in another. A head has a projection, not a
# job: some heads can be given a name that fits many inputs, none has to have one.

# %% [markdown]
# ## What weights do not say: the mean of heads
#
# Two layers of two heads, and one query. In one layer, head 0 reads the first key and head 1 the second. In the other,
# both heads read both keys.
#
# **Predict.** A picture shows the mean of the heads' weights. In which layer is it which?

# %%
key = value = jnp.eye(2)[:, None]  # two keys, one key/value head
opposite = jnp.array([[[20.0, 0.0], [0.0, 20.0]]])  # one query, two heads
even = jnp.zeros((1, 2, 2))
for what, query in {"opposite heads": opposite, "even heads": even}.items():
    mean = attention_weights(query, key).mean(0)[0]
    print(f"{what:15} mean of the weights {mean}  outputs {attention(query, key, value)[0].tolist()}")

# %% [markdown]
# The same picture, two layers that say different things. In the real decoder, too, a mean looks wider than its heads do
# on average, and where they look at different tokens, wider than any of them.

# %%
for i, of in enumerate(weights):
    heads, mean = entropy(of).mean(-1), entropy(of.mean(0)).mean(-1)
    print(f"layer {i}: entropy of the heads {heads} nats, of their mean {mean:.3f}")

# %% [markdown]
# ## What weights do not say: how large the values are
#
# **Predict.** One key has 97 % of the weight. What does the output lose if its value is replaced by zeros?

# %%
query, key = jnp.array([[5.0, 0.0]]), jnp.eye(2)
value = jnp.array([[1e-3, 0.0], [0.0, 50.0]])
weight = attention_weights(query[:, None], key[:, None])[0, 0]
print("weights", weight)
print("output ", attend(query, key, value)[0])
print("without the value of the first key", attend(query, key, value.at[0].set(0))[0])

# %% [markdown]
# Almost nothing. What moves the output is weight times value. In the decoder: how often is the key with the most weight
# not the one that brings most?

# %%
tokens, logits, (query, key, value) = read(sentences[0])
size = jnp.linalg.norm(value, axis=-1).repeat(config.n_heads // config.n_kv_heads, -1)  # (L, S, N)
brought = weights * size.swapaxes(1, 2)[:, :, None]
differ = weights.argmax(-1) != brought.argmax(-1)
print(f"in {int(differ.sum())} of {differ.size} rows")
lost = jnp.where(differ, weights.max(-1), 0)
i, n, t = map(int, jnp.unravel_index(lost.argmax(), lost.shape))
for what, of in {"most weight": weights, "brings most": brought}.items():
    s = int(of[i, n, t].argmax())
    print(f"layer {i} head {n}, query {tokens[t]!r}: {what}: {tokens[s]!r},", end=" ")
    print(f"weight {weights[i, n, t, s]:.2f}, value {size[i, s, n]:.2f} long")

# %% [markdown]
# ## What weights do not say: which weights they are
#
# **Predict.** The third value is the mean of the first two. Which weights give the output (0.5, 0.5)?

# %%
value = jnp.array([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
for weight in ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.25, 0.25, 0.5]):
    print(weight, "->", jnp.array(weight) @ value)

# %% [markdown]
# Wherever there are more keys than features, many weights give one output. In the decoder a value has 32 features. Take
# a sentence with more tokens, and ask a linear program: how little weight can the key with the most have, if the output
# must stay as it is?

# %%
tokens, _, (query, key, value) = read(
    "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
    "once or twice she had peeped into the book"
)
last = jnp.array([len(tokens) - 1])
own = np.asarray(attention_weights(query[0], key[0], masks.causal(), rows=last)[0, 0], float)
values = np.asarray(value[0, :, 0], float)
top = own.argmax()
same = linprog(np.arange(len(own)) == top, A_eq=np.c_[values, np.ones(len(own))].T, b_eq=[*own @ values, 1]).x

print(f"layer 0 head 0, the last of {len(tokens)} tokens: the most weight, {own[top]:.4f}, is on{tokens[top]!r}")
print(f"other weights have {same[top]:.4f} there, and {abs(same - own).sum() / 2:.0%} of all weight elsewhere")
print(f"they sum to {same.sum():.6f}, the smallest is {same.min():.4f}", end=" ")
print(f"and the outputs differ by {abs((same - own) @ values).max():.0e}")

# %% [markdown]
# No later layer can tell the two apart, so neither set of weights is *the* reason for what the model does next. (Where
# there are fewer keys than features, the output as a rule settles the weights.)

# %% [markdown]
# ## What weights do not say: the rest of the model
#
# After a head come the projection that mixes it with the others, the residual path that goes around it, and later
# layers. To see how much a head matters, take it out and see how the probabilities of the next token change.
#
# **Predict.** Which heads matter most: those that look at few tokens, or those that look widely?

# %%
tokens, logits, (query, key, value) = read(sentences[0])
parameters = {name: jnp.asarray(tensor.data) for name, tensor in model.named_parameters().items()}
run = jax.jit(lambda parameters, ids: demo.decoder(parameters, ids, config)[0][-1])
ids = jnp.array(tokenizer.encode(sentences[0]))
before = jattn.log_softmax(run(parameters, ids))


def without(i, n):
    """How far the next token's probabilities move without head n of layer i, in nats."""
    name = f"blocks.{i}.attn.W_O"
    out = parameters[name].at[n * D : (n + 1) * D].set(0)  # what it found is multiplied by 0
    after = jattn.log_softmax(run(parameters | {name: out}, ids))
    return float((jnp.exp(before) * (before - after)).sum())


L, N = config.n_layers, config.n_heads
matters = jnp.array([[without(i, n) for n in range(N)] for i in range(L)])
print("what the probabilities lose, in nats (Kullback-Leibler), layers down, heads across:")
print(matters)
wide = entropy(weights).mean(-1)
print(f"\ncorrelation with the entropies: {jnp.corrcoef(wide.ravel(), matters.ravel())[0, 1]:.2f}")
for i, n in zip(*jnp.unravel_index(jnp.argsort(-matters.ravel())[:3], (L, N)), strict=True):
    print(f"layer {i} head {n}: entropy {wide[i, n]:.2f}, loss {matters[i, n]:.2f}")

# %% [markdown]
# How widely a head looks hints at it, at best. A picture of weights is a good question; the answer comes from changing
# something and computing again.

# %% [markdown]
# ## A real encoder
#
# MiniLM turns sentences into vectors: the closer their meaning, the larger their cosine. In an encoder every token sees
# every token, so there is one thing to hide: the padding that fills up a batch of sentences of different lengths.

# %%
parameters, vocabulary, sizes = minilm.load()
meanings = jax.jit(partial(minilm.meanings, config=sizes))
ids, lengths = minilm.batch(minilm.SENTENCES, vocabulary)
vectors = meanings(parameters, ids, lengths)
for (i, j), published in zip(itertools.combinations(range(3), 2), minilm.PUBLISHED, strict=True):
    print(f"{vectors[i] @ vectors[j]:.4f}, published {published:.4f}:", *(minilm.SENTENCES[n] for n in (i, j)))

# %% [markdown]
# In that batch `masks.lengths` hid the keys from each sentence's length on:

# %%
pictures.mask(masks.lengths(key=int(lengths[0])), T=ids.shape[1], S=ids.shape[1] + 4)

# %% [markdown]
# **Predict.** A short sentence is filled up with 0, 2, 8, 32 tokens of padding, and nobody says so to the model.
# Then someone does. How much does its meaning change?

# %%
ids, lengths = minilm.batch(minilm.SENTENCES[:1], vocabulary)
alone = meanings(parameters, ids, lengths)[0]
print("padding   cosine with the sentence alone: with the mask   without")
for padding in (0, 2, 8, 32):
    padded = jnp.pad(ids, ((0, 0), (0, padding)), constant_values=vocabulary["[PAD]"])
    masked = meanings(parameters, padded, lengths)[0]
    unmasked = meanings(parameters, padded, lengths + padding)[0]
    print(f"{padding:7} {alone @ masked:47.6f} {alone @ unmasked:9.6f}")

# %% [markdown]
# With the mask the sentence means in a batch what it means alone. Without it, that depends on how long its neighbours
# in the batch happen to be: a fault that raises no error.

# %% [markdown]
# ## Exercises
#
# Grouped heads, from `attend` and `vmap`: query (T, N, H), key (S, K, H), value (S, K, D), all visible, to (T, N, D).


# %%
def grouped_heads(query, key, value): ...


check("grouped_heads", grouped_heads)  # hint("grouped_heads")

# %% [markdown]
# Other weights with the same output. Given weights (S,), all above 0, and values (S, D) with S > D + 1, return weights
# that are not negative, sum to 1 and give the same output, with at least 2 % of all weight moved.


# %%
def other_weights(weights, value): ...


check("other_weights", other_weights)  # hint("other_weights")
