"""What misuse gets: for each the exception, and its exact words, from every function that it can be given to.

The form is "who: what must hold, in axis letters with this call's sizes, got what." and, where the fix is not obvious,
one more sentence with the fix. What is legal and nearly always wrong is warned about.
"""

import functools
import traceback
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from jattn import (
    Cache,
    attend,
    attention,
    attention_weights,
    biases,
    cached_attention,
    dot_product_attention,
    init_multihead,
    masks,
    merge,
    multihead,
)
from jattn.interop import flax_attention_fn

NAN, INF = np.nan, np.inf


def floats(*shape, dtype=np.float32):
    return jnp.zeros(shape, dtype)


def bools(*shape):
    return jnp.zeros(shape, bool)


def ints(*shape):
    return jnp.zeros(shape, np.int32)


# The forms of attention, as functions of arguments by name, and a call of each that is right.


B, T, S, N, K, H, D, F = 2, 5, 7, 4, 2, 3, 6, 8
ONE = {"query": floats(T, H), "key": floats(S, H), "value": floats(S, D)}
MANY = {"query": floats(B, T, N, H), "key": floats(B, S, K, H), "value": floats(B, S, K, D)}
NEW = {"query": floats(B, T, N, H), "key": floats(B, T, K, H), "value": floats(B, T, K, D)}
CACHE = Cache.create(S, K, H, D, batch=(B,))
LAYER = {"params": init_multihead(jax.random.key(0), F, N, K, H, D), "x": floats(B, T, F)}


def in_flax(query, key, value, **options):
    """What flax's layers give, and what the maker of their function is given."""
    own = ("mask", "bias", "dropout_rate", "dropout_rng", "is_causal")
    given = {what: options.pop(what) for what in own if what in options}
    return flax_attention_fn(**options)(query, key, value, broadcast_dropout=False, **given)


class Form(NamedTuple):
    """A function `call`, named `who`, which is right with `good`; what else it takes; and how it words what it has.

    `words` are those of its axes, sizes included, and of what differs from form to form.
    """

    who: str
    call: Any
    good: dict
    takes: tuple
    words: dict

    @property
    def lead(self):
        return () if self.who == "attend" else (B, N)


DROPOUT = ("dropout_rate", "dropout_rng")
POSITIONS = ("query_positions", "key_positions")
SOURCES = ("mask", "bias")
NUMBERS = ("scale", "softcap", "sink")
ENGINE = ("empty", "method", "block_size")
ALL = (*SOURCES, *NUMBERS, *DROPOUT, *POSITIONS, *ENGINE, "return_stats")
PADDING = "For a [B, S] padding mask pass mask[:, None, None, :] or "
WORDS = {
    "query": "(*B, T, N, H)",
    "key": "(*B, S, K, H) = (2, 7, 2, 3)",
    "value": "(*B, S, K, D) = (2, 7, 2, 6)",
    "logits": "(*B, N, T, S) = (2, 4, 5, 7)",
    "padding": f"(*B, N, T, S) = (2, 4, 5, 7), got (2, 7). {PADDING}masks.lengths(key=...).",
    "first": "query",
    "arrays": "query, key and value",
    "others": ", float32" * 2,
    "heads": "(N,) = (4,)",
    "lengths": "(*B,) = (2,)",
    "queries": "(*B, T) = (2, 5)",
    "stored": "(*B, S) = (2, 7)",
    "pad": f" {PADDING}masks.lengths(key=...).",
    "rank": "",
    "of": "",
}
CACHED = WORDS | {
    "key": "(*B, T, K, H) = (2, 5, 2, 3)",
    "value": "(*B, T, K, D) = (2, 5, 2, 6)",
    "arrays": "query, key, value, cache.key and cache.value",
    "others": ", float32" * 4,
    "of": " B, K, H and D are those of the cache.",
}
PROJECTED = WORDS | {
    "query": "(*B, T, F)",
    "first": "x",
    "arrays": "x, params.query, params.key, params.value and params.out",
    "others": ", float32" * 4,
}
FORMS = {
    "attend": Form(
        "attend",
        attend,
        ONE,
        ALL,
        WORDS
        | {
            "query": "(T, H)",
            "key": "(S, H) = (7, 3)",
            "value": "(S, D) = (7, 6)",
            "logits": "(T, S) = (5, 7)",
            "padding": "(T, S) = (5, 7), got (2, 7).",
            "heads": "()",
            "lengths": "()",
            "queries": "(T,) = (5,)",
            "stored": "(S,) = (7,)",
            "pad": "",
            "rank": " Add heads and batches with jax.vmap, or call attention.",
        },
    ),
    "attention": Form("attention", attention, MANY, ALL, WORDS),
    "attention_weights": Form(
        "attention_weights",
        attention_weights,
        {"query": MANY["query"], "key": MANY["key"]},
        (*SOURCES, *NUMBERS, *POSITIONS, "empty"),
        WORDS | {"arrays": "query and key", "others": ", float32"},
    ),
    "cached_attention": Form(
        "cached_attention",
        cached_attention,
        NEW | {"cache": CACHE},
        (*SOURCES, *NUMBERS, *DROPOUT, *ENGINE, "return_stats", "new_lengths"),
        CACHED,
    ),
    "multihead": Form(
        "multihead",
        multihead,
        LAYER | {"context": floats(B, S, F)},
        ALL,
        PROJECTED
        | {
            "arrays": "x, context, params.query, params.key, params.value and params.out",
            "others": ", float32" * 5,
        },
    ),
    "multihead with a cache": Form(
        "multihead",
        multihead,
        LAYER | {"cache": CACHE},
        (*SOURCES, *NUMBERS, *DROPOUT, *ENGINE, "return_stats", "new_lengths"),
        PROJECTED,
    ),
    "dot_product_attention": Form(
        "dot_product_attention",
        dot_product_attention,
        MANY,
        ("mask", "bias", "scale", "is_causal", "return_residual", "implementation"),
        WORDS
        | {
            "query": "(B, T, N, H)",
            "key": "(B, S, K, H) = (2, S, K, 3)",
            "value": "(B, S, K, D) = (2, 7, 2, D)",
            "logits": "(B, N, T, S) = (2, 4, 5, 7)",
            "padding": f"(T, S) = (5, 7), got (2, 7). {PADDING}key_value_seq_lengths.",
            "pad": "",
        },
    ),
    "flax_attention_fn": Form(
        "flax_attention_fn",
        in_flax,
        MANY,
        (*SOURCES, *NUMBERS, *DROPOUT, *POSITIONS, *ENGINE, "is_causal"),
        WORDS | {"padding": f"(T, S) = (5, 7), got (2, 7). {PADDING[:-4]}.", "pad": ""},
    ),
}

