"""The demo, `python -m jattn`: a real decoder on jattn's attention, checked against the model's own tracer.

The model is glassllm's, trained and run in NumPy: grouped heads, rotary positions, causal. `decoder` is all of it in
JAX, and an example of how jattn is called.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import masks

SENTENCE = "Alice was beginning to get very tired of sitting by her sister"
TOLERANCE = 1e-5
NEW_TOKENS = 12


def decoder(weights, ids, config, caches=None):
    """A glassllm decoder in JAX.

    Axes: T tokens, N query heads, K key/value heads, H features of a head.

    Args:
        weights: name -> array, named as the model names them.
        ids: (T,) integers, the tokens. With caches, they come after those that the caches hold.
        config: the model's `cfg`.
        caches: a `jattn.Cache` for each layer, or None where `ids` is all there is.

    Returns:
        The logits of the token after each, (T, vocabulary), for each layer what its attention was called with: query
        (T, N, H), key and value (T, K, H), and the caches with the new tokens, None without.
    """
    T, N, K = len(ids), config.n_heads, config.n_kv_heads
    positions = jnp.arange(T) if caches is None else caches[0].next_positions(T)
    rotary = functools.partial(jattn.rotary, positions=positions, base=config.rope_base, interleaved=True)

    def normalised(x, gamma):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + config.eps) * gamma[None, :]

    layers = []
    x = weights["E"][ids]
    for i in range(config.n_layers):
        w = {name.removeprefix(f"blocks.{i}."): array for name, array in weights.items()}

        h = normalised(x, w["norm1.gamma"])
        query = rotary((h @ w["attn.W_Q"]).reshape(T, N, -1))
        key = rotary((h @ w["attn.W_K"]).reshape(T, K, -1))
        value = (h @ w["attn.W_V"]).reshape(T, K, -1)
        layers.append((query, key, value))
        if caches is None:
            out = jattn.attention(query, key, value, masks.causal())
        else:
            out, cache = jattn.cached_attention(query, key, value, caches[i])
            caches = [*caches[:i], cache, *caches[i + 1 :]]
        x = x + out.reshape(T, -1) @ w["attn.W_O"]

        h = normalised(x, w["norm2.gamma"])
        x = x + (jax.nn.silu(h @ w["ffn.W1"]) * (h @ w["ffn.W3"])) @ w["ffn.W2"]

    return normalised(x, weights["norm_f.gamma"]) @ weights["E"].T, layers, caches


def jitted(model):
    """`decoder` with the model's weights and sizes: a function of tokens, and of caches if there are any."""
    weights = {name: jnp.asarray(tensor.data) for name, tensor in model.named_parameters().items()}
    return functools.partial(jax.jit(functools.partial(decoder, config=model.cfg)), weights)


def both(model, ids):
    """The decoder's logits and layers, and the model's own tracer of the same tokens."""
    import glassllm

    tracer = glassllm.Tracer()
    with glassllm.no_grad():
        model(ids, trace=tracer)
    logits, layers, _ = jitted(model)(jnp.array(ids))
    return logits, layers, tracer


def with_cache(model, ids, count):
    """The `count` likeliest tokens after `ids`, one after the other, and the logits of each: read once, then kept."""
    config, run = model.cfg, jitted(model)
    H = config.d_model // config.n_heads
    caches = [jattn.Cache.create(len(ids) + count, config.n_kv_heads, H) for _ in range(config.n_layers)]
    found, rows, new = [], [], ids
    for _ in range(count):
        logits, _, caches = run(jnp.array(new), caches=caches)
        rows.append(logits[-1])
        new = [int(logits[-1].argmax())]
        found += new
    return found, jnp.stack(rows)


def without_cache(model, ids, count):
    """The same, where each token reads all before it again. The padding comes after everything that it may see."""
    run, padded, rows = jitted(model), ids + [0] * count, []
    for end in range(len(ids), len(padded)):
        rows.append(run(jnp.array(padded))[0][end - 1])
        padded[end] = int(rows[-1].argmax())
    return padded[len(ids) :], jnp.stack(rows)


def by_hand(query, key, value, row):
    """One query (H,) at position `row`, step by step: the numbers of each step, (S,), and what they come to."""
    raw = key @ query / len(query) ** 0.5
    visible = masks.causal()(jnp.array([row]), jnp.arange(len(key)))[0]
    logits = jnp.where(visible, raw, -jnp.inf)
    shifted = logits - logits.max()
    exp = jnp.exp(shifted)
    weight = exp / exp.sum()
    steps = {"raw score": raw, "after mask": logits, "minus max": shifted, "exp": exp, "weight": weight}
    return steps, {"lse": logits.max() + jnp.log(exp.sum()), "entropy": jattn.entropy(weight), "output": weight @ value}


