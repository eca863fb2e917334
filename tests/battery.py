"""The battery's cases: each option of `attention` said twice, to jattn and to the reference. No tests here."""

import functools
import itertools
import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import reference

from jattn import attention, biases, masks

STATS = ("lse", "max_logit", "entropy")


class Sizes(NamedTuple):
    B: tuple
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int


# Prime-like and all different where they can be, so that a swapped axis cannot hide.
SIZES = {
    "grouped heads": Sizes(B=(2,), T=5, S=7, N=6, K=3, H=3, D=2),
    "plain heads": Sizes(B=(2,), T=5, S=7, N=3, K=3, H=5, D=2),
    "one key/value head": Sizes(B=(3,), T=3, S=5, N=2, K=1, H=2, D=7),
    "no batch axes": Sizes(B=(), T=7, S=5, N=6, K=2, H=1, D=3),
    "two batch axes": Sizes(B=(2, 3), T=3, S=5, N=2, K=1, H=2, D=1),
}


def normal(seed, *shape, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs(n, seed=0, dtype=np.float64):
    """query, key, value of `attention`."""
    return (
        normal([seed, 1], *n.B, n.T, n.N, n.H, dtype=dtype),
        normal([seed, 2], *n.B, n.S, n.K, n.H, dtype=dtype),
        normal([seed, 3], *n.B, n.S, n.K, n.D, dtype=dtype),
    )


# Each option below maps a sentence to what jattn is told and what it means: a dense array that broadcasts to
# (*B, N, T, S). `q` and `k` are the positions, (*B, 1, T, 1) and (*B, 1, 1, S).


def _per_batch(n, *values):
    """The first values, one per batch element, and the same for use in a dense form."""
    x = np.resize(np.array(values, np.int32), n.B)
    return x, x.reshape(*n.B, 1, 1, 1)


def _array(n, shape, seed):
    mask = np.random.default_rng(seed).random(shape) < 0.7
    if mask.shape[-2] > 1:
        mask[..., 0, 1, :] = False  # an empty row in the first head
    return mask


def _full_array(n, q, k):
    mask = _array(n, (*n.B, n.N, n.T, n.S), 11)
    return mask, mask


def _padding_array(n, q, k):
    mask = _array(n, (*n.B, 1, 1, n.S), 12)
    return mask, mask


def _traced_causal(n, q, k):
    offset, dense = _per_batch(n, 0, -2, 1)
    return masks.causal(offset), k <= q + dense


def _lengths(n, q, k):
    (keys, dense_keys), (queries, dense_queries) = _per_batch(n, 3, 0, 5), _per_batch(n, 2, 3, 1)
    dense = (np.arange(n.S) < dense_keys) & (np.arange(n.T)[:, None] < dense_queries)
    return masks.lengths(key=keys, query=queries), dense


def _segments(n, q, k, padding=None):
    rng = np.random.default_rng(13)
    query_ids, key_ids = rng.integers(0, 3, (*n.B, n.T)), rng.integers(0, 3, (*n.B, n.S))
    dense = query_ids[..., None, :, None] == key_ids[..., None, None, :]
    if padding is not None:
        dense &= (query_ids != padding)[..., None, :, None]
    return masks.segments(query_ids, key_ids, padding=padding), dense


def _window_per_head(n, q, k):
    left = np.arange(n.N).reshape((1,) * len(n.B) + (n.N,))
    return masks.window(left, 1), (q - k <= left[..., None, None]) & (k - q <= 1)


def _rule_with_an_array(n, q, k):
    far, dense = _per_batch(n, 2, 3, 1)
    return masks.rule(lambda q, k, far: abs(q - k) < far, far), abs(q - k) < dense


def _everything_at_once(n, q, k):
    (array, dense_array), (lengths, dense_lengths) = _full_array(n, q, k), _lengths(n, q, k)
    mask = (masks.causal() | masks.prefix(2)) & array & ~(lengths & masks.window(0, 0))
    return mask, ((k <= q) | (k < 2)) & dense_array & ~(dense_lengths & (q == k))


MASKS = {
    "no mask": lambda n, q, k: (None, True),
    "a full mask array": _full_array,
    "a padding array": _padding_array,
    "causal": lambda n, q, k: (masks.causal(), k <= q),
    "causal, bottom right": lambda n, q, k: (masks.causal(offset=n.S - n.T), k <= q + n.S - n.T),
    "causal, offset per batch element": _traced_causal,
    "a window": lambda n, q, k: (masks.window(1, 2), (q - k <= 1) & (k - q <= 2)),
    "a window with one bound": lambda n, q, k: (masks.window(None, 0), k <= q),
    "a window per head": _window_per_head,
    "static lengths": lambda n, q, k: (masks.lengths(key=n.S - 2), np.arange(n.S) < n.S - 2),
    "lengths per batch element": _lengths,
    "segments": _segments,
    "segments with padding": lambda n, q, k: _segments(n, q, k, padding=0),
    "a prefix": lambda n, q, k: (masks.causal() | masks.prefix(3), (k <= q) | (k < 3)),
    "a rule": lambda n, q, k: (masks.rule(lambda q, k: (q + 2 * k) % 3 != 0), (q + 2 * k) % 3 != 0),
    "a rule with an array": _rule_with_an_array,
    "not a window": lambda n, q, k: (~masks.window(1, 0), (q - k > 1) | (k > q)),
    "everything at once": _everything_at_once,
}


def _array_bias(shape):
    def build(n):
        leaf = normal(21, *shape(n))
        return leaf, lambda leaf: leaf, lambda leaf, q, k: leaf

    return build


def _bias_with_holes(n):
    leaf = normal(22, *n.B, n.N, n.T, n.S)
    leaf = np.where(np.random.default_rng(23).random(leaf.shape) < 0.3, -np.inf, leaf)
    leaf[..., -1, 0, :] = -np.inf  # an empty row in the last head
    return leaf, lambda leaf: leaf, lambda leaf, q, k: leaf


def _alibi(n):
    leaf = 2.0 ** -np.arange(1, n.N + 1)
    return leaf, biases.alibi, lambda leaf, q, k: -leaf[:, None, None] * abs(q - k)


def _relative(n):
    leaf = normal(24, n.N, 5)
    dense = lambda leaf, q, k: leaf[np.arange(n.N)[:, None, None], 2 + np.clip(k - q, -2, 2)]  # noqa: E731
    return leaf, biases.relative, dense


def _bias_rule(n):
    leaf = normal(25, n.N)

    def bump(q, k, a):
        return a * jnp.sin((q - k).astype(a.dtype))

    return leaf, lambda leaf: biases.rule(bump, leaf), lambda leaf, q, k: leaf[:, None, None] * np.sin(q - k)


# leaf, what jattn is told, what it means. Gradients reach the leaf.
BIASES = {
    "no bias": lambda n: (None, lambda leaf: None, lambda leaf, q, k: 0.0),
    "a full bias": _array_bias(lambda n: (*n.B, n.N, n.T, n.S)),
    "a bias with broadcast axes": _array_bias(lambda n: (*(1 for _ in n.B), n.N, 1, n.S)),
    "a bias with holes": _bias_with_holes,
    "alibi": _alibi,
    "a relative table": _relative,
    "a bias rule": _bias_rule,
}


def _own_positions(n):
    return {}, np.arange(n.T), np.arange(n.S)


def _shuffled(n):
    rng = np.random.default_rng(31)
    q, k = rng.permutation(n.T) - 2, rng.permutation(n.S) - 1
    return {"query_positions": q, "key_positions": k}, q, k


def _per_batch_positions(n):
    rng = np.random.default_rng(32)
    q, k = rng.integers(-2, 9, (*n.B, n.T)), rng.integers(-2, 9, (*n.B, n.S))
    return {"query_positions": q, "key_positions": k}, q, k


POSITIONS = {
    "own positions": _own_positions,
    "later queries": lambda n: ({"query_positions": np.arange(n.T) + 2}, np.arange(n.T) + 2, np.arange(n.S)),
    "shuffled positions": _shuffled,
    "positions per batch element": _per_batch_positions,
}


class Case(NamedTuple):
    sizes: str
    mask: str
    bias: str
    positions: str
    softcap: bool
    sink: bool
    scale: bool
    dropout: bool
    stats: bool

    def __str__(self):
        extras = [word for word in self._fields[4:] if getattr(self, word)]
        return ", ".join([self.sizes, self.mask, self.bias, self.positions, *extras])


def cases():
    """Every mask meets every bias once; the other options are dealt out so that every two of them meet somewhere."""
    deal = random.Random(7)
    flag, seldom = (False, True), (False,) * 5 + (True,)  # dropout takes XLA a second to compile
    rest = (tuple(POSITIONS), flag, flag, flag, seldom, flag)
    met = set()
    for mask, bias in itertools.product(MASKS, BIASES):
        hands = [Case(deal.choice(tuple(SIZES)), mask, bias, *map(deal.choice, rest)) for _ in range(50)]
        pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in hands}
        best = max(hands, key=lambda case: len(pairs[case] - met))
        met |= pairs[best]
        yield best


