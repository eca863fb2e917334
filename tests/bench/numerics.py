"""Errors of jattn and its peers, side by side: `make numerics`, or `make numerics ARGS="rows lengths"` for some tables.

Every contender gets the same numbers, which its dtype holds exactly, and is compared with mpmath on float64's, with
80-bit arithmetic on the others and where there are millions of products. A cell is the largest error of its case, in
units of the last place: of the largest number of a row, for rows; of the sum of the sizes of what is summed, for
attention, where terms cancel. Peers run as they do in `peers.py`. It takes ten minutes.

What the tables show, and why. Rounding a logit of size L changes a weight by L units: from 1e3 on this is the error of
every contender. jax.nn takes float64's softmax in float32. Of bfloat16, weights and what flows back are rounded to meet
the inputs in products, as in torch and jax.nn, because machines that have such products have them many times faster;
tokamax multiplies in float32 here, and is up to twice as exact. jattn's dense engine also rounds the quotient of what
flows back by a row's total; the blockwise one divides the weights instead, whose total it knows by then. A product of 4
queries and a tile of keys, inside a loop, adds its 64 terms in another order than one outside: XLA:CPU makes its logits
a third less exact (1.2 units against 0.9, root mean square), which the sums of few queries, d key and d value, show;
those of 128 queries do not. Where one key has all the weight, what flows back to the logits is a difference of equal
numbers: half a unit here and in torch, which take it from the output, and 0 in jax.nn, which takes it from the weights.
XLA makes 0 of numbers below the normal ones, and torch does not: of an entropy as small as that, the sum of many such,
a few units are lost.
"""

import functools
import platform
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import mpmath
import numpy as np
import peers

import jattn
from jattn import pictures

SCALES = 1e-30, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e30
DTYPES = "float64", "float32", "bfloat16", "float16"
# float16 has no numbers beyond these.
FEW = 1e-3, 1.0, 1e3
# mpmath takes a microsecond for a product.
mpmath.mp.prec, MANY = 120, 2**20

_mpf, _exp, _log = (np.frompyfunc(f, 1, 1) for f in (mpmath.mpf, mpmath.exp, mpmath.log))


def wider(*arrays, products=0):
    """The arrays with 80 bits, or as numbers of mpmath: float64, where there are not too many products."""
    arrays = [np.asarray(x) for x in arrays]
    by_hand = arrays[0].dtype == np.float64 and products <= MANY
    return [_mpf(x) if by_hand else x.astype(np.longdouble) for x in arrays]


def exp(x):
    return _exp(x) if x.dtype == object else np.exp(x)


def log(x):
    return _log(x) if x.dtype == object else np.log(x)


def entropies(weights):
    return -(weights * log(np.where(weights > 0, weights, 1))).sum(-1, keepdims=True)


def exact_rows(x, weights):
    """softmax and logsumexp of x, and the entropy of weights."""
    x, weights = wider(x, weights)
    peak = x.max(-1, keepdims=True)
    exps = exp(x - peak)
    total = exps.sum(-1, keepdims=True)
    return {"softmax": exps / total, "logsumexp": peak + log(total), "entropy": entropies(weights)}


def exact_attention(query, key, value):
    """Of (T, N, H), (S, N, H), (S, N, H): results, the gradients of the output's sum, and the sizes of their terms."""
    products = query.size * key.shape[0]
    q, k, v = (x.swapaxes(0, 1) for x in wider(query, key, value, products=products))
    scale = wider(np.full((), q.shape[-1], query.dtype), products=products)[0] ** -0.5
    logits = scale * (q @ k.mT)
    peak = logits.max(-1, keepdims=True)
    total = exp(logits - peak).sum(-1, keepdims=True)
    p = exp(logits - peak) / total
    reach = v.sum(-1)[:, None]
    d_logits = scale * p * (reach - (p * reach).sum(-1, keepdims=True))
    # Sizes need few digits.
    P, Q, K, V = (np.abs(x).astype(np.longdouble) for x in (p, q, k, v))
    sizes = V.sum(-1)[:, None]
    terms = np.longdouble(scale) * P * (sizes + (P * sizes).sum(-1, keepdims=True))
    d_value = np.broadcast_to(p.sum(1)[..., None], v.shape)
    entropy = log(total) - (p * (logits - peak)).sum(-1, keepdims=True)
    return {
        "out": (p @ v, P @ V),
        "d query": (d_logits @ k, terms @ K),
        "d key": (d_logits.mT @ q, terms.mT @ Q),
        "d value": (d_value, d_value),
        "lse": (peak + log(total), np.abs(peak) + log(total)),
        # The largest number of a total is 1.
        "entropy": (entropy, np.maximum(entropy, 1)),
    }


