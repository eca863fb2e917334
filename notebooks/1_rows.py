# %% [markdown]
# # 1. Rows
#
# Attention begins with a table of scores: a row for each query, a column for each key. Softmax turns every row into
# weights. This lesson is about one row: what its numbers mean, why the printed formula breaks, and how to say in one
# number how far a row spreads.
#
# Where it says **Predict**, write your answer down before you look at the next cell. At the end you write the four
# functions of this lesson yourself, and a checker says the first thing that is wrong with them.

# %%
import jax
import jax.numpy as jnp
import numpy as np
from exercises import check, hint

from jattn import entropy, naive_softmax, pictures, rows_normalised, softmax

np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## A row for each query
#
# Two queries, two keys, four scores.
#
# **Predict.** Softmax turns the four scores into four weights. What is the sum of all four? And must the weights of a
# whole batch sum to 1?

# %%
scores = jnp.array([[0.3, -0.2], [2.0, 5.0]])
weights = softmax(scores)
print(weights)
print("sum of all:    ", weights.sum())
print("sum of each row:", weights.sum(axis=-1))
print("of each column: ", weights.sum(axis=0))

# %% [markdown]
# Each query divides one unit of attention among the keys, and knows nothing of the other queries. So every row sums
# to 1, the sum of all weights is the number of rows, and a column may sum to anything.
#
# The axis matters more than anything else here. Along axis 0 the numbers look just as much like weights, and answer
# another question: which query cares most for this key?

# %%
wrong_axis = softmax(scores, axis=0)
print(wrong_axis)
print("rows sum to 1?", rows_normalised(weights, tol=1e-6))
print("and with the wrong axis?", rows_normalised(wrong_axis, tol=1e-6))

# %% [markdown]
# ## From scores to weights, step by step
#
# Subtract the largest score of the row. Take exp. Divide by the sum.

# %%
row = jnp.array([0.71, 0.0, -1.0])
below = row - row.max()
exps = jnp.exp(below)

print("score          ", row)
print("minus the peak ", below)
print("exp            ", exps, " sum:", exps.sum())
print("divided by it  ", exps / exps.sum())
print("softmax        ", softmax(row))

# %% [markdown]
# After the subtraction the peak has exp(0) = 1 and everything else has less. The sum lies between 1 and the number
# of keys, whatever the scores are.
#
# ## A difference of scores is a ratio of weights
#
# Two weights of one row share their divisor. Their ratio is exp(difference of their scores), and no third key can
# change it.
#
# **Predict.** How far must one score be above another to weigh twice as much? And what do 100 more on *every* score do?

# %%
print("ln 2 above the other:", softmax(jnp.array([jnp.log(2), 0.0])))
print("1 above the other:   ", softmax(jnp.array([1.0, 0.0])))
print("equal:               ", softmax(jnp.array([0.0, 0.0])))
print("100 more for all changes weights by", jnp.abs(softmax(row + 100) - softmax(row)).max())

# %% [markdown]
# ln 2, and nothing at all: 100 on every score changes no difference. (What is left is the rounding of `row + 100` in
# float32.) So softmax may subtract what it likes from a row, and it should: see below.
#
# A factor is another matter. It multiplies the differences: large ones sharpen a row towards its peak, small ones
# flatten it.

# %%
factors = jnp.array([0.0, 0.3, 1.0, 3.0, 10.0])
pictures.weights(softmax(factors[:, None] * row), [f"x {c:g}" for c in factors], [f"score {s:.2f}" for s in row])

# %% [markdown]
# ## Why the peak goes first
#
# On paper softmax is exp(x) / sum(exp(x)), with no peak in it. `naive_softmax` computes just that.
#
# **Predict.** What does it make of the scores 1000 and 999? And what is the largest score whose exp fits into float32?

# %%
huge = jnp.array([1000.0, 999.0])
print("exp of them:  ", jnp.exp(huge))
print("naive_softmax:", naive_softmax(huge))
print("softmax:      ", softmax(huge), " as for", huge - huge.max())

# %% [markdown]
# exp overflows to inf, and inf / inf is nan: not one wrong weight but a whole row of nothing, which the next layer
# spreads over everything. 1000 looks absurd, but the limit is lower than it looks, and lowest where models compute:

# %%
for dtype in (jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16):
    limit = np.log(float(jnp.finfo(dtype).max))
    print(f"{np.dtype(dtype).name:8} holds exp(x) up to x = {limit:.1f}")

# %% [markdown]
# Low scores fail as well: every exp is 0, and so is their sum.

# %%
low = jnp.array([-1000.0, -1001.0])
print("naive_softmax:", naive_softmax(low))
print("softmax:      ", softmax(low))

# %% [markdown]
# Once the peak is subtracted nothing overflows, and at least one exp is 1. The factor exp(-peak) stands above and
# below the fraction's line, so no weight changes. In a batch each row has a peak of its own: with one peak for all
# rows, a low row is back at 0 / 0.

