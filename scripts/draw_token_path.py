"""Draws docs/token_path.png: the path of one token from its projection to its page, at GLM-5's widths.

python scripts/draw_token_path.py
"""

import pathlib

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

import mla_jax as mla

OUT = pathlib.Path(__file__).parents[1] / "docs" / "token_path.png"
LATENT, ROPE, OTHER, INK = "#0072b2", "#e69f00", "#dddddd", "#222222"


def box(axes, x, y, width, height, text, colour, ink="white"):
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=INK, linewidth=0.8))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9, color=ink)


def arrow(axes, start, end, bend=0.0):
    axes.add_patch(
        FancyArrowPatch(start, end, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=1)
    )


def main() -> None:
    config = mla.CacheConfig(
        geometry=mla.GEOMETRIES["glm-5"], num_layers=1, num_pages=4, page_size=4, platform="gfx942", kv_cache_dtype="fp8_e4m3"
    )
    g, layout = config.geometry, config.layout
    figure, axes = plt.subplots(figsize=(9, 3.4), dpi=110)
    box(axes, 0, 1.6, 1.3, 0.8, "hidden\nstate", OTHER, INK)
    box(axes, 2, 2.2, 1.9, 0.7, f"latent c_kv\n{g.kv_lora_rank} numbers", LATENT)
    box(axes, 2, 1.1, 1.9, 0.7, f"rope key k_rope\n{g.qk_rope_head_dim} numbers", ROPE)
    arrow(axes, (1.3, 2.1), (2, 2.5))
    arrow(axes, (1.3, 1.9), (2, 1.45))
    axes.text(1.65, 2.95, "project, norm", ha="center", fontsize=8)
    axes.text(1.65, 0.8, "project, rotate", ha="center", fontsize=8)
    box(axes, 4.6, 1.55, 1.9, 0.9, f"{config.write_path.name}:\none kernel\nencodes, stores", OTHER, INK)
    arrow(axes, (3.9, 2.5), (4.6, 2.15))
    arrow(axes, (3.9, 1.45), (4.6, 1.85))
    columns, rows, slot = config.num_pages, config.page_size, 8
    for page in range(columns):
        for offset in range(rows):
            own = page * rows + offset == slot
            x, y = 7.1 + page * 0.95, 2.6 - offset * 0.42
            colour = OTHER if page == 0 else "white"
            if own:
                box(axes, x, y, 0.68, 0.38, "", LATENT)
                box(axes, x + 0.68, y, 0.17, 0.38, "", ROPE)
            else:
                box(axes, x, y, 0.85, 0.38, str(page * rows + offset), colour, INK)
        axes.text(7.1 + page * 0.95 + 0.42, 0.98, "null page" if page == 0 else f"page {page}", ha="center", fontsize=8)
    arrow(axes, (5.55, 2.45), (7.1 + 2 * 0.95 + 0.42, 2.98), bend=-0.3)
    middle = 7.1 + 0.5 * ((columns - 1) * 0.95 + 0.85)
    captions = (
        f"slot {slot} = page {slot // rows} x {rows} + offset {slot % rows} (here pages of {rows})",
        f"one row, {layout.row_bytes} bytes: {layout.kv_lora_rank} + {layout.qk_rope_head_dim} codes of {layout.dialect} (MI300)",
    )
    for line, caption in enumerate(captions):
        axes.text(middle, 0.48 - 0.36 * line, caption, ha="center", fontsize=9)
    axes.set(xlim=(-0.1, 11.1), ylim=(0.0, 3.75))
    axes.axis("off")
    figure.savefig(OUT, bbox_inches="tight", metadata={"Software": None})


if __name__ == "__main__":
    main()
