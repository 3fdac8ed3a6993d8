"""One or two reports as an HTML page: one file that loads nothing.

Charts are drawn by uPlot (https://github.com/leeoniya/uPlot, MIT license), a copy of which is in ``vendor/``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PARTS = {  # a place in the template → the file that is put there
    "charts_style": "vendor/uPlot.min.css",
    "style": "page.css",
    "charts": "vendor/uPlot.iife.min.js",
    "script": "page.js",
}


def page_of(reports: Sequence[dict[str, Any]], names: Sequence[str], title: str) -> str:
    """Build the page of one report, or of two side by side.

    reports  results of `data_of`
    names    one for each, shown where there are two
    """
    page = text_of("page.html")
    for place, file in PARTS.items():
        page = page.replace(f"/*{{{place}}}*/", text_of(file))
    data = json.dumps({"title": title, "names": list(names), "reports": list(reports)}, separators=(",", ":"))
    return page.replace("/*{data}*/", data.replace("<", "\\u003c"))  # no text of a model may end the script


def text_of(file: str) -> str:
    return (HERE / file).read_text(encoding="utf-8")
