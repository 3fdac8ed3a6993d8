"""Every message that a user can meet is plain, short, and explained in docs/troubleshooting.md.

The messages are read from the source, so that a new one is held without being listed here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = {
    "PlansDiffer",
    "ValueError",
    "RuntimeError",
    "TypeError",
    "NotStreamed",
    "OverBudget",
}  # others are defects of this package
TELLING = {"warn", "hint", "tell", "assert_on_device"}
PICKING = {"next"}  # functions whose arguments are looked into
PASSED_ON = {"reason"}  # an argument of `refuse` itself
LONGEST = 200  # characters of one sentence
PRIVATE = re.compile(
    r"\b(spread|gauge|bands?|settle[ds]?|fed|feeds?|heavy|light|noted|remade|rehears\w+|distilled|deferred|"
    r"unfit|made of|what has none|nobody|hands? on|its products|given up|made again)\b"
)
# A capital, or the name of an option.
STARTS = re.compile(r"[A-Z…]|\w+(_\w+|=)|strict |mode |offload |lossy |cache ")


@dataclass(frozen=True)
class Message:
    """A text of the source; ``…`` stands for what is filled in at run time.

    remedies  of a refusal: what a user is told to do. None of other messages, which hold it in their text
    """

    where: str
    text: str
    remedies: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        """Its first sentence."""
        return sentences(self.text.removeprefix("streambp: ").removeprefix("note: "))[0]


def sentences(text: str) -> list[str]:
    return [s.rstrip(".") for s in re.split(r"(?<=[.?])\s+(?=[A-Z…])", text.strip())]


def literal(node: ast.AST) -> str | None:
    """A string in the source, with ``…`` for each value in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return re.sub(
            "…+", "…", "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
        )
    return None


class Source:
    """One module, and where the texts come from that its calls are given."""

    def __init__(self, path: Path, text: str):
        self.path, self.tree = path, ast.parse(text)
        self.values: dict[str, list[ast.AST]] = {}
        self.returned: dict[str, list[ast.AST]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self.values.setdefault(name_of(target), []).append(node.value)
            elif isinstance(node, ast.FunctionDef):
                found = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
                self.returned[node.name] = found

    def texts(self, node: ast.AST, seen: frozenset[str] = frozenset()) -> Iterator[str]:
        """All texts that an expression may be."""
        text = literal(node)
        if text is not None:
            if " " in text:
                yield text
            return
        called = isinstance(node, ast.Call)
        name = name_of(node.func if called else node)
        known = {} if not name or name in seen else self.returned if called else self.everywhere
        behind = known.get(name, ())
        inside = () if called and name not in PICKING else ast.iter_child_nodes(node)
        for child in behind or inside:
            yield from self.texts(child, seen | {name} if behind else seen)

    @functools.cached_property
    def everywhere(self) -> dict[str, list[ast.AST]]:
        """Names of this module; and what any module puts into a mapping (``self.lost[node] = …``)."""
        found = dict(self.values)
        for source in sources():
            for name, values in source.values.items():
                if name.endswith("[]"):
                    found.setdefault(name, []).extend(values)
        return found

    def messages(self) -> Iterator[Message]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self.of_call(node)
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if name_of(node.exc.func) in ERRORS and node.exc.args:
                    yield from self.plain(node, node.exc.args[0])

    def of_call(self, call: ast.Call) -> Iterator[Message]:
        name, args = name_of(call.func), [*call.args, *(k.value for k in call.keywords)]
        if name == "Refusal" or name == "refuse" and len(args) == 3:
            if name == "Refusal" and name_of(args[1]) in PASSED_ON:
                return
            remedies = tuple(self.texts(args[2]))
            for reason in tuple(self.texts(args[1])) or ("",):
                yield Message(self.place(call), reason, remedies)
        elif name in TELLING and (name == "tell" or isinstance(call.func, ast.Attribute)):
            yield from self.plain(call, args[1 if name == "assert_on_device" else 0])
        elif name == "append" and name_of(call.func.value) == "notes":
            yield from self.plain(call, args[0])

    def plain(self, node: ast.AST, text: ast.AST) -> Iterator[Message]:
        if isinstance(text, ast.Call) and name_of(text.func) == "str":
            return  # a refusal's, collected where that is made
        for found in self.texts(text):
            if not found.startswith(("streambp: …", "streambp cannot stream a region: …", "note: …")):
                yield Message(self.place(node), found)

    def place(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{node.lineno}"


def name_of(node: ast.AST) -> str:
    """``x`` of ``x`` and of ``self.x``; ``x[]`` of ``self.x[…]``."""
    if isinstance(node, ast.Subscript):
        return f"{name_of(node.value)}[]" if isinstance(node.value, ast.Attribute) else ""
    return getattr(node, "attr", getattr(node, "id", ""))


@functools.cache
def sources() -> tuple[Source, ...]:
    files = [*(ROOT / "passes").rglob("*.py"), *(ROOT / "streambp_compile").rglob("*.py")]
    return tuple(
        Source(f, f.read_text(encoding="utf-8"))
        for f in sorted(files)
        if ROOT / "streambp_compile" / "passes" not in f.parents
    )


@functools.cache
def messages() -> tuple[Message, ...]:
    found = [m for source in sources() for m in source.messages()]
    return tuple({(m.text, m.remedies): m for m in found}.values())


def named(message: Message) -> str:
    return f"{message.where}: {message.title[:60]}"


@pytest.mark.parametrize("message", messages(), ids=named)
def test_a_message_is_plain(message):
    texts = (message.text, *(message.remedies or ()))
    for text in texts:
        assert STARTS.match(text.removeprefix("streambp: ").removeprefix("note: ")), text
        assert not PRIVATE.search(text), PRIVATE.search(text)
        assert all(len(sentence) <= LONGEST for sentence in sentences(text)), text
    if message.remedies is not None:
        assert message.text and message.remedies, "a refusal says why, and what to do"
        assert not any(text.endswith(".") for text in texts), "a refusal adds its own full stops"


def explained() -> dict[str, str]:
    """Titles of docs/troubleshooting.md, each with what stands below it; titles in a row share one text."""
    found: dict[str, str] = {}
    parts = re.split(r"^### (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    text = ""
    for title, below in reversed(list(zip(parts[::2], parts[1::2]))):
        text = below.split("\n## ")[0].strip() or text
        found[title.strip().strip("`")] = text
    return found


def test_the_page_explains_every_message_and_no_other():
    assert {m.title for m in messages()} == set(explained())


@pytest.mark.parametrize("title", sorted(explained()))
def test_an_explanation_says_what_to_do(title):
    explanation, _, remedy = explained()[title].partition("**What to do:**")
    assert len(explanation.split()) >= 8 and len(remedy.split()) >= 3


def test_texts_are_found_through_names_and_functions():
    source = Source(
        ROOT / "model.py",
        'WHY = ("a", "Too many tokens"), ("b", "Too few tokens")\n'
        "def reason(n):\n    return next(text for _, text in WHY)\n"
        "def check(node):\n    raise refuse(node, reason(1), f'Take {node} of them')\n",
    )
    assert [(m.text, m.remedies) for m in source.messages()] == [
        ("Too many tokens", ("Take … of them",)),
        ("Too few tokens", ("Take … of them",)),
    ]
