"""What bad input gets: for each misuse the exception, and its exact words.

The form is "who: what must hold, in axis letters with this call's sizes, got what." and, where the fix is not obvious,
one more sentence with the fix.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jattn import attend, attention, attention_weights, biases, masks, merge

NAN, INF = np.nan, np.inf


def floats(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


def bools(*shape):
    return jnp.zeros(shape, bool)


def ints(*shape):
    return jnp.zeros(shape, np.int32)


def one(mask=None, bias=None, query=(5, 3), key=(7, 3), value=(7, 2), dtypes=(np.float32,) * 3, **options):
    """`attend` with sizes T = 5, S = 7, H = 3, D = 2, but for what is named."""
    arrays = (floats(*shape, dtype=dtype) for shape, dtype in zip((query, key, value), dtypes, strict=True))
    return attend(*arrays, mask, bias, **options)


def many(mask=None, bias=None, query=(2, 5, 4, 3), key=(2, 7, 2, 3), value=(2, 7, 2, 6), **options):
    """`attention` with sizes B = 2, T = 5, S = 7, N = 4, K = 2, H = 3, D = 6, but for what is named."""
    return attention(floats(*query), floats(*key), floats(*value), mask, bias, **options)


def weights(mask=None, bias=None, query=(2, 5, 4, 3), key=(2, 7, 2, 3), **options):
    return attention_weights(floats(*query), floats(*key), mask, bias, **options)


NOT_BOOLEAN = "Scores that are added go in `bias`; for a 0/1 mask pass `mask != 0`."
ADD_HEADS = "Add heads and batches with jax.vmap, or call attention."
PADDING = "For a [B, S] padding mask pass mask[:, None, None, :] or masks.lengths(key=...)."

MISUSES = {
    # shapes
    "one head: a query with heads": (
        lambda: one(query=(5, 4, 3)),
        ValueError,
        f"attend: query must be (T, H), got (5, 4, 3). {ADD_HEADS}",
    ),
    "one head: a key with a batch": (
        lambda: one(key=(2, 7, 3)),
        ValueError,
        f"attend: key must be (S, H), got (2, 7, 3). {ADD_HEADS}",
    ),
    "one head: a value that is a vector": (
        lambda: one(value=(7,)),
        ValueError,
        f"attend: value must be (S, D), got (7,). {ADD_HEADS}",
    ),
    "one head: H differs": (
        lambda: one(key=(7, 4)),
        ValueError,
        "attend: key must be (S, H) = (7, 3), got (7, 4).",
    ),
    "one head: key and value lengths differ": (
        lambda: one(value=(6, 2)),
        ValueError,
        "attend: value must be (S, D) = (7, 2), got (6, 2).",
    ),
    "one head: no features": (
        lambda: one(query=(5, 0), key=(7, 0)),
        ValueError,
        "attend: H must be at least 1, got query (5, 0).",
    ),
    "a query without heads": (
        lambda: many(query=(5, 3)),
        ValueError,
        "attention: query must be (*B, T, N, H), got (5, 3).",
    ),
    "H differs": (
        lambda: many(key=(2, 7, 2, 4)),
        ValueError,
        "attention: key must be (*B, S, K, H) = (2, 7, 2, 3), got (2, 7, 2, 4).",
    ),
    "key and value lengths differ": (
        lambda: many(value=(2, 6, 2, 6)),
        ValueError,
        "attention: value must be (*B, S, K, D) = (2, 7, 2, 6), got (2, 6, 2, 6).",
    ),
    "key and value heads differ": (
        lambda: many(value=(2, 7, 4, 6)),
        ValueError,
        "attention: value must be (*B, S, K, D) = (2, 7, 2, 6), got (2, 7, 4, 6).",
    ),
    "batches differ": (
        lambda: many(key=(3, 7, 2, 3)),
        ValueError,
        "attention: key must be (*B, S, K, H) = (2, 7, 2, 3), got (3, 7, 2, 3).",
    ),
    "a batch of 1 is not broadcast": (
        lambda: many(key=(1, 7, 2, 3)),
        ValueError,
        "attention: key must be (*B, S, K, H) = (2, 7, 2, 3), got (1, 7, 2, 3).",
    ),
    "a missing batch is not broadcast": (
        lambda: many(key=(7, 2, 3)),
        ValueError,
        "attention: key must be (*B, S, K, H) = (2, 7, 2, 3), got (7, 2, 3).",
    ),
    "N is not a multiple of K": (
        lambda: many(query=(2, 5, 6, 3), key=(2, 7, 4, 3), value=(2, 7, 4, 6)),
        ValueError,
        "attention: N = 6 query heads is not a multiple of K = 4 key/value heads.",
    ),
    "N is less than K": (
        lambda: many(query=(2, 5, 1, 3)),
        ValueError,
        "attention: N = 1 query heads is not a multiple of K = 2 key/value heads.",
    ),
    "weights: H differs": (
        lambda: weights(key=(2, 7, 2, 4)),
        ValueError,
        "attention_weights: key must be (*B, S, K, H) = (2, 7, 2, 3), got (2, 7, 2, 4).",
    ),
    # dtypes
    "integers": (
        lambda: one(dtypes=(np.int32,) * 3),
        TypeError,
        "attend: query must be floating, got int32.",
    ),
    "one dtype is another": (
        lambda: one(dtypes=(np.float32, np.float16, np.float32)),
        TypeError,
        "attend: query, key and value must share one floating dtype, got float32, float16, float32.",
    ),
    "an integer value": (
        lambda: one(dtypes=(np.float32, np.float32, np.int32)),
        TypeError,
        "attend: query, key and value must share one floating dtype, got float32, float32, int32.",
    ),
    "complex numbers": (
        lambda: one(dtypes=(np.complex64,) * 3),
        TypeError,
        "attend: query must be floating, got complex64.",
    ),
    "float8": (
        lambda: one(dtypes=(jnp.float8_e4m3fn,) * 3),
        TypeError,
        "attend: query must be floating, got float8_e4m3fn.",
    ),
    "booleans": (
        lambda: one(dtypes=(np.bool_,) * 3),
        TypeError,
        "attend: query must be floating, got bool.",
    ),
    "weights: a mix of dtypes": (
        lambda: attention_weights(floats(5, 4, 3), floats(7, 4, 3, dtype=np.float16)),
        TypeError,
        "attention_weights: query and key must share one floating dtype, got float32, float16.",
    ),
    "what is no array": (
        lambda: attend("query", floats(7, 3), floats(7, 2)),
        TypeError,
        "attend: query must be an array, got str.",
    ),
    "None": (
        lambda: attend(None, floats(7, 3), floats(7, 2)),
        TypeError,
        "attend: query must be an array, got NoneType.",
    ),
    # masks
    "one head: a transposed mask": (
        lambda: one(bools(7, 5)),
        ValueError,
        "attend: mask must be (T, S) = (5, 7), got (7, 5).",
    ),
    "one head: a mask of keys": (
        lambda: one(bools(7)),
        ValueError,
        "attend: mask must be (T, S) = (5, 7), got (7,).",
    ),
    "one head: a mask with a head axis": (
        lambda: one(bools(1, 5, 7)),
        ValueError,
        "attend: mask must be (T, S) = (5, 7), got (1, 5, 7).",
    ),
    "a transposed mask": (
        lambda: many(bools(2, 4, 7, 5)),
        ValueError,
        "attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (2, 4, 7, 5).",
    ),
    "a [B, S] mask": (
        lambda: many(bools(2, 7)),
        ValueError,
        f"attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (2, 7). {PADDING}",
    ),
    "a (T, S) mask": (
        lambda: many(bools(5, 7)),
        ValueError,
        f"attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (5, 7). {PADDING}",
    ),
    "a mask without its head axis": (
        lambda: many(bools(2, 5, 7)),
        ValueError,
        f"attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (2, 5, 7). {PADDING}",
    ),
    "a mask of key/value heads": (
        lambda: many(bools(2, 2, 5, 7)),
        ValueError,
        "attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (2, 2, 5, 7).",
    ),
    "a scalar mask": (
        lambda: many(jnp.array(True)),
        ValueError,
        f"attention: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (). {PADDING}",
    ),
    "weights: a [B, S] mask": (
        lambda: weights(bools(2, 7)),
        ValueError,
        f"attention_weights: mask must be (*B, N, T, S) = (2, 4, 5, 7), got (2, 7). {PADDING}",
    ),
    "one head: a float mask": (
        lambda: one(floats(5, 7)),
        TypeError,
        f"attend: mask must be boolean (True = may attend), got float32. {NOT_BOOLEAN}",
    ),
    "an integer mask": (
        lambda: many(ints(2, 4, 5, 7)),
        TypeError,
        f"attention: mask must be boolean (True = may attend), got int32. {NOT_BOOLEAN}",
    ),
    "a bias rule as the mask": (
        lambda: one(biases.alibi(np.float32(1))),
        TypeError,
        "attend: mask must be a rule from jattn.masks or an array, got alibi(slopes=float32[]), a bias.",
    ),
    "a padding mask as an array rule": (
        lambda: many(masks.array(np.ones((2, 7), bool))),
        ValueError,
        "attention: array(mask=...) must be (T, S) = (5, 7), got (2, 7). For a [B, S] padding mask pass mask[:, None].",
    ),
    "a function as the mask": (
        lambda: one(lambda q, k: k <= q),
        TypeError,
        "attend: mask must be a rule or an array, got a function. Pass jattn.masks.rule(fn).",
    ),
    "causal without its brackets": (
        lambda: one(masks.causal),
        TypeError,
        "attend: mask must be a rule or an array, got a function. Call it: jattn.masks.causal(...).",
    ),
    # biases
    "one head: a boolean bias": (
        lambda: one(bias=bools(5, 7)),
        TypeError,
        "attend: bias must be floating, got bool. A boolean mask goes in `mask`.",
    ),
    "an integer bias": (
        lambda: many(bias=ints(2, 4, 5, 7)),
        TypeError,
        "attention: bias must be floating, got int32. A boolean mask goes in `mask`.",
    ),
    "a bias without its batch": (
        lambda: many(bias=floats(4, 5, 7)),
        ValueError,
        "attention: bias must be (*B, N, T, S) = (2, 4, 5, 7), got (4, 5, 7).",
    ),
    "a transposed bias": (
        lambda: one(bias=floats(7, 5)),
        ValueError,
        "attend: bias must be (T, S) = (5, 7), got (7, 5).",
    ),
    "a mask rule as the bias": (
        lambda: one(bias=masks.causal()),
        TypeError,
        "attend: bias must be a rule from jattn.biases or an array, got causal(offset=0), a mask.",
    ),
    # arrays in rules
    "one head: lengths of a batch": (
        lambda: one(masks.lengths(key=ints(2))),
        ValueError,
        "attend: lengths(key=...) must be (), got (2,).",
    ),
    "lengths of another batch": (
        lambda: many(masks.lengths(key=ints(3))),
        ValueError,
        "attention: lengths(key=...) must be (*B,) = (2,), got (3,).",
    ),
    "segments of another length": (
        lambda: many(masks.segments(ints(2, 5), ints(2, 6))),
        ValueError,
        "attention: segments(key_ids=...) must be (*B, S) = (2, 7), got (2, 6).",
    ),
    "segments of queries alone, where keys are others": (
        lambda: one(masks.segments(ints(5))),
        ValueError,
        "attend: segments(key_ids=...) must be (S,) = (7,), got (5,).",
    ),
    "slopes of key/value heads": (
        lambda: many(bias=biases.alibi(2)),
        ValueError,
        "attention: alibi(slopes=...) must be (N,) = (4,), got (2,).",
    ),
    "a mask array in a rule without its head axis": (
        lambda: many(masks.causal() & bools(2, 2, 2, 5, 7)),
        ValueError,
        "attention: array(mask=...) must be (T, S) or (*B, T, S) or (*B, N, T, S), got (2, 2, 2, 5, 7).",
    ),
    "slopes of a batch and heads that nobody has": (
        lambda: many(bias=biases.alibi(floats(1, 1, 4))),
        ValueError,
        "attention: alibi(slopes=...) must be () or (N,) or (*B, N), got (1, 1, 4).",
    ),
    # numbers
    "a softcap of 0": (
        lambda: one(softcap=0.0),
        ValueError,
        "attend: softcap must be finite and > 0, got 0.0. Pass None for no softcap.",
    ),
    "a negative softcap": (
        lambda: many(softcap=-30),
        ValueError,
        "attention: softcap must be finite and > 0, got -30.0. Pass None for no softcap.",
    ),
    "a NaN softcap": (
        lambda: one(softcap=NAN),
        ValueError,
        "attend: softcap must be finite and > 0, got nan. Pass None for no softcap.",
    ),
    "an infinite softcap": (
        lambda: weights(softcap=INF),
        ValueError,
        "attention_weights: softcap must be finite and > 0, got inf. Pass None for no softcap.",
    ),
    "a softcap for each head": (
        lambda: many(softcap=floats(4)),
        ValueError,
        "attention: softcap must be (), got (4,).",
    ),
    "a scale for each head": (
        lambda: many(scale=floats(4)),
        ValueError,
        "attention: scale must be (), got (4,).",
    ),
    "a scale that is no number": (
        lambda: one(scale="1"),
        TypeError,
        "attend: scale must be an array, got str.",
    ),
    "a boolean scale": (
        lambda: one(scale=True),
        TypeError,
        "attend: scale must be a number, got bool.",
    ),
    "one head: a sink for each head": (
        lambda: one(sink=floats(4)),
        ValueError,
        "attend: sink must be (), got (4,).",
    ),
    "one sink for all heads": (
        lambda: many(sink=0.0),
        ValueError,
        "attention: sink must be (N,) = (4,), got ().",
    ),
    "a sink for each key/value head": (
        lambda: many(sink=floats(2)),
        ValueError,
        "attention: sink must be (N,) = (4,), got (2,).",
    ),
    # dropout
    "dropout without rng": (
        lambda: one(dropout_rate=0.1),
        ValueError,
        "attend: dropout_rng must be a random key, got None with dropout_rate 0.1.",
    ),
    "a negative dropout rate": (
        lambda: one(dropout_rate=-0.1, dropout_rng=jax.random.key(0)),
        ValueError,
        "attend: dropout_rate must be a number in [0, 1], got -0.1.",
    ),
    "a dropout rate in percent": (
        lambda: many(dropout_rate=10, dropout_rng=jax.random.key(0)),
        ValueError,
        "attention: dropout_rate must be a number in [0, 1], got 10.",
    ),
    "a NaN dropout rate": (
        lambda: one(dropout_rate=NAN, dropout_rng=jax.random.key(0)),
        ValueError,
        "attend: dropout_rate must be a number in [0, 1], got nan.",
    ),
    "a dropout rate of True": (
        lambda: one(dropout_rate=True, dropout_rng=jax.random.key(0)),
        ValueError,
        "attend: dropout_rate must be a number in [0, 1], got True.",
    ),
    "a seed as the dropout rng": (
        lambda: one(dropout_rate=0.1, dropout_rng=0),
        TypeError,
        "attend: dropout_rng must be a random key, from jax.random.key, got int64().",
    ),
    "many dropout rngs": (
        lambda: many(dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0), 2)),
        ValueError,
        "attention: dropout_rng must be (), got (2,). Pass one key; it is split over batch and heads.",
    ),
    # positions
    "positions of another length": (
        lambda: one(query_positions=ints(7)),
        ValueError,
        "attend: query_positions must be (T,) = (5,), got (7,).",
    ),
    "key positions of another batch": (
        lambda: many(key_positions=ints(3, 7)),
        ValueError,
        "attention: key_positions must be (*B, S) = (2, 7), got (3, 7).",
    ),
    "one head: positions of a batch": (
        lambda: one(key_positions=ints(1, 7)),
        ValueError,
        "attend: key_positions must be (S,) = (7,), got (1, 7).",
    ),
    "positions that are floats": (
        lambda: one(query_positions=floats(5)),
        TypeError,
        "attend: query_positions must be integers, got float32.",
    ),
    # names of options
    "an unknown policy": (
        lambda: one(empty="mean"),
        ValueError,
        "attend: empty must be one of 'zero', 'raise', got 'mean'.",
    ),
    "a policy that is no name": (
        lambda: weights(empty=None),
        ValueError,
        "attention_weights: empty must be one of 'zero', 'raise', got None.",
    ),
    "an unknown method": (
        lambda: many(method="flash"),
        ValueError,
        "attention: method must be one of 'auto', 'dense', 'blockwise', 'cudnn', got 'flash'.",
    ),
    "a block size for the dense method": (
        lambda: one(method="dense", block_size=128),
        ValueError,
        "attend: block_size is for method='blockwise', got 128 with 'dense'.",
    ),
    "rows that are not there": (
        lambda: weights(rows=np.array([0, 5])),
        ValueError,
        "attention_weights: rows must be within 0 ... T - 1 = 4, got [0, 5].",
    ),
    "rows from the end": (
        lambda: weights(rows=[-1]),
        ValueError,
        "attention_weights: rows must be within 0 ... T - 1 = 4, got [-1].",
    ),
    "rows as a mask": (
        lambda: weights(rows=bools(5)),
        TypeError,
        "attention_weights: rows must be integers, got bool.",
    ),
    "a single row": (
        lambda: weights(rows=ints()),
        ValueError,
        "attention_weights: rows must be (R,), got ().",
    ),
    # merge
    "no parts": (lambda: merge([], []), ValueError, "merge: outs must hold at least one part, got none."),
    "fewer lses than outs": (
        lambda: merge([floats(5, 2)] * 3, [floats(5)] * 2),
        ValueError,
        "merge: lses must be (parts, *B) = (3, 5), got (2, 5).",
    ),
    "lses with a feature axis": (
        lambda: merge([floats(5, 2)], [floats(5, 2)]),
        ValueError,
        "merge: lses must be (parts, *B) = (1, 5), got (1, 5, 2).",
    ),
    "parts of other shapes": (
        lambda: merge([floats(5, 2), floats(4, 2)], [floats(5), floats(4)]),
        ValueError,
        "merge: outs[1] must be (5, 2), got (4, 2). All parts have one shape.",
    ),
    "parts that are integers": (
        lambda: merge([ints(5, 2)], [floats(5)]),
        TypeError,
        "merge: outs[0] must be floating, got int32.",
    ),
    "parts of other dtypes": (
        lambda: merge([floats(5, 2), floats(5, 2, dtype=np.float16)], [floats(5)] * 2),
        TypeError,
        "merge: outs must share one dtype, got float32 and float16.",
    ),
    # mask rules
    "a negative window": (
        lambda: masks.window(-1, 0),
        ValueError,
        "masks.window: left must be >= 0, got -1. Pass None for no bound.",
    ),
    "a negative window in an array": (
        lambda: masks.window(0, np.array([0, -2])),
        ValueError,
        "masks.window: right must be >= 0, got -2. Pass None for no bound.",
    ),
    "a window that is half a position": (
        lambda: masks.window(1.5, 0),
        TypeError,
        "masks.window: left must be an int or an array of integers, got 1.5.",
    ),
    "causal with a boolean": (
        lambda: masks.causal(True),
        TypeError,
        "masks.causal: offset must be an int or an array of integers, got True.",
    ),
    "causal without an offset": (
        lambda: masks.causal(None),
        TypeError,
        "masks.causal: offset must be an int or an array of integers, got None.",
    ),
    "a negative length": (
        lambda: masks.lengths(key=-1),
        ValueError,
        "masks.lengths: key must be >= 0, got -1. Pass None for no bound.",
    ),
    "a boolean padding mask as lengths": (
        lambda: masks.lengths(key=bools(2, 7)),
        TypeError,
        "masks.lengths: key must be an int or an array of integers, got bool.",
    ),
    "a negative prefix": (
        lambda: masks.prefix(-3),
        ValueError,
        "masks.prefix: length must be >= 0, got -3.",
    ),
    "segments that are floats": (
        lambda: masks.segments(floats(5)),
        TypeError,
        "masks.segments: query_ids must be integers, got float32.",
    ),
    "a segment for all": (
        lambda: masks.segments(ints()),
        ValueError,
        "masks.segments: query_ids must be (*B, T), got ().",
    ),
    "padding by a boolean": (
        lambda: masks.segments(ints(5), padding=False),
        TypeError,
        "masks.segments: padding must be an int or an array of integers, got False.",
    ),
    "a 0/1 mask as an array": (
        lambda: masks.array(ints(5, 7)),
        TypeError,
        f"masks.array: mask must be boolean (True = may attend), got int32. {NOT_BOOLEAN}",
    ),
    "a mask array of one axis": (
        lambda: masks.array(bools(7)),
        ValueError,
        "masks.array: mask must be (*B, T, S), got (7,).",
    ),
    "a rule that is no function": (
        lambda: masks.rule(bools(5, 7)),
        TypeError,
        "masks.rule: fn must be a function, got {array}.",
    ),
    "a rule that returns numbers": (
        lambda: one(masks.rule(lambda q, k: (k <= q).astype(np.int32))),
        TypeError,
        "masks.rule: fn must return a boolean array (True = may attend), got int32.",
    ),
    "a rule that returns nothing": (
        lambda: one(masks.rule(lambda q, k: None)),
        TypeError,
        "masks.rule: fn must return a boolean array (True = may attend), got None.",
    ),
    "a rule that returns another shape": (
        lambda: one(masks.rule(lambda q, k: (k <= q).any(0))),
        ValueError,
        "masks.rule: fn must return (t, s) = (5, 7), each axis full or 1, got (7,).",
    ),
    "a rule's array of less than its rank": (
        lambda: masks.rule(lambda q, k, x: k <= q, ints(), ranks=(1,)),
        ValueError,
        "masks.rule: array0 must be (*B, ...), got ().",
    ),
    "ranks of other arrays": (
        lambda: masks.rule(lambda q, k, x: k <= q, ints(), ranks=(0, 0)),
        ValueError,
        "masks.rule: ranks must be one int >= 0 for each of 1 arrays, got (0, 0).",
    ),
    "a rule and numbers": (
        lambda: masks.causal() & ints(5, 7),
        TypeError,
        f"masks.array: mask must be boolean (True = may attend), got int32. {NOT_BOOLEAN}",
    ),
    "numbers or a rule": (
        lambda: np.zeros((5, 7)) | masks.causal(),
        TypeError,
        f"masks.array: mask must be boolean (True = may attend), got float64. {NOT_BOOLEAN}",
    ),
    "a rule and None": (
        lambda: masks.causal() & None,
        TypeError,
        "mask & x: x must be a rule from jattn.masks or a boolean array, got NoneType.",
    ),
    "a mask and a bias": (
        lambda: masks.causal() | biases.alibi(np.float32(1)),
        TypeError,
        "mask | x: x must be a rule from jattn.masks or a boolean array, got Bias.",
    ),
    "the word and, between rules": (
        lambda: masks.causal() and masks.window(1, 1),
        TypeError,
        "causal(offset=0) has no truth value. Combine masks with &, | and ~, not with and, or and not.",
    ),
    # bias rules
    "no slopes": (lambda: biases.alibi(0), ValueError, "biases.alibi: N must be >= 1, got 0."),
    "slopes that are integers": (
        lambda: biases.alibi(ints(4)),
        TypeError,
        "biases.alibi: slopes must be floating, got int32. A boolean mask goes in `mask`.",
    ),
    "an even table": (
        lambda: biases.relative(floats(4)),
        ValueError,
        "biases.relative: L = 2 R + 1 must be odd, got 4. Pass buckets for others.",
    ),
    "a table of integers": (
        lambda: biases.relative(ints(5)),
        TypeError,
        "biases.relative: table must be floating, got int32. A boolean mask goes in `mask`.",
    ),
    "buckets that are no function": (
        lambda: biases.relative(floats(5), buckets=(1, 2)),
        TypeError,
        "biases.relative: buckets must be a function, got tuple.",
    ),
    "a bias array that is a mask": (
        lambda: biases.array(bools(5, 7)),
        TypeError,
        "biases.array: bias must be floating, got bool. A boolean mask goes in `mask`.",
    ),
    "a bias array of one axis": (
        lambda: biases.array(floats(7)),
        ValueError,
        "biases.array: bias must be (*B, T, S), got (7,).",
    ),
    "a bias rule that returns a mask": (
        lambda: one(bias=biases.rule(lambda q, k: k <= q)),
        TypeError,
        "biases.rule: fn must return floats, got bool. A boolean mask goes in `mask`.",
    ),
    "a bias rule that returns integers": (
        lambda: one(bias=biases.rule(lambda q, k: k - q)),
        TypeError,
        "biases.rule: fn must return floats, got int32.",
    ),
    "a bias rule that returns another shape": (
        lambda: one(bias=biases.rule(lambda q, k: jnp.zeros((5, 6)))),
        ValueError,
        "biases.rule: fn must return (t, s) = (5, 7), each axis full or 1, got (5, 6).",
    ),
    "a bias rule that is no function": (
        lambda: biases.rule(0.5),
        TypeError,
        "biases.rule: fn must be a function, got float.",
    ),
}


@pytest.mark.parametrize("call, kind, text", MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_named(call, kind, text):
    with pytest.raises(kind) as e:
        call()
    assert str(e.value) == text.format(array="ArrayImpl")


@pytest.mark.parametrize("call, kind, text", MISUSES.values(), ids=MISUSES)
def test_a_misuse_is_named_while_tracing(call, kind, text):
    """Inside jit the arrays that a call makes are tracers, and nothing has run yet."""
    with pytest.raises(kind) as e:
        jax.eval_shape(call)
    assert str(e.value) == text.format(array="DynamicJaxprTracer")


def test_a_misuse_is_named_under_vmap_and_grad():
    with pytest.raises(ValueError, match=r"^attend: mask must be \(T, S\) = \(5, 7\), got \(7, 5\)\."):
        jax.vmap(lambda mask: one(mask))(bools(3, 7, 5))
    with pytest.raises(TypeError, match="^attend: bias must be floating, got int32"):
        jax.grad(lambda x: attend(x, x, x, bias=ints(5, 5)).sum())(floats(5, 3))


@pytest.mark.parametrize("call", [one, many, weights])
def test_options_are_keyword_only(call):
    with pytest.raises(TypeError, match="positional"):
        {one: attend, many: attention, weights: attention_weights}[call](*[floats(1)] * 6)


@pytest.mark.parametrize("call", [one, many, weights])
def test_an_unknown_option_is_refused(call):
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_causal'"):
        call(is_causal=True)


def test_a_rng_without_a_rate_is_no_dropout():
    """The same call trains and evaluates."""
    np.testing.assert_array_equal(one(dropout_rng=jax.random.key(0)), one())


def test_a_traced_softcap_is_refused_under_checkify():
    error, _ = checkify.checkify(jax.jit(lambda softcap: many(softcap=softcap)))(0.0)
    assert "attention: softcap must be finite and > 0." in error.get()


def test_sizes_that_agree_by_chance_are_not_guessed():
    """Where B = N = T = S, a mask of lower rank could be anything; it is refused all the same."""
    shape = dict(query=(4, 4, 4, 3), key=(4, 4, 4, 3), value=(4, 4, 4, 3))
    for wrong in ((4, 4), (4, 4, 4)):
        with pytest.raises(ValueError, match=r"^attention: mask must be \(\*B, N, T, S\) = \(4, 4, 4, 4\)"):
            many(bools(*wrong), **shape)
        with pytest.raises(ValueError, match=r"^attention: bias must be \(\*B, N, T, S\) = \(4, 4, 4, 4\)"):
            many(bias=floats(*wrong), **shape)


ZEROS_AND_ONES = (np.arange(35).reshape(5, 7) % 3 == 0).astype(np.float64)
LOOKS_LIKE_A_MASK = "bias holds 0 and 1 alone, and is added to logits. For a mask pass mask=bias != 0."
WITH_BIAS = {
    "attend": lambda bias: one(bias=bias),
    "attention": lambda bias: many(bias=bias[None, None]),
    "attention_weights": lambda bias: weights(bias=bias[None, None]),
}


@pytest.mark.parametrize("who", WITH_BIAS)
def test_a_bias_that_looks_like_a_mask_is_warned_about_at_the_caller(who):
    with pytest.warns(UserWarning) as found:
        WITH_BIAS[who](ZEROS_AND_ONES)
    assert [str(w.message) for w in found] == [f"{who}: {LOOKS_LIKE_A_MASK}"]
    assert found[0].filename == __file__


@pytest.mark.parametrize("bias", [np.zeros((5, 7)), np.ones((5, 7)), -ZEROS_AND_ONES, 0.5 * ZEROS_AND_ONES])
def test_a_bias_that_is_one_is_not_warned_about(bias):
    WITH_BIAS["attend"](bias)
    with np.errstate(divide="ignore"):
        WITH_BIAS["attend"](np.log(bias + 1))
