"""A real decoder's attention, all layers, against the model's own tracer; and the demo that shows it."""

import functools
import subprocess
import sys

import glassllm
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

import jattn
from jattn import __main__ as demo
from jattn import masks

SENTENCES = [demo.SENTENCE, "“Oh!” said the Cat, and grinned.", "I"]


@functools.cache
def both(sentence):
    model, tokenizer = glassllm.load_pretrained("en")
    return demo.both(model, tokenizer.encode(sentence))


def assert_agrees(ours, its):
    assert_close(ours, its, "float32", factor=5)  # 1e-5 of the largest number


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_logits_of_a_real_decoder_are_its_own(sentence):
    logits, _, tracer = both(sentence)
    assert logits.dtype == jnp.float32
    assert_agrees(logits, tracer.get("logits").value)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_weights_and_outputs_of_every_layer_are_its_own(sentence):
    _, layers, tracer = both(sentence)
    assert len(layers) == 4
    for i, (query, key, value) in enumerate(layers):
        assert_agrees(jattn.attention_weights(query, key, masks.causal()), tracer.get("attn.softmax", i).value)
        out = jattn.attention(query, key, value, masks.causal())
        assert_agrees(out.swapaxes(0, 1), tracer.get("attn.mix", i).value)


@pytest.mark.parametrize("row", [0, 7, 18])
def test_one_row_by_hand_is_one_row_of_attend(row):
    _, layers, tracer = both(demo.SENTENCE)
    query, key, value = (x[:, 1] for x in layers[1])
    query = layers[1][0][row, 2]  # query head 2 reads key/value head 1
    steps, expected = demo.by_hand(query, key, value, row)
    found = demo.by_jattn(query, key, value, row)
    assert_agrees(steps["after mask"], tracer.get("attn.mask", 1, head=2).value[row])
    assert_agrees(steps["weight"], tracer.get("attn.softmax", 1, head=2).value[row])
    for name in expected:
        assert_agrees(found[name], expected[name])
    assert_agrees(found["output"], tracer.get("attn.mix", 1, head=2).value[row])


def test_the_slopes_of_a_row_are_the_same_by_grad_and_by_jvp():
    _, layers, _ = both(demo.SENTENCE)
    query, key, value = (x[:, 0] for x in layers[3])
    reverse, forward = demo.slopes(query[9], key, value, 9, key[2])
    assert set(forward) == {"lse", "entropy", "|output|"}
    for name in forward:
        assert abs(forward[name]) > 1e-3
        assert_agrees(reverse[name], forward[name])


def test_the_demo_runs_and_everything_agrees(tmp_path):
    command = [sys.executable, "-m", "jattn", "--out", tmp_path / "a" / "b"]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert run.returncode == 0, run.stdout + run.stderr
    # matplotlib says so where it has never been used.
    assert run.stderr.replace("Matplotlib is building the font cache; this may take a moment.\n", "") == ""
    assert "Everything agrees" in run.stdout
    assert "make test" in run.stdout
    page = tmp_path / "a" / "b" / "explorer.html"
    assert str(page) in run.stdout
    assert "</html>" in page.read_text("utf-8")
    picture = page.with_name("weights.png")
    assert str(picture) in run.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_s_page_holds_all_layers_and_heads():
    model, tokenizer = glassllm.load_pretrained("en")
    _, layers, _ = both(SENTENCES[1])
    tokens = [tokenizer.vocab[i] for i in tokenizer.encode(SENTENCES[1])]
    page = demo.explorer(layers, tokens)
    N = model.cfg.n_heads
    assert repr(page).startswith(f"Explorer({model.cfg.n_layers} layers, {N} heads, {len(tokens)} queries")


def test_the_demo_goes_on_where_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    x = jnp.eye(2)
    demo.save(tmp_path / "file" / "folder", jattn.explore(x, x, x), x, None)
    assert "not saved: " in capsys.readouterr().out


def test_without_matplotlib_the_demo_saves_no_picture(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    x = jnp.eye(2)
    demo.save(tmp_path, jattn.explore(x, x, x), x, None)
    assert "not saved: pictures need matplotlib" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["explorer.html"]


def test_the_demo_fails_where_something_differs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "print_row", lambda *args: True)
    monkeypatch.setattr(demo, "print_slopes", lambda *args: False)
    assert demo.main(["The Cat", "--out", str(tmp_path)]) == 1
    assert "DISAGREEMENT" in capsys.readouterr().out


@pytest.mark.parametrize(("x", "agrees"), [(100.0009, True), (100.0011, False), (np.nan, False)])
def test_numbers_agree_to_1e_5_of_the_largest(x, agrees):
    assert demo.difference([x, 1.0], [100.0, 1.0])[1] == agrees


REFUSED = {
    "an empty sentence": ([""], "the tokens of the sentence must be 1 to 128, got 0"),
    "a sentence that is too long": (["the " * 200], "the tokens of the sentence must be 1 to 128, got"),
    "a layer that is not there": (["--layer", "4"], "--layer must be 0 to 3, got 4"),
    "a head that is not there": (["--head=-1"], "--head must be 0 to 3, got -1"),
    "a query that is not there": (["The Cat", "--query", "9"], "--query must be 0 to 2, got 9"),
}


@pytest.mark.parametrize(("argv", "message"), REFUSED.values(), ids=REFUSED)
def test_the_demo_refuses(argv, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        demo.main(argv)
    assert message in capsys.readouterr().err


def test_the_demo_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "glassllm", None)
    with pytest.raises(SystemExit, match="1"):
        demo.main([])
    assert "pip install glassllm" in capsys.readouterr().err
