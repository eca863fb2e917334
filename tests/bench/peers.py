"""Times of jattn and its peers, side by side: `make bench`, or `make bench ARGS="long small"` for some tables.

Every row is one question. Its contenders run in turns, so that what slows the machine slows all of them; the medians
are printed, and how many times faster jattn is than each peer. In its turn a contender runs twice, and the second run
is timed: the first finds caches and memory as another left them. A gradient is timed with the output, for a cotangent
that the compiler does not know: where it is that of a sum, a peer need not make the output at all. jattn and jax.nn run
in this process, torch and tokamax each in their own (`worker.py`), one call at a time. Temporaries are counted by the
compiler where there is one.
"""

import contextlib
import functools
import json
import operator
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import _attention, _plan, _tile, _visible, masks, pictures

ROOT = Path(__file__).parents[2]
PLOT = Path(__file__).with_name("peers.svg")
SECONDS, TURNS = 3.0, 3  # a row takes at least both
RUNS = 2  # of a turn, of which the last is timed
N, H = 8, 64


def question(T, **of):
    """All that a contender needs to know; `worker.py` gets it as JSON."""
    small = {"B": 1, "S": T, "N": N, "K": of.get("N", N), "H": H, "dtype": "float32", "causal": False}
    small |= {"rows": False, "runs": RUNS}
    return small | {"T": T, "gradient": False, "window": None, "lengths": None, "implementation": None} | of


class Missing(Exception):
    """A peer that is not there, or cannot do what is asked; it says why."""


class Here:
    """A function compiled in this process, with its arrays."""

    def __init__(self, f, x):
        self.f, self.x = jax.jit(f).lower(*x).compile(), x
        self.megabytes = self.f.memory_analysis().temp_size_in_bytes / 1e6
        jax.block_until_ready(self.f(*x))

    def ms(self):
        for _ in range(RUNS):
            start = time.perf_counter()
            jax.block_until_ready(self.f(*self.x))
            last = time.perf_counter() - start
        return 1e3 * last


class Worker:
    """A process that answers questions with times."""

    def __init__(self, *command):
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        try:
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nothing, encoding="utf-8")
        except OSError as error:
            raise Missing(str(error)) from error
        try:
            self.version = self._answer()["version"]
        except Missing:
            self.close()
            raise

    def close(self):
        self.process.kill()
        self.process.communicate()

    def ask(self, r):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(r) + "\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise Missing(answer["error"])
        return answer


class There:
    """A question to a worker."""

    def __init__(self, worker, r):
        self.worker, self.r = worker, r
        temporaries = worker.ask(r)["temp_bytes"]
        self.megabytes = None if temporaries is None else temporaries / 1e6

    def ms(self):
        return self.worker.ask(self.r)["ms"]


def arrays(r):
    """query, key, value, and where a part of the keys is used, how many."""
    shapes = (r["B"], r["T"], r["N"], r["H"]), *2 * [(r["B"], r["S"], r["K"], r["H"])]
    x = [jax.random.normal(jax.random.key(i), shape).astype(r["dtype"]) for i, shape in enumerate(shapes)]
    return (*x, *([] if r["lengths"] is None else [jnp.full(r["B"], r["lengths"], jnp.int32)]))


def of_jattn(r, **options):
    def f(q, k, v, *lengths):
        rules = [masks.causal()] if r["causal"] else []
        rules += [masks.window(r["window"], 0)] if r["window"] is not None else []
        rules += [masks.lengths(key=key) for key in lengths]
        return jattn.attention(q, k, v, functools.reduce(operator.and_, rules) if rules else None, **options)

    return f


def of_jax_nn(r):
    def f(q, k, v, lengths=None):
        return jax.nn.dot_product_attention(q, k, v, is_causal=r["causal"], key_value_seq_lengths=lengths)

    return f


def here(f, r):
    """With `gradient`, the output and its gradients for a given cotangent, as a step of training needs them."""
    x = arrays(r)
    if not r["gradient"]:
        return Here(f, x)

    def step(cotangent, *x):
        out, pull = jax.vjp(f, *x)
        return out, pull(cotangent)

    return Here(step, (jnp.ones_like(x[0]), *x))


# Which environment a peer lives in, what `worker.py` is told, and what is added to its questions.
ELSEWHERE = {
    "torch": (".venv-torch", "torch", {}),
    "flex_attention": (".venv-torch", "flex", {}),
    "tokamax xla": (".venv-tokamax", "tokamax", {"implementation": "xla"}),
    "tokamax xla_chunked": (".venv-tokamax", "tokamax", {"implementation": "xla_chunked"}),
}
CONTENDERS = {"jattn": lambda r: here(of_jattn(r), r), "jax.nn": lambda r: here(of_jax_nn(r), r)}
ALL = "jax.nn", "torch", "tokamax xla", "tokamax xla_chunked"
QUADRATIC = "jax.nn", "tokamax xla"


