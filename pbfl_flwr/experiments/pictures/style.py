"""Common style of all pictures: small, on white, colour-blind-safe."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from pbfl_flwr.errors import PbflError
from pbfl_flwr.experiments.results import RunGroup

INK, GRID, BLANK = "#1b1f24", "#c9ced6", "#f4f5f6"
# Okabe and Ito's palette without black and yellow, ordered so that successive colours differ clearly.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6f5f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)), (0, (8, 2)))
SEQUENTIAL, DIVERGING = "cividis", "PuOr"
WIDTH = 4.2  # inches: 403 CSS pixels, so that 9 points stay readable on a phone
MOST_TICKS = 12
LEGEND_CHARACTERS, HANDLE_CHARACTERS = 48, 5  # in a line of a legend, and those of them that a handle takes
# Inches: a legend up to the first takes its height from the axes; a higher one leaves them the height that they have
# above a legend of the second, which is one of three lines.
MOST_LEGEND, USUAL_LEGEND = 1.1, 0.55
T = TypeVar("T")

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
    "figure.facecolor": "white",
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.parse_math": False,  # "$" in names is literal
    "svg.fonttype": "none",  # text is written as text: accessible and searchable
    "svg.hashsalt": "pbfl",  # makes output reproducible
    "pdf.fonttype": 42,  # fonts embedded as text
}
# Of files, without the date and version that their writers add.
KINDS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 220, "metadata": {"Software": None}},
    "svg": {"metadata": {"Date": None, "Creator": None}},
    "pdf": {"metadata": {"CreationDate": None, "Creator": None, "Producer": None}},
}


@contextmanager
def styled() -> Iterator[None]:
    """Draw in this style, and without a warning for each character that the font lacks: it is drawn as a box."""
    with rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from (current )?font", UserWarning)
        yield


@dataclass(frozen=True, eq=False)
class Picture:
    """A finished drawing: file name without suffix, title, how to read it, and the figure."""

    name: str
    title: str
    caption: str
    figure: Figure


def of_each_run(
    draw: Callable[[RunGroup], Iterator[Picture]],
) -> Callable[[Sequence[RunGroup]], Iterator[Picture | PbflError]]:
    """Return the kind that draws every configuration's first run, or yields the reason why it cannot.

    Args:
        draw: yields the pictures of one run; the configuration's number is appended to their names.
    """

    @wraps(draw)
    def drawn(groups: Sequence[RunGroup]) -> Iterator[Picture | PbflError]:
        for number, group in enumerate(groups):
            try:
                for picture in draw(group):
                    yield replace(picture, name=f"{picture.name}-{number}")
            except PbflError as error:
                yield PbflError(f"{group.label}: {error}")

    return drawn


def of_available(
    groups: Sequence[RunGroup], read: Callable[[RunGroup], T]
) -> tuple[list[tuple[int, RunGroup, T]], list[PbflError]]:
    """Return what was read of the configurations that have it, and the reasons why the others do not.

    Each comes with its number among all, so that it looks alike in all pictures.
    """
    available, reasons = [], []
    for number, group in enumerate(groups):
        try:
            available.append((number, group, read(group)))
        except PbflError as error:
            reasons.append(PbflError(f"{group.label}: {error}"))
    return available, reasons


def canvas(height: float = 2.9, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of the common width with ``rows`` axes one below the other."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]


def heatmap_picture(
    name: str, title: str, caption: str, values: Any, *, height: float = 2.9, **properties: Any
) -> Picture:
    """Return the picture of one :func:`heatmap` with these properties; the other arguments are those of Picture."""
    figure, (axes,) = canvas(height)
    heatmap(axes, values, **properties)
    return titled_picture(name, title, caption, figure)


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
) -> None:
    """Draw a matrix (rows, columns) with a labelled colour bar; NaN cells are blank.

    ``rows`` and ``columns`` are their names, by default their numbers; ``limits`` the values at the ends of the colour
    map, None for the matrix's own.
    """
    axes.set_facecolor(BLANK)
    drawn = axes.imshow(
        values, aspect="auto", interpolation="none", cmap=colours, vmin=limits[0], vmax=limits[1]
    )
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    name_ticks(axes.xaxis, columns)
    name_ticks(axes.yaxis, rows)
    axes.tick_params(length=2)
    bar = axes.figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.02)
    bar.set_label(unit)
    bar.outline.set_linewidth(0.5)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()


def name_ticks(axis: Any, names: Sequence[str] | None) -> None:
    """Label an axis with names, at most MOST_TICKS of them, on the x axis rotated if long; None for numbers."""
    if names is None:
        axis.set_major_locator(MaxNLocator(8, integer=True))
        return
    step = -(-len(names) // MOST_TICKS)
    shown = [shortened(name) for name in names[::step]]
    rotated = axis.axis_name == "x" and max(map(len, shown)) > 3
    axis.set_ticks(range(0, len(names), step), shown, rotation=90 if rotated else 0)


def shortened(text: str) -> str:
    """Truncate text to 14 characters for labels."""
    return text if len(text) <= 14 else f"{text[:13]}…"


def legend_name(text: str) -> str:
    """Return a label that legends show: matplotlib leaves out those that begin with an underscore."""
    return f"\u200b{text}" if text.startswith("_") else text


def curve_axes(axes: Axes, xlabel: str, ylabel: str, *, whole: bool = False) -> None:
    """Set labels and a light grid on axes of curves; ``whole`` for whole numbers as x ticks."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=whole, min_n_ticks=1 if whole else 2))


