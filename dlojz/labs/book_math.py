"""Formulas of the labs as pictures that need no script and no network: TeX → SVG by matplotlib's mathtext.

Layer 6 (labs). Invariant: a formula keeps its TeX as the text that is read aloud and copied; one that mathtext does not
know is shown as its TeX, never left out.
"""

from __future__ import annotations

import hashlib
import io
import re
from functools import cache

from dlojz.viz.markup import safe

EM_POINTS = 11.0
"""Size at which a formula is drawn; the page scales it to its own text, as lengths are given in em."""
_SVG = re.compile(r"<svg\b.*</svg>", re.DOTALL)
_LIMIT = r"\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[a-zA-Z]+|[^\\{}\s])"
_PLAIN = (
    # What mathtext calls otherwise, or does not size.
    (re.compile(r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:displaystyle|textstyle|nolimits|limits)(?![a-zA-Z])"), ""),
    (re.compile(r"\\(?:lVert|rVert)(?![a-zA-Z])"), r"\\Vert"),
    (re.compile(r"\\(?:lvert|rvert)(?![a-zA-Z])"), r"|"),
    (re.compile(r"\\texttt(?=\{)"), r"\\mathtt"),
    (re.compile(r"\\operatorname\*?(?=\{)"), r"\\mathrm"),
    (re.compile(r"\\(?:le|leqslant)(?![a-zA-Z])"), r"\\leq"),
    (re.compile(r"\\(?:ge|geqslant)(?![a-zA-Z])"), r"\\geq"),
    # An operator right after another one: TeX parts their limits, mathtext sets them edge to edge.
    (re.compile(rf"(\\(?:sum|prod)(?:[_^]{_LIMIT})+)\s*(?=\\(?:sum|prod)(?![a-zA-Z]))"), r"\1\\;"),
)


def formula_html(tex: str, *, block: bool) -> str:
    """A formula as HTML: an inline SVG in the colour of the text, or its TeX where it cannot be drawn.

    Args:
        tex: Without its dollar signs.
        block: On a line of its own, with fractions at full size.
    """
    label = safe(" ".join(tex.split()))
    drawn = _drawn(tex.strip(), block)
    if drawn is None:
        shown = f'<code class="tex">{label}</code>'
    else:
        picture, width_em, height_em, depth_em = drawn
        opening = (
            f'<span class="math" role="img" aria-label="{label}" style="width:{width_em:.3f}em;'
            f'height:{height_em:.3f}em;vertical-align:{-depth_em:.3f}em">'
        )
        shown = "".join((opening, picture, "</span>"))
    return "".join(('<div class="formula">', shown, "</div>")) if block else shown


@cache
def _drawn(tex: str, block: bool) -> tuple[str, float, float, float] | None:
    """The SVG, its width, height and depth below the line of writing, in em; None where mathtext gives up."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import MathTextParser

    text = tex
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    if block:
        text = re.sub(r"\\frac(?![a-zA-Z])", r"\\dfrac", text)
    text = f"${' '.join(text.split())}$"
    font = FontProperties(size=EM_POINTS, math_fontfamily="dejavusans")
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "dlojz"}):
        try:
            width, height, depth, _, _ = MathTextParser("path").parse(text, dpi=72, prop=font)
        except (ValueError, RuntimeError):
            return None
        # A point of air all round, as glyphs may stand out of their boxes.
        width, height, depth = width + 2, height + 2, depth + 1
        figure = Figure(figsize=(width / 72, height / 72))
        figure.text(1 / width, depth / height, text, fontproperties=font)
        picture = io.StringIO()
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None})
    found = _SVG.search(picture.getvalue())
    if found is None:
        return None
    svg = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<!--.*?-->|\n\s*", " ", found[0], flags=re.DOTALL)
    return _own_names(svg, text + str(block)), width / EM_POINTS, height / EM_POINTS, depth / EM_POINTS


def _own_names(svg: str, text: str) -> str:
    """Ids that no other formula of the page has, and no size of its own: the page gives it."""
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{mark}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{mark}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{mark}-\1)", svg)
    return re.sub(
        r'(<svg\b[^>]*?)\s(?:width|height)="[^"]*"', r"\1", re.sub(r'(<svg\b[^>]*?)\swidth="[^"]*"', r"\1", svg)
    )
