"""attend: one head. attention: the same function, mapped over heads, groups and batches. And their weights.

A public function checks its arguments, wherever it is called from, and hands them to one jitted core. Below this file
nothing knows that heads exist.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _blockwise, _checks, _cudnn, _dense, _dropout, _mesh, _rules, _tile, _visible, biases, masks

AXES = {
    "query": ("*B", "T", "N", "H"),
    "key": ("*B", "S", "K", "H"),
    "value": ("*B", "S", "K", "D"),
    "query_positions": ("*B", "T"),
    "key_positions": ("*B", "S"),
}


# Per platform: from how many logits of one head on "auto" is blockwise, from how many queries or keys on it is so too,
# and the tiles (queries, keys) to choose from. One query without a mask stays dense, which reads each key once.
# cpu: 2 cores, AVX-512, jax 0.12, float32, 8 heads, H = 64; how many times as long dense takes as blockwise:
#   512 x 512                       0.7 to 1.0
#   1024 x 1024                     0.9 to 1.1, causal 1.6 to 2.5
#   4 to 256 x 2048, 2048 x 256     0.7 to 4.5, with a gradient 0.9 to 2.8, a quarter of the keys seen 1.5 to 16
#   1 x 2048, masked                0.7, an eighth of the keys seen 1.7 to 2.1
#   1 x 8192, masked                0.5 (one sequence), 2.0 (eight), an eighth of the keys seen 2.4 to 8.6
#   1 x 8192, no mask               0.5 to 0.8
# Nothing else is measured yet. There a walk over the tiles of a few queries may well cost more than what it skips.
_TILES = (512, 512), (256, 256)
_BLOCKWISE = {"cpu": (1024 * 1024, 2048, _TILES), "other": (1024 * 1024, math.inf, _TILES)}


def attend(
    query,
    key,
    value,
    mask=None,
    bias=None,
    *,
    scale=None,
    softcap=None,
    sink=None,
    dropout_rate=0.0,
    dropout_rng=None,
    query_positions=None,
    key_positions=None,
    empty="zero",
    method="auto",
    block_size=None,
    return_stats=False,
):
    """Mixes values, for each query, by how well their keys match it: one head.

    The logits are `scale * query·key`, then the softcap, then + bias, then the mask, then the sink. Axes: T queries,
    S keys, H features of a query or key, D features of a value. Add heads and batches with `jax.vmap`, or call
    `attention`.

    Args:
        query: (T, H), floating.
        key: (S, H), the dtype of `query`.
        value: (S, D), the dtype of `query`.
        mask: a rule from `jattn.masks`, or bool (T, S) with either axis 1; True = may attend. None: all may. An array
            of 8 x 8 or more that is the inverse of a causal one is warned about.
        bias: a rule from `jattn.biases`, or floating (T, S) with either axis 1, in nats. Where it is -inf, no key
            is visible. One of 0 and 1 alone, which most likely was meant as a mask, is warned about.
        scale: multiplies query·key, 1/sqrt(H) if None. A scalar, may be traced.
        softcap: bounds the logits, `softcap * tanh(logits / softcap)`, in nats; None for no bound. A scalar.
        sink: a logit that takes weight and gives nothing, in nats. A scalar, may be traced.
        dropout_rate: the share of weights that is dropped, 0 to 1.
        dropout_rng: a random key, needed where `dropout_rate` is not 0. The bits of a pair depend on it and on the
            pair's two indices alone.
        query_positions: integers (T,), 0, 1, 2, ... if None.
        key_positions: integers (S,), likewise.
        empty: what a query gets that may attend to nothing: "zero", or "raise" for an error. Where the mask is traced,
            "raise" is a check that JAX compiles inside `checkify.checkify` alone.
        method: "dense" makes all T x S logits at once, "blockwise" a tile of them at a time, in memory linear in T and
            S, forward and backward; "auto" chooses one of these by T and S. "cudnn" is cuDNN's kernel on a GPU, for
            float16 and bfloat16, without a mask or with `masks.causal()`, with gradients of first order; where a number
            is not finite, "blockwise" takes its place.
        block_size: (queries, keys) of a tile, for `method="blockwise"`; it need not divide T and S. None chooses.
        return_stats: whether to return `Stats` too.

    Returns:
        (T, D) in the dtype of `query`; with `return_stats` a pair of it and `Stats`, each (T,). A query that may
        attend to no key gets zeros and passes back zero. What a query may not attend to is never read. A NaN that
        it may attend to makes its row NaN.

    Raises:
        ValueError: a shape disagrees with the axes above, an option has no meaning, or a row is empty under
            `empty="raise"` (under `checkify` where the mask is traced).
        TypeError: integer arrays, mixed dtypes, a mask that is not boolean, a bias that is not floating.

    Numerics: logits (nats), softmax and sums in float32, float64 when `query` is. For the product with bfloat16 values
        weights are rounded to bfloat16.

    Source: Vaswani et al. 2017, equation 1, arXiv:1706.03762.

    Example:
        >>> attend(jnp.eye(2), jnp.eye(2), jnp.eye(2), masks.causal())[0].tolist()
        [1.0, 0.0]
    """
    return attend_as("attend", False, query, key, value, mask, bias, scale=scale, softcap=softcap, sink=sink,
                     dropout_rate=dropout_rate, dropout_rng=dropout_rng, query_positions=query_positions,
                     key_positions=key_positions, empty=empty, method=method, block_size=block_size,
                     return_stats=return_stats)  # fmt: skip


def attention(
    query,
    key,
    value,
    mask=None,
    bias=None,
    *,
    scale=None,
    softcap=None,
    sink=None,
    dropout_rate=0.0,
    dropout_rng=None,
    query_positions=None,
    key_positions=None,
    empty="zero",
    method="auto",
    block_size=None,
    return_stats=False,
):
    """Attention with heads and batches: `attend`, mapped.

    Query head n reads key/value head n // G, with G = N // K. More than 256 heads, and more than there are tokens, are
    warned about: most likely T and N are swapped. Axes: B batch, any number of axes, T queries, S keys,
    N query heads, K key/value heads, H features of a query or key, D features of a value.

    Args:
        query: (*B, T, N, H), floating.
        key: (*B, S, K, H), the dtype of `query`; N is a multiple of K.
        value: (*B, S, K, D), the dtype of `query`.
        mask: a rule from `jattn.masks`, or bool (*B, N, T, S) with each axis full or 1; True = may attend. The
            arrays in a rule may be led by nothing, by (*B) or by (*B, N).
        bias: a rule from `jattn.biases`, or floating (*B, N, T, S) with each axis full or 1, in nats. The arrays in
            a rule may be led by nothing, by (N,) or by (*B, N).
        scale: as in `attend`.
        softcap: as in `attend`.
        sink: (N,), as in `attend`.
        dropout_rate: as in `attend`.
        dropout_rng: one random key. The head with flat index f, over (*B, N), uses `jax.random.fold_in(key, f)`.
        query_positions: integers (T,) or (*B, T), 0, 1, 2, ... if None.
        key_positions: integers (S,) or (*B, S), likewise.
        empty: as in `attend`.
        method: as in `attend`.
        block_size: as in `attend`.
        return_stats: whether to return `Stats` too.

    Returns:
        (*B, T, N, D) in the dtype of `query`; with `return_stats` a pair of it and `Stats`, each (*B, T, N).

    Raises:
        ValueError: as in `attend`, or N is not a multiple of K.
        TypeError: as in `attend`.

    Numerics: as in `attend`.

    Source: Vaswani et al. 2017, arXiv:1706.03762; grouped heads, Ainslie et al. 2023, arXiv:2305.13245.

    Example:
        >>> x = jnp.ones((2, 5, 4, 8))
        >>> attention(x, x[:, :, :2], x[:, :, :2], masks.causal()).shape
        (2, 5, 4, 8)
    """
    return attend_as("attention", True, query, key, value, mask, bias, scale=scale, softcap=softcap, sink=sink,
                     dropout_rate=dropout_rate, dropout_rng=dropout_rng, query_positions=query_positions,
                     key_positions=key_positions, empty=empty, method=method, block_size=block_size,
                     return_stats=return_stats)  # fmt: skip


def attention_weights(
    query,
    key,
    mask=None,
    bias=None,
    *,
    rows=None,
    scale=None,
    softcap=None,
    sink=None,
    query_positions=None,
    key_positions=None,
    empty="zero",
):
    """The weights that `attention` mixes values with, to look at: T x S of them for each head.

    Args:
        query: (*B, T, N, H), floating.
        key: (*B, S, K, H), the dtype of `query`.
        mask: as in `attention`.
        bias: as in `attention`.
        rows: integers (R,): which queries, all if None. May be traced; what is outside 0 ... T - 1 gives NaN then.
        scale: as in `attention`.
        softcap: as in `attention`.
        sink: as in `attention`.
        query_positions: as in `attention`, for all T queries.
        key_positions: as in `attention`.
        empty: as in `attention`.

    Returns:
        (*B, N, T, S), or (*B, N, R, S), float32 or wider. A row sums to 1, less the weight of the sink, or to 0
        where the query may attend to nothing.

    Raises:
        ValueError: as in `attention`, or `rows` is known and outside 0 ... T - 1.
        TypeError: as in `attention`.

    Example:
        >>> x = jnp.ones((3, 1, 2))
        >>> attention_weights(x, x, masks.causal(), rows=jnp.array([1]))[0].tolist()
        [[0.5, 0.5, 0.0]]
    """
    call = Call("attention_weights", heads=True)
    call.arrays(query=query, key=key)
    call.sources(mask, bias)
    call.numbers(scale, softcap, sink)
    call.positions(query_positions=query_positions, key_positions=key_positions)
    call.rows(rows)
    return call.run(_weights, empty, head_axis=0)


def attend_as(
    who, heads, query, key, value, mask, bias, *, scale=None, softcap=None, sink=None, dropout_rate=0.0,
    dropout_rng=None, query_positions=None, key_positions=None, empty="zero", method="auto", block_size=None,
    return_stats=False, there=None,
):  # fmt: skip
    """`attend`, or `attention` with heads, called `who` in errors.

    `there` is a mask of its own: what it hides is no part of the call, and a query to which it shows nothing is
    padding, which no policy counts as an empty row.
    """
    call = Call(who, heads)
    call.arrays(query=query, key=key, value=value)
    _checks.choice(who, "method", method, ("auto", "dense", "blockwise", "cudnn"))
    return_stats = _checks.flag(who, "return_stats", return_stats)
    if method == "cudnn":
        others = {"bias": bias, "softcap": softcap, "sink": sink, "query_positions": query_positions,
                  "key_positions": key_positions, "block_size": block_size, "a cache": there}  # fmt: skip
        given = [what for what, x in others.items() if x is not None]
        given += ["dropout"] * (not _checks.zero(dropout_rate)) + ["statistics"] * return_stats
        return call.cudnn(mask, scale, given, empty)
    call.sources(mask, bias, there)
    call.numbers(scale, softcap, sink)
    call.positions(query_positions=query_positions, key_positions=key_positions)
    call.dropout(dropout_rate, dropout_rng)
    blocks = call.method(method, block_size)
    return call.run(_out_and_stats if return_stats else _out, empty, blocks=blocks)


_blockwise_attention = functools.partial(attention, method="blockwise")


# Engines, as `_lifted` maps them: the arrays of one head by name, and the sizes of axes that no array may have.


def _head(args, T, S):
    """One head's Inputs and its pairs."""
    args = dict(args)
    if "query" not in args:
        args |= {"query": jnp.zeros((T, 1)), "key": jnp.zeros((S, 1))}
    args.setdefault("value", None)
    rows, there = args.pop("rows", None), args.pop("there", None)
    if there is not None:
        args["mask"] = there & args["mask"] if "mask" in args else there
    x = _tile.inputs(**args)
    positions = x.query_positions, x.key_positions
    return x, _rules.all_pairs(T, S, *positions) if rows is None else _rules.some_rows(rows, S, *positions)


