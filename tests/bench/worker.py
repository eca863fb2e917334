"""A process that one peer runs in, with a Python of its own: `python tests/bench/worker.py torch|flex|tokamax`.

It first says which version it is. Then each line of its input is a request in JSON, a question of `peers.py`, and is
answered with a line: {"ms": of one call, "temp_bytes": or null}, or {"error": why there is none}. The first request of
its kind is prepared: arrays, compilation, one call to warm up. With `gradient`, a call gives the output and, for a
cotangent of ones, its gradients. Of `runs` calls only the last is timed. A request with a `file` is on the arrays in
it, and the output, or the gradients, go to the file of that name with .out.npz behind it.
"""

import functools
import json
import os
import sys
import time


def _torch():
    import torch  # pyright: ignore[reportMissingImports]: the environment of this project has none

    torch.set_num_threads(os.cpu_count() or 1)
    return torch


def _given(r):
    """The arrays of a file, float32 or 64."""
    import numpy as np

    with np.load(r["file"]) as file:
        return [file[name] for name in file.files]


def _saved(r, results):
    import numpy as np

    np.savez(r["file"] + ".out.npz", *results)


def _torch_arrays(torch, r):
    if "file" in r:
        x = [torch.from_numpy(x).transpose(1, 2).to(getattr(torch, r["dtype"])) for x in _given(r)]
        return [y.contiguous().requires_grad_(r["gradient"]) for y in x]
    shapes = (r["B"], r["N"], r["T"], r["H"]), *2 * [(r["B"], r["K"], r["S"], r["H"])]
    return [torch.randn(shape).to(getattr(torch, r["dtype"])).requires_grad_(r["gradient"]) for shape in shapes]


def torch():
    """scaled_dot_product_attention on contiguous (B, N, T, H); or softmax, logsumexp and entropy of rows."""
    torch = _torch()

    def rows(r):
        x, weights = (torch.from_numpy(x).to(getattr(torch, r["dtype"])) for x in _given(r))
        found = x.softmax(-1), x.logsumexp(-1, keepdim=True), torch.special.entr(weights).sum(-1, keepdim=True)
        _saved(r, [y.double().numpy() for y in found])
        return lambda: None, None

    def prepared(r):
        if r["rows"]:
            return rows(r)
        x = _torch_arrays(torch, r)
        mask = None if r["lengths"] is None else (torch.arange(r["S"]) < r["lengths"]).expand(r["B"], 1, r["T"], r["S"])

        def call():
            out = torch.nn.functional.scaled_dot_product_attention(
                *x, attn_mask=mask, is_causal=r["causal"], enable_gqa=r["K"] < r["N"]
            )
            return [out, *torch.autograd.grad(out, x, cotangent)] if r["gradient"] else [out]

        cotangent = torch.ones_like(x[0])
        if "file" in r:
            found = call()[r["gradient"] :]
            _saved(r, [y.detach().double().transpose(1, 2).numpy() for y in found])
        return call, None

    return f"torch {torch.__version__}", prepared


def flex():
    """flex_attention, compiled, with a mask of blocks for a window; it needs a C++ compiler."""
    torch = _torch()
    from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]: as above
        create_block_mask,
        flex_attention,
    )

    def prepared(r):
        x, left = _torch_arrays(torch, r), r["window"]
        window = create_block_mask(lambda b, n, t, s: (s <= t) & (t - s <= left), None, None, r["T"], r["S"], "cpu")
        compiled = torch.compile(flex_attention)
        return lambda: compiled(*x, block_mask=window, enable_gqa=r["K"] < r["N"]), None

    return f"torch {torch.__version__}", prepared


def tokamax():
    import jax
    import jax.numpy as jnp
    import numpy as np
    import tokamax  # pyright: ignore[reportMissingImports]: as above

    def prepared(r):
        # So it is for all that follows; no time is taken of float64.
        if r["dtype"] == "float64":
            jax.config.update("jax_enable_x64", True)
        shapes = (r["B"], r["T"], r["N"], r["H"]), *2 * [(r["B"], r["S"], r["K"], r["H"])]
        x = [jax.random.normal(jax.random.key(i), shape).astype(r["dtype"]) for i, shape in enumerate(shapes)]
        if "file" in r:
            x = [jnp.asarray(y).astype(r["dtype"]) for y in _given(r)]
        options = {"is_causal": r["causal"], "implementation": r["implementation"]}

        def f(cotangent, *x):
            out, pull = jax.vjp(lambda *x: tokamax.dot_product_attention(*x, **options), *x)
            return [out, *pull(cotangent)] if r["gradient"] else [out]

        x = [jnp.ones_like(x[0]), *x]
        compiled = jax.jit(f).lower(*x).compile()
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        if "file" in r:
            _saved(r, [np.asarray(y, np.float64) for y in compiled(*x)[r["gradient"] :]])
        return lambda: jax.block_until_ready(compiled(*x)), temporaries

    return f"tokamax {_version('tokamax')} (jax {jax.__version__})", prepared


def _version(package):
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def _reason(error):
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def main(peer):
    # What libraries print must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields):
        print(json.dumps(fields), file=answers, flush=True)

    try:
        version, prepared = {"torch": torch, "flex": flex, "tokamax": tokamax}[peer]()
    except Exception as error:
        return answer(error=_reason(error))
    answer(version=version)

    @functools.lru_cache(2)  # two implementations of one peer take turns; older arrays are let go
    def warm(line):
        r = json.loads(line)
        call, temporaries = prepared(r)
        call()
        return call, temporaries, r["runs"]

    for line in sys.stdin:
        try:
            call, temporaries, runs = warm(line)
            for _ in range(runs):
                start = time.perf_counter()
                call()
                ms = 1e3 * (time.perf_counter() - start)
            answer(ms=ms, temp_bytes=temporaries)
        except Exception as error:
            answer(error=_reason(error))


if __name__ == "__main__":
    main(sys.argv[1])
