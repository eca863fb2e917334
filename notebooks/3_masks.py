# %% [markdown]
# # 3. Masks and policies
#
# A mask says what each query may know. That makes it the part of attention that is most easily wrong and least easily
# seen to be: a bad mask raises no error, and may even make the loss look better. This lesson ends with a model
# that cheats, and with the check that catches it.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from exercises import check, hint

from jattn import attend, attention, attention_weights, explore, masks, pictures, softmax, testing

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## Causal: no one reads ahead
#
# A model that writes a text token by token has only what is written so far. So in training, too, token t may see the
# tokens up to t, itself included.

# %%
print(masks.causal())

# %% [markdown]
# **Predict.** Three tokens. Which weights of the first row do you know without knowing any score? How many keys do the
# second and the third row mix?

# %%
x = jax.random.normal(jax.random.key(0), (3, 1, 4))  # (T, N, H): 3 tokens, 1 head, 4 features
print(attention_weights(x, x, masks.causal())[0])

# %% [markdown]
# The first token can only see itself, with weight exactly 1. Each row is a softmax over its visible keys alone.
#
# Rules say it in terms of positions and combine like sets: `&`, `|`, `~`. Below, a query sees the four tokens up
# to its own, and the first two of the text.

# %%
pictures.mask(masks.causal() & (masks.window(3, 0) | masks.prefix(2)), 12, 12)

# %% [markdown]
# A mask is a statement about information, not a way to save time. Some kernels skip what is hidden, others compute all
# of it and throw half away. What is visible is the same.
#
# ## Before softmax, not after
#
# One could also compute all weights first and strike out the hidden ones. The output of a hidden value would then be
# gone.
#
# **Predict.** Is anything of the hidden keys left?

# %%
scores = jax.random.normal(jax.random.key(1), (3, 3))
causal = masks.causal().dense(3, 3)
before = softmax(jnp.where(causal, scores, -jnp.inf))
after = jnp.where(causal, softmax(scores), 0)
print("masked before, rows sum to", before.sum(axis=-1))
print("masked after,  rows sum to", after.sum(axis=-1))

# %% [markdown]
# The rows no longer sum to 1, and what is missing is the share of the hidden keys. Their values are gone, but their
# scores are still in the divisor: token 0 can tell from the size of its output how well the future matches. A change
# of a later score shows it.

# %%
changed = scores.at[0, 2].add(3)
print("row 0, masked before:", softmax(jnp.where(causal, changed, -jnp.inf))[0], " was", before[0])
print("row 0, masked after: ", jnp.where(causal, softmax(changed), 0)[0], " was", after[0])

# %% [markdown]
# ## Padding: a batch is longer than its sequences
#
# Sequences of a batch are filled up to one length. What fills them is no text, and no query may see it.
#
# **Predict.** Two sequences, of 3 and 5 tokens, share a batch of length 5. With the mask, what does the short one get
# in place of what it gets when it is alone?

# %%
tokens = jax.random.normal(jax.random.key(2), (2, 5, 1, 4))  # (B, T, N, H)
lengths = jnp.array([3, 5])
batched = attention(tokens, tokens, tokens, masks.lengths(key=lengths))
unmasked = attention(tokens, tokens, tokens)
alone = attention(tokens[0, :3], tokens[0, :3], tokens[0, :3])
print("with the mask, off by    ", jnp.abs(batched[0, :3] - alone).max())
print("without the mask, off by ", jnp.abs(unmasked[0, :3] - alone).max())

# %% [markdown]
# The same: to mask a key is to delete it. As an array this mask has the axes of the weights, (B, N, T, S), with 1 where
# it does not vary. An array of (B, S) is refused, since B and S could as well be other axes that happen to fit.

# %%
padding = jnp.arange(5) < lengths[:, None]
as_array = attention(tokens, tokens, tokens, padding[:, None, None, :])
print("as an array the same:", jnp.array_equal(as_array, batched))
try:
    attention(tokens, tokens, tokens, padding)
