"""How all pictures look: small, transparent, safe for colour-blind eyes, readable in light and dark.

A picture is drawn once, in the colours of paper. In a page every one of these colours becomes a CSS variable, so that
the page's own style decides (:func:`inline_svg`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

INK, GRID, BLANK = "#1b1f24", "#c9ced6", "#f4f5f6"
# Okabe and Ito's colours without black and yellow, in an order that keeps neighbours apart.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6f5f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
SEQUENTIAL, DIVERGING = "cividis", "PuOr"
WIDTH = 4.2  # inches: 403 CSS pixels, so that 9 points stay readable on a phone
PNG_DPI = 220
MOST_TICKS = 12

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.7,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.parse_math": False,  # names are words, whatever signs they hold
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and measured
    "svg.hashsalt": "pbfl",  # the same picture, the same bytes
}


@dataclass(frozen=True, eq=False)
class Picture:
    """A finished drawing.

    Attributes:
        name: of its file, without suffix.
        title: what it shows, in a few words.
        caption: how to read it.
        alt: what is in it, for those who do not see it.
        figure: the drawing.
    """

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure


def canvas(height: float = 2.9, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of the common width with axes one below the other."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def heatmap(
    axes: Axes,
    values: Any,
    *,
    xlabel: str,
    ylabel: str,
    unit: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    limits: tuple[float | None, float | None] = (None, None),
    colours: str = SEQUENTIAL,
) -> ScalarMappable:
    """Draw a matrix (rows, columns) with a labelled colour bar; NaN stays blank.

    Args:
        axes: where.
        values: the matrix.
        xlabel: what the columns are.
        ylabel: what the rows are.
        unit: of the values.
        rows: names of the rows, by default their numbers.
        columns: likewise.
        limits: smallest and largest value of the colours.
        colours: the colour map.
    """
    axes.set_facecolor(BLANK)  # or else blank and dark cells look alike on a dark page
    drawn = axes.imshow(
        values, aspect="auto", interpolation="none", cmap=colours, vmin=limits[0], vmax=limits[1]
    )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    _names(axes.xaxis, columns, len(values[0]))
    _names(axes.yaxis, rows, len(values))
    axes.tick_params(length=2)
    bar = axes.figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label(unit)
    bar.outline.set_linewidth(0.5)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    return drawn


def _names(axis: Any, names: Sequence[str] | None, count: int) -> None:
    if names is None:
        axis.set_major_locator(MaxNLocator(8, integer=True))
        return
    step = -(-count // MOST_TICKS)
    axis.set_ticks(range(0, count, step), [shortened(str(name)) for name in names[::step]])


def class_axis(axes: Axes, names: Sequence[str]) -> None:
    """Set the names of classes on the x axis, upright where they would touch."""
    step = -(-len(names) // MOST_TICKS)
    shown = [shortened(name) for name in names[::step]]
    axes.set_xticks(range(0, len(names), step), shown, rotation=90 if max(map(len, shown)) > 3 else 0)


def shortened(text: str, longest: int = 14) -> str:
    """Return text that fits beside a picture."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def lines(axes: Axes, xlabel: str, ylabel: str, *, whole: bool = False) -> None:
    """Set labels and a quiet grid on axes of curves.

    Args:
        axes: where.
        xlabel: with unit.
        ylabel: with unit.
        whole: whether x counts something: then its ticks are whole numbers.
    """
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=whole, min_n_ticks=1 if whole else 2))


def logarithmic(axis: Any) -> None:
    """Make an axis logarithmic with plain numbers at its ticks."""
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def look(number: int) -> dict[str, Any]:
    """Return the colour, marker and dashes of the curve of that number: told apart by more than colour."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
    }


def marked(count: int) -> int:
    """Return the distance of markers on a curve of so many points: about ten of them."""
    return max(1, count // 10)


def key_below(figure: Figure, axes: Axes, order: Sequence[str] = (), marker_scale: float = 1.0) -> None:
    """Put the legend under the figure, as many columns as its words allow.

    Args:
        figure: where.
        axes: whose labelled drawings are explained.
        order: of the labels; empty is as drawn.
        marker_scale: of the markers in the legend.
    """
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    if order:
        pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: order.index(pair[0]))
        labels, handles = [label for label, _ in pairs], [handle for _, handle in pairs]
    columns = max(1, min(4, len(labels), 48 // (max(len(label) for label in labels) + 5)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, markerscale=marker_scale)


def finished(name: str, title: str, caption: str, alt: str, figure: Figure) -> Picture:
    """Return a picture with its title above it, in lines that fit its width; the arguments are those of Picture."""
    import textwrap

    figure.suptitle("\n".join(textwrap.wrap(title, 52)), fontsize=RC["axes.titlesize"], color=INK)
    return Picture(name, title, caption, alt, figure)


def svg(picture: Picture) -> str:
    """Return the picture as an SVG file."""
    text = io.StringIO()
    with rc_context(RC):
        picture.figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def png(picture: Picture) -> bytes:
    """Return the picture as a PNG file on white."""
    data = io.BytesIO()
    with rc_context(RC):
        picture.figure.savefig(
            data, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None}
        )
    return data.getvalue()


def inline_svg(picture: Picture) -> str:
    """Return the picture as an element for a page: its ids are its own, its colours are the page's variables.

    The text comes from matplotlib, which escapes what it writes.
    """
    text = svg(picture)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)  # it would speak for the whole page
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # nothing points to groups
    text = re.sub(r'\bid="', f'id="{picture.name}-', text)
    text = re.sub(r"url\(#", f"url(#{picture.name}-", text)
    text = re.sub(r'href="#', f'href="#{picture.name}-', text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    text = text.replace(BLANK, "var(--blank)")
    for number, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--c{number})")
    return text.replace("<svg ", '<svg role="img" aria-labelledby="' + picture.name + '-alt" ', 1).strip()
