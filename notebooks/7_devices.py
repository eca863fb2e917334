# %% [markdown]
# # 7. Many devices
#
# A sequence can be too long for one device. Here eight of them, which this machine simulates, share one; then a model
# on paper, held against what their programs say of themselves, goes on to ten million tokens and thousands of devices.

# %%
import os

# Read once, when JAX starts.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %%
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scale
from exercises import check, hint

from jattn import attention, masks, pictures, ring

print(len(jax.devices()), "devices")

# %% [markdown]
# ## A ring
#
# Each device holds a part of the queries, keys and values. Keys and values are sent around: after P steps, every device
# has seen all of them, one part at a time, and has folded each into the sums of its own queries. These are the parts
# that meet in lesson 5.
#
# **Predict.** By how much does it differ from attention on one device?

# %%
P, T, N, K, H = 8, 64, 4, 2, 16
mesh = jax.make_mesh((P,), ("x",), (jax.sharding.AxisType.Auto,))
tokens = jax.P("x")  # axis 0 is the sequence


def part(query, key, value):
    return ring.attention(query, key, value, masks.causal(), axis_name="x")


around = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=tokens, out_specs=tokens))
query, key, value = (jax.random.normal(jax.random.key(n), (T, heads, H)) for n, heads in enumerate((N, K, K)))
out = around(query, key, value)
print("each device has", out.addressable_shards[0].data.shape, "of", out.shape)
print(f"off by {np.abs(np.asarray(out) - np.asarray(attention(query, key, value, masks.causal()))).max():.0e}")

# %% [markdown]
# By rounding alone: merging parts is exact, in any order.

# %% [markdown]
# ## Who waits
#
# Under a causal mask, late queries see many keys and early ones few. All devices go around together, so the one with
# the most to do is what the others wait for.
#
# **Predict.** Of what one device would do, which share does the last of the eight have? And if each device gets an
# early and a late stripe of the sequence, as `ring.zigzag` deals them?

# %%
visible = jnp.asarray(masks.causal().dense(T, T))
for name, order in (("in order", visible), ("zigzag", ring.zigzag(visible, P, axis=0))):
    shares = np.asarray(order.reshape(P, -1).sum(1)) / int(visible.sum())
    print(f"{name:8}", *(f"{share:.1%}" for share in shares))

# %% [markdown]
# ## What a program says of itself
#
# A compiled program lists what it sends, and counts its arithmetic and its memory. Nothing is run for that.
#
# **Predict.** Eight devices: how many arrays does one send, forward? How many more when the gradient is taken?

