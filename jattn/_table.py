"""Numbers in rows and columns, to be read: as text, and as HTML in a notebook."""

import html
import math
from typing import Any, NamedTuple

import numpy as np

NOT_FINITE = "! marks what is not finite."


class Table(NamedTuple):
    """A title, named columns, rows of texts, sums below a line, and sentences below them all.

    The first column is aligned to the left, the others to the right.
    """

    title: str
    columns: list
    rows: list
    sums: list
    notes: list

    def __str__(self):
        lines = [[_on_one_line(cell) for cell in row] for row in (self.columns, *self.rows, *self.sums)]
        first, *rest = (max(map(len, column)) for column in zip(*lines, strict=True))
        text = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], rest)]).rstrip() for row in lines]
        rule, end = "-" * (first + sum(n + 2 for n in rest)), 1 + len(self.rows)
        sums = [rule, *text[end:]] if self.sums else []
        return "\n".join([self.title, text[0], rule, *text[1:end], *sums, *self.notes])

    def __repr__(self):
        return str(self)

    def _repr_html_(self):
        head, rows, sums = self.parts()
        style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
        title, notes = html.escape(self.title), "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return (
            f'<table style="{style}"><caption style="text-align:left">{title}</caption><thead>{head}</thead>'
            f'<tbody>{rows}</tbody><tfoot style="border-top:1px solid">{sums}</tfoot></table>{notes}'
        )

    def parts(self):
        """Head, body and foot as rows of HTML, texts escaped."""
        return self._line(self.columns, "col"), *("".join(map(self._line, rows)) for rows in (self.rows, self.sums))

    @staticmethod
    def _line(row, scope="row"):
        tag = "th" if scope == "col" else "td"
        cells = "".join(
            f'<{tag} style="text-align:right;white-space:nowrap">{html.escape(cell)}</{tag}>' for cell in row[1:]
        )
        return f'<tr><th scope="{scope}" style="text-align:left">{html.escape(row[0])}</th>{cells}</tr>'


def _on_one_line(text):
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number(x, expected=False):
    """A number as text, with a "!" where it is not finite, unless that is `expected`."""
    if not math.isfinite(x):
        return ("NaN" if math.isnan(x) else str(float(x))) + "!" * (not expected)
    return f"{x + 0.0:.4f}" if x == 0 or 1e-3 <= abs(x) < 1e6 else f"{x:.2e}"


# What is shown at most: queries, keys of one query, weights of many queries, features of a value.
_QUERIES, _KEYS, _WEIGHTS, _FEATURES = 12, 16, 8, 3


def of_query(trace, query, tokens):
    """The steps of one query of a Trace: a line for each key, named by `tokens` if there are any, and sums below."""
    row = _row(trace, query)
    S, D = row["value"].shape
    # What has made a row NaN comes first.
    sound = np.isfinite(row["masked"]) & np.isfinite(row["value"]).all(1)
    keys = _heaviest(np.where(row["visible"] & ~sound, np.inf, np.nan_to_num(row["weights"])), _KEYS)

    steps = {"raw score": row["raw"]}
    # Steps that this query did not take are left out.
    if not np.array_equal(row["raw"], row["capped"], equal_nan=True):
        steps["softcap"] = row["capped"]
    if not np.array_equal(row["capped"], row["biased"], equal_nan=True):
        steps["+ bias"] = row["biased"]
    steps |= {"after mask": row["masked"], "minus max": row["shifted"], "exp": row["exp"], "weight": row["weights"]}

    def line(j):
        # A hidden key is -inf by intention.
        expected = [not row["visible"][j] and x[j] == -np.inf for x in steps.values()]
        numbers = [number(x[j], by_intention) for x, by_intention in zip(steps.values(), expected, strict=True)]
        return [_named(j, tokens), *numbers, _some(row["value"][j]), _some(row["weighted"][j])]

    blank = [""] * (len(steps) - 2)
    sums = [["sum", *blank, number(row["total"]), number(row["weights"].sum()), "", _some(row["out"])]]
    if "sink" in row:
        shifted = row["sink"] - row["peak"]
        exp = np.exp(shifted)
        weight = exp / row["total"] if exp else exp
        told = [number(x, x == -np.inf) for x in (row["sink"], shifted, exp, weight)]
        sums.insert(0, ["sink", *blank[2:], *told, "", ""])

    others = number(np.delete(row["weights"], keys).sum())
    notes = [f"{S - len(keys)} of {S} keys are left out. They hold {others} of the weight."] * (len(keys) < S)
    seen = f"{row['visible'].sum()} of {S} keys visible"
    if row["visible"].any():
        nats = f"lse {number(row['lse'])} nats, entropy {number(row['entropy'])} nats"
        notes.append(f"{nats}: that of {number(row['effective'])} equal weights. {seen}.")
    else:
        notes.append(f"{seen}: {_POLICY.format(trace.empty)}, lse {number(row['lse'], True)}.")
    cut = f" ({_FEATURES} of {D})" * (D > _FEATURES)
    columns = ["key", *steps, f"value{cut}", f"weight·value{cut}"]
    return _marked(Table(f"query {query} over {S} keys", columns, [*map(line, keys)], sums, notes))


