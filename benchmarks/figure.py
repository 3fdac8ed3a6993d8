"""The figure of the README: peak memory of one training step, by method, from committed pages of results.

python benchmarks/figure.py    draws docs/peak-memory.svg from benchmarks/results/t8192.md, t8192-plans.md

Peaks do not depend on the processor, so a later page takes the place of an earlier one, method by method.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = tuple(ROOT / "benchmarks" / "results" / name for name in ("t8192.md", "t8192-plans.md"))
FIGURE = ROOT / "docs" / "peak-memory.svg"
TITLE = "Peak memory of one training step above weights and gradients, MiB"
NAMES, WIDTH, BAR, GAP, TOP = 300, 840, 22, 10, 48  # pixels: column of names, all, a bar, between bars, title
OURS, OTHERS = "#1a7f4b", "#9aa5b1"


def peaks(page: str) -> dict[str, float]:
    """Method and MiB of every row of a page of results."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    return {row[0]: float(row[1]) for row in rows if len(row) > 2 and row[1].replace(".", "").isdigit()}


def drawn(pages: Sequence[str]) -> str:
    """An SVG of horizontal bars, the longest first."""
    found: dict[str, float] = {}
    for page in pages:
        found.update(peaks(page))
    rows = sorted(found.items(), key=lambda row: -row[1])
    room, height = WIDTH - NAMES - 70, TOP + len(rows) * (BAR + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="14">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="26" font-size="16">{TITLE}</text>',
    ]
    for i, (name, mib) in enumerate(rows):
        top, length = TOP + i * (BAR + GAP), max(1, round(room * mib / rows[0][1]))
        color, weight = (OURS, "bold") if name == "streambp" else (OTHERS, "normal")
        lines += [
            f'<text x="{NAMES - 10}" y="{top + 16}" text-anchor="end" font-weight="{weight}">'
            f"{escape(name)}</text>",
            f'<rect x="{NAMES}" y="{top}" width="{length}" height="{BAR}" fill="{color}"/>',
            f'<text x="{NAMES + length + 6}" y="{top + 16}" font-weight="{weight}">{mib:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    FIGURE.write_text(drawn([page.read_text(encoding="utf-8") for page in RESULTS]), encoding="utf-8")
    print(FIGURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
