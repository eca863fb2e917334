"""trace: every step of one head's attention, as arrays, and as tables to read."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _attention, _checks, _dense, _table, _tile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Trace:
    """Every step of `attend`, for T queries and S keys, logits in nats; a pytree. Made by `trace`.

    Attributes:
        visible: bool (T, S): which keys each query sees.
        raw: (T, S): scale * query·key. This and the next two are shown of hidden pairs too, and enter nothing else.
        capped: (T, S): raw after the softcap.
        biased: (T, S): capped + bias.
        masked: (T, S): the logits that softmax sees, -inf where hidden.
        peak: (T,): what is subtracted, the row's largest logit or the sink; 0 for an empty row.
        shifted: (T, S): masked - peak.
        exp: (T, S): e^shifted, 0 where hidden.
        total: (T,): the sum of exp over the keys, and that of the sink.
        weights: (T, S): exp / total.
        value: (S, D): as given.
        weighted: (T, S, D): weight·value, 0 where hidden.
        out: (T, D): the sum of weighted over the keys, as `attend` returns it.
        lse: (T,): log of the sum of e^logit, sink included; -inf for an empty row.
        entropy: (T,): of the weights, sink included, in nats; 0 for an empty row.
        effective: (T,): e^entropy: so many equal weights have this entropy.
        sink: None, or the logit, (), that takes weight and gives nothing.
        empty: what a query gets that sees no key. Static.
    """

    visible: Any
    raw: Any
    capped: Any
    biased: Any
    masked: Any
    peak: Any
    shifted: Any
    exp: Any
    total: Any
    weights: Any
    value: Any
    weighted: Any
    out: Any
    lse: Any
    entropy: Any
    effective: Any
    sink: Any
    empty: Any = dataclasses.field(default="zero", metadata={"static": True})

    def rows(self, query=None):
        """Plain Python numbers: what happened to each key.

        Args:
            query: which query, from 0; all of them if None.

        Returns:
            A list of dicts, one per key, of one query or of one after the other: "query", "key", "visible", "raw",
            "capped", "biased", "masked", "shifted", "exp", "weight", and the lists "value" and "weighted".

        Raises:
            ValueError: there is no such query; or the Trace is of many heads, or has no values yet.

        Example:
            >>> trace(jnp.eye(2), jnp.eye(2), jnp.eye(2), masks.causal()).rows(0)[1]["masked"]
            -inf
        """
        self._has_one_head("Trace.rows")
        T, S = self.visible.shape
        queries = range(T) if query is None else [self._query("Trace.rows", query)]
        shown = {name: getattr(self, name) for name in ("visible", "raw", "capped", "biased", "masked", "shifted")}
        shown |= {"exp": self.exp, "weight": self.weights, "weighted": self.weighted}
        shown = {name: np.asarray(x).tolist() for name, x in shown.items()}
        value = np.asarray(self.value).tolist()
        return [
            {"query": i, "key": j, "value": value[j]} | {name: x[i][j] for name, x in shown.items()}
            for i in queries
            for j in range(S)
        ]

    def table(self, query=0, tokens=None):
        """One query's attention, step by step: a line for each key, sums below. Text; HTML in a notebook.

        Of many keys it shows the 16 that weigh most, and says what it leaves out and what that weighs. A "!" marks
        what is not finite.

        Args:
            query: which query, from 0.
            tokens: S texts, the names of the keys.

        Returns:
            A table: `print` it, or let a notebook show it.

        Raises:
            ValueError: there is no such query, or the tokens are not S; or the Trace is of many heads, or has no
                values yet.
            TypeError: the tokens are no texts.

        Example:
            >>> print(trace(jnp.eye(2), jnp.eye(2), jnp.eye(2), masks.causal()).table(0, ["to", "be"]))
            query 0 over 2 keys
            key   raw score  after mask  minus max     exp  weight          value   weight·value
            ------------------------------------------------------------------------------------
            0 to     0.7071      0.7071     0.0000  1.0000  1.0000  1.0000 0.0000  1.0000 0.0000
            1 be     0.0000        -inf       -inf  0.0000  0.0000  0.0000 1.0000  0.0000 0.0000
            ------------------------------------------------------------------------------------
            sum                                     1.0000  1.0000                 1.0000 0.0000
            lse 0.7071 nats, entropy 0.0000 nats: that of 1.0000 equal weights. 1 of 2 keys visible.
        """
        who = "Trace.table"
        self._has_one_head(who)
        if tokens is not None:
            tokens = _checks.tokens(who, "tokens", tokens, "S", self.visible.shape[1])
        return _table.of_query(self, self._query(who, query), tokens)

    def __str__(self):
        problem = self._problem()
        if problem:
            return f"{self!r}: {problem}"
        if len(self.visible) == 1:
            return str(self.table())
        return f"{_table.of_queries(self)}\nOne query, step by step: trace.table(query)."

    def _repr_html_(self):
        return None if self._problem() else _table.of_queries(self)._repr_html_()

    def __repr__(self):
        shapes = {name: getattr(getattr(self, name), "shape", ()) for name in ("weights", "out")}
        return f"Trace({', '.join(f'{name} {_checks.tupled(shape)}' for name, shape in shapes.items())})"

    def _problem(self):
        """Why there are no numbers of one head to show, or None."""
        # Transforms fill pytrees with placeholders, and print them in their errors.
        if not all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(self)) or not _checks.known(self):
            return "no values yet. Return it from the transformed function, then look."
        if self.visible.ndim > 2:
            one = f"x[{', '.join('0' * (self.visible.ndim - 2))}]"
            return f"many heads. Pick one: jax.tree.map(lambda x: {one}, trace)."
        return None

    def _has_one_head(self, who):
        problem = self._problem()
        if problem:
            raise ValueError(f"{who}: the Trace must be of one head, (T, S), got {self!r}: {problem}")

    def _query(self, who, query):
        T = len(self.visible)
        _checks.size(who, "query", query, 0)
        if query >= T:
            raise ValueError(f"{who}: query must be within 0 ... T - 1 = {T - 1}, got {query}.")
        return int(query)


def trace(
    query,
    key,
    value,
    mask=None,
    bias=None,
    *,
    scale=None,
    softcap=None,
    sink=None,
    query_positions=None,
    key_positions=None,
    empty="zero",
):
    """Every step of `attend`, to look at: one head.

    `print` shows a line for each query, `trace(...).table(i)` each step of one query, `trace(...).rows()` plain
    numbers. Under `jit` and `vmap` it is a pytree like any other; return it, then look. It holds T x S x D numbers.

    Args:
        query: (T, H), floating.
        key: (S, H), the dtype of `query`.
        value: (S, D), the dtype of `query`.
        mask: as in `attend`.
        bias: as in `attend`.
        scale: as in `attend`.
        softcap: as in `attend`.
        sink: as in `attend`.
        query_positions: as in `attend`.
        key_positions: as in `attend`.
        empty: as in `attend`.

    Returns:
        A `Trace`: raw scores, the same after softcap, bias and mask, minus their peak, exp, weights, weighted values
        and their sum, lse, entropy. out, lse and entropy are to the bit those of `attend(..., method="dense",
        return_stats=True)`. What a query may not attend to shows in raw, capped and biased alone.

    Raises:
        ValueError: as in `attend`.
        TypeError: as in `attend`.

    Example:
        >>> print(trace(jnp.eye(2), jnp.eye(2), jnp.eye(2), masks.causal()))
        2 queries over 2 keys
        query    peak  sum of exp  entropy  weight 0  weight 1            out
        ---------------------------------------------------------------------
        0      0.7071      1.0000   0.0000    1.0000    0.0000  1.0000 0.0000
        1      0.7071      1.4931   0.6343    0.3302    0.6698  0.3302 0.6698
        One query, step by step: trace.table(query).
    """
    call = _attention.Call("trace", heads=False)
    call.arrays(query=query, key=key, value=value)
    call.sources(mask, bias)
    call.numbers(scale, softcap, sink)
    call.positions(query_positions=query_positions, key_positions=key_positions)
    return dataclasses.replace(call.run(_traced, empty, led=False), empty=empty)


def _traced(args, T, S, blocks):
    head, pairs = _attention._head(args, T, S)
    x, visible, logits, rows = _dense.found(head, pairs, True)
    p, shifted = _tile.weights(x, logits, visible, rows)
    # A row without a largest logit is NaN in all that its keys show.
    sound = rows.sound[:, None]
    weights, total = _dense.shares(x, rows, p)
    results: Any = _tile.results(x, rows, _tile.sums(x, pairs, visible, rows, True), args["query"].dtype)
    out, stats = results
    # Replaced before the product, whose derivative would meet it.
    pair = None if visible is None else visible[:, :, None]
    value = _tile.seen(pair, x.value[None], 0)
    return Trace(
        visible=jnp.full((T, S), True) if visible is None else visible,
        # Of hidden pairs too: from here on nothing reads these.
        raw=_tile.logits(x._replace(softcap=None, bias=None), None),
        capped=_tile.logits(x._replace(bias=None), None),
        biased=_tile.logits(x, None),
        masked=_tile.seen(visible, logits, -jnp.inf),
        peak=rows.peak * rows.sound,
        shifted=_tile.seen(visible, shifted * sound, -jnp.inf),
        exp=_tile.seen(visible, p * sound, 0),
        total=total,
        weights=weights,
        value=args["value"],
        weighted=_tile.seen(pair, weights[:, :, None] * value, 0),
        out=out,
        lse=stats.lse,
        entropy=stats.entropy,
        effective=jnp.exp(stats.entropy),
        sink=x.sink,
    )
