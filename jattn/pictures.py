"""Pictures of weights, masks, entropies and measurements.

They are drawn with matplotlib, which is imported with the first picture: `pip install "jattn[notebooks]"`. Each
function returns a matplotlib `Figure` that a notebook shows and `figure.savefig(path)` saves. Nothing is painted behind
it and its text is grey, so that it can be read on white and on black. The same numbers give the same file.
"""

import functools
import io
import math
from typing import Any

import numpy as np

from jattn import _checks, masks

__all__ = ["curves", "entropy", "mask", "weights"]

GREY = "#808080"
# Okabe and Ito's colours, which the colour-blind tell apart.
LOOKS = [("#0072B2", "o"), ("#E69F00", "s"), ("#D55E00", "^"), ("#009E73", "D"), ("#CC79A7", "v"), ("#56B4E9", "P")]
BLUE, ORANGE = LOOKS[0][0], LOOKS[2][0]
STYLE: Any = {f"{what}.color": GREY for what in ("text", "xtick", "ytick")} | {
    "axes.edgecolor": GREY,
    "axes.facecolor": "none",
    "axes.labelcolor": GREY,
    "axes.titlesize": "medium",
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],  # the first comes with matplotlib
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "jattn",
}
LINE = 0.13  # inches that a label needs


def _styled(function):
    """`function` in the style of this module, which leaves the caller's as it was."""

    @functools.wraps(function)
    def styled(*args, **options):
        try:
            import matplotlib
        except ImportError as error:
            message = 'pictures need matplotlib, which is not installed: pip install "jattn[notebooks]"'
            raise ImportError(message) from error
        with matplotlib.rc_context(STYLE):
            return function(*args, **options)

    return styled


