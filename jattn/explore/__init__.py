"""explore: attention as a page to play with. One HTML file, which needs nothing else and asks no one for anything.

Python puts the arrays and a first state into the page, as plain tables from `trace`; `page.js` computes the rest there.
"""

import base64
import html
import json
import pathlib
import re
from importlib import resources

import jax
import jax.numpy as jnp
import numpy as np

from jattn import _attention, _checks, _table, _tile, _visible
from jattn._trace import trace

# A page shows so many queries and keys at most, and holds so many numbers.
_TOKENS, _NUMBERS = 128, 300_000


class Explorer:
    """A page to explore one call of attention. A notebook shows it; `save` writes it to a file. Made by `explore`."""

    def __init__(self, page, plain, summary):
        self._page = page
        self._plain = plain
        self._summary = summary

    def save(self, path):
        """Writes the page to a file, for any browser.

        Args:
            path: where to, a text or a path.

        Returns:
            The path.

        Raises:
            OSError: nothing can be written there.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     explore(jnp.eye(2), jnp.eye(2), jnp.eye(2)).save(f"{folder}/page.html").name
            'page.html'
        """
        path = pathlib.Path(path)
        # A token may hold half a character.
        path.write_text(self._page, "utf-8", "backslashreplace")
        return path

    def __repr__(self):
        return f"Explorer({self._summary}): a notebook shows it; .save('page.html') writes it."

    def _repr_html_(self):
        # The frame keeps style and script to itself. Where frames are not shown, the tables are.
        frame = 'sandbox="allow-scripts" style="width:100%;height:900px;border:0" title="Attention explorer"'
        return (
            f'<iframe srcdoc="{html.escape(self._page)}" {frame}></iframe>'
            f"<details><summary>Its first state, as plain tables</summary>{self._plain}</details>"
        )