def logarithmic(axis: Any) -> None:
    """Make an axis logarithmic, with ticks in decimal notation."""
    axis.axes.set_xscale("log") if axis.axis_name == "x" else axis.axes.set_yscale("log")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def curve_style(number: int) -> dict[str, Any]:
    """Return colour, marker and line style of a curve by its number, so that curves differ in more than colour.

    The first 49 differ in colour or marker, and in colour or line style; the first 343 in one of the three.
    """
    turn, colour = divmod(number, len(COLOURS))  # other combinations in every turn
    return {
        "color": COLOURS[colour],
        "marker": MARKERS[(colour + turn) % len(MARKERS)],
        "linestyle": DASHES[(colour + 3 * turn + turn // len(MARKERS)) % len(DASHES)],
    }


def curve(
    axes: Axes, xs: Sequence[float], ys: Any, label: str, number: int, band: Any = (), **line: Any
) -> None:
    """Draw a labelled curve with about ten markers, in the style of its number, from n xs and ys.

    ``band`` are its lower and upper edge, n values each; none if empty.
    """
    style = curve_style(number)
    axes.plot(xs, ys, label=legend_name(label), **{"markevery": max(1, len(xs) // 10), **style, **line})
    if band:
        axes.fill_between(xs, *band, color=style["color"], alpha=0.18, linewidth=0)


def legend_below(figure: Figure, axes: Axes, order: Sequence[str] = (), marker_scale: float = 1.0) -> None:
    """Put the legend below the figure, in as many columns as its labels allow, in drawing order by default.

    Long labels are wrapped, and the figure becomes higher for a high legend.
    """
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    if order:
        pairs = sorted(zip(labels, handles, strict=True), key=lambda pair: order.index(pair[0]))
        labels, handles = [label for label, _ in pairs], [handle for _, handle in pairs]
    longest = max(len(label) for label in labels) + HANDLE_CHARACTERS
    columns = max(1, min(4, len(labels), LEGEND_CHARACTERS // longest))
    legend = figure.legend(
        handles,
        ["\n".join(textwrap.wrap(label, LEGEND_CHARACTERS - HANDLE_CHARACTERS)) for label in labels],
        loc="outside lower center",
        ncols=columns,
        markerscale=marker_scale,
    )
    height = legend.get_window_extent().height / figure.dpi
    if height > MOST_LEGEND:
        figure.set_figheight(figure.get_figheight() + height - USUAL_LEGEND)


def titled_picture(name: str, title: str, caption: str, figure: Figure) -> Picture:
    """Return a picture with its wrapped title above it and its legend below it.

    The arguments are those of :class:`Picture`; a legend that it already has stays.
    """
    if not figure.legends:
        legend_below(figure, figure.axes[0])
    figure.suptitle("\n".join(textwrap.wrap(title, 52)), fontsize=RC["axes.titlesize"], color=INK)
    return Picture(name, title, caption, figure)


def file_of(picture: Picture, kind: str) -> bytes:
    """Return the picture as a file of one of KINDS."""
    data = io.BytesIO()
    with styled():
        picture.figure.savefig(data, format=kind, **KINDS[kind])
    return data.getvalue()
