"""What attention over a ring of devices costs: on paper, and as compiled programs say of themselves.

`ring` is the model, for any number of devices; `counted` needs as many as it is asked about, simulated ones included.
Nothing is run. The parts of a sequence are equal, and values have as many features as keys.
"""

import functools
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jattn


class Cost(NamedTuple):
    """Of one call, for each device."""

    flops: float
    sent: float  # bytes
    held: float  # bytes: arguments, results and all between


def ring(T, P, *, N, K, H, size, gradient=False, causal=False, tile=512):
    """`Cost` of `jattn.ring.attention`, forward or forward and backward, of T tokens on P devices.

    N query heads, K key/value heads, H features of `size` bytes each; tiles of `tile` x `tile` pairs. Where it is
    causal, tokens are dealt by `ring.zigzag`, so that each device has half of the pairs to do.
    """
    n = T / P
    tokens, keys = n * N * H, 2 * n * K * H  # numbers in a part of the queries, and of keys and values
    wide = max(size, 4)
    # Forward: query·key and weights·value, 2 FLOPs for each feature. Backward: query·key again, and the two products
    # that each of them turns into.
    flops = (14 if gradient else 4) * T * n * N * H / (2 if causal else 1)
    # Keys and values come past every device. Backward, they come home, and their gradients with them, in float32.
    sent = keys * ((P - 1) * size + (P * (size + wide) if gradient else 0))
    # In: query, key, value, backward the output's gradient. Out: the output, or gradients of query, key and value.
    outside = size * (3 * tokens + 2 * keys if gradient else 2 * tokens + keys)
    # Sums; what is used and what is under way; backward, of halves, queries and the output's gradient; two arrays of a
    # tile.
    again = 2 if gradient and size < wide else 0
    inside = (1 + again) * tokens + (4 if gradient else 2) * keys + 2 * N * min(tile, n) ** 2
    return Cost(flops, sent, outside + wide * inside)


def trade(T, P, *, N, K, H, size):
    """The bytes that each device sends, forward, where devices trade heads for tokens, `traded`; P divides K."""
    # Of query, key, value and output, all but the own share.
    return (P - 1) / P * (2 * N + 2 * K) * T / P * H * size


def traded(query, key, value):
    """Attention inside shard_map, of a sequence that is sharded over "x": each device gets all tokens of its heads."""
    there, back = (
        functools.partial(jax.lax.all_to_all, axis_name="x", split_axis=s, concat_axis=c, tiled=True)
        for s, c in ((1, 0), (0, 1))
    )
    return back(jattn.attention(there(query), there(key), there(value)))


def seconds(cost, *, flops, bandwidth, overlap=True):
    """How long a call takes at `flops` per second and `bandwidth` bytes per second, sent while computing or after."""
    compute, communicate = cost.flops / flops, cost.sent / bandwidth
    return max(compute, communicate) if overlap else compute + communicate


def program(T, P, *, N, K, H, size=4, gradient=False, tile=None, softcap=None) -> Any:
    """The compiled program of attention over T tokens on P devices, or of output and gradient; size 2 is bfloat16.

    Without a tile devices trade heads for tokens.
    """
    mesh = jax.make_mesh((P,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:P])
    tokens = jax.P("x")

    def part(query, key, value):
        return jattn.ring.attention(query, key, value, axis_name="x", block_size=(tile, tile), softcap=softcap)

    attend = jax.shard_map(part if tile else traded, mesh=mesh, in_specs=tokens, out_specs=tokens)

    def backward(query, key, value, cotangent):
        return jax.vjp(attend, query, key, value)[1](cotangent)

    where = jax.NamedSharding(mesh, tokens)
    heads = (N, K, K, N) if gradient else (N, K, K)
    args = [jax.ShapeDtypeStruct((T, n, H), {2: jnp.bfloat16, 4: jnp.float32}[size], sharding=where) for n in heads]
    return jax.jit(backward if gradient else attend).lower(*args).compile()


def counted(T, P, *, gradient=False, tile, **sizes):
    """`Cost` by the compiler's own counts.

    Of a loop it counts one step: so a step is all that two parts share. Forward two of P steps count, one in the loop
    and the last, which is outside; backward one. Of a choice it counts both sides, and in float32 without a softcap
    there are two ways to make a tile, of which one is taken.
    """
    softcap = 50.0 if sizes.get("size", 4) == 4 else None
    steps, forward = (program(T, P, gradient=g, tile=T // P, softcap=softcap, **sizes) for g in (gradient, False))
    each = forward.cost_analysis()["flops"]
    flops = P / 2 * each + P * (steps.cost_analysis()["flops"] - each)
    memory = program(T, P, gradient=gradient, tile=tile, **sizes).memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return Cost(flops, sum(size * times for size, times in sends(steps)), held)


def sends(program):
    """The bytes of each array that a device sends to the next one, and how many times it does."""
    text, found = program.as_text(), []
    times = {body: int(n) for body, n in re.findall(r"body=%?([\w.-]+).*known_trip_count\D*(\d+)", text)}
    for computation in text.split("\n\n"):
        name = re.match(r"%?([\w.-]+)", computation)
        arrays = re.findall(r"= \(?(u16|f32)\[([\d,]+)\]\S* .*?collective-permute(?:-start)?\(", computation)
        found += [(_bytes(*array), times.get(name and name[1], 1)) for array in arrays]
    return found


def trades(program):
    """The bytes that a device gives away in all trades of a program."""
    traded = re.findall(r"= \((.*)\) all-to-all\(", program.as_text())
    shares = [re.findall(r"(bf16|f32)\[([\d,]+)\]", arrays) for arrays in traded]
    # One share of each is its own.
    return sum(_bytes(*share) for own in shares for share in own[1:])


def _bytes(dtype, shape):
    return {"bf16": 2, "u16": 2, "f32": 4}[dtype] * math.prod(map(int, shape.split(",")))