except ValueError as error:
    print(error)

# %% [markdown]
# ## When queries and keys are not equally many
#
# A decoder keeps the keys of five tokens and asks with the newest one alone: T = 1, S = 5.
#
# **Predict.** How many keys does this one query see under `masks.causal()`?

# %%
for rule in (masks.causal(), masks.causal(offset=4)):
    print(f"{rule!r}: sees", rule.dense(1, 5)[0].astype(int))

# %% [markdown]
# One, the oldest: nobody said that the query stands at position 4, so it stands at 0. Some libraries line up the first
# query with the first key, others the last with the last, and for T = S it makes no difference, until it does. jattn
# aligns nothing silently: say where the query is with `offset`, with `query_positions`, or keep a `Cache`.
#
# ## A row with nothing in it
#
# Generation pads on the left, so that all sequences end together. Add a causal mask, and the first rows see nothing:
# all that they may see by one mask is hidden by the other.

# %%
left_padded = masks.causal() & masks.rule(lambda query, key: key >= 1)  # the first token is padding
print(left_padded.draw(4, 4))

# %% [markdown]
# No distribution exists over an empty set. But a function must return something, and here are four libraries side by
# side, given the same arrays and the same mask.


# %%
import operator

import equinox
from flax import nnx


def in_jax_nn(query, key, value, mask):
    query, key, value = (x[:, None] for x in (query, key, value))  # one head
    return jax.nn.dot_product_attention(query, key, value, mask=mask[None])[:, 0]


def in_flax(query, key, value, mask):
    query, key, value = (x[:, None] for x in (query, key, value))
    return nnx.dot_product_attention(query, key, value, mask=mask[None])[:, 0]


def in_equinox(query, key, value, mask):
    layer = equinox.nn.MultiheadAttention(1, 2, key=jax.random.key(0))
    projections = ("query_proj", "key_proj", "value_proj", "output_proj")
    weights_of = operator.attrgetter(*(f"{name}.weight" for name in projections))
    layer = equinox.tree_at(weights_of, layer, 4 * (jnp.eye(2),))  # which change nothing
    return layer(query, key, value, mask)


LIBRARIES = {"jax.nn": in_jax_nn, "flax.nnx": in_flax, "equinox": in_equinox, "jattn": attend}

