"""A picture of a step's kernels, from a result of `profiles.step`: one layer, then the head.

The only file that needs matplotlib, which nothing else of Encore does.
"""

from pathlib import Path
from typing import Any

from profiles.op_table import ATTENTION, BASE, KINDS, LORA, OTHER, POINTWISE, SAMPLING
from profiles.timeline import own_us

COLOURS = {
    BASE: "#4c78a8",
    LORA: "#f58518",
    ATTENTION: "#54a24b",
    POINTWISE: "#b9a3cf",
    SAMPLING: "#e45756",
    OTHER: "#9d9d9d",
}
MEANINGS = {
    BASE: "base product: activations times the model's own weights",
    LORA: "LoRA: the adapters' products x Aᵀ and then Bᵀ, and what sorts rows",
    ATTENTION: "attention over the KV cache",
    POINTWISE: "pointwise: norms, rotary, activation, routing",
    SAMPLING: "sampling: the next token and its logprob",
    OTHER: "other",
}
BAR_HEIGHT, WAIT_HEIGHT = 0.62, 0.1
LETTER = 0.0068  # of the width of a lane: a letter of a box's label
COLUMNS = 4
LINE = 0.021  # of the height of the picture: a line of the list
LEFT, RIGHT = 0.075, 0.985
LANE_NAMES = ("main stream", "side branch")


def check_picture(path: Path) -> None:
    """Leave with a message where `path` cannot be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise SystemExit(
            "--picture needs matplotlib: pip install -e '.[plot]', or pip install matplotlib"
        ) from None
    known = FigureCanvasBase.get_supported_filetypes().keys() - {"pgf"}  # which needs TeX
    if path.suffix.removeprefix(".").lower() not in known:
        raise SystemExit(
            f"--picture {path}: accepted: a name that ends in {', '.join(sorted(known))}"
        )
    if path.is_dir():
        raise SystemExit(f"--picture {path}: a directory")
    if not path.parent.is_dir():
        raise SystemExit(f"--picture {path}: no such directory: {path.parent}")


def draw_step(result: dict[str, Any], path: Path) -> None:
    """Write the picture of one layer, head and sampling to `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(15, 9.5))
    FigureCanvasAgg(figure)
    layer, head = result["layer"], result["head"]
    _draw(
        figure,
        0.87,
        layer,
        f"One layer, number {layer['index'] + 1} of {result['layers']} that look alike: "
        f"{layer['us']:.1f} µs, {len(layer['kernels'])} kernels",
    )
    _draw(figure, 0.40, head, f"After the last layer, LM head and sampling: {head['us']:.1f} µs")
    shown = {row["kind"] for row in layer["kernels"] + head["kernels"]}
    figure.legend(
        handles=[
            Patch(color=COLOURS[kind], label=MEANINGS[kind]) for kind in KINDS if kind in shown
        ],
        loc="lower center",
        ncol=3,
        frameon=False,
    )
    figure.suptitle(
        f"One decode step of {result['model']}: {result['batch']} rows, adapters "
        f"“{result['adapters']}”, {result['ms_per_replay']:.2f} ms a CUDA-graph replay on "
        f"{result['hardware']}",
        x=0.02,
        ha="left",
        fontsize=14,
    )
    figure.text(
        0.02,
        0.915,
        "Each box is one GPU kernel, as long as it worked, numbered as in the list below it. A "
        "thin bar before a box: the kernel was\nthere already and waited for the one before. White "
        "between boxes: the stream stands still. TB/s is what a kernel of 1 MB or more moves, and "
        f"{result['read_bandwidth_tb_per_s']:.1f} is what the card reads at most.",
        fontsize=9.5,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    print(f"drawn: {path}")


def _draw(figure: Any, top: float, part: dict[str, Any], title: str) -> None:
    """The kernels of one part on their lanes, below `top`, and the list of them."""
    rows, length_us = part["kernels"], part["us"] or 1.0
    lanes = max((row["lane"] for row in rows), default=0) + 1
    height = 0.075 * lanes
    axes = figure.add_axes((LEFT, top - 0.03 - height, RIGHT - LEFT, height))
    axes.set_title(title, loc="left", fontsize=12)
    lines = -(-len(rows) // COLUMNS)
    under = top - 0.03 - height - 0.075
    for index, row in enumerate(rows):
        _draw_box(axes, index + 1, row, length_us)
        column, line = divmod(index, lines)
        figure.text(
            LEFT + column * (RIGHT - LEFT) / COLUMNS,
            under - line * LINE,
            f"{index + 1}  {label(row)}",
            fontsize=9,
        )
    axes.set_xlim(-0.004 * length_us, 1.004 * length_us)
    axes.set_ylim(-lanes + 0.5, 0.5)
    axes.set_yticks([-lane for lane in range(lanes)], [_lane_name(lane) for lane in range(lanes)])
    axes.set_xlabel("µs", labelpad=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_box(axes: Any, number: int, row: dict[str, Any], length_us: float) -> None:
    """A kernel's box, with its number and, where there is room, its name."""
    low, width = -row["lane"] - BAR_HEIGHT / 2, own_us(row) / length_us
    starts = row["start_us"] + row["us"] - own_us(row)
    axes.add_patch(_box(row, low, starts, own_us(row), BAR_HEIGHT))
    if starts > row["start_us"]:
        axes.add_patch(
            _box(row, low - WAIT_HEIGHT, row["start_us"], row["us"] - own_us(row), WAIT_HEIGHT)
        )
    text = f"{number}  {row['op']}"
    if len(text) * LETTER > width:
        text = str(number)
    inside = len(text) * LETTER <= width
    axes.text(
        starts + own_us(row) / 2,
        -row["lane"] if inside else low + BAR_HEIGHT + 0.02,
        text,
        ha="center",
        va="center" if inside else "bottom",
        color="white" if inside else "black",
        size=9 if inside else 7,
        clip_on=False,
    )


def _box(row: dict[str, Any], low: float, start_us: float, us: float, height: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(
        (start_us, low),
        us,
        height,
        facecolor=COLOURS[row["kind"]],
        edgecolor="white",
        linewidth=0.5,
    )


def label(row: dict[str, Any]) -> str:
    """ "gate, up: product, 57.1 µs, 4.1 TB/s"; the op's further kernels have no bytes."""
    name = row["op"] if row["op"] != "?" else row["kernel"]
    us, moved = own_us(row), row.get("megabytes")
    text = f"{name}, {us:.1f} µs"
    if moved is not None and moved >= 1 and us > 0:
        text += f", {moved / us:.1f} TB/s"
    return text


def _lane_name(lane: int) -> str:
    return LANE_NAMES[lane] if lane < len(LANE_NAMES) else f"side branch {lane}"
