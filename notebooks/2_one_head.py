# %% [markdown]
# # 2. One head
#
# A dictionary gives you the value of the one key that equals your query, or nothing. Attention is a dictionary that
# never says no: every key matches a little, and you get a mixture of all values, each in proportion to how well its key
# matches. This lesson takes one such lookup apart, then lets you move the query and watch.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from exercises import check, hint

from jattn import attend, attention, attention_weights, entropy, explore, masks, rotary, softmax, trace

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## Values are mixed
#
# The last step first, because it is the simplest: the output is a weighted sum of value vectors.
#
# **Predict.** The values are (2, 0) and (0, 4), the weights 0.25 and 0.75. What comes out? And what comes out when one
# key has all the weight?

# %%
value = jnp.array([[2.0, 0.0], [0.0, 4.0]])
print("0.25 and 0.75:", jnp.array([0.25, 0.75]) @ value)
print("all on one:   ", jnp.array([0.0, 1.0]) @ value)

# %% [markdown]
# With all the weight on one key, the output is exactly its value: the dictionary is the limit of attention. Here are
# the weights of lesson 1, with a value for each of its four keys. The masked one adds nothing.

# %%
weights = softmax(jnp.array([0.7, 1.1, 0.2, -jnp.inf]))
values = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0], [-1.0, 1.0]])
print("weights:", weights)
print("output: ", weights @ values)

# %% [markdown]
# ## Scores: how well does each key match?
#
# A score is the product of query and key, divided by the root of their number of features. `trace` shows every step of
# one head. Read its table from left to right.
#
# **Predict.** The query is (1, 0), the keys are (1, 0) and (0, 1), the values (2, 0) and (0, 2). Will the output lie
# nearer to the first value or to the second? Will it be (2, 0)?

# %%
query = jnp.array([[1.0, 0.0]])
key = jnp.eye(2)
value = 2 * jnp.eye(2)
trace(query, key, value).table(0, ["same", "other"])

# %% [markdown]
# Three things are easily confused, and each has its column. Scores are not weights: they may be negative, and they sum
# to anything. Weights are not the output: they say how much of each value, and the values say of what.
#
# The key that the query equals has two thirds of the weight and not all of it. A product of 1 is only so far above a
# product of 0. Let a mask allow the first key alone, and it is a dictionary again:

# %%
trace(query, key, value, masks.causal()).table(0, ["same", "other"])

# %% [markdown]
# ## The whole of it in three lines
#
# S = QKᵀ / √H + M, then A = softmax of each row of S, then O = AV. M is 0 where a query may look and -inf where it may
# not: the mask comes before softmax, so that the rows still sum to 1. `attend` is these three lines, made safe at the
# edges.

# %%
T, S, H, D = 3, 5, 4, 2
rngs = jax.random.split(jax.random.key(0), 3)
Q, K, V = map(jax.random.normal, rngs, [(T, H), (S, H), (S, D)])
M = jnp.where(masks.causal().dense(T, S), 0, -jnp.inf)

scores = Q @ K.T / jnp.sqrt(H) + M
A = softmax(scores)
print(A)
print("largest difference to attend:", jnp.abs(A @ V - attend(Q, K, V, masks.causal())).max())

# %% [markdown]
# **Predict.** Q is (3, 4), K is (5, 4), V is (5, 2). What are the shapes of the scores, of the weights and of the
# output? Which axis disappears, and what stands in its place?

# %%
for name, x in {"scores": scores, "weights": A, "output": A @ V}.items():
    print(f"{name:8}", x.shape)

# %% [markdown]
# The key axis is summed away, and the features of the values take its place. So the output has one row per query; the
# number of keys has left no trace in its shape, and D need not be H. With batches and heads in front nothing changes:
# (B, N, T, S) weights times (B, N, S, D) values are (B, N, T, D).
#
# ## Move the query
#
# Three keys of length 1, a third of a turn apart, with a colour each. Turn the query around and see whom it asks.

# %%
angles = jnp.array([0.0, 2 * jnp.pi / 3, 4 * jnp.pi / 3])
compass = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)
colours = jnp.eye(3)  # red, green, blue


def asked(direction, length):
    """What a query of this direction, in degrees, and length gets: how much of each colour."""
    radians = jnp.deg2rad(direction)
    query = length * jnp.stack([jnp.cos(radians), jnp.sin(radians)])
    return attend(query[None], compass, colours)[0]


for direction in (0.0, 30.0, 60.0, 90.0, 120.0):
    print(f"{direction:4.0f} degrees: red, green, blue =", asked(direction, 4.0))

# %% [markdown]
# The direction decides who wins; half way between two keys they get the same.
#
# **Predict.** Keep the direction at 0 degrees, exactly at red, and change the length of the query. What does a length
# of 100 give? And a length of 0, a query that asks nothing?

# %%
for length in (0.0, 1.0, 4.0, 16.0, 100.0):
    got = asked(0.0, length)
    print(f"length {length:5.1f}: red, green, blue = {got}   entropy {entropy(got):.4f}")

# %% [markdown]
# The length decides how decided the query is: it multiplies all scores, as the factor of lesson 1 did. A query of 0
# gives every key the same score and gets the plain mean of all values. It cannot get nothing: a row of weights
# sums to 1.
#
# Here it is to play with: drag the query around, make it longer and shorter, hide a key, change the scale. (Where no
# scripts run, as on a repository's page, you see its first state.)