query = key = jax.random.normal(jax.random.key(3), (4, 2))
value = jnp.array([[9.0, 9.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])  # the first is of the padding
mask = left_padded.dense(4, 4)

# %% [markdown]
# **Predict.** What does row 0, which sees nothing, get in each of them: NaN, zeros, its own value, or the mean of all
# values, padding and future included?

# %%
for name, library in LIBRARIES.items():
    out = library(query, key, value, mask)
    print(f"{name:9} row 0: {out[0]}   row 3: {out[3]}")
print("mean of all values:", value.mean(axis=0))

# %% [markdown]
# All agree on row 3. On row 0, three of them answer with the mean of everything: a very large negative number stands in
# for -inf, it is the same in all places, and softmax of equal scores is uniform. It looks harmless, since nobody
# reads the output of padding. But it is the opposite of what the mask says: the row that may see nothing sees all.
#
# `assert_causal` tries whether outputs depend on later inputs.

# %%
for name, library in LIBRARIES.items():
    try:
        testing.assert_causal(lambda value, library=library: library(query, key, value, mask), value)
        print(f"{name:9} is causal")
    except AssertionError as error:
        print(f"{name:9} {error}")

# %% [markdown]
# In a model, the next layer may read this row, and then the future has come through a mask that forbids it twice.
#
# jattn asks for a policy by name. `empty="zero"`, the default: output 0, weights 0, every derivative exactly 0.
# `empty="raise"`: an error, for those whose rows are never empty.

# %%
print("zero: ", attend(query, key, value, mask)[0], "  no keys at all:", attend(query, key[:0], value[:0])[0])
try:
    attend(query, key, value, mask, empty="raise")
except ValueError as error:
    print("raise:", error)

# %% [markdown]
# ## What is masked is not read
#
# Padding holds whatever was in memory. Say it is NaN.
#
# **Predict.** Row 3 gives the padding a weight of exactly 0. What does each library return for it when the padding's
# value is NaN?

# %%
for name, library in LIBRARIES.items():
    print(f"{name:9} row 3: {library(query, key, value.at[0].set(jnp.nan), mask)[3]}")

# %% [markdown]
# 0 times NaN is NaN. A weight of 0 is not the same as not looking: one bad document ruins its neighbours in a packed
# batch. jattn never reads what is hidden, forward or backward.
#
# Here are the same arrays to play with: choose the query "pad", switch the policy, then the mask. (Where no scripts
# run, you see the first state.)

# %%
explore(query, key, value, mask, tokens=["pad", "a", "b", "c"])

# %% [markdown]
# ## The leak
#
# Now a real model, on real text: the licence of this repository, letter by letter. Two letter models are
# trained alike, one layer of two heads each, to guess the next letter from those before it. One of them lacks the
# causal mask.

# %%
from pathlib import Path

text = " ".join(Path("../LICENSE").read_text("utf-8").lower().split())
letters = sorted(set(text))
ids = jnp.array([letters.index(letter) for letter in text])
train_ids, held_out_ids = jnp.split(ids, [len(ids) * 9 // 10])
print(f"{len(ids)} letters, {len(letters)} different ones: ... {text[500:580]} ...")

# %%
import optax

from jattn import init_multihead, multihead

T, F = 32, 64  # letters that it sees at once, and features of each


def init(rng):
    rngs = jax.random.split(rng, 6)
    return {
        "letters": jax.random.normal(rngs[0], (len(letters), F)),
        "places": jax.random.normal(rngs[1], (T, F)),
        "heads": init_multihead(rngs[2], F, N=2),
        "up": jax.random.normal(rngs[3], (F, 4 * F)) / np.sqrt(F),
        "down": jax.random.normal(rngs[4], (4 * F, F)) / np.sqrt(4 * F),
        "out": jax.random.normal(rngs[5], (F, len(letters))) / np.sqrt(F),
    }


def model(params, ids, mask):
    """(*B, T) letters -> (*B, T, letters): scores for the letter after each."""
    x = params["letters"][ids] + params["places"]
    x = x + multihead(params["heads"], x, mask=mask)
    x = x + jax.nn.relu(x @ params["up"]) @ params["down"]
    return x @ params["out"]


@jax.jit
def loss(params, ids, mask):
    """Nats per letter, the mean over (B, T + 1) letters."""
    scores = model(params, ids[:, :-1], mask)
    return optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]).mean()


# %%
def batch(rng, ids, B=32):
    starts = jax.random.randint(rng, (B, 1), 0, len(ids) - T)
    return ids[starts + jnp.arange(T + 1)]


def train(mask, steps=500):
    """The trained model, and the loss at every step."""
    optimizer = optax.adam(3e-3)

    def step(state, rng):
        params, memory = state
        value, slope = jax.value_and_grad(loss)(params, batch(rng, train_ids), mask)
        change, memory = optimizer.update(slope, memory)
        return (optax.apply_updates(params, change), memory), value

    params = init(jax.random.key(0))
    rngs = jax.random.split(jax.random.key(1), steps)
    (params, _), losses = jax.jit(lambda state: jax.lax.scan(step, state, rngs))((params, optimizer.init(params)))
    return params, losses


# %% [markdown]
# **Predict.** Which of the two reaches the lower loss? By how much?

# %%
honest, honest_losses = train(masks.causal())
cheat, cheat_losses = train(None)

print("step    causal   no mask   (nats per letter)")
for step in (0, 25, 50, 100, 200, 499):
    print(f"{step:4}    {honest_losses[step]:6.2f}    {cheat_losses[step]:6.2f}")

# %% [markdown]
# Without the mask it looks like a triumph. But is such a loss possible? Two yardsticks: a guess by the frequency of
# letters alone, and people. Shannon had them guess English letter by letter, and found at least 0.6 bits per letter
# ("Prediction and entropy of printed English", 1951).

# %%
frequencies = jnp.bincount(ids, length=len(letters)) / len(ids)
print(f"by frequency alone {-(frequencies * jnp.log(frequencies)).sum():.2f}, people at least {0.6 * np.log(2):.2f}")
print(f"without the mask   {cheat_losses[-20:].mean():.2f}")

# %% [markdown]
# Better than any reader of English, after 500 steps, with one layer. The model is not good: it copies the answer. The
# letter that it should guess after position t stands at position t + 1, and nothing forbids looking there.
#
# **Predict.** Will text that it has never seen expose it?

# %%
held_out = batch(jax.random.key(2), held_out_ids, B=64)
print(f"held out: causal {loss(honest, held_out, masks.causal()):.2f}, no mask {loss(cheat, held_out, None):.2f}")

# %% [markdown]
# No. The next letter stands there in held-out text as well: validation has the same leak as training. It shows only
# when the model must write, since then there is no next letter to copy. Give it only the past to look at:

# %%
print(f"no mask in training, only the past to see: {loss(cheat, held_out, masks.causal()):.2f}")


def written(params, mask, length=100):
    """What the model writes after the first T letters of the text: each letter drawn as likely as it finds it."""

    def step(seen, rng):
        drawn = jax.random.categorical(rng, model(params, seen, mask)[-1])
        return jnp.append(seen[1:], drawn), drawn

    rngs = jax.random.split(jax.random.key(3), length)
    _, drawn = jax.jit(lambda seen: jax.lax.scan(step, seen, rngs))(ids[:T])
    return "".join(letters[i] for i in drawn)


print("causal: ", written(honest, masks.causal()))
print("no mask:", written(cheat, None))

# %% [markdown]
# Neither is a writer after 500 steps on a licence. But one has learned how words look, the other which letters are
# frequent.
#
# To find out like this costs a training run. The check needs none: on random weights, no output may depend on a later
# input.

# %%
untrained = init(jax.random.key(4))
for name, mask in {"causal": masks.causal(), "no mask": None, "off by one": masks.causal(offset=1)}.items():
    try:
        testing.assert_causal(lambda ids, mask=mask: model(untrained, ids, mask), ids[:T])
        print(f"{name:10} passes")
    except AssertionError as error:
        print(f"{name:10} {error}")

# %% [markdown]
# Put that line into the tests of your own model. It takes any function of a sequence, a whole model included, and does
# not care which library computes its attention.
#
# ## Exercises
#
# **1.** `causal_mask`: bool (T, S), True where query t may see key s, with the first query at the first key.


# %%
def my_causal_mask(T, S): ...


check("causal_mask", my_causal_mask)  # hint("causal_mask")

# %% [markdown]
# **2.** `padding_mask`: from lengths (B,) and S make a bool mask with the axes (B, N, T, S), each of them full or 1.


# %%
def my_padding_mask(lengths, S): ...


check("padding_mask", my_padding_mask)  # hint("padding_mask")

# %% [markdown]
# **3.** `masked_softmax`: along the last axis, over the entries where `where` is True. A row without any gets zeros
# this time, no error, and its gradient must be 0 and not NaN. What is hidden must not be read, not even a NaN.


# %%
def my_masked_softmax(x, where): ...


check("masked_softmax", my_masked_softmax)  # hint("masked_softmax")

# %% [markdown]
# Next: [4. Many heads](4_heads.ipynb), and what weights do not say.
