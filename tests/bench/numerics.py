"""Errors of jattn and its peers, side by side: `make numerics`, or `make numerics ARGS="rows lengths"` for some tables.

Every contender gets the same numbers, which its dtype holds exactly, and is compared with 80-bit arithmetic on them. A
cell is the largest error of its case, in units of the last place: of the largest number of a row, for rows; of the sum
of the sizes of what is summed, for attention, where terms cancel. Peers run as they do in `peers.py`.

What the tables show, and why. Rounding a logit of size L changes a weight by L units: from 1e3 on this is the error of
every contender. jax.nn takes float64's softmax in float32. Of bfloat16, weights and what flows back are rounded to meet
the inputs in products, here as in torch and jax.nn; tokamax multiplies in float32, and is up to twice as exact. Where
one key has all the weight, what flows back to the logits is a difference of equal numbers: half a unit here and in
torch, which take it from the output, and 0 in jax.nn, which takes it from the weights.
"""

import functools
import platform
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peers

import jattn
from jattn import pictures

PLOT = Path(__file__).with_name("numerics.svg")
SCALES = 1e-30, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e30
DTYPES = "float64", "float32", "bfloat16", "float16"
# float16 has no numbers beyond these.
FEW = 1e-3, 1.0, 1e3


def exact_rows(x):
    x = np.asarray(x).astype(np.longdouble)
    peak = x.max(-1, keepdims=True)
    exps = np.exp(x - peak)
    total = exps.sum(-1, keepdims=True)
    return {"softmax": exps / total, "logsumexp": (peak + np.log(total))}


def exact_entropy(weights):
    w = np.asarray(weights).astype(np.longdouble)
    return -(w * np.log(np.where(w > 0, w, 1))).sum(-1, keepdims=True)


def exact_attention(query, key, value):
    """Of (T, N, H), (S, N, H), (S, N, H): the output and the gradients of its sum, and the sizes of their terms."""
    q, k, v = (np.asarray(x).astype(np.longdouble).swapaxes(0, 1) for x in (query, key, value))
    scale = 1 / np.sqrt(np.longdouble(q.shape[-1]))
    p = exact_rows(scale * q @ k.mT)["softmax"]
    reach, sizes = v.sum(-1)[:, None], np.abs(v).sum(-1)[:, None]
    d_logits = scale * p * (reach - (p * reach).sum(-1, keepdims=True))
    terms = scale * p * (sizes + (p * sizes).sum(-1, keepdims=True))
    ones = np.ones((*p.shape[:2], v.shape[-1]))
    return {
        "out": (p @ v, p @ np.abs(v)),
        "d query": (d_logits @ k, terms @ np.abs(k)),
        "d key": (d_logits.mT @ q, terms.mT @ np.abs(q)),
        "d value": 2 * (p.mT @ ones,),
    }


def units(got, exact, dtype, sizes=None):
    """The largest error, in units of the last place of `sizes`, or of the largest number of the row."""
    info = jnp.finfo(dtype)
    size = np.abs(exact).max(-1, keepdims=True) if sizes is None else sizes
    # The smallest number that is not rounded to fewer digits.
    size = np.maximum(size, np.longdouble(info.tiny))
    error = np.abs(np.asarray(got).astype(np.longdouble) - exact)
    return float((error / (np.longdouble(info.eps) * np.exp2(np.floor(np.log2(size))))).max(initial=0))


# Each gives a dictionary of results from arrays of one dtype.


def rows_of_jattn(x):
    return {"softmax": jattn.softmax(x), "logsumexp": jattn.logsumexp(x)[:, None]}


def rows_of_jax_nn(x):
    return {"softmax": jax.nn.softmax(x), "logsumexp": jax.nn.logsumexp(x, keepdims=True, axis=-1)}


def attention_of_jattn(method, *x):
    f = functools.partial(jattn.attention, method=method)
    return f(*x), jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))(*x)


def attention_of_jax_nn(*x):
    f = jax.nn.dot_product_attention
    return f(*x), jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))(*x)


def _named(out, gradients):
    by_head = [np.asarray(y[0], np.float64).swapaxes(0, 1) for y in (out, *gradients)]
    return dict(zip(("out", "d query", "d key", "d value"), by_head, strict=True))


HERE = {
    "jattn dense": functools.partial(attention_of_jattn, "dense"),
    "jattn blockwise": functools.partial(attention_of_jattn, "blockwise"),
    "jax.nn": attention_of_jax_nn,
}
WORKERS = {}


def elsewhere(name, x, dtype):
    """What a worker makes of arrays (1, T, N, H), by way of files."""
    worker, added = WORKERS[name]
    (_, T, N, H), S = x[0].shape, x[1].shape[1]
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "x.npz")
        np.savez(file, *(np.asarray(y, np.float32) for y in x))
        made = []
        for gradient in (False, True):
            r = peers.question(T, S=S, N=N, H=H, dtype=dtype, gradient=gradient) | added | {"file": file}
            worker.ask(r)
            with np.load(file + ".out.npz") as out:
                made.append([out[key] for key in out.files])
    return made[0][0], made[1]


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


def line(name, cells):
    print(f"| {name} | {' | '.join('–' if x is None else f'{x:.3g}' for x in cells)} |", flush=True)


def scales(dtype):
    return FEW if dtype == "float16" else SCALES