def workers(names):
    """Of these peers: {name: (its Worker, what is added to its questions)}; versions, and a line for each not there."""
    found, of_peer, lines = {}, {}, {}
    for name in names:
        folder, peer, added = ELSEWHERE[name]
        try:
            if peer not in of_peer:
                of_peer[peer] = Worker(ROOT / folder / "bin" / "python", Path(__file__).with_name("worker.py"), peer)
            found[name] = of_peer[peer], added
            lines[of_peer[peer].version] = None
        except Missing as why:
            lines[f"no {name} ({why})"] = None
    return found, list(lines)


def started():
    """Adds the peers that are there to `CONTENDERS`; their versions, and a line for each that is not."""
    found, lines = workers(ELSEWHERE)
    for name, (worker, added) in found.items():
        CONTENDERS[name] = lambda r, worker=worker, added=added: There(worker, r | added)
    return lines


def medians(contenders, least=None):
    """Milliseconds of each contender, run in turns."""
    times = {name: [] for name in contenders}
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop or min(map(len, times.values())) < (least or TURNS):
        for name, contender in contenders.items():
            times[name].append(contender.ms())
    return {name: statistics.median(of) for name, of in times.items()}


@contextlib.contextmanager
def table(title, *peers):
    """Prints a head, then a line per question that the function it gives is asked; what went wrong comes last."""
    peers = [name for name in peers if name in CONTENDERS]
    counted = ["jattn", *(name for name in peers if name != "torch")]
    head = ["jattn, ms"]
    for name in peers:
        head += [f"{name}, ms", "times faster"]
    head += [f"{name}, MB" for name in counted]
    print(f"\n{title}\n\n| | {' | '.join(head)} |\n|{'---|' * (1 + len(head))}", flush=True)
    missing = {}

    def row(name, r, able=peers, least=None):
        contenders = {}
        for peer in ("jattn", *able):
            try:
                contenders[peer] = CONTENDERS[peer](r)
            except Missing as why:
                missing[peer] = str(why)
        ms = medians(contenders, least)
        megabytes = {peer: of.megabytes for peer, of in contenders.items() if of.megabytes is not None}
        cells = [name, f"{ms['jattn']:.2f}"]
        for peer in peers:
            cells += [f"{ms[peer]:.2f}", f"**{ms[peer] / ms['jattn']:.2f}**"] if peer in ms else ["–", "–"]
        cells += [f"{megabytes[peer]:.0f}" if peer in megabytes else "–" for peer in counted]
        print(f"| {' | '.join(cells)} |", flush=True)
        return ms, megabytes

    yield row
    for peer, why in missing.items():
        print(f"\nno time of {peer}: {why}")


def both(row, name, r):
    row(name, r)
    row(f"{name}, gradient", r | {"gradient": True})


def long(T=4096, dtypes=("float32", "bfloat16")):
    with table(f"T = S = {T}, 1 batch, 8 heads, H = 64", *ALL) as row:
        for dtype in dtypes:
            both(row, dtype, question(T, dtype=dtype))
            both(row, f"{dtype}, causal", question(T, dtype=dtype, causal=True))


def small(batches=(1, 8, 64), lengths=(16, 64, 128, 256, 512, 1024)):
    title = "Short sequences, 8 heads, H = 64, float32"
    with table(title, "jax.nn", "torch") as row:
        for B in batches:
            for T in lengths:
                # More would need gigabytes for jax.nn's logits.
                if B * T <= 16384:
                    both(row, f"B = {B}, T = {T}", question(T, B=B))


