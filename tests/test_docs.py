"""What the pages say of the repository is so: files that they name exist, links lead somewhere, printed text
is today's."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "streambp_compile|passes|tests|benchmarks|examples|docs"
FILE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w/?")
MADE = {"benchmarks/results/gpu", "docs/architecture"}  # written by a run, or the beginning of a name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    missing = [name for name in FILE.findall(text) if name not in MADE and not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["architecture.md", "dynamo-graph.md"])
def test_files_that_a_page_names_by_their_end_exist(page):
    """``loops/tiles.py``, ``tiles.py``: some file ends like that."""
    ends = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    files = [
        f"/{p.relative_to(ROOT)}"
        for root in ("streambp_compile", "passes")
        for p in (ROOT / root).rglob("*.py")
    ]
    files += [f"/{p.relative_to(ROOT)}" for p in (ROOT / "tests").glob("*.py")]
    assert ends and not [end for end in ends if not any(f.endswith(f"/{end}") for f in files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_of_a_page_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_is_linked_from_the_readme_or_another_page(page):
    others = "".join(p.read_text(encoding="utf-8") for p in PAGES if p != page)
    assert page.name == "README.md" or page.name in others


def test_the_printed_layer_is_todays(interpreted):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import one_layer
    finally:
        sys.path.pop(0)
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    texts = one_layer.sections()
    assert set(texts) == {name for _, name in re.findall(r"<!-- (one_layer): (\w+) -->", page)}
    assert one_layer.renewed(page, texts) == page, "python examples/one_layer.py --write docs/architecture.md"


def test_the_figure_is_of_the_committed_results():
    from benchmarks import figure

    assert figure.FIGURE.read_text(encoding="utf-8") == figure.drawn(
        [page.read_text(encoding="utf-8") for page in figure.RESULTS]
    )