# %%
sizes: dict[str, Any] = {"N": 4, "K": 2, "H": 64}
T, tile = 16384, 64
for gradient in (False, True):
    one_tile = scale.program(T, 8, gradient=gradient, tile=T // 8, **sizes)
    sent = scale.sends(one_tile)
    print("with gradient:" if gradient else "forward:", sum(n for _, n in sent), "arrays of", sent[0][0], "bytes")

# %% [markdown]
# Keys and values, seven times, and every device has seen them; backward they go eight times and come home, and with
# them their gradients, which collect something at each device.
#
# The arithmetic needs care. XLA counts the body of a loop *once*, however often it goes round. So the program above was
# made with one tile to a part: its loops over devices are the only ones that go round. Forward that is P - 1 times, and
# the last step stands behind it. It counts two steps, of P. And of a choice it counts *both* sides: in float32 there
# are two ways to make a tile, and the faster one is taken if its result is right; with a softcap there is one. A
# program without loops and choices can tell whether that is right.

# %%
flops = 8 / 2 * scale.program(T, 8, tile=T // 8, softcap=50.0, **sizes).cost_analysis()["flops"]
like = [jax.ShapeDtypeStruct((T, heads, 64), jnp.float32) for heads in (4, 2, 2)]
dense: Any = jax.jit(lambda *x: attention(*x, softcap=50.0, method="dense")).lower(*like).compile()
rounds = set(re.findall(r"known_trip_count.*?(\d+)", one_tile.as_text()))
print("its loops go round", *rounds, "times")
print(f"8 devices together do {8 * flops / dense.cost_analysis()['flops']:.3f} of the FLOPs of one, dense")

# %% [markdown]
# **Predict.** Eight devices share a sequence. What is in one device's temporaries, against those of a device alone?

# %%
for gradient in (False, True):
    alone, one_of_8 = (
        scale.program(T, P, gradient=gradient, tile=tile, **sizes).memory_analysis().temp_size_in_bytes for P in (1, 8)
    )
    what = "with gradient" if gradient else "forward"
    print(f"{what:13} {alone / 1e6:5.1f} MB alone, {one_of_8 / 1e6:4.1f} MB on each of 8: {one_of_8 / alone:.3f}")

# %% [markdown]
# More than an eighth: what arrives needs a place while what is there is still in use.

# %% [markdown]
# ## On paper
#
# With T tokens on P devices, N query heads, K key heads and H features:
#
# - arithmetic: 2 FLOPs a feature for query·key and 2 for weights·value, over T·T pairs, shared by P. Backward five such
#   products, 10 more. Half of it under a causal mask that is balanced;
# - bytes sent: keys and values of T / P tokens, P - 1 times. Backward P times, and their gradients, in float32, too;
# - bytes held: arguments, results, sums in float32, and two of everything that travels;
# - time: the longer of arithmetic and sending where they overlap, their sum where they don't.
#
# That is all of `scale.ring` and `scale.seconds`, thirty lines. Is it true? Counted over model:
#
# **Predict.** Which of the three is off by the most?

# %%
print("                        devices", *(f"{name:>6}" for name in scale.Cost._fields))
for gradient in (False, True):
    for P in (2, 4, 8):
        for size in (4, 2) if P == 8 else (4,):
            call = sizes | {"gradient": gradient, "tile": tile, "size": size}
            ratios = [x / y for x, y in zip(scale.counted(T, P, **call), scale.ring(T, P, **call), strict=True)]
            what = ("with gradient" if gradient else "forward") + (", bfloat16" if size == 2 else "")
            print(f"{what:23} {P:7}", *(f"{ratio:6.3f}" for ratio in ratios))

# %% [markdown]
# Bytes sent are exact. Of arithmetic the model leaves out softmax, a few FLOPs a pair against hundreds. Memory is what
# a compiler arranges as it likes.

# %% [markdown]
# ## Heads for tokens
#
# There is another way. Devices trade: each gives away the tokens that it has, of all heads but its share, and gets all
# tokens of its share. Then `attention` sees whole sequences of fewer heads, and a second trade brings the output back.
#
# **Predict.** Eight devices. Which way sends less with eight heads of queries and of keys? With 32 on 8?

# %%
for N, K in ((8, 8), (32, 8)):
    call: dict[str, Any] = {"N": N, "K": K, "H": 64, "size": 4}
    one_tile, trade = scale.program(T, 8, tile=T // 8, **call), scale.program(T, 8, **call)
    sent, given = sum(size * times for size, times in scale.sends(one_tile)), scale.trades(trade)
    print(f"{N:2} heads on {K}: {sent / 1e6:5.1f} MB in the ring, {given / 1e6:5.1f} MB traded", end=", ")
    print(f"{given / scale.trade(T, 8, **call):.3f} of what it is on paper")

# %% [markdown]
# In the ring, keys and values of the whole sequence come past every device. A trade moves each number once, queries and
# output too. So with G query heads to a key head:

# %%
for G in (1, 4, 8):
    call = {"N": 8 * G, "K": 8, "H": 128, "size": 4}
    ratios = [scale.ring(T, P, **call).sent / scale.trade(T, P, **call) for P in (2, 4, 8)]
    print(f"G = {G}: the ring sends", *(f"{x:4.1f}" for x in ratios), "times as much, on 2, 4 and 8 devices")

# %% [markdown]
# P / (G + 1) times. Few devices and many query heads to a key head: the ring. More devices, as long as each has a key
# head: trade. Beyond that there is nothing to trade, and the ring goes on. It also hides what it sends behind what it
# computes.
#
# ## Ten million tokens
#
# Now sizes that nobody here can run. What is assumed of the devices: 400 TFLOP/s that are really reached, in bfloat16,
# and 50 GB/s to the next device. One layer with its gradient, causal and dealt in a zigzag: 32 query heads, 8 key
# heads, of 128 features. Other machines are other numbers in this cell.

# %%
device: dict[str, Any] = {"flops": 400e12, "bandwidth": 50e9}
layer: dict[str, Any] = {"N": 32, "K": 8, "H": 128, "size": 2, "gradient": True, "causal": True}
lengths = [32_000, 100_000, 320_000, 1_000_000, 3_200_000, 10_000_000]

lines = {"seconds for a layer": {}, "gigabytes held by a device": {}}
for P in (8, 64, 512, 4096):
    costs = [(T, scale.ring(T, P, **layer)) for T in lengths]
    for overlap in (True, False):
        times = [(T, scale.seconds(cost, **device, overlap=overlap)) for T, cost in costs]
        lines["seconds for a layer"][f"{P} devices", not overlap] = times
    lines["gigabytes held by a device"][f"{P} devices"] = [(T, cost.held / 1e9) for T, cost in costs]
pictures.curves(lines, dashed="sent after computing")

# %% [markdown]
# **Predict.** Where sending takes longer than computing, more devices help no more. From how many devices on, in
# powers of two, is that, for a given T?

# %%
for T in lengths:
    costs = {P: scale.ring(T, P, **layer) for P in (2**n for n in range(3, 13))}
    rules = [P for P, cost in costs.items() if cost.sent / device["bandwidth"] > cost.flops / device["flops"]]
    print(f"T = {T:>10,}:", f"communication rules from {min(rules)} devices on" if rules else "never, up to 4096")

# %% [markdown]
# Arithmetic shrinks with P, what is sent does not. So it is a matter of how many tokens a device has, whatever T and P
# are:

# %%
T = P = 1000
one_each = scale.ring(T, P, **layer)
enough = (one_each.sent / device["bandwidth"]) / (one_each.flops / device["flops"])
print(f"Communication rules where a device has fewer than {enough:,.0f} tokens.")
largest = scale.ring(10_000_000, 4096, **layer)
whole, busy = scale.seconds(largest, **device), largest.flops / device["flops"]
print(f"10 million on 4096 are {10_000_000 / 4096:,.0f} each: {whole:.2f} s a layer, {busy / whole:.0%} computing.")

# %% [markdown]
# What the model does not know: how long a message takes to start, links that others use too, and devices that are late.
# With few tokens each, the first of these would come to matter.

# %% [markdown]
# ## Exercise
#
# The *fewest* bytes that a device must send in a forward ring, so that each part reaches every device: T tokens on P
# devices, K key/value heads, H features of a key and D of a value, of `size` bytes each. An integer; T is a multiple
# of P.


# %%
def ring_bytes(T, P, K, H, D, size): ...


check("ring_bytes", ring_bytes)  # hint("ring_bytes")