# %%
query = jnp.array([[1.0, 3.0]])
explore(query, compass, colours, tokens=["query"], key_tokens=["red", "green", "blue"])

# %% [markdown]
# **Predict.** Two keys may be seen, their scores are equal, their values are (2, 6) and (8, 0). What comes out? What
# changes if both scores are 100 higher?

# %%
pair = jnp.array([[2.0, 6.0], [8.0, 0.0]])
print(softmax(jnp.array([1.0, 1.0])) @ pair, softmax(jnp.array([101.0, 101.0])) @ pair)

# %% [markdown]
# ## Why divide by the root of H?
#
# A product of two random vectors is a sum of H terms. If their entries are independent with variance 1, the product
# has variance H: it grows with the number of features, and with it the factor that sharpens every row.
#
# **Predict.** Without the division: at 1024 features, how many of 64 random keys does a random query really use?


# %%
def random_scores(H, scale, size=1.0):
    """256 random queries, `size` times as large, over 64 random keys."""
    rngs = jax.random.split(jax.random.key(H))
    return scale * size * jax.random.normal(rngs[0], (256, H)) @ jax.random.normal(rngs[1], (64, H)).T


def in_words(scores):
    keys = jnp.exp(entropy(softmax(scores))).mean()
    return f"spread of scores {scores.std():5.2f}, as many as {keys:5.2f} equal keys"


for H in (4, 64, 1024):
    print(f"H = {H:4}   q·k:    ", in_words(random_scores(H, 1)))
    print("           q·k/√H: ", in_words(random_scores(H, H**-0.5)))

# %% [markdown]
# Without it a random query looks at hardly more than one key, and noise decides which. With it the scores spread
# by 1, for any H.
#
# But only under that assumption on variances. The division is a unit of measurement, no measure of similarity: a
# model whose queries are larger has sharp rows again, and nothing prevents it from learning that.

# %%
for size in (1.0, 3.0, 10.0):
    print(f"queries {size:4.1f} times as large: ", in_words(random_scores(64, 64**-0.5, size)))

# %% [markdown]
# ## Attention does not know the order
#
# **Predict.** Shuffle the keys, and the values with them. What happens to the output?

# %%
order = jnp.array([3, 0, 4, 1, 2])
print("moved by at most", jnp.abs(attend(Q, K[order], V[order]) - attend(Q, K, V)).max())

# %% [markdown]
# Nothing, but for rounding: a sum has no order. To "the dog bit the man" and "the man bit the dog" one head gives the
# same answer, unless the keys themselves say where they stand. `rotary` turns query and key by an angle that grows
# with their position. Their product then depends on the distance between the two.

# %%
tokens = 0.5 * jax.random.normal(jax.random.key(1), (5, 1, 8))  # (T, N, H), with N = 1 head


def last_output(order, first=0):
    """What the last token gets from all five, in this order, when the first of them is at position `first`."""
    positions = first + jnp.arange(5)
    query = rotary(tokens[-1:], positions[-1:])
    return attention(query, rotary(tokens[order], positions), tokens[order])[0, 0]


in_order, shuffled = jnp.arange(5), jnp.array([3, 0, 1, 2, 4])
print("shuffled:            moved by", jnp.abs(last_output(shuffled) - last_output(in_order)).max())
print("all 1000 places on:  moved by", jnp.abs(last_output(in_order, first=1000) - last_output(in_order)).max())

# %% [markdown]
# Now order counts, and nothing but distance: a text that begins 1000 places later gives the same, up to the
# rounding of angles. Queries and keys are turned, values never: a turned value would carry its position into the
# output.
#
# ## In which precision?
#
# Models keep their arrays in bfloat16, which has two or three digits.
#
# **Predict.** A thousand weights of 0.001, added one after another in bfloat16: how near to 1 do they come?

# %%
small = jnp.full(1000, 0.001, jnp.bfloat16)
total, _ = jax.lax.scan(lambda total, weight: (total + weight, None), jnp.zeros((), jnp.bfloat16), small)
print("added in bfloat16:", total, "  in float32:", small.astype(jnp.float32).sum())

# %% [markdown]
# From there on 0.001 is less than half of the last digit, and every further weight is rounded away. So scores, softmax
# and sums are float32 on the way, whatever comes in; the output has the dtype of the inputs, and weights stay float32.

# %%
half = [x.astype(jnp.bfloat16)[:, None] for x in (Q, K, V)]  # (T, N, H), with N = 1
print("output:", attention(*half).dtype, "  weights:", attention_weights(*half[:2]).dtype)

# %% [markdown]
# ## Exercises
#
# **1.** `attend`: (T, H) queries, (S, H) keys, (S, D) values and a bool mask (T, S), True where a query may look, give
# (T, D). Use your softmax of lesson 1, or `jattn.softmax`. A query that may see no key: raise a ValueError. A key that
# no query may see must not matter, whatever its value is.


# %%
def my_attend(query, key, value, mask): ...


check("attend", my_attend)  # hint("attend")

# %% [markdown]
# **2.** `aim`: the other way around. Given (S, H) keys of length 1 and the number of one of them, return a query (H,)
# that gives this key more than 0.99 of the weight, with scores divided by √H as above.


# %%
def my_aim(key, target): ...


check("aim", my_aim)  # hint("aim")

# %% [markdown]
# Next: [3. Masks and policies](3_masks.ipynb), what a query may see, and what happens when it may see nothing.