def units(got, exact, dtype, sizes=None):
    """The largest error, in units of the last place of `sizes`, or of the largest number of the row."""
    size = np.abs(exact).max(-1, keepdims=True) if sizes is None else sizes
    # No number is rounded to fewer digits; and what is 0 because it was too small for float32 or 64 counts as one unit.
    info, wide = jnp.finfo(dtype), jnp.finfo(np.promote_types(np.float32, jnp.dtype(dtype)))
    least = np.maximum(np.longdouble(info.tiny), np.longdouble(wide.tiny) / np.longdouble(info.eps))
    size = np.maximum(size.astype(np.longdouble), least)
    got = np.asarray(got, np.float64)
    error = np.abs((_mpf(got) if exact.dtype == object else got) - exact).astype(np.longdouble)
    return float((error / (np.longdouble(info.eps) * np.exp2(np.floor(np.log2(size))))).max(initial=0))


# Each gives a dictionary of results, from arrays of one dtype.


def rows_of_jattn(x, weights):
    found = jattn.softmax(x), jattn.logsumexp(x)[:, None], jattn.entropy(weights)[:, None]
    return dict(zip(ROWS, found, strict=True))


def rows_of_jax_nn(x, weights):
    entropy = jax.scipy.special.entr(weights).sum(-1, keepdims=True)
    return dict(zip(ROWS, (jax.nn.softmax(x), jax.nn.logsumexp(x, -1, keepdims=True), entropy), strict=True))


def attention_of_jattn(method, *x):
    f = functools.partial(jattn.attention, method=method)
    stats = jattn.attention(*x, method=method, return_stats=True)[1]
    return results(f, x) | {"lse": stats.lse[..., None], "entropy": stats.entropy[..., None]}


def attention_of_jax_nn(*x):
    lse = jax.nn.dot_product_attention(*x, return_residual=True)[1]
    return results(jax.nn.dot_product_attention, x) | {"lse": lse[..., None]}


def results(f, x):
    gradients = jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))(*x)
    return dict(zip(ATTENTION, (f(*x), *gradients), strict=True))


ROWS = "softmax", "logsumexp", "entropy"
ATTENTION = "out", "d query", "d key", "d value"
HERE = {
    "jattn dense": jax.jit(functools.partial(attention_of_jattn, "dense")),
    "jattn blockwise": jax.jit(functools.partial(attention_of_jattn, "blockwise")),
    "jax.nn": jax.jit(attention_of_jax_nn),
}
WORKERS = {}


def elsewhere(name, x, dtype, **of):
    """What a worker makes of arrays, by way of files."""
    worker, added = WORKERS[name]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "x.npz")
        # numpy has no bfloat16.
        np.savez(file, *(np.asarray(y, np.promote_types(np.float32, y.dtype)) for y in x))
        worker.ask(peers.question(1, dtype=dtype, **of) | added | {"file": file})
        with np.load(file + ".out.npz") as out:
            return [out[key] for key in out.files]


def rows_elsewhere(name, x, weights, dtype):
    return dict(zip(ROWS, elsewhere(name, (x, weights), dtype, rows=True), strict=True))


def attention_elsewhere(name, x, dtype):
    made = elsewhere(name, x, dtype), elsewhere(name, x, dtype, gradient=True)
    return dict(zip(ATTENTION, (*made[0], *made[1]), strict=True))


def started():
    """Adds the peers that are there to `WORKERS`; their versions, and a line for each that is not."""
    found, lines = peers.workers(name for name in peers.ELSEWHERE if name != "flex_attention")
    WORKERS.update(found)
    return lines


def close():
    for worker, _ in WORKERS.values():
        worker.close()


def head(title, names):
    print(f"\n{title}\n\n| | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}", flush=True)


def line(name, names, errors):
    cells = [f"{errors[who]:.3g}" if who in errors else "–" for who in names]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def asked(contenders, dtype):
    """What each of {contender: function} gives; one that cannot says why."""
    found = {}
    for who, f in contenders.items():
        try:
            found[who] = f()
        # jax.nn on a CPU has no float16.
        except (ValueError, peers.Missing) as why:
            said(f"no {who} of {dtype}: {why}")
    return found


@functools.cache
def said(line):
    """Says it once."""
    print(line, file=sys.stderr)


def scales(dtype):
    return FEW if dtype == "float16" else SCALES


def rows(S=1000, many=64, dtypes=DTYPES):
    """softmax, logsumexp and entropy of rows of normal numbers, times a scale."""
    here = {"jattn": jax.jit(rows_of_jattn), "jax.nn": jax.jit(rows_of_jax_nn)}
    names = [*here, *(name for name in WORKERS if name == "torch")]
    head(f"{many} rows of {S} numbers", names)
    for dtype in dtypes:
        for scale in scales(dtype):
            x = (np.random.default_rng(0).normal(size=(many, S)) * scale).astype(jnp.dtype(dtype))
            weights = np.asarray(jax.nn.softmax(x.astype(np.float64))).astype(x.dtype)
            contenders = {who: functools.partial(f, x, weights) for who, f in here.items()}
            for who in names[len(here) :]:
                contenders[who] = functools.partial(rows_elsewhere, who, x, weights, dtype)
            found = asked(contenders, dtype)
            for what, want in exact_rows(x, weights).items():
                errors = {who: units(of[what], want, dtype) for who, of in found.items()}
                line(f"{dtype}, {what}, scale {scale:g}", names, errors)