def _out(args, T, S, blocks, stats=False):
    x, pairs = _head(args, T, S)
    dtype = args["query"].dtype
    if 0 in (T, S):
        out, found = _dense.nothing(x, T, dtype)
    elif blocks is None:
        out, found = _dense.attend(x, pairs, dtype, stats)
    else:
        out, found = _blockwise.attend(x, dtype, stats, blocks)
    return (out, found) if stats else out


_out_and_stats = functools.partial(_out, stats=True)


def _weights(args, T, S, blocks):
    weights = _dense.weights(*_head(args, T, S))
    if "rows" not in args:
        return weights
    # A row that is not there is shown as no number.
    there = (args["rows"] >= 0) & (args["rows"] < T)
    return jnp.where(there[:, None], weights, jnp.nan)


def _empty(args, T, S, blocks):
    x, pairs = _head(args, T, S)
    empty = ~_tile.some(_tile.visible_pairs(_tile.cut(x, pairs), pairs), pairs)
    return empty & args["there"].tile(pairs).any(1) if "there" in args else empty


class Call:
    """One call: its arrays by name, checked, and the names of their axes."""

    def __init__(self, who, heads):
        self.who = who
        self.heads = heads
        self.sizes = {}
        self.args = {}
        self.axes = {}

    def _axes(self, *axes):
        return axes if self.heads else tuple(a for a in axes if a[:2] not in ("*B", "N", "N?", "K"))

    def add(self, what, x, axes):
        self.args[what] = x
        self.axes[what] = [axes]

    def arrays(self, **arrays):
        who = self.who
        arrays = _checks.one_floating_dtype(who, **arrays)
        axes = {what: self._axes(*AXES[what]) for what in arrays}
        hint = "" if self.heads else "Add heads and batches with jax.vmap, or call attention."
        for what, x in arrays.items():
            _checks.rank(who, what, x, axes[what], at_least=self.heads, hint=hint)
        query, key = arrays["query"], arrays["key"]
        *B, N, K = (*query.shape[:-3], query.shape[-2], key.shape[-2]) if self.heads else (1, 1)
        T, H = query.shape[-3 if self.heads else 0], query.shape[-1]
        S = key.shape[-3 if self.heads else 0]
        self.sizes = {"B": tuple(B), "T": T, "S": S, "N": N, "K": K, "H": H, "D": arrays.get("value", query).shape[-1]}
        for what, x in arrays.items():
            _checks.shape(who, what, x, axes[what], self.sizes)
            self.add(what, x, axes[what])
        _checks.heads(who, query, self.sizes)

    def sources(self, mask, bias, there=None):
        for what, x in (("mask", mask), ("there", there)):
            if x is not None:
                self._source(what, x, masks, masks.Mask, [("*B?",), ("*B?", "N?")])
        if bias is not None:
            self._source("bias", bias, biases, biases.Bias, [("N?",), ("*B?", "N?")])

    def _source(self, what, x, module, kind, leads):
        if isinstance(x, kind):
            rule = x
        elif isinstance(x, _rules.Rule):
            must, other = f"a rule from {module.__name__} or an array", "bias" if what == "mask" else "mask"
            raise TypeError(f"{self.who}: {what} must be {must}, got {x!r}, a {other}.")
        elif callable(x):
            own = getattr(module, getattr(x, "__name__", ""), None) is x
            hint = f"Call it: {module.__name__}.{x.__name__}(...)." if own else f"Pass {module.__name__}.rule(fn)."
            raise TypeError(f"{self.who}: {what} must be a rule or an array, got a function. {hint}")
        elif isinstance(x, str):
            hint = f" Pass {module.__name__}.{x}(...)." if x in module.__all__ else ""
            raise TypeError(f"{self.who}: {what} must be a rule or an array, got {x!r}.{hint}")
        elif isinstance(x, list | tuple) and any(isinstance(rule, _rules.Rule) for rule in x):
            hint = "Combine masks with &, | and ~." if what == "mask" else "A sum of them is one biases.rule."
            raise TypeError(f"{self.who}: {what} must be one rule, got a {type(x).__name__} of them. {hint}")
        else:
            rule = module.array(self._array(what, x))
        self.args[what] = rule
        self.axes[what] = [
            self._led(name, leaf, core, [(), *leads] if self.heads else [()])
            for leaf, (name, core) in zip(jax.tree.leaves(rule), rule.leaf_axes(), strict=True)
        ]

    def _array(self, what, x):
        """A mask or bias given as an array, of the full rank of the logits."""
        full, hint = self._axes("*B?", "N?", "T?", "S?"), ""
        if what == "mask":
            x = _checks.boolean(self.who, what, x, masks.NOT_BOOLEAN)
            if x.ndim == 0:
                hint = "For a causal mask pass masks.causal()."
            elif self.heads and x.ndim != len(_checks.expand(full, self.sizes)):
                hint = "For a [B, S] padding mask pass mask[:, None, None, :] or masks.lengths(key=...)."
                if x.shape == (self.sizes["T"], self.sizes["S"]) != (*self.sizes["B"], self.sizes["S"]):
                    hint = "For one (T, S) mask of all sequences and heads pass masks.array(mask)."
            _checks.not_inverted(self.who, what, x)
        else:
            x = _checks.floating(self.who, what, x, biases.NOT_FLOATING)
            _checks.no_mask(self.who, what, x)
        _checks.shape(self.who, what, x, full, self.sizes, hint=hint)
        return x

    def _led(self, name, leaf, core, leads):
        """The axes of a leaf. What leads them is told by their number alone, never by their sizes."""
        for lead in reversed(leads):
            if leaf.ndim == len(_checks.expand(lead, self.sizes)) + len(core):
                padding = name == "array(mask=...)" and leaf.shape == (*self.sizes["B"], self.sizes["S"])
                hint = "For a [B, S] padding mask pass mask[:, None]." * padding
                _checks.shape(self.who, name, leaf, lead + core, self.sizes, hint=hint)
                return lead + core
        choices = " or ".join(_checks.tupled(a.rstrip("?") for a in lead + core) for lead in leads)
        raise ValueError(f"{self.who}: {name} must be {choices}, got {_checks.tupled(leaf.shape)}.")

    def numbers(self, scale, softcap, sink):
        for what, x, axes in (("scale", scale, ()), ("softcap", softcap, ()), ("sink", sink, self._axes("N"))):
            if x is None:
                continue
            x = _checks.number(self.who, what, x).astype(_visible.wide(jnp.result_type(self.args["query"])))
            _checks.shape(self.who, what, x, axes, self.sizes)
            if what == "softcap":
                cap = "finite and > 0", "Pass None for no softcap."
                x = _checks.valid(self.who, what, x, lambda x: (x > 0) & (x < np.inf), *cap)
            self.add(what, x, axes)

    def positions(self, **positions):
        for what, x in positions.items():
            if x is None:
                continue
            x = _checks.integral(self.who, what, x)
            axes = self._axes(*AXES[what])[-1 if x.ndim == 1 else 0 :]
            _checks.shape(self.who, what, x, axes, self.sizes)
            self.add(what, x, axes)

    def dropout(self, rate, rng):
        rate = _checks.number(self.who, "dropout_rate", rate)
        _checks.shape(self.who, "dropout_rate", rate, (), self.sizes)
        rate = rate.astype(_visible.wide(jnp.result_type(self.args["query"])))
        rate = _checks.valid(self.who, "dropout_rate", rate, lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]")
        if _checks.zero(rate):
            return
        if rng is None:
            on = f"dropout_rate {rate!s}" if _checks.known(rate) else "a traced dropout_rate"
            raise ValueError(f"{self.who}: dropout_rng must be a random key, got None with {on}.")
        words = _dropout.words(self.who, rng)
        if self.heads:
            heads = (*self.sizes["B"], self.sizes["N"])
            words = _dropout.folded(words, math.prod(heads)).reshape(*heads, 2)
        self.add("words", words, (*self._axes("*B", "N"), "words"))
        self.add("rate", rate, ())

    def rows(self, rows):
        if rows is None:
            return
        rows = _checks.integral(self.who, "rows", rows)
        _checks.rank(self.who, "rows", rows, ("R",))
        T = self.sizes["T"]
        if _checks.known(rows) and rows.size and not (0 <= np.min(rows) and np.max(rows) < T):
            raise ValueError(f"{self.who}: rows must be within 0 ... T - 1 = {T - 1}, got {np.asarray(rows).tolist()}.")
        self.add("rows", rows, ("R",))

    def method(self, method, block_size):
        """The sizes of tiles (queries, keys) to choose from, or None for all at once."""
        T, S = self.sizes["T"], self.sizes["S"]
        who = self.who
        if block_size is not None:
            if method != "blockwise":
                raise ValueError(f"{who}: block_size is for method='blockwise', got {block_size} with {method!r}.")
            sizes = tuple(block_size) if isinstance(block_size, tuple | list) else ()
            if len(sizes) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes):
                raise ValueError(f"{who}: block_size must be two positive ints, (queries, keys), got {block_size}.")
            return (sizes,)
        logits, length, tiles = _BLOCKWISE.get(jax.default_backend(), _BLOCKWISE["other"])
        masked = "mask" in self.args or "there" in self.args
        long = T * S >= logits or (max(T, S) >= length and (T > 1 or masked))
        return tiles if method == "blockwise" or (method == "auto" and long) else None

    def cudnn(self, mask, scale, others, empty):
        """What cuDNN's kernel gives, or an error that says why it gives nothing."""
        _checks.choice(self.who, "empty", empty, ("zero", "raise"))
        self.numbers(scale, None, None)
        platform, dtype = jax.default_backend(), self.args["query"].dtype
        refusal = _cudnn.refusal(platform=platform, dtype=dtype, sizes=self.sizes, mask=mask,
                                 scale_is_known=_checks.known(scale), others=others)  # fmt: skip
        if refusal is not None:
            needed, got = refusal
            raise ValueError(f"{self.who}: method='cudnn' needs {needed}, got {got}. Pass method='blockwise'.")
        scale = 1 / math.sqrt(self.sizes["H"]) if scale is None else float(scale)
        x = [self.args[what] for what in ("query", "key", "value")]
        if not self.heads:
            x = [y[:, None] for y in x]
        out = _cudnn.attend(_blockwise_attention, scale, mask is not None, *x)
        return out if self.heads else out[:, 0]

    def run(self, engine, empty, head_axis=1, blocks=None, led=True):
        """What the engine gives, arrays that are all `led` by batches, heads and queries, or not."""
        _checks.choice(self.who, "empty", empty, ("zero", "raise"))
        refused = None
        # What empty rows are asked of may say nothing of batches and heads: without any, there is no row.
        if empty == "raise" and 0 not in (*self.sizes["B"], self.sizes["N"]):
            sources = ("mask", "there", "bias", "query_positions", "key_positions")
            seen = {what: x for what, x in self.args.items() if what in sources}
            if _checks.known(seen):
                with jax.ensure_compile_time_eval():
                    _checks.no_empty_rows(self.who, np.asarray(_lifted(seen, engine=_empty, **self._plan(seen))))
            else:
                refused = self.who, tuple(seen)
        how = {"engine": engine, "head_axis": head_axis, "blocks": blocks, "refused": refused}
        run = functools.partial(_lifted, **how, **self._plan(self.args))
        return _mesh.placed(run, (self.args,), self._lead(head_axis) if led else ())

    def _lead(self, head_axis):
        """What batches, heads and queries of the result are sharded over: what those of the query are."""
        *lead, _ = _mesh.axes(self.args["query"])
        if "rows" in self.args:
            lead[-2 if self.heads else -1] = None
        return [*lead[:-2], lead[-1], lead[-2]] if self.heads and head_axis == 0 else lead

    def _plan(self, args):
        B, K = self.sizes["B"], self.sizes["K"]
        levels = {f"B{i}": n for i, n in enumerate(B)} | ({"K": K, "G": self.sizes["N"] // K} if self.heads else {})
        axes = tuple((what, tuple(_spelled(a, len(B)) for a in self.axes[what])) for what in sorted(args))
        return {"axes": axes, "levels": tuple(levels.items()), "T": self.sizes["T"], "S": self.sizes["S"]}


def _spelled(axes, rank):
    """("*B", "N", "T") with two batch axes -> ("B0", "B1", "N", "T")."""
    letters = [axis.rstrip("?") for axis in axes]
    return tuple(b for letter in letters for b in ([f"B{i}" for i in range(rank)] if letter == "*B" else [letter]))


@functools.partial(jax.jit, static_argnames=("engine", "axes", "levels", "T", "S", "head_axis", "blocks", "refused"))
def _lifted(args, *, engine, axes, levels, T, S, head_axis=0, blocks=None, refused=None):
    """`engine` of one head, mapped over `levels`, pairs (axis, size), outermost first; heads go to `head_axis`."""
    if refused is not None:
        who, seen = refused
        own = tuple((what, a) for what, a in axes if what in seen)
        empty = _lifted({what: args[what] for what in seen}, engine=_empty, axes=own, levels=levels, T=T, S=S)
        _checks.no_empty_rows(who, empty)

    leaves, structure = jax.tree.flatten(args)
    names = [letters for _, leaf_axes in axes for letters in leaf_axes]
    sizes = dict(levels)
    split = [_split(x, letters, sizes) for x, letters in zip(leaves, names, strict=True)]
    leaves, names = [x for x, _ in split], [letters for _, letters in split]
    in_axes = {}
    for level in sizes:
        in_axes[level] = [letters.index(level) if level in letters else None for letters in names]
        names = [tuple(a for a in letters if a != level) for letters in names]

    def lifted(leaves):
        return engine(jax.tree.unflatten(structure, leaves), T, S, blocks)

    # Heads innermost. Where only the empty rows are asked for, there may be nothing to map.
    for level in reversed(sizes):
        if any(a is not None for a in in_axes[level]):
            lifted = jax.vmap(lifted, (in_axes[level],), head_axis if level in "KG" else 0)
    out = lifted(leaves)
    if engine is _empty or "G" not in sizes:
        return out
    n = len(sizes) - 2 + head_axis
    return jax.tree.map(lambda x: x.reshape(*x.shape[:n], sizes["K"] * sizes["G"], *x.shape[n + 2 :]), out)


def _split(x, letters, levels):
    """`x` with its heads split into K and G, and without the mapped axes on which it is 1 but the call is not."""
    shape, out = [], []
    for n, letter in zip(x.shape, letters, strict=True):
        if letter == "N":
            split = {"K": levels["K"], "G": levels["G"]} if n != 1 or levels["K"] * levels["G"] == 1 else {}
        elif letter in levels and n == 1 and levels[letter] != 1:
            split = {}
        else:
            split = {letter: n}
        shape += split.values()
        out += split
    return x.reshape(shape), tuple(out)