def by_jattn(query, key, value, row):
    """The same in one call. The query keeps its position, or `causal` would take it for the first."""
    position = jnp.array([row])
    out, stats = jattn.attend(query[None], key, value, masks.causal(), query_positions=position, return_stats=True)
    return {"lse": stats.lse[0], "entropy": stats.entropy[0], "output": out[0]}


def slopes(query, key, value, row, direction):
    """How the same row changes as its query moves along `direction`, (H,): by `jax.grad`, and by `jax.jvp`."""

    def numbers(query):
        row_of = by_jattn(query, key, value, row)
        return {"lse": row_of["lse"], "entropy": row_of["entropy"], "|output|": jnp.linalg.norm(row_of["output"])}

    _, forward = jax.jvp(numbers, (query,), (direction,))
    reverse = {name: jax.grad(lambda query, name=name: numbers(query)[name])(query) @ direction for name in forward}
    return reverse, forward


def difference(x, y):
    """The largest difference of `x` from `y`, and whether it is within tolerance, relative to the size of `y`."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    largest = abs(x - y).max()
    return largest, largest <= TOLERANCE * max(1.0, abs(y).max())


def print_agreement(logits, layers, tracer):
    pairs = {"logits": (logits, tracer.get("logits").value)}
    for i, (query, key, _) in enumerate(layers):
        weights = jattn.attention_weights(query, key, masks.causal())
        pairs[f"weights of layer {i}"] = weights, tracer.get("attn.softmax", i).value
    print(f"  {'':20}{'shape':16}{'largest number':>16}{'largest difference':>21}")
    for what, (ours, its) in pairs.items():
        print(f"  {what:20}{str(its.shape):16}{abs(its).max():16.4f}{difference(ours, its)[0]:21.1e}")
    return all(difference(*pair)[1] for pair in pairs.values())


def print_row(tokens, query, key, value, row):
    steps, expected = by_hand(query, key, value, row)
    found = by_jattn(query, key, value, row)
    labels = [f"{i:3} {token}" for i, token in enumerate(tokens)]
    width = max(map(len, [*labels, "sum; output"]))

    def print_line(label, numbers, features):
        columns = (f"{number:>{max(7, len(name))}}" for name, number in zip(steps, numbers, strict=True))
        print(f"  {label:{width}}", *columns, " ", *features)

    print_line("key", steps, [f"value (2 of {value.shape[1]})"])
    for i, label in enumerate(labels):
        print_line(label, [f"{step[i]:.4f}" for step in steps.values()], [f"{x:7.3f}" for x in value[i, :2]])
    total = ["", "", "", f"{steps['exp'].sum():.4f}", f"{steps['weight'].sum():.4f}"]
    print_line("sum; output", total, [f"{x:7.3f}" for x in found["output"][:2]])
    print(f"  lse {found['lse']:.4f} nats. Entropy {found['entropy']:.4f} nats, that of", end=" ")
    print(f"{jnp.exp(found['entropy']):.1f} equal keys; {row + 1} are visible.")
    return all(difference(found[name], expected[name])[1] for name in expected)


def print_slopes(query, key, value, row, direction):
    reverse, forward = slopes(query, key, value, row, direction)
    print(f"  {'slope of':15} {'jax.grad':>10} {'jax.jvp':>10}")
    for name in forward:
        print(f"  {name:15} {reverse[name]:10.6f} {forward[name]:10.6f}")
    return all(difference(reverse[name], forward[name])[1] for name in forward)


def print_generation(model, tokenizer, ids, count):
    cached, cached_logits = with_cache(model, ids, count)
    plain, logits = without_cache(model, ids, count)
    own = [step.token for step in model.generate(ids, count, greedy=True)]
    for what, tokens in {"with a cache": cached, "without": plain, "the model's own": own}.items():
        print(f"  {what:16}...{tokenizer.decode(tokens)!r}")
    largest, agree = difference(cached_logits, logits)
    print(f"  Logits with a cache and without differ by {largest:.1e} at most.")
    return all((agree, cached == plain, plain == own))


def explorer(layers, tokens):
    """The page to explore all layers and heads."""
    query, key, value = (jnp.stack(arrays) for arrays in zip(*layers, strict=True))
    return jattn.explore(query, key, value, masks.causal(), tokens=tokens)


def save(folder, explorer, weights, tokens):
    """Saves what is to be looked at, the page and a picture of one layer's weights, and prints where it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        print(f"  {explorer.save(folder / 'explorer.html')}: open it in a browser. It needs no network.")
        jattn.pictures.weights(weights, tokens).savefig(folder / "weights.png", dpi=160)
        print(f"  {folder / 'weights.png'}: the weights of the layer above, head by head.")
    except (OSError, ImportError) as error:
        print(f"  not saved: {error}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m jattn", description="A real decoder on jattn's attention.")
    parser.add_argument("sentence", nargs="?", default=SENTENCE)
    parser.add_argument("--layer", type=int, default=2, help="the layer to look into, from 0")
    parser.add_argument("--head", type=int, default=3, help="its query head, from 0")
    parser.add_argument("--query", type=int, help="the position of its query, from 0; if not given, the middle")
    parser.add_argument("--out", type=pathlib.Path, default="demo", help="the folder to save into, demo if not given")
    args = parser.parse_args(argv)
    try:
        import glassllm
    except ImportError:
        parser.exit(1, "The demo runs the decoder of the package glassllm; install it: pip install glassllm\n")

    model, tokenizer = glassllm.load_pretrained("en")
    config, ids = model.cfg, tokenizer.encode(args.sentence)
    row = len(ids) // 2 if args.query is None else args.query
    for what, i, sizes in (
        ("the tokens of the sentence", len(ids), range(1, config.max_len + 1)),
        ("--layer", args.layer, range(config.n_layers)),
        ("--head", args.head, range(config.n_heads)),
        ("--query", row, range(len(ids))),
    ):
        if i not in sizes:
            parser.error(f"{what} must be {sizes[0]} to {sizes[-1]}, got {i}")
    vocabulary = [token.replace("\n", "\\n") for token in tokenizer.vocab]
    tokens = [vocabulary[i] for i in ids]

    logits, layers, tracer = both(model, ids)

    print(f"glassllm's decoder on jattn: {config.n_layers} layers, {config.n_heads} query heads on", end=" ")
    print(f"{config.n_kv_heads} key/value heads, {len(ids)} tokens\n  {' '.join(tokens)}\n")

    print("1. jattn against the model's own tracer, which is NumPy")
    agree = [print_agreement(logits, layers, tracer)]

    print("\n2. The next token")
    probabilities = jattn.softmax(logits[-1])
    for i in jnp.argsort(-probabilities)[:5]:
        print(f"  {vocabulary[i]:15} {probabilities[i]:10.4f}")

    # Query head n reads key/value head n // G.
    kv_head = args.head // (config.n_heads // config.n_kv_heads)
    query, key, value = layers[args.layer]
    query, key, value = query[row, args.head], key[:, kv_head], value[:, kv_head]
    print(f"\n3. One row: layer {args.layer}, query head {args.head} on key/value head {kv_head},", end=" ")
    print(f"query {row} {tokens[row]}")
    agree.append(print_row(tokens, query, key, value, row))

    nearest = int(jnp.argmax(key[: row + 1] @ query))
    print(f"\n4. The same row as its query moves towards the key with most weight, {nearest} {tokens[nearest]}")
    agree.append(print_slopes(query, key, value, row, key[nearest] / jnp.linalg.norm(key[nearest])))

    count = min(NEW_TOKENS, config.max_len - len(ids))
    if count:
        print(f"\n5. The {count} tokens that come next, each the likeliest")
        agree.append(print_generation(model, tokenizer, ids, count))

    print("\nTo look inside: every layer, head and query of this sentence")
    query, key, _ = layers[args.layer]
    weights = jattn.attention_weights(query, key, masks.causal())
    save(args.out, explorer(layers, tokens), weights, [token.replace("▁", " ") for token in tokens])

    verdict = "Everything agrees" if all(agree) else "DISAGREEMENT: not everything is equal"
    print(f"\n{verdict} to {TOLERANCE:g} of the largest number.")
    print("Try next: make demo ARGS='\"A sentence of your own\" --layer 1 --head 2 --query 3', or make test.")
    return 0 if all(agree) else 1


if __name__ == "__main__":
    # Accelerators would round the decoder's own float32 products, which is not what is compared here.
    with jax.default_matmul_precision("highest"):
        sys.exit(main())