RNG = jax.random.key(7)
RATE = 0.4


@functools.cache
def kept(n):
    """Which pairs dropout keeps, seen from outside: equal weights and one-hot values show each weight alone."""
    query, key = np.zeros((*n.B, n.T, n.N, 1)), np.zeros((*n.B, n.S, n.K, 1))
    value = np.broadcast_to(np.eye(n.S)[:, None], (*n.B, n.S, n.K, n.S))
    out = attention(query, key, value, dropout_rate=RATE, dropout_rng=RNG, method="dense")
    return np.moveaxis(np.asarray(out), -3, -2) > 0


class Problem(NamedTuple):
    """`args` are what is differentiated; `mask` may be traced or not."""

    args: dict
    mask: object
    call: object
    expected: object


def problem(case, dtype=np.float64):
    n = SIZES[case.sizes]
    positions, q, k = POSITIONS[case.positions](n)
    q, k = q[..., None, :, None], k[..., None, None, :]
    mask, dense_mask = MASKS[case.mask](n, q, k)
    leaf, build, dense_bias = BIASES[case.bias](n)
    query, key, value = inputs(n, dtype=dtype)
    args = {"query": query, "key": key, "value": value}
    if leaf is not None:
        args["bias"] = leaf
    if case.sink:
        args["sink"] = normal(41, n.N)
    if case.scale:
        args["scale"] = np.float64(0.7)
    if case.softcap:
        args["softcap"] = np.float64(1.3)
    static = dict(positions, return_stats=case.stats)
    if case.dropout:
        static |= {"dropout_rate": RATE, "dropout_rng": RNG}

    def call(args, mask, **engine):
        args = dict(args)
        bias = build(args.pop("bias", None))
        return attention(mask=mask, bias=bias, **args, **static, **engine)

    def expected(args):
        args = {name: np.asarray(x, np.float64) for name, x in args.items()}
        bias = dense_bias(args.pop("bias", None), q, k)
        full = (*n.B, n.N, n.T, n.S)
        result = reference.attention(
            **args,
            mask=np.broadcast_to(dense_mask, full),
            bias=np.broadcast_to(bias, full),
            keep=kept(n) / (1 - RATE) if case.dropout else None,
        )
        return result

    return Problem(args, mask, call, expected)


def made(jaxpr):
    """Pairs (primitive, abstract value) of all that a program makes, in every loop and branch."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield from ((eqn.primitive.name, v.aval) for v in eqn.outvars)
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(getattr(param, "jaxpr", param), "eqns"):
                yield from made(param)