# %%
both = jnp.stack([huge, low])
one_peak = jnp.exp(both - both.max())
print("one peak for both:   ", *(one_peak / one_peak.sum(axis=-1, keepdims=True)))
print("each row has its own:", *softmax(both))

# %% [markdown]
# ## A score of -inf means: not here
#
# exp(-inf) is exactly 0. That is how a score says that its key must not be looked at.

# %%
masked = jnp.array([0.7, 1.1, 0.2, -jnp.inf])
print("exp:    ", jnp.exp(masked), " sum:", jnp.exp(masked).sum())
print("weights:", softmax(masked), " the last is exactly 0:", softmax(masked)[-1] == 0)

# %% [markdown]
# **Predict.** Someone shows a chart of the weights of these four scores: 0.26, 0.41, 0.33, 0. They sum to 1, and the
# masked one is 0. How can you tell, without computing anything, that they are wrong?

# %%
charted = jnp.array([0.26, 0.41, 0.33, 0.0])
print("keys by score: ", jnp.argsort(-masked))
print("keys by chart: ", jnp.argsort(-charted))
print("keys by weight:", jnp.argsort(-softmax(masked)))
print("off by up to", jnp.abs(charted - softmax(masked)).max())

# %% [markdown]
# A higher score never weighs less. To sum to 1 is a weak check; to keep the order is another one, and to compute is
# the best. (Nor must printed weights sum to 1: they are rounded.)

# %%
thirds = softmax(jnp.zeros(3))
print("printed:", np.round(thirds, 2), " sum:", np.round(thirds, 2).sum(), " before rounding:", thirds.sum())

# %% [markdown]
# And a row of -inf alone? There is no way to divide one unit of attention among nobody. Every library answers
# something; jattn lets you say which answer you want. Lesson 3 shows where such rows come from, and what others do.

# %%
nobody = jnp.full(3, -jnp.inf)
print("naive:       ", naive_softmax(nobody))
print("empty='zero':", softmax(nobody, empty="zero"))
try:
    softmax(nobody, empty="raise")
except ValueError as error:
    print("empty='raise':", error)

# %% [markdown]
# ## Entropy: how many keys is that?
#
# Entropy is -sum(w ln w), in nats. It is 0 when one key has all the weight, and largest when all weigh the same: ln of
# their number. Turn that around and e^entropy says how many equal keys would spread as far.
#
# **Predict.** The weights 1/2, 1/4, 1/4 over three keys: is that more or less than two and a half equal keys?

# %%
rows = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]])
for weights in rows:
    nats = entropy(weights)
    print(weights, f" entropy {nats:.4f} nats, as {jnp.exp(nats):.3f} equal keys")

# %% [markdown]
# The zeros in those rows are a trap. ln 0 is -inf and 0 times -inf is nan, although w ln w tends to 0 with w. So 0 ln 0
# counts as 0, and it needs saying in code. The slope of w ln w at 0 is infinite; jattn gives it 0, so that a
# masked key cannot ruin a gradient.

# %%
focused = jnp.array([1.0, 0.0, 0.0])
print("as printed:", -(focused * jnp.log(focused)).sum())
print("entropy:   ", entropy(focused), " its gradient:", jax.grad(entropy)(focused))

# %% [markdown]
# **Predict.** The factors from above once more. Which way does the entropy of the row go as the factor grows, and
# where does it begin and end?

# %%
for c in factors:
    nats = float(entropy(softmax(c * row)))
    print(f"x {c:4.1f}   entropy {nats:.4f}   {'#' * round(40 * nats / np.log(3))}")
print(f"ln 3 =           {np.log(3):.4f}")

# %% [markdown]
# ## Exercises
#
# Write the four functions yourself with `jax.numpy`, then run the cell: it says the first thing that is wrong, with
# the input that shows it. `hint("softmax")` gives a hint, and another one when you call it again.
#
# **1.** `softmax` along any axis. It must survive huge scores and -inf. A row in which everything is -inf has no
# weights: raise a ValueError.


# %%
def my_softmax(x, axis=-1): ...


check("softmax", my_softmax)  # hint("softmax")

# %% [markdown]
# **2.** `naive_softmax`, along the last axis, as the formula is printed: with all its failures.


# %%
def my_naive_softmax(x): ...


check("naive_softmax", my_naive_softmax)  # hint("naive_softmax")

# %% [markdown]
# **3.** `rows_normalised`: True if every row of `weights`, along the last axis, sums to 1 within `tol`.


# %%
def my_rows_normalised(weights, tol=1e-9): ...


check("rows_normalised", my_rows_normalised)  # hint("rows_normalised")

# %% [markdown]
# **4.** `entropy` of every row, in nats, with 0 ln 0 = 0.


# %%
def my_entropy(weights): ...


check("entropy", my_entropy)  # hint("entropy")

# %% [markdown]
# Next: [2. One head](2_one_head.ipynb), where scores come from, and what the weights are for.