def explore(query, key, value, mask=None, *, tokens=None, key_tokens=None, scale=None, empty="zero"):
    """An interactive page: choose a query, move it, hide keys, change mask, scale and policy, and watch each step.

    Its first state is jattn's, of the last query of the first head. Axes: T queries, S keys, N query heads, K key/value
    heads, H features of a query or key, D of a value, L layers. The page needs no network, and without scripts it is
    plain tables. It holds 300,000 numbers at most: heads and layers beyond are left out, and it says so.

    Args:
        query: (T, H), (T, N, H) or (L, T, N, H), floating; T is at most 128.
        key: (S, H), (S, K, H) or (L, S, K, H), the dtype of `query`; S is at most 128.
        value: (S, D), (S, K, D) or (L, S, K, D), the dtype of `query`.
        mask: as in `attend` for one head, as in `attention` for more; layers are its batch axis.
        tokens: T texts, the names of the queries; and of the keys, if S is T.
        key_tokens: S texts, the names of the keys.
        scale: as in `attention`.
        empty: as in `attention`; the page can switch it.

    Returns:
        An `Explorer`, which a notebook shows, and `.save("page.html")` writes.

    Raises:
        ValueError: a shape disagrees with the axes above, or a list of tokens with the number of queries or keys; there
            is too much to show; the arrays are traced; or as in `attention`.
        TypeError: as in `attention`, or tokens that are no texts.

    Example:
        >>> x = jnp.eye(3)
        >>> explore(x, x, x, masks.causal(), tokens=["to", "be", "or"])
        Explorer(1 layer, 1 head, 3 queries over 3 keys): a notebook shows it; .save('page.html') writes it.
    """
    who = "explore"
    if not _checks.known(query, key, value, mask, scale):
        raise ValueError(f"{who}: the arrays must have values, got traced ones. Call it outside of jit and vmap.")
    arrays = _checks.one_floating_dtype(who, query=query, key=key, value=value)
    rank = arrays["query"].ndim
    if rank not in (2, 3, 4):
        got = _checks.tupled(arrays["query"].shape)
        raise ValueError(f"{who}: query must be (T, H), (T, N, H) or (L, T, N, H), got {got}.")
    call = _attention._Call(who, heads=rank > 2)
    call.arrays(**arrays)
    call.sources(mask, None)
    call.numbers(scale, None, None)
    n = call.sizes
    L, T, S, N, K, H, D = *(n["B"] if rank == 4 else (1,)), n["T"], n["S"], n["N"], n["K"], n["H"], n["D"]
    for axis, size in (("T", T), ("S", S)):
        if not 1 <= size <= _TOKENS:
            raise ValueError(f"{who}: {axis} must be 1 ... {_TOKENS}, got {size}. Pass the part to look at.")
    if 0 in (L, N, D):
        raise ValueError(f"{who}: L, N and D must be at least 1, got {L}, {N} and {D}.")
    numbers = [str(i) for i in range(max(T, S))]
    names = numbers[:T] if tokens is None else _checks.tokens(who, "tokens", tokens, "T", T)
    of_keys = names if S == T else numbers[:S]
    key_names = of_keys if key_tokens is None else _checks.tokens(who, "key_tokens", key_tokens, "S", S)

    visible = np.asarray(call.run(_mask, empty, head_axis=0)).reshape(L, N, T, S)
    # Float32 holds all of float16 and bfloat16. Without x64, JAX takes float64 for float32.
    dtype = str(_visible.wide(jax.dtypes.canonicalize_dtype(arrays["query"].dtype)))
    query, key, value = (np.asarray(x, dtype).reshape(L, x.shape[-rank + (rank > 3)], -1, x.shape[-1])
                         for x in arrays.values())  # fmt: skip
    scale = float(np.asarray(call.args.get("scale", 1 / np.sqrt(H)), dtype))

    layers, groups, notes = _kept(who, L, N, K, T * (N // K) * H + S * (H + D))
    heads = groups * (N // K)
    query, key, value = query[:layers, :, :heads], key[:layers, :, :groups], value[:layers, :, :groups]
    visible = visible[:layers, :heads]

    head = arrays if rank == 2 else {name: x[(0,) * (rank - 3)][:, 0] for name, x in arrays.items()}
    first = trace(**head, mask=visible[0, 0], scale=scale)
    patterns = {}
    indices = [[patterns.setdefault(np.packbits(mask).tobytes(), len(patterns)) for mask in row] for row in visible]
    data = {
        "L": layers, "N": heads, "K": groups, "T": T, "S": S, "H": H, "D": D,
        "dtype": dtype,
        "query": _coded(query), "key": _coded(key), "value": _coded(value),
        "basis": _coded(np.array([[_directions(key[i, :, k]) for k in range(groups)] for i in range(layers)])),
        "scale": _coded(np.float64(scale)),
        "masks": [_coded(np.frombuffer(pattern, np.uint8)) for pattern in patterns],
        "mask": indices,
        "tokens": names,
        "keyTokens": key_names,
        "empty": empty,
        "first": {"query": T - 1, "weights": _coded(np.asarray(first.weights, np.float64))},
        "notes": notes,
        "version": jax.__version__,
    }  # fmt: skip
    tables = [first.table(T - 1, key_names), _table.of_queries(first, names, key_names)]
    plain = "".join(table._repr_html_() for table in tables)
    sizes = f"{_counted(L, 'layer')}, {_counted(N, 'head')}, {_counted(T, 'query')} over {_counted(S, 'key')}"
    return Explorer(_page(data, plain), plain, sizes)


def _mask(args, T, S, block):
    x, pairs = _attention._head(args, T, S)
    visible = _tile.visible_pairs(_tile.cut(x, pairs), pairs)
    return jnp.full((T, S), True) if visible is None else visible


def _kept(who, L, N, K, numbers):
    """How many layers and key/value heads a page holds, given the numbers of one, and what it says of the others."""
    if numbers > _NUMBERS:
        must = f"a key/value head must have at most {_NUMBERS} numbers in query, key and value"
        raise ValueError(f"{who}: {must}, got {numbers}. Pass fewer queries, keys or features.")
    groups = min(K, _NUMBERS // numbers)
    layers = min(L, _NUMBERS // (numbers * groups))
    cut = {"Layers": (layers, L), "Heads": (groups * (N // K), N)}
    left_out = [f"{what} {kept} ... {n - 1} are left out." for what, (kept, n) in cut.items() if kept < n]
    return layers, groups, [*left_out, f"A page holds {_NUMBERS} numbers at most."] if left_out else []


def _directions(key):
    """(2, H): the two orthogonal directions in which the keys, (S, H), differ most; the axes themselves if H <= 2.

    What keys have in common is left out: it adds the same to each score, and so changes no weight.
    """
    H = key.shape[1]
    if H <= 2:
        return np.eye(2)[:, :H]
    key = np.where(np.isfinite(key).all(1)[:, None], key, 0).astype(np.float64)
    key = key / max(np.abs(key).max(), np.finfo(np.float64).tiny)
    directions = np.linalg.svd(key - key.mean(0))[2][:2]
    return directions * np.sign(directions[[0, 1], np.abs(directions).argmax(1)])[:, None]


def _coded(x):
    """Bytes of an array, little-endian, as base64: to the bit, NaN and infinities too."""
    return base64.b64encode(np.ascontiguousarray(x, x.dtype.newbyteorder("<")).tobytes()).decode()


def _counted(n, what):
    return f"{n} {what if n == 1 else {'query': 'queries'}.get(what, what + 's')}"


def _page(data, plain):
    files = resources.files(__name__)
    parts = {name: files.joinpath(f"page.{name}").read_text("utf-8") for name in ("css", "js", "html")}
    # No text can end the script that it stands in.
    parts |= {"data": json.dumps(data).replace("<", "\\u003c"), "plain": plain, "error": _checks.empty_row("attention")}
    # One pass: what is put in is not searched again.
    return re.sub(r"{{(\w+)}}", lambda found: parts[found[1]], parts["html"])
