"""Times of jattn and its peers, side by side: `make bench`, or `make bench ARGS="long small"` for some tables.

Every row is one question. Its contenders run in turns, so that what slows the machine slows all of them; the medians
are printed, and how many times faster jattn is than jax.nn. Temporaries are counted by the compiler.
"""

import os
import platform
import statistics
import sys
import time

import jax
import jax.numpy as jnp

import jattn
from jattn import _visible, masks

N, H = 8, 64


def arrays(B, T, dtype="float32", S=None, K=N):
    shapes = (B, T, N, H), (B, S or T, K, H), (B, S or T, K, H)
    return tuple(jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))


def gradient(f):
    return jax.grad(lambda *x: f(*x).astype(jnp.float32).sum(), (0, 1, 2))


def compiled(f, x):
    return jax.jit(f).lower(*x).compile()


def medians(contenders, x, seconds=3.0, least=5):
    """Milliseconds of each of the compiled `contenders`, run in turns."""
    times = {name: [] for name in contenders}
    for f in contenders.values():
        jax.block_until_ready(f(*x))
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or min(map(len, times.values())) < least:
        for name, f in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(f(*x))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(of) for name, of in times.items()}


def megabytes(f):
    return f.memory_analysis().temp_size_in_bytes / 1e6


def row(name, ours, theirs, x):
    """One line: jattn's time and temporaries, those of jax.nn, and the ratio of the times."""
    both = {"jattn": compiled(ours, x), "jax.nn": compiled(theirs, x)}
    ms = medians(both, x)
    print(
        f"| {name} | {ms['jattn']:.2f} | {ms['jax.nn']:.2f} | **{ms['jax.nn'] / ms['jattn']:.2f}** "
        f"| {megabytes(both['jattn']):.0f} | {megabytes(both['jax.nn']):.0f} |",
        flush=True,
    )


def table(title):
    print(f"\n{title}\n\n| | jattn, ms | jax.nn, ms | times faster | jattn, MB | jax.nn, MB |")
    print("|---|---|---|---|---|---|")


def peers(mask=None, **options):
    theirs = {"is_causal": True} if mask is not None else {}
    return lambda *x: jattn.attention(*x, mask, **options), lambda *x: jax.nn.dot_product_attention(*x, **theirs)


def pair(name, x, mask=None):
    ours, theirs = peers(mask)
    row(name, ours, theirs, x)
    row(f"{name}, gradient", gradient(ours), gradient(theirs), x)


def long():
    table("T = S = 4096, 1 batch, 8 heads, H = 64")
    for dtype in ("float32", "bfloat16"):
        x = arrays(1, 4096, dtype)
        pair(dtype, x)
        pair(f"{dtype}, causal", x, masks.causal())


def small():
    table("Short sequences, 8 heads, H = 64, float32")
    for B in (1, 8, 64):
        for T in (16, 64, 128, 256, 512, 1024):
            # More would need gigabytes for jax.nn's logits.
            if B * T <= 16384:
                pair(f"B = {B}, T = {T}", arrays(B, T))


def sparse():
    """What a mask costs, as a share of all pairs: it should be the share of the tiles that hold a visible pair."""
    T = 4096
    ids = jnp.arange(T, dtype=jnp.int32)[None] // (T // 8)
    x = (*arrays(1, T), ids, jnp.array([T // 4], jnp.int32))
    rules = {
        "all pairs": lambda ids, length: None,
        "causal, 1/2": lambda ids, length: masks.causal(),
        "window(255, 0), 1/16": lambda ids, length: masks.window(255, 0),
        "8 segments, traced, 1/8": lambda ids, length: masks.segments(ids),
        "a quarter of the keys, traced, 1/4": lambda ids, length: masks.lengths(key=length),
    }

    def f(rule):
        return lambda q, k, v, *traced: jattn.attention(q, k, v, rule(*traced), method="blockwise")

    ms = medians({name: compiled(f(rule), x) for name, rule in rules.items()}, x)
    print(f"\nMasks, T = S = {T}, 8 heads, H = 64, float32\n\n| | ms | share of all pairs' time |\n|---|---|---|")
    for name, t in ms.items():
        print(f"| {name} | {t:.1f} | {t / ms['all pairs']:.3f} |")


def decode():
    table("One query, B = 8, N = 8, K = 2, S = 8192, float32")
    x = arrays(8, 1, S=8192, K=2)
    ours, theirs = peers()
    row("a whole cache", ours, theirs, x)
    one_pass = jax.jit(lambda q, k, v: k.sum() + v.sum())
    print(f"\nOne pass over keys and values: {medians({'pass': one_pass}, x)['pass']:.2f} ms")


def isolation():
    """What it costs that what is not visible is not read: against products and peaks that do read it."""
    x = arrays(1, 2048)
    print("\nIsolation of bad keys, T = S = 2048, float32: time with it / time without\n")
    for name, mask in (("no mask", None), ("causal", masks.causal())):
        f = {method: peers(mask, method=method)[0] for method in ("dense", "blockwise")}
        kept = {method: compiled(of, x) for method, of in f.items()}
        with _unguarded():
            bare = {f"{method}, bare": compiled(lambda *x, of=of: of(*x), x) for method, of in f.items()}
        ms = medians(kept | bare, x, seconds=6)
        print(*(f"{name}, {method}: {ms[method] / ms[f'{method}, bare']:.3f}" for method in f), sep="\n")


class _unguarded:
    """Products that read whatever there is."""

    def __enter__(self):
        jax.clear_caches()
        self.was = _visible._product, _visible.shown

        def bare(spec, x, y, visible, operands):
            letters = _visible._LETTERS[spec]
            precision = _visible.precision(x.dtype)
            out = jnp.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", x, y, precision=precision)
            return jnp.where(visible, out, 0) if visible is not None and spec == _visible._SCORES else out

        _visible._product, _visible.shown = bare, lambda x: x

    def __exit__(self, *error):
        _visible._product, _visible.shown = self.was
        jax.clear_caches()


TABLES = {f.__name__: f for f in (long, small, sparse, decode, isolation)}

if __name__ == "__main__":
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, {jax.default_backend()}, "
        f"{os.cpu_count()} cores, {platform.machine()}. Medians of runs in turns."
    )
    for name in sys.argv[1:] or TABLES:
        TABLES[name]()