def sparse(T=4096, longer=16384):
    """What a mask costs, as a share of all pairs: it should be the share of the tiles that hold a visible pair."""
    ids = jnp.arange(T, dtype=jnp.int32)[None] // (T // 8)
    x = (*arrays(question(T)), ids, jnp.array([T // 4], jnp.int32))
    rules = {
        "all pairs": lambda ids, length: None,
        "causal, 1/2": lambda ids, length: masks.causal(),
        "window(255, 0), 1/16": lambda ids, length: masks.window(255, 0),
        "8 segments, traced, 1/8": lambda ids, length: masks.segments(ids),
        "a quarter of the keys, traced, 1/4": lambda ids, length: masks.lengths(key=length),
    }

    def f(rule):
        return lambda q, k, v, *traced: jattn.attention(q, k, v, rule(*traced), method="blockwise")

    ms = medians({name: Here(f(rule), x) for name, rule in rules.items()})
    print(f"\nMasks, T = S = {T}, 8 heads, H = 64, float32\n\n| | ms | share of all pairs' time |\n|---|---|---|")
    for name, t in ms.items():
        print(f"| {name} | {t:.1f} | {t / ms['all pairs']:.3f} |", flush=True)

    r = question(longer)
    full, window = here(of_jattn(r, method="blockwise"), r), r | {"window": 255}
    contenders = {"all pairs": full, "window(255, 0)": here(of_jattn(window, method="blockwise"), window)}
    try:
        contenders["window(255, 0), flex_attention"] = CONTENDERS["flex_attention"](window)
        without = None
    except (KeyError, Missing) as why:
        without = f"\nno time of flex_attention: {why}"
    ms = medians(contenders)
    print(f"\nT = S = {longer}:", end="")
    for tiles in _attention._BLOCKWISE["cpu"][-1]:
        one = _tile.inputs(np.zeros((longer, 1)), np.zeros((longer, 1)), None, mask=masks.window(255, 0))
        visited = _plan.plan(one, tiles).kinds != _plan.EMPTY
        print(f" {100 * visited.mean():.1f} % of the tiles of {tiles}", end="")
    print(" hold a pair of window(255, 0)\n")
    print("| | ms | share of all pairs' time |\n|---|---|---|")
    for name, time_ in ms.items():
        print(f"| {name} | {time_:.1f} | {time_ / ms['all pairs']:.3f} |", flush=True)
    if without:
        print(without)


def decode(S=8192, capacity=65536, used=1024):
    title = "One query, B = 8, N = 8, K = 2, float32; torch gets lengths as a bool mask"
    r = question(1, B=8, K=2, S=S)
    with table(title, "jax.nn", "torch") as row:
        row(f"a whole cache, S = {S}", r)
        row(f"a cache of {capacity}, {used} used", r | {"S": capacity, "lengths": used})
    one_pass = Here(lambda q, k, v: k.sum() + v.sum(), arrays(r))
    print(f"\nOne pass over keys and values, S = {S}: {medians({'pass': one_pass})['pass']:.2f} ms", flush=True)


def isolation(T=2048):
    """What it costs that what is not visible is not read: against products and peaks that do read it."""
    print(f"\nIsolation of bad keys, T = S = {T}, float32: time with it / time without\n")
    for name, r in (("no mask", question(T)), ("causal", question(T, causal=True))):
        methods = "dense", "blockwise"
        kept = {method: here(of_jattn(r, method=method), r) for method in methods}
        with _unguarded():
            bare = {f"{method}, bare": here(of_jattn(r, method=method), r) for method in methods}
        ms = medians(kept | bare)
        print(*(f"{name}, {method}: {ms[method] / ms[f'{method}, bare']:.3f}" for method in methods), sep="\n")


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


def growth(lengths=(512, 1024, 2048, 4096, 8192, 16384), quadratic=8192, path=PLOT):
    """Time and memory as T grows, and their plot. Beyond `quadratic` only peers that need no T x S logits go on."""
    peers = [name for name in ALL if name in CONTENDERS]
    lines = {}
    with table("As T = S grows, 1 batch, 8 heads, H = 64, float32", *peers) as row:
        for T in lengths:
            for gradient in (False, True):
                able = [name for name in peers if T <= quadratic or name not in QUADRATIC]
                name = f"T = {T}, gradient" if gradient else f"T = {T}"
                ms, megabytes = row(name, question(T, gradient=gradient), able, least=1 if T > 8192 else None)
                for what, of in (("milliseconds", ms), ("megabytes of temporaries", megabytes)):
                    for peer, y in of.items():
                        lines.setdefault(what, {}).setdefault((peer, gradient), []).append((T, y))
    plot(lines, path)


def plot(lines, path):
    """Draws `lines`, {panel: {(peer, gradient): [(T, y)]}}. No peer takes the colour of one that is not there."""
    try:
        figure = pictures.curves(lines, names=("jattn", *ALL), dashed="gradient")
    except ImportError as error:
        return print(f"\nno plot: {error}")
    figure.savefig(path)
    print(f"\nplot: {path}")


TABLES = {f.__name__: f for f in (long, small, sparse, decode, isolation, growth)}

if __name__ == "__main__":
    versions = f"Python {platform.python_version()}", f"jax {jax.__version__}", *started()
    machine = f"{jax.default_backend()}, {os.cpu_count()} cores, {platform.machine()}"
    print(f"{', '.join(versions)}; {machine}. Medians of runs in turns.", flush=True)
    for name in sys.argv[1:] or TABLES:
        TABLES[name]()