# What is wrong


class Foreign:
    """What another library's array may do when it is asked to be NumPy's."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


def first(x):
    """`x` in the place of the first array of tokens."""
    return lambda form: {form.words["first"]: x}


def leading(what, make, *shape):
    """An array in front of whose axes are those that lead the logits."""
    return lambda form: {what: make(*form.lead, *shape)}


def resized(what, axis, n):
    """The array `what` with another number on an axis, counted from the end."""

    def change(form):
        shape = list(np.shape(form.good.get(what, np.zeros((1,) * 4))))
        shape[axis] = n
        return {what: floats(*shape)}

    return change


def retyped(dtype):
    """All floating arrays of a call, of another dtype."""
    cast = lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    return lambda form: jax.tree.map(cast, form.good)


MAPPED = tuple(name for name in FORMS if name != "attend")
WITH_HEADS = tuple(name for name in MAPPED if "multihead" not in name)
STRICT = tuple(name for name in FORMS if name != "flax_attention_fn")
# A mask or a bias of lower rank is lifted there, and no mistake.
LIFTING = ("dot_product_attention", "flax_attention_fn")
WITH_RULES = tuple(name for name in FORMS if name not in LIFTING)
MAPPED_WITH_RULES = WITH_RULES[1:]
FREE = ("attention", "attention_weights", *LIFTING)
CACHING = ("cached_attention", "multihead with a cache")

NOT_BOOLEAN = "Scores that are added go in `bias`; for a 0/1 mask pass `mask != 0`."
NOT_FLOATING = "A boolean mask goes in `mask`."
SWAP = "Arrays are (*B, T, N, H): of (*B, N, T, H) swap these axes, jnp.swapaxes(x, -3, -2)."
NO_GROUPS = "query heads is not a multiple of K ="
RNG = jax.random.key(0)
PARAMS = LAYER["params"]

# For which forms, what is changed in a call that is right, and what is raised: its type, and its words after "who: ".
# There {got} is the shape of what was changed, and other names are those of the form's own words.
MISUSES = {
    # shapes
    "a query that is a vector": (FORMS, first(floats(3)), ValueError, "{first} must be {query}, got (3,).{rank}"),
    "one head: a query with heads": (
        ("attend",),
        lambda form: {"query": floats(T, N, H)},
        ValueError,
        "query must be (T, H), got (5, 4, 3).{rank}",
    ),
    "one head: a key with a batch": (
        ("attend",),
        lambda form: {"key": floats(B, S, H)},
        ValueError,
        "key must be (S, H), got (2, 7, 3).{rank}",
    ),
    "H differs": (FORMS, resized("key", -1, 4), ValueError, "key must be {key}, got {got}.{of}"),
    "key and value lengths differ": (
        WITH_HEADS,
        resized("value", -3, 6),
        ValueError,
        "value must be {value}, got {got}.{of}",
    ),
    "one head: key and value lengths differ": (
        ("attend",),
        resized("value", -2, 6),
        ValueError,
        "value must be {value}, got (6, 6).",
    ),
    "key and value heads differ": (
        WITH_HEADS,
        resized("value", -2, 4),
        ValueError,
        "value must be {value}, got {got}.{of}",
    ),
    "batches differ": (WITH_HEADS, resized("key", 0, 3), ValueError, "key must be {key}, got {got}.{of}"),
    "a batch of 1 is not broadcast": (
        WITH_HEADS,
        resized("key", 0, 1),
        ValueError,
        "key must be {key}, got {got}.{of}",
    ),
    "a missing batch is not broadcast": (
        WITH_HEADS,
        lambda form: {"key": floats(*form.good["key"].shape[1:])},
        ValueError,
        "key must be {key}, got {got}.{of}",
    ),
    "no features": (
        ("attend", *FREE),
        lambda form: {what: form.good[what][..., :0] for what in ("query", "key")},
        ValueError,
        "H must be at least 1, got query {got}.",
    ),
    "N is not a multiple of K": (
        WITH_HEADS,
        resized("query", -2, 5),
        ValueError,
        f"N = 5 {NO_GROUPS} 2 key/value heads.",
    ),
    "N is less than K": (WITH_HEADS, resized("query", -2, 1), ValueError, f"N = 1 {NO_GROUPS} 2 key/value heads."),
    "a layer whose N is not a multiple of K": (
        ("multihead", "multihead with a cache"),
        lambda form: {"params": PARAMS._replace(query=PARAMS.query[:, :3], out=PARAMS.out[:3])},
        ValueError,
        f"N = 3 {NO_GROUPS} 2 key/value heads.",
    ),
    "heads before tokens": (
        FREE,
        lambda form: {what: jnp.swapaxes(jnp.repeat(x, N // x.shape[2], 2), 1, 2) for what, x in form.good.items()},
        ValueError,
        f"N = 5 {NO_GROUPS} 7 key/value heads. {SWAP}",
    ),
    "tokens of other features": (
        ("multihead", "multihead with a cache"),
        resized("x", -1, 9),
        ValueError,
        "x must be (*B, T, F) = (2, T, 8), got (2, 5, 9).",
    ),
    # dtypes
    **{
        f"arrays of {np.dtype(dtype)}": (
            FORMS,
            retyped(dtype),
            TypeError,
            f"{{first}} must be floating, got {np.dtype(dtype)}.",
        )
        for dtype in (np.int32, np.uint8, np.complex64, jnp.float8_e4m3fn)
    },
    "arrays of booleans": (("attend", *FREE), retyped(np.bool_), TypeError, "query must be floating, got bool."),
    "arrays that JAX does not have": (
        FORMS,
        lambda form: {form.words["first"]: np.zeros((B, T, N, H), object)},
        TypeError,
        "{first} must be an array, got one of object.",
    ),
    "one dtype is another": (
        STRICT,
        lambda form: {form.words["first"]: form.good[form.words["first"]].astype(np.float16)},
        TypeError,
        "{arrays} must share one floating dtype, got float16{others}.",
    ),
    "a random key for keys": (
        ("attend", "attention"),
        lambda form: {"key": RNG},
        TypeError,
        "{arrays} must share one floating dtype, got float32, key<fry>, float32.",
    ),
    "a text for an array": (FORMS, first("query"), TypeError, "{first} must be an array, got str."),
    "None for an array": (FORMS, first(None), TypeError, "{first} must be an array, got NoneType."),
    "a dict for an array": (FORMS, first({"heads": 8}), TypeError, "{first} must be an array, got dict."),
    "a ragged list": (FORMS, first([[1.0], [1.0, 2.0]]), TypeError, "{first} must be an array, got list."),
    "a list of integers": (
        STRICT,
        first([[1, 2], [3, 4]]),
        TypeError,
        "{arrays} must share one floating dtype, got int64{others}.",
    ),
    "an array that cannot be NumPy's": (FORMS, first(Foreign()), TypeError, "{first} must be an array, got Foreign."),
    # masks
    "a transposed mask": (FORMS, leading("mask", bools, 7, 5), ValueError, "mask must be {logits}, got {got}."),
    "a mask for another T": (FORMS, leading("mask", bools, 4, 7), ValueError, "mask must be {logits}, got {got}."),
    "a mask for another S": (FORMS, leading("mask", bools, 5, 6), ValueError, "mask must be {logits}, got {got}."),
    "a mask of key/value heads": (
        MAPPED,
        lambda form: {"mask": bools(B, K, T, S)},
        ValueError,
        "mask must be {logits}, got (2, 2, 5, 7).",
    ),
    "a mask of too many axes": (
        FORMS,
        leading("mask", bools, 1, 5, 7),
        ValueError,
        "mask must be {logits}, got {got}.{pad}",
    ),
    "a [B, S] mask": (FORMS, lambda form: {"mask": bools(B, S)}, ValueError, "mask must be {padding}"),
    "a (T, S) mask": (
        MAPPED_WITH_RULES,
        lambda form: {"mask": bools(T, S)},
        ValueError,
        "mask must be {logits}, got (5, 7). For one (T, S) mask of all sequences and heads pass masks.array(mask).",
    ),
    "a [B, T, S] mask": (
        MAPPED_WITH_RULES,
        lambda form: {"mask": bools(B, T, S)},
        ValueError,
        "mask must be {logits}, got (2, 5, 7).{pad}",
    ),
    "a mask of keys": (
        WITH_RULES,
        lambda form: {"mask": bools(S)},
        ValueError,
        "mask must be {logits}, got (7,).{pad}",
    ),
    "True for a causal mask": (
        WITH_RULES,
        lambda form: {"mask": True},
        ValueError,
        "mask must be {logits}, got (). For a causal mask pass masks.causal().",
    ),
    "1 for a causal mask": (
        STRICT,
        lambda form: {"mask": 1},
        TypeError,
        f"mask must be boolean (True = may attend), got int64. {NOT_BOOLEAN}",
    ),
    "a text for a causal mask": (
        WITH_RULES,
        lambda form: {"mask": "causal"},
        TypeError,
        "mask must be a rule or an array, got 'causal'. Pass jattn.masks.causal(...).",
    ),
    "a text that is no rule": (
        WITH_RULES,
        lambda form: {"mask": "padding"},
        TypeError,
        "mask must be a rule or an array, got 'padding'.",
    ),
    "a text, where masks are arrays": (
        LIFTING,
        lambda form: {"mask": "causal"},
        TypeError,
        "mask must be an array, got str.",
    ),
    "a rule, where masks are arrays": (
        ("dot_product_attention",),
        lambda form: {"mask": masks.causal()},
        TypeError,
        "mask must be an array, got causal(offset=0). jattn.attention takes rules.",
    ),
    "a float mask": (
        STRICT,
        leading("mask", floats, 5, 7),
        TypeError,
        f"mask must be boolean (True = may attend), got float32. {NOT_BOOLEAN}",
    ),
    "an integer mask": (
        STRICT,
        leading("mask", ints, 5, 7),
        TypeError,
        f"mask must be boolean (True = may attend), got int32. {NOT_BOOLEAN}",
    ),
    "an additive mask": (
        STRICT,
        leading("mask", lambda *shape: np.full(shape, -INF, np.float32), 5, 7),
        TypeError,
        f"mask must be boolean (True = may attend), got float32. {NOT_BOOLEAN}",
    ),
    "an additive mask, where 0 and 1 are one": (
        ("flax_attention_fn",),
        leading("mask", lambda *shape: np.full(shape, -INF, np.float32), 5, 7),
        TypeError,
        "mask must be boolean, or 0 and 1 (1 = may attend), got -inf. Scores that are added go in `bias`.",
    ),
    "a bias rule as the mask": (
        WITH_RULES,
        lambda form: {"mask": biases.alibi(np.float32(1))},
        TypeError,
        "mask must be a rule from jattn.masks or an array, got alibi(slopes=float32[]), a bias.",
    ),
    "a function as the mask": (
        WITH_RULES,
        lambda form: {"mask": lambda q, k: k <= q},
        TypeError,
        "mask must be a rule or an array, got a function. Pass jattn.masks.rule(fn).",
    ),
    "causal without its brackets": (
        WITH_RULES,
        lambda form: {"mask": masks.causal},
        TypeError,
        "mask must be a rule or an array, got a function. Call it: jattn.masks.causal(...).",
    ),
    "a list of masks": (
        WITH_RULES,
        lambda form: {"mask": [masks.causal(), masks.lengths(key=3)]},
        TypeError,
        "mask must be one rule, got a list of them. Combine masks with &, | and ~.",
    ),
    # biases
    "a boolean bias": (
        FORMS,
        leading("bias", bools, 5, 7),
        TypeError,
        f"bias must be floating, got bool. {NOT_FLOATING}",
    ),
    "an integer bias": (
        FORMS,
        leading("bias", ints, 5, 7),
        TypeError,
        f"bias must be floating, got int32. {NOT_FLOATING}",
    ),
    "a complex bias": (
        FORMS,
        leading("bias", functools.partial(floats, dtype=np.complex64), 5, 7),
        TypeError,
        f"bias must be floating, got complex64. {NOT_FLOATING}",
    ),
    "a transposed bias": (FORMS, leading("bias", floats, 7, 5), ValueError, "bias must be {logits}, got {got}."),
    "a bias for another S": (FORMS, leading("bias", floats, 5, 6), ValueError, "bias must be {logits}, got {got}."),
    "a bias without its batch": (
        WITH_RULES,
        lambda form: {"bias": floats(N, T, S)},
        ValueError,
        "bias must be {logits}, got (4, 5, 7).",
    ),
    "a mask rule as the bias": (
        WITH_RULES,
        lambda form: {"bias": masks.causal()},
        TypeError,
        "bias must be a rule from jattn.biases or an array, got causal(offset=0), a mask.",
    ),
    "a list of biases": (
        WITH_RULES,
        lambda form: {"bias": (biases.alibi(N), biases.alibi(N))},
        TypeError,
        "bias must be one rule, got a tuple of them. A sum of them is one biases.rule.",
    ),
    # arrays in rules
    "lengths of another batch": (
        (*WITH_RULES, "flax_attention_fn"),
        lambda form: {"mask": masks.lengths(key=ints(3))},
        ValueError,
        "lengths(key=...) must be {lengths}, got (3,).",
    ),
    "segments of another length": (
        (*WITH_RULES, "flax_attention_fn"),
        lambda form: {"mask": masks.segments(ints(*form.lead[:1], 5), ints(*form.lead[:1], 6))},
        ValueError,
        "segments(key_ids=...) must be {stored}, got {got}.",
    ),
    "segments of queries alone, where keys are others": (
        (*WITH_RULES, "flax_attention_fn"),
        lambda form: {"mask": masks.segments(ints(*form.lead[:1], 5))},
        ValueError,
        "segments(key_ids=...) must be {stored}, got {got}.",
    ),
    "slopes of key/value heads": (
        WITH_RULES,
        lambda form: {"bias": biases.alibi(K)},
        ValueError,
        "alibi(slopes=...) must be {heads}, got (2,).",
    ),
    "slopes of a batch and heads that nobody has": (
        MAPPED_WITH_RULES,
        lambda form: {"bias": biases.alibi(floats(1, 1, 4))},
        ValueError,
        "alibi(slopes=...) must be () or (N,) or (*B, N), got (1, 1, 4).",
    ),
    "a padding mask in a rule": (
        MAPPED_WITH_RULES,
        lambda form: {"mask": masks.array(bools(B, S))},
        ValueError,
        "array(mask=...) must be (T, S) = (5, 7), got (2, 7). For a [B, S] padding mask pass mask[:, None].",
    ),
    "a mask of too many axes in a rule": (
        MAPPED_WITH_RULES,
        lambda form: {"mask": masks.causal() & bools(2, 2, 2, 5, 7)},
        ValueError,
        "array(mask=...) must be (T, S) or (*B, T, S) or (*B, N, T, S), got (2, 2, 2, 5, 7).",
    ),
    # numbers
    **{
        f"a softcap of {x}": (
            FORMS,
            lambda form, x=x: {"softcap": x},
            ValueError,
            f"softcap must be finite and > 0, got {float(x)}. Pass None for no softcap.",
        )
        for x in (0.0, -30, NAN, INF)
    },
    "a softcap for each head": (
        FORMS,
        lambda form: {"softcap": floats(N)},
        ValueError,
        "softcap must be (), got (4,).",
    ),
    "a scale for each head": (FORMS, lambda form: {"scale": floats(N)}, ValueError, "scale must be (), got (4,)."),
    "a scale that is a text": (FORMS, lambda form: {"scale": "1"}, TypeError, "scale must be a number, got str."),
    "a boolean scale": (FORMS, lambda form: {"scale": True}, TypeError, "scale must be a number, got bool."),
    "a complex scale": (FORMS, lambda form: {"scale": 1j}, TypeError, "scale must be a number, got complex128."),
    "one sink for all heads": (MAPPED, lambda form: {"sink": 0.0}, ValueError, "sink must be {heads}, got ()."),
    "a sink for each key/value head": (
        FORMS,
        lambda form: {"sink": floats(K)},
        ValueError,
        "sink must be {heads}, got (2,).",
    ),
    # dropout
    "dropout without rng": (
        FORMS,
        lambda form: {"dropout_rate": 0.1},
        ValueError,
        "dropout_rng must be a random key, got None with dropout_rate 0.1.",
    ),
    **{
        f"a dropout rate of {x}": (
            FORMS,
            lambda form, x=x: {"dropout_rate": x, "dropout_rng": RNG},
            ValueError,
            f"dropout_rate must be a number in [0, 1], got {float(x)}.",
        )
        for x in (-0.1, 1.1, 10, NAN)
    },
    "a dropout rate of True": (
        FORMS,
        lambda form: {"dropout_rate": True, "dropout_rng": RNG},
        TypeError,
        "dropout_rate must be a number, got bool.",
    ),
    "a dropout rate of None": (
        FORMS,
        lambda form: {"dropout_rate": None, "dropout_rng": RNG},
        TypeError,
        "dropout_rate must be a number, got NoneType.",
    ),
    "a dropout rate that is a text": (
        FORMS,
        lambda form: {"dropout_rate": "0.1", "dropout_rng": RNG},
        TypeError,
        "dropout_rate must be a number, got str.",
    ),
    "a dropout rate for each head": (
        FORMS,
        lambda form: {"dropout_rate": floats(N), "dropout_rng": RNG},
        ValueError,
        "dropout_rate must be (), got (4,).",
    ),
    "a seed as the dropout rng": (
        FORMS,
        lambda form: {"dropout_rate": 0.1, "dropout_rng": 0},
        TypeError,
        "dropout_rng must be a random key, from jax.random.key, got int64().",
    ),
    "NumPy's generator as the dropout rng": (
        FORMS,
        lambda form: {"dropout_rate": 0.1, "dropout_rng": np.random.default_rng(0)},
        TypeError,
        "dropout_rng must be a random key, from jax.random.key, got Generator.",
    ),
    "many dropout rngs": (
        FORMS,
        lambda form: {"dropout_rate": 0.1, "dropout_rng": jax.random.split(RNG, 2)},
        ValueError,
        "dropout_rng must be (), got (2,). Pass one key; it is split over batch and heads.",
    ),
    # positions
    "positions of another length": (
        FORMS,
        lambda form: {"query_positions": ints(7)},
        ValueError,
        "query_positions must be (T,) = (5,), got (7,).",
    ),
    "one position for all": (
        FORMS,
        lambda form: {"query_positions": 3},
        ValueError,
        "query_positions must be {queries}, got ().",
    ),
    "key positions of another batch": (
        FORMS,
        lambda form: {"key_positions": ints(3, 7)},
        ValueError,
        "key_positions must be {stored}, got (3, 7).",
    ),
    "positions that are floats": (
        FORMS,
        lambda form: {"query_positions": floats(5)},
        TypeError,
        "query_positions must be integers, got float32.",
    ),
    "positions beyond 32 bits": (
        FORMS,
        lambda form: {"query_positions": np.full(5, 2**31)},
        ValueError,
        "query_positions must be within 32 bits, got 2147483648.",
    ),
    # a cache
    "what is no cache": (
        CACHING,
        lambda form: {"cache": (1, 2, 3)},
        TypeError,
        "cache must be a Cache, got tuple. Make one with Cache.create.",
    ),
    "new lengths that are floats": (
        CACHING,
        lambda form: {"new_lengths": floats(B)},
        TypeError,
        "new_lengths must be integers, got float32.",
    ),
    "one new length for all": (
        CACHING,
        lambda form: {"new_lengths": 2},
        ValueError,
        "new_lengths must be (*B,) = (2,), got ().",
    ),
    "more new tokens than there are": (
        CACHING,
        lambda form: {"new_lengths": [3, 6]},
        ValueError,
        "new_lengths must be within 0 ... T = 5, got [3, 6].",
    ),
    # names of options
    "an unknown policy": (
        FORMS,
        lambda form: {"empty": "mean"},
        ValueError,
        "empty must be one of 'zero', 'raise', got 'mean'.",
    ),
    "a policy that is no name": (
        FORMS,
        lambda form: {"empty": None},
        ValueError,
        "empty must be one of 'zero', 'raise', got None.",
    ),
    "an unknown method": (
        FORMS,
        lambda form: {"method": "flash"},
        ValueError,
        "method must be one of 'auto', 'dense', 'blockwise', 'cudnn', got 'flash'.",
    ),
    "a method that is an array": (
        FORMS,
        lambda form: {"method": np.zeros(2, np.int32)},
        ValueError,
        "method must be one of 'auto', 'dense', 'blockwise', 'cudnn', got array([0, 0], dtype=int32).",
    ),
    "an implementation that is not there": (
        FORMS,
        lambda form: {"implementation": "flash"},
        ValueError,
        "implementation must be one of None, 'xla', 'cudnn', got 'flash'.",
    ),
    "a block size for the dense method": (
        FORMS,
        lambda form: {"method": "dense", "block_size": 128},
        ValueError,
        "block_size is for method='blockwise', got 128 with 'dense'.",
    ),
    "one block size for both": (
        FORMS,
        lambda form: {"method": "blockwise", "block_size": 128},
        ValueError,
        "block_size must be two positive ints, (queries, keys), got 128.",
    ),
    "a block of no keys": (
        FORMS,
        lambda form: {"method": "blockwise", "block_size": (4, 0)},
        ValueError,
        "block_size must be two positive ints, (queries, keys), got (4, 0).",
    ),
    "return_stats that is a number": (
        FORMS,
        lambda form: {"return_stats": 1},
        TypeError,
        "return_stats must be True or False, got 1.",
    ),
    "return_stats that is an array": (
        FORMS,
        lambda form: {"return_stats": bools()},
        TypeError,
        "return_stats must be True or False, got bool().",
    ),
    "a mask for is_causal": (
        FORMS,
        lambda form: {"is_causal": bools(T, S)},
        TypeError,
        "is_causal must be True or False, got bool(5, 7).",
    ),
    "return_residual that is a text": (
        FORMS,
        lambda form: {"return_residual": "yes"},
        TypeError,
        "return_residual must be True or False, got 'yes'.",
    ),
}

CELLS = {
    f"{misuse}, {name}": (FORMS[name], *row)
    for misuse, (names, *row) in MISUSES.items()
    for name in names
    if row[0](FORMS[name]).keys() <= {*FORMS[name].good, *FORMS[name].takes}
}


def given(form, args, outer=()):
    """The call as a function of its arrays of JAX, and what they look like with axes in front. Others are constants."""
    arrays = {what for what, x in args.items() if all(isinstance(y, jax.Array) for y in jax.tree.leaves(x))}
    rest = {what: x for what, x in args.items() if what not in arrays}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*outer, *x.shape), x.dtype), {a: args[a] for a in arrays})
    return lambda arrays: form.call(**arrays, **rest), like


def mapped(form, args):
    call, like = given(form, args, (3,))
    jax.eval_shape(jax.vmap(call), like)


WAYS = {
    "eager": lambda form, args: form.call(**args),
    "traced": lambda form, args: jax.eval_shape(*given(form, args)),
    "mapped": mapped,
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_changed_is_all_that_is_wrong(form, way):
    way(form, form.good)


@pytest.mark.parametrize("form, change, kind, text", CELLS.values(), ids=CELLS)
def test_a_misuse_is_named(form, change, kind, text):
    changed = change(form)
    *_, got = [(), *(getattr(x, "shape", ()) for x in jax.tree.leaves(next(iter(changed.values()))))]
    for way, called in WAYS.items():
        with pytest.raises(kind) as e:
            called(form, form.good | changed)
        assert str(e.value) == f"{form.who}: {text.format(got=got, **form.words)}", way
        # Not one of a kind that others raise, nor one of theirs by chance.
        assert type(e.value) is kind, way
        *_, (frame, _) = traceback.walk_tb(e.tb)
        assert frame.f_globals["__name__"].partition(".")[0] == "jattn", way


# What some functions alone can be given


def one(mask=None, bias=None, **options):
    return attend(**ONE, mask=mask, bias=bias, **options)


def weights(**options):
    return attention_weights(MANY["query"], MANY["key"], **options)


OTHERS = {
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


@pytest.mark.parametrize("call, kind, text", OTHERS.values(), ids=OTHERS)
def test_another_misuse_is_named(call, kind, text):
    with pytest.raises(kind) as e:
        call()
    assert str(e.value) == text.format(array="ArrayImpl")


@pytest.mark.parametrize("call, kind, text", OTHERS.values(), ids=OTHERS)
def test_another_misuse_is_named_while_tracing(call, kind, text):
    """Inside jit the arrays that a call makes are tracers, and nothing has run yet."""
    with pytest.raises(kind) as e:
        jax.eval_shape(call)
    assert str(e.value) == text.format(array="DynamicJaxprTracer")


ELSEWHERE = ("is_causal", "attn_mask", "dropout_p", "key_padding_mask", "enable_gqa")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_of_another_library_is_refused_by_name(form, name):
    """By Python, where a signature has all options: editors and type checkers read it too."""
    if name not in form.takes:
        with pytest.raises(
            TypeError, match=f"(unexpected keyword argument '{name}'|: '{name}' is no option. There are )"
        ):
            form.call(**form.good, **{name: None})


@pytest.mark.parametrize("call, arrays", [(attend, ONE), (attention, MANY), (dot_product_attention, MANY)])
def test_options_are_keyword_only(call, arrays):
    with pytest.raises(TypeError, match="positional"):
        call(*arrays.values(), None, None, 0.5)


def test_a_rng_without_a_rate_is_no_dropout():
    """The same call trains and evaluates."""
    np.testing.assert_array_equal(one(dropout_rng=RNG), one())


@pytest.mark.parametrize("what, x, must", [
    ("softcap", 0.0, "finite and > 0"),
    ("softcap", INF, "finite and > 0"),
    ("dropout_rate", -0.1, "a number in [0, 1]"),
    ("dropout_rate", 1.5, "a number in [0, 1]"),
])  # fmt: skip
def test_a_traced_number_that_has_no_meaning_gives_nan_and_an_error_under_checkify(what, x, must, engine):
    call = jax.jit(lambda x: one(**{what: x}, dropout_rng=RNG, **engine))
    assert np.isnan(call(x)).all() and np.isfinite(call(0.5)).all()
    error, _ = checkify.checkify(call)(x)
    assert f"attend: {what} must be {must}." in error.get()


def test_sizes_that_agree_by_chance_are_not_guessed():
    """Where B = N = T = S, a mask of lower rank could be anything; it is refused all the same."""
    x = floats(4, 4, 4, 3)
    for wrong in ((4, 4), (4, 4, 4)):
        with pytest.raises(ValueError, match=r"^attention: mask must be \(\*B, N, T, S\) = \(4, 4, 4, 4\)"):
            attention(x, x, x, bools(*wrong))
        with pytest.raises(ValueError, match=r"^attention: bias must be \(\*B, N, T, S\) = \(4, 4, 4, 4\)"):
            attention(x, x, x, bias=floats(*wrong))


# What is legal, and nearly always wrong


ZEROS_AND_ONES = (np.arange(35).reshape(5, 7) % 3 == 0).astype(np.float64)
LATER = ~np.tri(8, dtype=bool)


def warned(form, **args):
    """What the call warns about, and that it does so where it is made."""
    with pytest.warns(UserWarning) as found:
        form.call(**form.good | args)
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def of_8(form):
    """The form with T = S = 8."""
    grown = lambda x: jnp.zeros([8 if n in (T, S) else n for n in x.shape], x.dtype)  # noqa: E731
    return form._replace(good=jax.tree.map(grown, form.good))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_bias_that_looks_like_a_mask_is_warned_about_at_the_caller(form):
    text = "bias holds 0 and 1 alone, and is added to logits. For a mask pass mask=bias != 0."
    assert warned(form, bias=ZEROS_AND_ONES[(None,) * len(form.lead)]) == [f"{form.who}: {text}"]


@pytest.mark.parametrize("bias", [np.zeros((5, 7)), np.ones((5, 7)), -ZEROS_AND_ONES, 0.5 * ZEROS_AND_ONES])
def test_a_bias_that_is_one_is_not_warned_about(bias):
    one(bias=bias)
    with np.errstate(divide="ignore"):
        one(bias=np.log(bias + 1))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_inverted_causal_mask_is_warned_about_at_the_caller(form):
    text = "mask shows a query the keys after it alone. True = may attend: pass ~mask."
    assert warned(of_8(form), mask=LATER[(None,) * len(form.lead)]) == [f"{form.who}: {text}"]


@pytest.mark.parametrize(
    "mask", [~LATER, LATER.T, LATER | np.eye(8, dtype=bool), LATER[:7], LATER[:7, :7], LATER & False]
)
def test_another_mask_is_not_warned_about(mask):
    T, S = mask.shape
    attend(floats(T, H), floats(S, H), floats(S, D), mask)
    attend(floats(T, H), floats(S, H), floats(S, D), ~masks.causal())


@pytest.mark.parametrize("name", FREE)
def test_more_heads_than_tokens_are_warned_about_at_the_caller(name):
    form = FORMS[name]
    swapped = {what: floats(1, 5, 300, x.shape[-1]) for what, x in form.good.items()}
    text = f"N = 300 query heads for T = 5 queries and S = 5 keys. {SWAP}"
    assert warned(form, **swapped) == [f"{form.who}: {text}"]
    # As many as others have, or as there are tokens.
    for shape in ((1, 5, 256), (1, 300, 300)):
        WAYS["traced"](form, {what: floats(*shape, x.shape[-1]) for what, x in form.good.items()})