def rows(S=1000, many=64, dtypes=DTYPES):
    """softmax, logsumexp and entropy of rows of normal numbers, times a scale."""
    head(f"{many} rows of {S} numbers", ["jattn", "jax.nn"])
    for dtype in dtypes:
        for scale in scales(dtype):
            x = (np.random.default_rng(0).normal(size=(many, S)) * scale).astype(jnp.dtype(dtype))
            exact = exact_rows(x)
            ours, theirs = jax.jit(rows_of_jattn)(x), jax.jit(rows_of_jax_nn)(x)
            for name, want in exact.items():
                line(f"{dtype}, {name}, scale {scale:g}", [units(of[name], want, dtype) for of in (ours, theirs)])
            weights = ours["softmax"]
            found = jattn.entropy(weights)[:, None], jax.scipy.special.entr(weights).sum(-1, keepdims=True)
            want = exact_entropy(weights)
            line(f"{dtype}, entropy, scale {scale:g}", [units(y, want, dtype) for y in found])


def compared(name, x, dtype):
    """The errors of all contenders: {result: {contender: units}}."""
    exact = exact_attention(*(y[0] for y in x))
    found = {}
    for contender, f in HERE.items():
        try:
            found[contender] = _named(*jax.jit(f)(*x))
        except ValueError as why:
            # jax.nn on a CPU has no float16.
            print(f"no {contender} for {name}: {why}", file=sys.stderr)
    for contender in WORKERS if dtype != "float64" else ():
        try:
            found[contender] = _named(*elsewhere(contender, x, dtype))
        except peers.Missing as why:
            print(f"no {contender} for {name}: {why}", file=sys.stderr)
    errors = {
        what: {who: units(of[what], want, dtype, sizes) for who, of in found.items()}
        for what, (want, sizes) in exact.items()
    }
    for what, of in errors.items():
        line(f"{name}, {what}", [of.get(who) for who in (*HERE, *WORKERS)])
    return errors


def arrays(T, S, scale, dtype, N=2, H=64):
    """query, key, value, (1, T, N, H): their logits are of the size of `scale`."""
    rng = np.random.default_rng(1)
    each = np.sqrt(scale)
    sizes = (1, T, N, H), (1, S, N, H), (1, S, N, H)
    factors = each, each, 1.0
    return [jnp.asarray((f * rng.normal(size=n)).astype(jnp.dtype(dtype))) for f, n in zip(factors, sizes, strict=True)]


def attention(T=16, S=512, dtypes=DTYPES):
    """Output and gradients, as logits grow: beyond 1e3 a rounding of a logit is no small change of a weight."""
    head(f"{T} queries, {S} keys, H = 64; scale: the size of the logits", [*HERE, *WORKERS])
    lines = {}
    for dtype in dtypes:
        for scale in scales(dtype):
            errors = compared(f"{dtype}, scale {scale:g}", arrays(T, S, scale, dtype), dtype)
            if dtype == "float32":
                lines[scale] = errors
    return lines


def lengths(keys=(16, 128, 1024, 10_000, 100_000), T=4, dtypes=("float32", "bfloat16", "float16")):
    """Output and gradients, as there are more keys to sum over."""
    head(f"{T} queries, S keys, H = 64", [*HERE, *WORKERS])
    lines = {}
    for dtype in dtypes:
        for S in keys:
            errors = compared(f"{dtype}, S = {S}", arrays(T, S, 1.0, dtype), dtype)
            if dtype == "float32":
                lines[S] = errors
    return lines


_DRAWN = "jattn dense", "jax.nn", "torch", "tokamax xla", "tokamax xla_chunked", "jattn blockwise"
LOOKS = dict(zip(_DRAWN, pictures.LOOKS, strict=True))


def plot(panels, path):
    """Draws {title: {x: errors}}: the output's error solid, the largest of the gradients' dashed."""
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]: an extra
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]: an extra
    except ImportError:
        return print("\nno plot: matplotlib is not installed; it comes with the extra `notebooks`")
    with matplotlib.rc_context(pictures.STYLE):
        figure = Figure(figsize=(9, 4), layout="constrained")
        for axes, (title, cases) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
            for who in dict.fromkeys(who for errors in cases.values() for who in errors["out"]):
                colour, marker = LOOKS[who]
                style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2}
                y = [errors["out"].get(who) for errors in cases.values()]
                worst = [max(of.get(who, 0) for what, of in e.items() if what != "out") for e in cases.values()]
                axes.plot([*cases], y, "-", label=who, **style)
                axes.plot([*cases], worst, "--", **style)
            axes.set(xscale="log", title=title, ylabel="units of the last place")
            axes.grid(color=pictures.GREY, alpha=0.25, linewidth=0.5)
            axes.legend(frameon=False, title="output; dashed: gradients")
        figure.savefig(path, transparent=True, metadata={"Date": None})
    print(f"\nplot: {path}")


TABLES = {f.__name__: f for f in (rows, attention, lengths)}
TITLES = {"attention": "float32: size of the logits", "lengths": "float32: number of keys"}


def main(*names, path=PLOT):
    jax.config.update("jax_enable_x64", True)
    versions = f"Python {platform.python_version()}", f"jax {jax.__version__}", *started()
    print(f"{', '.join(versions)}; {jax.default_backend()}, {platform.machine()}.", flush=True)
    lines = {name: TABLES[name]() for name in names or TABLES}
    panels = {TITLES[name]: of for name, of in lines.items() if of}
    if panels:
        plot(panels, path)
    close()


if __name__ == "__main__":
    main(*sys.argv[1:])