def of_queries(trace, tokens=None, key_tokens=None):
    """A line for each query of a Trace, queries and keys named by texts, T and S of them, if there are any."""
    T, S = trace.visible.shape
    rows = [_row(trace, i) for i in range(min(T, _QUERIES))]
    keys = _heaviest(sum((row["weights"] for row in rows), np.zeros(S)), _WEIGHTS)
    D = trace.value.shape[1]
    columns = ["query", "peak", "sum of exp", "entropy", *(f"weight {_named(j, key_tokens)}" for j in keys)]
    columns += ["other weights"] * (len(keys) < S) + [f"out{f' ({_FEATURES} of {D})' * (D > _FEATURES)}"]
    lines = []
    for i, row in enumerate(rows):
        numbers = [row["peak"], row["total"], row["entropy"], *row["weights"][keys]]
        numbers += [np.delete(row["weights"], keys).sum()] * (len(keys) < S)
        name = _named(i, tokens) + " (empty)" * (not row["visible"].any())
        lines.append([name, *map(number, numbers), _some(row["out"])])
    others = number(np.asarray(trace.weights)[len(rows) :].sum())
    notes = [f"{T - len(rows)} of {T} queries are left out. Their weights sum to {others}."] * (len(rows) < T)
    empty = T - int(np.asarray(trace.visible).any(1).sum())
    if empty:
        notes.append(f"{empty} of {T} queries see no key: {_POLICY.format(trace.empty)}.")
    return _marked(Table(f"{T} queries over {S} keys", columns, lines, [], notes))


_POLICY = "zeros, by empty={!r}"


def _row(trace, query) -> dict[str, Any]:
    """One query's arrays by name, NumPy, with all values."""
    row: dict[str, Any] = {
        name: np.asarray(x, np.float64)[query]
        for name, x in vars(trace).items()
        if name not in ("visible", "value", "sink", "empty")
    }
    row |= {"visible": np.asarray(trace.visible)[query], "value": np.asarray(trace.value, np.float64)}
    if trace.sink is not None:
        row["sink"] = np.float64(trace.sink)
    return row


def _heaviest(weights, n):
    """The indices of the n largest, in order."""
    return np.sort(np.argsort(-weights, stable=True)[:n])


def _named(i, tokens):
    return str(i) if tokens is None or tokens[i] == str(i) else f"{i} {tokens[i]}"


def _some(features):
    return " ".join(map(number, features[:_FEATURES]))


def _marked(table):
    cells = (cell for row in (*table.rows, *table.sums) for cell in row[1:])
    return table._replace(notes=[*table.notes, NOT_FINITE]) if any("!" in cell for cell in cells) else table
