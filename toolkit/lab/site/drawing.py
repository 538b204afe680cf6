"""A matplotlib renderer that returns SVG elements per artist.

Matplotlib's own SVG is one file per figure. Separate elements let a thousand pictures of one panel
share their common parts.
"""

import base64
import html
import io
import math
import re
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.path import Path
from matplotlib.transforms import Affine2D, Bbox
from PIL import Image

from toolkit.lab.kit.panel import PIXELS_PER_INCH_ON_PAGE

_COMMANDS = {
    Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C", Path.CLOSEPOLY: "Z"
}  # fmt: skip
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}
_CAPS = {"round": "round", "projecting": "square"}
_HATCH_TILE = PIXELS_PER_INCH_ON_PAGE  # an inch, as on the panel


class ElementRenderer(RendererBase):
    """Writes SVG elements; one unit is a pixel on the page, and tenths of it are kept.

    Attributes:
        elements: elements drawn since this list was last cleared.
        patterns: the hatches used so far, id -> `<pattern>`.
    """

    def __init__(self, figure: Figure) -> None:
        super().__init__()
        canvas = figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        # Words are laid out as on the panel.
        self._measure, self._dpi = canvas.get_renderer(), figure.dpi
        self._sizes: dict[Any, tuple[float, float, float]] = {}
        self._width, self._height = figure.bbox.size
        self._scale = PIXELS_PER_INCH_ON_PAGE / figure.dpi
        self._to_page = Affine2D().scale(self._scale, -self._scale)
        self._to_page.translate(0, self._height * self._scale)
        self.elements: list[str] = []
        self.patterns: dict[str, str] = {}
        for axes in figure.axes:
            for image in axes.images:
                cast(AxesImage, image).set_interpolation("none")  # its cells as they are

    def draw(self, artists: Iterable[Artist]) -> list[str]:
        """The elements of some artists, in this order."""
        self.elements = []
        for artist in artists:
            artist.draw(self)
        return self.elements

    # What matplotlib calls, by its names.

    def draw_path(
        self, gc: GraphicsContextBase, path: Path, transform: Any, rgbFace: Any = None
    ) -> None:
        path, clip = path.transformed(transform), gc.get_clip_rectangle()
        is_filled = rgbFace is not None or gc.get_hatch() is not None
        # Lines are cut while they are written, which matplotlib does for no area.
        if outline := self._outline(path, None if is_filled or clip is None else clip.extents):
            element = f'<path d="{outline}"{self._paint(gc, rgbFace)}/>'
            if is_filled and clip is not None:
                seen = Bbox.intersection(path.get_extents(), clip.padded(1))
                if seen is None:
                    return
                if not np.allclose(seen.extents, path.get_extents().extents):
                    element = self._cut(element, clip.extents)
            self.elements.append(element)

    def draw_markers(
        self, gc: GraphicsContextBase, marker_path: Path, marker_trans: Any, path: Path,
        trans: Any, rgbFace: Any = None,
    ) -> None:  # fmt: skip
        clip, parts = gc.get_clip_rectangle(), []
        for x, y in np.asarray(path.transformed(trans).vertices):
            if math.isfinite(x + y) and (clip is None or clip.padded(1).contains(x, y)):
                placed = marker_path.transformed(marker_trans + Affine2D().translate(x, y))
                parts.append(self._outline(placed, None))
        if parts:
            self.elements.append(f'<path d="{"".join(parts)}"{self._paint(gc, rgbFace)}/>')

    def draw_image(
        self, gc: GraphicsContextBase, x: float, y: float, im: Any, transform: Any = None
    ) -> None:
        pixels = np.asarray(im)
        rows, columns = pixels.shape[:2]
        unit = transform or Affine2D().scale(columns, rows)
        corners = (unit + Affine2D().translate(x, y)).transform([(0, 0), (1, 1)])
        if (clip := gc.get_clip_rectangle()) is not None:
            # Whole cells: those whose middle is seen.
            seen = [
                _middles_within(corners[:, axis], count, clip.extents[axis::2])
                for axis, count in ((1, rows), (0, columns))
            ]
            if not all(cut.stop > cut.start for cut in seen):
                return
            pixels = pixels[seen[0], seen[1]]
            size = np.array([columns, rows])
            ends = np.array([[c.start, c.stop] for c in (seen[1], seen[0])]).T / size
            corners = corners[0] + ends * (corners[1] - corners[0])
        (left, top), (right, bottom) = self._to_page.transform(corners)
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels)).save(file, format="png", optimize=True)
        source = base64.b64encode(file.getvalue()).decode()
        wide, high = (right - left) / pixels.shape[1], (bottom - top) / pixels.shape[0]
        self.elements.append(
            f'<image width="{pixels.shape[1]}" height="{pixels.shape[0]}" '
            f'transform="matrix({wide:.4g} 0 0 {high:.4g} {left:.1f} {top:.1f})" '
            f'preserveAspectRatio="none" href="data:image/png;base64,{source}"/>'
        )

    def draw_text(
        self, gc: GraphicsContextBase, x: float, y: float, s: str, prop: Any, angle: float,
        ismath: Any = False, mtext: Any = None,
    ) -> None:  # fmt: skip
        if ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        if (clip := gc.get_clip_rectangle()) is not None and not clip.padded(2).contains(x, y):
            return
        # Held where the panel holds it, so that a browser's narrower letters stay in place.
        anchor = "left"
        if mtext is not None:
            turned = angle and mtext.get_rotation_mode() != "anchor"
            anchor = "center" if turned else mtext.get_horizontalalignment()
        width = self.get_text_width_height_descent(s, prop, ismath)[0]
        along = {"left": 0, "center": 0.5, "right": 1}[anchor] * width
        # `draw_text` counts y from the top.
        x += along * math.cos(math.radians(angle))
        y -= along * math.sin(math.radians(angle))
        x, y = x * self._scale, y * self._scale
        size = prop.get_size_in_points() * PIXELS_PER_INCH_ON_PAGE / 72
        colour = to_hex(gc.get_rgb())
        look = f' fill="{colour}" font-size="{_tenths(size)}"'
        look += f' text-anchor="{_ANCHORS[anchor]}"' if anchor != "left" else ""
        look += ' font-weight="bold"' if prop.get_weight() == "bold" else ""
        look += ' font-style="italic"' if prop.get_style() == "italic" else ""
        look += f' opacity="{gc.get_alpha():.2g}"' if gc.get_alpha() not in (None, 1) else ""
        place = f'x="{_tenths(x)}" y="{_tenths(y)}"'
        if angle:
            look += f' transform="rotate({-angle:g} {_tenths(x)} {_tenths(y)})"'
        # A browser keeps no run of spaces, and some words are moved by one.
        words = re.sub("^ +| {2,}", lambda run: "\N{NO-BREAK SPACE}" * len(run[0]), s)
        self.elements.append(f"<text {place}{look}>{html.escape(words)}</text>")

    def get_text_width_height_descent(
        self, s: str, prop: Any, ismath: Any
    ) -> tuple[float, float, float]:
        key = s, prop.get_size_in_points(), prop.get_weight(), prop.get_style(), ismath
        if key not in self._sizes:
            self._sizes[key] = self._measure.get_text_width_height_descent(s, prop, ismath)
        return self._sizes[key]

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self._width, self._height

    def points_to_pixels(self, points: Any) -> Any:
        return points * self._dpi / 72

    def flipy(self) -> bool:
        return True

    def option_scale_image(self) -> bool:
        return True

    def option_image_nocomposite(self) -> bool:
        return True

    # How it is written.

    def _cut(self, element: str, clip: Any) -> str:
        """An area within a window of its own, which shows nothing beyond its edges."""
        left, top, right, bottom = self._on_page(clip)
        top, bottom = sorted((top, bottom))
        box = f"{_tenths(left)} {_tenths(top)} {_tenths(right - left)} {_tenths(bottom - top)}"
        x, y, width, height = box.split()
        return (
            f'<svg x="{x}" y="{y}" width="{width}" height="{height}" viewBox="{box}">'
            f"{element}</svg>"
        )

    def _outline(self, path: Path, clip: Any) -> str:
        """The `d` of a path: whole tenths of a pixel."""
        parts = []
        segments = path.iter_segments(self._to_page, remove_nans=True, clip=self._on_page(clip))
        for points, code in segments:
            words = "" if code == Path.CLOSEPOLY else " ".join(map(_tenths, points))
            parts.append(f"{_COMMANDS[code]}{words}")  # pyright: ignore[reportArgumentType]
        return "".join(parts)

    def _on_page(self, clip: Any) -> Any:
        if clip is None:
            return None
        (left, bottom), (right, top) = self._to_page.transform(np.reshape(clip, (2, 2)))
        return left, top, right, bottom

    def _paint(self, gc: GraphicsContextBase, face: Any) -> str:
        """Fill and stroke, as attributes."""
        alpha, is_forced = gc.get_alpha(), gc.get_forced_alpha()
        look = f' opacity="{alpha:.3g}"' if is_forced and alpha != 1 else ""
        if gc.get_hatch() is not None:
            look += f' fill="url(#{self._pattern(gc, face)})"'
        else:
            look += ' fill="none"' if face is None else f' fill="{to_hex(face)}"'
            if face is not None and len(face) == 4 and face[3] != 1 and not is_forced:
                look += f' fill-opacity="{face[3]:.3g}"'
        width = self.points_to_pixels(gc.get_linewidth()) * self._scale
        colour = gc.get_rgb()
        if width and colour[3]:
            look += f' stroke="{to_hex(colour)}" stroke-width="{_tenths(width)}"'
            if colour[3] != 1 and not is_forced:
                look += f' stroke-opacity="{colour[3]:.3g}"'
            if (cap := gc.get_capstyle()) in _CAPS:
                look += f' stroke-linecap="{_CAPS[cap]}"'
            offset, dashes = gc.get_dashes()
            if dashes is not None:
                in_pixels = self.points_to_pixels(1) * self._scale
                lengths = " ".join(map(_tenths, np.asarray(dashes) * in_pixels))
                look += f' stroke-dasharray="{lengths}"'
                look += f' stroke-dashoffset="{_tenths(offset * in_pixels)}"' if offset else ""
        elif face is not None and gc.get_snap() is not False:
            look += ' shape-rendering="crispEdges"'  # no seams between the cells of a scale
        return look

    def _pattern(self, gc: GraphicsContextBase, face: Any) -> str:
        """The id of a hatch, which says how it looks, so that two panels can share it."""
        under = "none" if face is None or (len(face) == 4 and not face[3]) else to_hex(face)
        ink, hatch = to_hex(gc.get_hatch_color()), gc.get_hatch()
        name = "hatch-" + "-".join(f"{ord(c):x}" for c in str(hatch)) + f"-{under}-{ink}"
        name = name.replace("#", "")
        if name not in self.patterns:
            tile = Affine2D().scale(_HATCH_TILE, -_HATCH_TILE).translate(0, _HATCH_TILE)
            lines = []
            for points, code in gc.get_hatch_path().iter_segments(tile, simplify=False):
                words = "" if code == Path.CLOSEPOLY else " ".join(map(_tenths, points))
                lines.append(f"{_COMMANDS[code]}{words}")  # pyright: ignore[reportArgumentType]
            square = f'width="{_HATCH_TILE}" height="{_HATCH_TILE}"'
            width = _tenths(gc.get_hatch_linewidth() * PIXELS_PER_INCH_ON_PAGE / 72)
            self.patterns[name] = (
                f'<pattern id="{name}" patternUnits="userSpaceOnUse" {square}>'
                f'<rect {square} fill="{under}"/>'
                f'<path d="{"".join(lines)}" fill="{ink}" stroke="{ink}" '
                f'stroke-width="{width}"/></pattern>'
            )
        return name


def _tenths(value: float) -> str:
    """A length in as few letters as tenths of a pixel take."""
    text = f"{value:.1f}"
    return text.removesuffix(".0") if text != "-0.0" else "0"


def _middles_within(ends: np.ndarray, count: int, limits: Iterable[float]) -> slice:
    """Which of `count` equal cells between two ends have their middle within the limits."""
    middles = ends[0] + (np.arange(count) + 0.5) / count * (ends[1] - ends[0])
    low, high = limits
    (seen,) = np.nonzero((middles > low) & (middles < high))
    return slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)