@_styled
def weights(weights, tokens=None, key_tokens=None):
    """Attention weights as a heat map, one for each head. What weighs exactly 0 is left blank; NaN is orange.

    Args:
        weights: (T, S) or (N, T, S), as `attention_weights` returns them.
        tokens: T strings, the queries; None for their numbers.
        key_tokens: S strings, the keys. None: `tokens` where T = S, their numbers elsewhere.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: another shape, or another number of tokens.
        TypeError: no array of numbers, or a traced one; or tokens that are no texts.
        ImportError: matplotlib is not installed.

    Example:
        >>> x = jnp.ones((3, 2, 4))
        >>> figure = pictures.weights(attention_weights(x, x, masks.causal()), ["I", "am", "here"])
        >>> [panel.get_title() for panel in figure.axes[:2]]
        ['head 0', 'head 1']
    """
    x = _numbers("pictures.weights", "weights", weights, ("N", "T", "S"), fewer=1)
    heads = x.reshape(-1, *x.shape[-2:])
    N, T, S = heads.shape
    if key_tokens is None and T == S:
        key_tokens = tokens
    labels = _labels("tokens", tokens, "T", T), _labels("key_tokens", key_tokens, "S", S)

    columns = min(N, 4)
    rows = -(-N // columns)
    width, height = _sides(T, S, 5 if N == 1 else 3)
    figure, panels = _figure((columns * (width + 0.1) + 1.8, rows * (height + 0.3) + 0.9), rows, columns)
    for axes in panels[N:]:
        axes.remove()
    for n, axes in enumerate(panels[:N]):
        colours = _heat(axes, heads[n], heads)
        axes.images[0].get_array()[heads[n] == 0] = 0
        _ticks(axes, *labels, width, height)
        axes.set(title=f"head {n}" if x.ndim == 3 else None, xlabel="key", ylabel="query")
        axes.label_outer()
    _bar(figure, colours, panels[:N], "weight")
    return _laid_out(figure)


@_styled
def mask(mask, T=None, S=None):
    """A mask: blue where a query may attend to a key, blank where it may not.

    Args:
        mask: a rule from `jattn.masks`, or bool (T, S).
        T: how many queries are shown, from position 0 on. None: all of an array, some of a rule.
        S: how many keys, likewise.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: arrays in the mask are led by batch or head axes, or have other sizes.
        TypeError: no mask, or a traced one.
        ImportError: matplotlib is not installed.

    Example:
        >>> pictures.mask(masks.causal(), 4, 6).axes[0].get_title()
        'causal(offset=0)'
    """
    rule = mask
    if not isinstance(mask, masks.Mask):
        x = _checks.boolean("pictures.mask", "mask", mask, masks.NOT_BOOLEAN)
        _checks.rank("pictures.mask", "mask", x, ("T", "S"))
        rule, T, S = masks.array(x), T or x.shape[0], S or x.shape[1]
    if not _checks.known(rule):
        raise TypeError("pictures.mask: mask must be known, got a traced one. Draw it outside jit.")
    T, S = (rule._interesting(axis) if n is None else n for axis, n in (("T", T), ("S", S)))
    _checks.size("pictures.mask", "T", T, at_least=1)
    _checks.size("pictures.mask", "S", S, at_least=1)
    visible = np.asarray(rule.dense(T, S))

    width, height = _sides(T, S, 4)
    figure, (axes,) = _figure((width + 1, height + 0.9))
    axes.imshow(_colour(BLUE, visible), interpolation="nearest")
    _ticks(axes, map(str, range(T)), map(str, range(S)), width, height)
    if max(T, S) <= 40:
        axes.set_xticks(np.arange(S + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(T + 1) - 0.5, minor=True)
        axes.grid(which="minor", color=GREY, alpha=0.4, linewidth=0.5)
        axes.tick_params(which="minor", length=0)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(repr(rule) if rule is mask else "", wrap=True, parse_math=False)
    return _laid_out(figure)


@_styled
def entropy(entropies):
    """The entropy of each head of each layer: how widely it looks. NaN is orange.

    Args:
        entropies: (L, N), nats, e.g. the mean over queries of `Stats.entropy` of L layers.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: another shape.
        TypeError: no array of numbers, or a traced one.
        ImportError: matplotlib is not installed.

    Example:
        >>> figure = pictures.entropy(jnp.array([[0.0, 1.5], [0.7, 2.0]]))
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0.00', '1.50', '0.70', '2.00']
    """
    x = _numbers("pictures.entropy", "entropies", entropies, ("L", "N"))
    L, N = x.shape
    figure, (axes,) = _figure((0.5 * N + 1.8, 0.35 * L + 0.9))
    colours = _heat(axes, x, x)
    _ticks(axes, map(str, range(L)), map(str, range(N)), 0.5 * N, 0.35 * L)
    axes.set(xlabel="head", ylabel="layer", aspect="auto")
    for (i, n), nats in np.ndenumerate(x):
        # Black on light colours, white on dark ones.
        ink = "white" if nats <= np.max(colours.get_clim()) / 2 else "black"
        axes.text(n, i, f"{nats:.2f}", color=ink, ha="center", va="center", fontsize=8)
    _bar(figure, colours, [axes], "entropy, nats")
    return _laid_out(figure)


@_styled
def curves(lines, *, names=None, dashed="", axis="T = S"):
    """Measurements as sequences, or something else, grow, both axes logarithmic: a panel each for time, memory, ...

    Args:
        lines: {title of a panel: {name: [(T, number), ...]}}. A name may be a pair (name, bool): where True, the line
            is dashed, in the colour of its name.
        names: all names, in the order in which they take colours, that of `lines` if None. With it, a name keeps its
            colour where another one is missing.
        dashed: what dashed lines are, said in the legend.
        axis: what T is, said below each panel.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ValueError: there is no panel, or there are more names than colours.
        TypeError: points that are no pairs of numbers.
        ImportError: matplotlib is not installed.

    Example:
        >>> dense, blockwise = [(512, 4.0), (1024, 16.0)], [(512, 2.0), (1024, 4.0)]
        >>> figure = pictures.curves({"megabytes": {"dense": dense, "blockwise": blockwise}})
        >>> [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
        ['dense', 'blockwise']
    """
    pairs = {
        title: [(*(name if isinstance(name, tuple) else (name, False)), points) for name, points in of.items()]
        for title, of in lines.items()
    }
    found = dict.fromkeys(name for of in pairs.values() for name, _, _ in of)
    order = list(names or found)
    _checks.size("pictures.curves", "the number of panels in lines", len(lines), at_least=1)
    if not found.keys() <= set(order[: len(LOOKS)]):
        must = f"at most {len(LOOKS)}, all of {list(found)} among them"
        raise ValueError(f"pictures.curves: names must be {must}, got {order}.")

    figure, panels = _figure((1 + 4 * len(lines), 4), 1, len(lines))
    for axes, (title, of) in zip(panels, pairs.items(), strict=True):
        ticks = set()
        for name, is_dashed, points in of:
            x = _numbers("pictures.curves", f"lines[{title!r}][{name!r}]", points, ("points", "(T, number)"))
            _checks.shape("pictures.curves", f"lines[{title!r}][{name!r}]", x, ("points", "2"), {"2": 2})
            colour, marker = LOOKS[order.index(name)]
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1.2}
            axes.plot(*x.T, "--" if is_dashed else "-", label="" if is_dashed else name, **style)
            ticks |= set(x[:, 0])
        axes.set(xscale="log", yscale="log", xlabel=axis, title=title)
        labels = [f"{T:g}" for T in sorted(ticks)]
        axes.set_xticks(sorted(ticks), labels)
        # Numbers stand upright where there is no room for them beside each other.
        steps = np.diff(np.log(sorted(ticks)))
        closest = 3.5 * np.min(steps / np.sum(steps), initial=1)
        axes.tick_params("x", rotation=90 if closest < 0.08 * max(map(len, labels)) else 0)
        axes.set_xticks([], minor=True)
        axes.tick_params(which="both", colors=GREY)
        axes.grid(color=GREY, alpha=0.25, linewidth=0.5)
        # Many names leave less room for lines.
        size = "small" if len(found) > 4 else "medium"
        title = f"dashed: {dashed}" if dashed else None
        axes.legend(frameon=False, title=title, fontsize=size, title_fontsize=size)
    return _laid_out(figure)


def _numbers(who, what, x, axes, fewer=0):
    """`x` as a float64 array with these axes, or without the first `fewer` of them."""
    x = _checks.array(who, what, x)
    if not _checks.known(x):
        raise TypeError(f"{who}: {what} must be known, got a traced array. Draw it outside jit.")
    x = _checks.number(who, what, x)
    _checks.rank(who, what, x, axes[fewer:] if np.ndim(x) == len(axes) - fewer else axes)
    if 0 in x.shape:
        raise ValueError(f"{who}: {what} must not be empty, got {_checks.tupled(x.shape)}.")
    return np.asarray(x, np.float64)


def _labels(what, tokens, axis, size):
    if tokens is None:
        return [str(i) for i in range(size)]
    return [str(token).replace("\n", "\\n") for token in _checks.tokens("pictures.weights", what, tokens, axis, size)]


@functools.cache
def _figure_class():
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that shows itself in a notebook, without pyplot, and is saved the same each time."""

        @_styled
        def savefig(self, fname, **options):
            if str(options.get("format") or fname).endswith("svg"):
                options["metadata"] = {"Date": None} | options.get("metadata", {})
            super().savefig(fname, **options)

        def _repr_png_(self):
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=160, metadata={"Software": None})
            width, height = self.get_size_inches()
            # Twice as many dots as it is shown with: there are screens that have them.
            return file.getvalue(), {"width": round(80 * width), "height": round(80 * height)}

    return Picture


def _figure(size, rows=1, columns=1):
    """A figure of `size` inches, and its panels."""
    figure = _figure_class()(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _laid_out(figure):
    # Once: a second layout, which starts from the first, would be a little different.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def _colour(colour, visible):
    """`colour` where `visible`, nothing elsewhere: red, green, blue and opacity."""
    from matplotlib.colors import to_rgba

    return np.where(visible[..., None], to_rgba(colour), 0.0)


def _heat(axes, x, every):
    """Draws the numbers `x` in colours from 0 to the largest of `every`, and returns what made colours of them."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(0, np.max(every, initial=0, where=np.isfinite(every)) or 1), "cividis")
    axes.imshow(np.where(np.isfinite(x)[..., None], colours.to_rgba(x), _colour(ORANGE, x != 0)))
    return colours


def _bar(figure, colours, panels, label):
    bar = figure.colorbar(colours, ax=panels, label=label, shrink=0.8)
    bar.outline.set_visible(False)


def _sides(T, S, most):
    """Width and height, in inches, of a panel of T x S cells, `most` at the most."""
    longest = min(max(LINE * max(T, S), 1.6), most)
    return tuple(max(longest * n / max(T, S), 0.2) for n in (S, T))


def _ticks(axes, rows, columns, width, height):
    """Labels both axes, as many labels as fit in the width and height, in inches."""
    for axis, labels, inches in ((axes.yaxis, list(rows), height), (axes.xaxis, list(columns), width)):
        step = max(1, math.ceil(len(labels) * LINE / inches - 1e-6))
        axis.set_ticks(range(0, len(labels), step), labels[::step], parse_math=False)
    # Numbers stand upright where there is room for them.
    longest = max(len(label.get_text()) for label in axes.get_xticklabels())
    axes.tick_params("x", rotation=90 if longest * 0.08 * len(axes.get_xticks()) > width else 0)