def compared(name, x, dtype):
    """The errors of all contenders: {result: {contender: units}}."""
    contenders = {who: functools.partial(f, *x) for who, f in HERE.items()}
    contenders |= {who: functools.partial(attention_elsewhere, who, x, dtype) for who in WORKERS}
    found = asked(contenders, dtype)
    errors = {}
    for what, (want, sizes) in exact_attention(*(y[0] for y in x)).items():
        by_head = {who: np.asarray(of[what][0]).swapaxes(0, 1) for who, of in found.items() if what in of}
        errors[what] = {who: units(got, want, dtype, sizes) for who, got in by_head.items()}
        line(f"{name}, {what}", (*HERE, *WORKERS), errors[what])
    return errors


def arrays(T, S, scale, dtype, N=2, H=64):
    """query, key, value, (1, T, N, H): their logits are of the size of `scale`."""
    rng = np.random.default_rng(1)
    each = np.sqrt(scale)
    sizes = (1, T, N, H), (1, S, N, H), (1, S, N, H)
    factors = each, each, 1.0
    return [jnp.asarray((f * rng.normal(size=n)).astype(jnp.dtype(dtype))) for f, n in zip(factors, sizes, strict=True)]


def attention(T=16, S=512, dtypes=DTYPES):
    """Results and gradients, as logits grow: beyond 1e3 a rounding of a logit is no small change of a weight."""
    head(f"{T} queries, {S} keys, H = 64; scale: the size of the logits", [*HERE, *WORKERS])
    return {
        dtype: {
            scale: compared(f"{dtype}, scale {scale:g}", arrays(T, S, scale, dtype), dtype) for scale in scales(dtype)
        }
        for dtype in dtypes
    }


def lengths(keys=(16, 128, 1024, 10_000, 100_000), T=4, dtypes=DTYPES):
    """Results and gradients, as there are more keys to sum over."""
    head(f"{T} queries, S keys, H = 64", [*HERE, *WORKERS])
    return {
        dtype: {S: compared(f"{dtype}, S = {S}", arrays(T, S, 1.0, dtype), dtype) for S in keys} for dtype in dtypes
    }


def summary(found):
    """The largest errors of the tables {table: {dtype: {scale or S: errors}}}, scales beyond 1 left out."""
    head("The largest of the errors above, logits of a size of 1 or less", [*HERE, *WORKERS])
    for dtype in DTYPES:
        cases = [e for scale, e in found.get("attention", {}).get(dtype, {}).items() if scale <= 1]
        cases += found.get("lengths", {}).get(dtype, {}).values()
        for what in dict.fromkeys(what for errors in cases for what in errors):
            whos = dict.fromkeys(who for errors in cases for who in errors[what])
            line(f"{dtype}, {what}", (*HERE, *WORKERS), {who: max(e[what].get(who, 0) for e in cases) for who in whos})


def plot(table, lines, path):
    """Draws {dtype: {scale or S: errors}}: the output's error solid, the largest of the gradients' dashed."""
    panels = {}
    for dtype, cases in lines.items():
        panel = panels[f"{dtype}: units of the last place"] = {}
        for x, errors in cases.items():
            for who, out in errors["out"].items():
                for dashed, y in ((False, out), (True, max(errors[what][who] for what in ATTENTION[1:]))):
                    # 0 has no place on this axis.
                    if y:
                        panel.setdefault((who, dashed), []).append((x, y))
    try:
        figure = pictures.curves(panels, names=DRAWN, dashed="gradients", axis=AXES[table])
    except ImportError as error:
        return print(f"\nno plot: {error}")
    figure.savefig(path)
    print(f"\nplot: {path}")


# A contender has the colour that it has in the plot of times.
DRAWN = "jattn dense", *peers.ALL, "jattn blockwise"
AXES = {"attention": "size of the logits", "lengths": "S"}
TABLES = {f.__name__: f for f in (rows, attention, lengths)}


def main(*names, folder=Path(__file__).parent):
    jax.config.update("jax_enable_x64", True)
    versions = f"Python {platform.python_version()}", f"jax {jax.__version__}", *started()
    print(f"{', '.join(versions)}; {jax.default_backend()}, {platform.machine()}.", flush=True)
    found = {name: TABLES[name]() for name in names or TABLES}
    found = {name: of for name, of in found.items() if of}
    if found:
        summary(found)
    for name, lines in found.items():
        plot(name, lines, folder / f"numerics_{name}.svg")
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
