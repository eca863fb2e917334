"""Pictures show the numbers that they are given, are the same each time, and can be read on white and on black."""

import io
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import masks, pictures

matplotlib = pytest.importorskip("matplotlib", reason="pictures need matplotlib, from the extra `notebooks`")

NAN = float("nan")


def pixels(axes):
    """Red, green, blue and opacity of each cell of a heat map."""
    return np.asarray(axes.images[0].get_array())


def labels(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def saved(figure, format):
    file = io.BytesIO()
    figure.savefig(file, format=format)
    return file.getvalue()


def test_a_heavier_weight_is_lighter_and_one_of_exactly_zero_is_blank():
    figure = pictures.weights(np.array([[1.0, 0.0, 0.0], [1e-9, 0.7, 0.3], [0.0, 0.0, 0.0]]))
    red, green, blue, opacity = pixels(figure.axes[0]).transpose(2, 0, 1)
    np.testing.assert_array_equal(opacity, [[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    lightness = (red + green + blue)[[1, 1, 1, 0], [0, 2, 1, 0]]
    assert (np.diff(lightness) > 0.1).all()


@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf])
def test_what_is_not_finite_is_orange_and_hides_nothing_else(bad):
    with_it = pixels(pictures.weights(np.array([[0.25, bad], [0.0, 1.0]])).axes[0])
    without = pixels(pictures.weights(np.array([[0.25, 0.0], [0.0, 1.0]])).axes[0])
    np.testing.assert_allclose(with_it[0, 1], matplotlib.colors.to_rgba(pictures.ORANGE))
    np.testing.assert_array_equal(with_it[[0, 1, 1], [0, 0, 1]], without[[0, 1, 1], [0, 0, 1]])


def test_heads_share_one_scale_of_colours():
    figure = pictures.weights(jnp.array([[[0.5, 0.5]], [[0.5, 0.9]], [[1.0, 0.0]]]))
    first, second, third, bar = figure.axes
    assert [axes.get_title() for axes in (first, second, third)] == ["head 0", "head 1", "head 2"]
    np.testing.assert_array_equal(pixels(first)[0, 0], pixels(second)[0, 0])
    assert bar.get_ylim() == (0, 1)


def test_the_last_row_of_heads_may_be_short():
    figure = pictures.weights(np.full((5, 2, 2), 0.5))
    assert [axes.get_title() for axes in figure.axes[:-1]] == [f"head {n}" for n in range(5)]


def test_tokens_label_queries_and_where_they_are_the_same_keys():
    # The first would be a fault in a formula.
    square = pictures.weights(np.eye(2), tokens=["$\\a$", "new\nline"]).axes[0]
    assert labels(square.yaxis) == labels(square.xaxis) == ["$\\a$", "new\\nline"]
    oblong = pictures.weights(np.ones((1, 2)), tokens=["a"]).axes[0]
    assert (labels(oblong.yaxis), labels(oblong.xaxis)) == (["a"], ["0", "1"])
    crossed = pictures.weights(np.ones((2, 1)), tokens=["a", "b"], key_tokens=["c"]).axes[0]
    assert (labels(crossed.yaxis), labels(crossed.xaxis)) == (["a", "b"], ["c"])


def test_labels_that_do_not_fit_are_left_out():
    axes = pictures.weights(np.ones((3, 400))).axes[0]
    shown = [int(label) for label in labels(axes.xaxis)]
    assert 20 < len(shown) < 50 and shown == list(range(0, 400, shown[1]))
    assert list(axes.get_xticks()) == shown


def test_a_mask_is_drawn_as_it_is():
    rule = masks.window(1, 0) | masks.prefix(1)
    axes = pictures.mask(rule, 5, 7).axes[0]
    np.testing.assert_array_equal(pixels(axes)[..., 3] == 1, rule.dense(5, 7))
    assert axes.get_title() == repr(rule)
    array = np.array([[True, False, True]])
    axes = pictures.mask(array).axes[0]
    np.testing.assert_array_equal(pixels(axes)[..., 3] == 1, array)
    assert axes.get_title() == ""
    # Without sizes, some of a rule: as much as it prints.
    assert pixels(pictures.mask(masks.prefix(3)).axes[0]).shape[:2] == (5, 5)


def test_entropies_are_written_where_they_stand():
    axes, bar = pictures.entropy(np.array([[0.0, 1.0, 2.0], [NAN, 0.5, 0.25]])).axes
    found = {text.get_position(): text.get_text() for text in axes.texts}
    assert found == {(0, 0): "0.00", (1, 0): "1.00", (2, 0): "2.00", (0, 1): "nan", (1, 1): "0.50", (2, 1): "0.25"}
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("head", "layer", "entropy, nats")


def test_a_curve_keeps_its_colour_whoever_is_missing():
    points = [(8, 1.0), (16, 3.0)]
    lines = {"ms": {("b", False): points, ("b", True): points}, "MB": {"c": points}}
    first, second = pictures.curves(lines, names=["a", "b", "c"], dashed="gradient").axes
    b, dashed, c = *first.lines, *second.lines
    assert [line.get_color() for line in (b, dashed, c)] == [pictures.LOOKS[i][0] for i in (1, 1, 2)]
    assert [line.get_linestyle() for line in (b, dashed, c)] == ["-", "--", "-"]
    np.testing.assert_array_equal(dashed.get_xydata(), points)
    assert [text.get_text() for text in first.get_legend().get_texts()] == ["b"]
    assert first.get_legend().get_title().get_text() == "dashed: gradient"
    assert labels(first.xaxis) == ["8", "16"] and first.get_xlabel() == "T = S"


def test_numbers_below_a_curve_stand_upright_where_they_are_close():
    wide, narrow = ([(x, 1.0) for x in of] for of in ((16, 128, 1024, 1e4, 1e5), (1e-30, 1e-3, 1.0, 1e30)))
    figure = pictures.curves({"units": {"a": wide}, "more units": {"a": narrow}}, axis="size of the logits")
    assert [axes.get_xlabel() for axes in figure.axes] == 2 * ["size of the logits"]
    assert [axes.get_xticklabels()[0].get_rotation() for axes in figure.axes] == [0, 90]


def drawings():
    return [pictures.weights(np.full((2, 3, 3), 0.3)), pictures.curves({"ms": {"a": [(8, 1.0), (16, 3.0)]}})]


def test_a_notebook_shows_the_picture_and_it_is_the_same_each_time():
    for figure, again in zip(drawings(), drawings(), strict=True):
        png, size = figure._repr_png_()
        width, height = np.frombuffer(png[16:24], ">u4")
        assert png[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == (2 * size["width"], 2 * size["height"])
        assert again._repr_png_() == (png, size) and b"http" not in png
        # Another backend, or a style of the user's, makes no difference.
        with matplotlib.rc_context({"text.color": "red", "xtick.color": "red", "figure.dpi": 50, "font.size": 30}):
            assert figure._repr_png_() == (png, size)
        svg = saved(figure, "svg")
        assert saved(again, "svg") == svg and b"dc:date" not in svg


def test_nothing_is_painted_behind_and_all_text_is_grey():
    for figure in drawings():
        svg = saved(figure, "svg").decode()
        assert not re.search(r"fill: ?(#f{3,6}|white)", svg)
        texts = re.findall(r'<text style="([^"]*)"', svg)
        assert len(texts) >= 5 and all("fill: #808080" in style for style in texts)


def test_pictures_leave_pyplot_and_the_settings_alone():
    code = """
import sys, matplotlib, jattn, numpy as np
settings = lambda: [matplotlib.rcParams[name] for name in jattn.pictures.STYLE]
before = settings()
jattn.pictures.weights(np.eye(2))._repr_png_()
assert settings() == before
assert "matplotlib.pyplot" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


REFUSED = {
    "weights of one row": (
        lambda: pictures.weights(np.ones(3)),
        ValueError,
        "pictures.weights: weights must be (N, T, S), got (3,).",
    ),
    "weights of a batch": (
        lambda: pictures.weights(np.ones((2, 2, 3, 3))),
        ValueError,
        "pictures.weights: weights must be (N, T, S), got (2, 2, 3, 3).",
    ),
    "no weights": (
        lambda: pictures.weights(np.ones((2, 0))),
        ValueError,
        "pictures.weights: weights must not be empty, got (2, 0).",
    ),
    "text for weights": (lambda: pictures.weights("abc"), TypeError, "pictures.weights: weights must be an array, got"),
    "too few tokens": (
        lambda: pictures.weights(np.ones((2, 3)), tokens=["a"]),
        ValueError,
        "pictures.weights: tokens must be (T,) = (2,), got (1,).",
    ),
    "too many tokens of keys": (
        lambda: pictures.weights(np.ones((1, 2, 3)), key_tokens=list("abcd")),
        ValueError,
        "pictures.weights: key_tokens must be (S,) = (3,), got (4,).",
    ),
    "traced weights": (
        lambda: jax.jit(pictures.weights)(jnp.eye(2)),
        TypeError,
        "pictures.weights: weights must be known, got a traced array. Draw it outside jit.",
    ),
    "a float mask": (
        lambda: pictures.mask(np.eye(2)),
        TypeError,
        "pictures.mask: mask must be boolean (True = may attend), got float64.",
    ),
    "a mask of heads": (
        lambda: pictures.mask(np.ones((1, 2, 2), bool)),
        ValueError,
        "pictures.mask: mask must be (T, S), got (1, 2, 2).",
    ),
    "a mask of another size": (lambda: pictures.mask(np.eye(3, dtype=bool), 2, 2), ValueError, "array(mask=...) must"),
    "a mask of a batch": (
        lambda: pictures.mask(masks.lengths(key=jnp.array([1, 2])), 3, 3),
        ValueError,
        "Map batch and head axes with jax.vmap.",
    ),
    "no queries": (lambda: pictures.mask(masks.causal(), 0, 2), ValueError, "pictures.mask: T must be an int >= 1"),
    "a traced mask": (
        lambda: jax.jit(pictures.mask)(masks.lengths(key=jnp.array(1))),
        TypeError,
        "pictures.mask: mask must be known, got a traced one.",
    ),
    "entropies of queries": (
        lambda: pictures.entropy(np.ones((2, 3, 4))),
        ValueError,
        "pictures.entropy: entropies must be (L, N), got (2, 3, 4).",
    ),
    "no panels": (lambda: pictures.curves({}), ValueError, "pictures.curves: the number of panels in lines must be"),
    "more lines than colours": (
        lambda: pictures.curves({"ms": {name: [(1, 1)] for name in "abcdefg"}}),
        ValueError,
        "pictures.curves: names must be at most 6",
    ),
    "a name without a colour": (
        lambda: pictures.curves({"ms": {"a": [(1, 1)]}}, names=["b"]),
        ValueError,
        "all of ['a'] among them, got ['b'].",
    ),
    "points that are no pairs": (
        lambda: pictures.curves({"ms": {"a": [(1, 2, 3)]}}),
        ValueError,
        "pictures.curves: lines['ms']['a'] must be (points, 2), got (1, 3).",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused(call, kind, message):
    with pytest.raises(kind) as raised:
        call()
    assert message in str(raised.value)


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    pictures.weights(np.eye(2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape('pip install "jattn[notebooks]"')):
        pictures.weights(np.eye(2))
