"""Imports go one way: accessories → doorway → pipeline → passes → parts → rules → types → torch.fx. Read from
the source, so that nothing need be run."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*(ROOT / "streambp_compile").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])
PRIVATE = ("torch._dynamo", "torch._inductor", "torch._functorch")
# the table, and what it and the passes speak
SPOKEN = ("rules", "kernels", "mask_analysis", "phases")
PARTS = (
    "token_propagation",
    "alignment",
    "key_ranges",
    "linearity",
    "deferral",
    "moved_rows",
    "width",
    "zero_values",
)  # no passes, but parts of analyze, split and the pipeline


def module_of(path: Path) -> str:
    """``passes/rules/views.py`` → ``streambp_compile.passes.rules.views``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "streambp_compile" else ("streambp_compile", *parts))


def imports_of(path: Path) -> set[tuple[str, str | None]]:
    """Every import, at any depth: (module, name), relative ones resolved; ``import a.b`` has no name."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add((inner, None) if inner in MODULES else (source, alias.name))
    return found


MODULES = {module_of(p) for p in FILES}
IMPORTS = {module_of(p): imports_of(p) for p in FILES}
PASSES = {m for m in MODULES if m.startswith("streambp_compile.passes.") and m.count(".") == 2}
PASSES -= {f"streambp_compile.passes.{name}" for name in ("ir", *SPOKEN, *PARTS)}


DRIVERS = tuple(
    f"streambp_compile.{name}"
    for name in (
        "pipeline",
        "regions.joint_regions",
        "regions.region_programs",
        "regions.batch_analysis",
        "regions.batch_parts",
        "runtime.batch_turns",
        "runtime.memory_layouts",
        "runtime.rematerialisation",
        "runtime.runner",
        "runtime.places",
        "runtime.sizes",
    )
)


# What a user calls beside the backend: no compilation needs it. The report alone opens one, its page.
ACCESSORIES = ("doctor", "plan", "tools", "trainer")
OPENED = {("streambp_compile.reporting.report", "streambp_compile.tools.page.files")}


def floor(module: str) -> int:
    """0 types … 5 doorway, 6 accessories."""
    if not module.startswith("streambp_compile.passes"):
        accessory = (*module.split("."), "")[1] in ACCESSORIES
        return 6 if accessory else 4 if module in DRIVERS else 5
    name = (*module.split("."), "")[2]
    return 0 if name == "ir" else 1 if name in SPOKEN else 2 if name in PARTS else 3


def inside(module: str) -> list[tuple[str, str | None]]:
    return [(source, name) for source, name in IMPORTS[module] if source in MODULES]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_nothing_imports_upwards(module):
    above = {(module, source) for source, _ in inside(module) if floor(source) > floor(module)}
    assert above == {pair for pair in OPENED if pair[0] == module}


# Folders of dynamo/ that the families of rewrites share, and what else these know of the doorway.
SHARED = ("reading", "rows")
BENEATH = ("streambp_compile.internals", "streambp_compile.passes", "streambp_compile.runtime.sizes")


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("streambp_compile.dynamo.")))
def test_a_family_of_rewrites_imports_no_other(module):
    """``dynamo/rows/`` reads ``dynamo/reading/``, other folders read both, and none knows of regions."""
    folder = module.split(".")[2]
    known = SHARED[: SHARED.index(folder)] if folder in SHARED else SHARED
    homes = tuple(f"streambp_compile.dynamo.{name}" for name in (*known, folder))
    assert not [source for source, _ in inside(module) if not source.startswith((*homes, *BENEATH))]


@pytest.mark.parametrize("module", sorted(PASSES))
def test_a_pass_imports_no_other_pass(module):
    others = []
    for source, name in inside(module):
        if source in PASSES:
            others.append((source, name))
    assert not others


@pytest.mark.parametrize("module", sorted(m for m in MODULES if ".rules." in m))
def test_a_rule_family_imports_no_other(module):
    rules = "streambp_compile.passes.rules"
    shared = tuple(f"{rules}.{name}" for name in ("signatures", "facets", "mask_domain"))
    others = [s for s, _ in inside(module) if ".rules." in s and not s.startswith(shared)]
    assert not others


@pytest.mark.parametrize("module", sorted(m for m in MODULES if m.startswith("streambp_compile.passes")))
def test_passes_know_nothing_of_the_compiler(module):
    known = [s for s, n in IMPORTS[module] if f"{s}.{n}".startswith((*PRIVATE, "torch.compiler", "torch._"))]
    assert not known


@pytest.mark.parametrize("module", sorted(m for m in MODULES if not m.startswith("streambp_compile.passes")))
def test_private_torch_comes_in_by_one_door(module):
    private = sorted({s for s, n in IMPORTS[module] if f"{s}.{n}".startswith("torch._")})
    assert module.startswith("streambp_compile.internals") or not private


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_private_torch_is_not_reached_by_attribute_either(path):
    """``torch._dynamo.x`` without an import is the same door left open. ``torch._ops`` types and ``torch._C``
    switches are graph targets."""
    reached = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
            and node.attr.startswith("_")
        ):
            reached.add(f"torch.{node.attr}")
    assert path.parent.name == "internals" or not reached - {"torch._ops"}, sorted(reached)


LONGEST = 40  # lines of a function
DEEPEST = 4  # blocks within blocks
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)
SCOPES = (ast.FunctionDef, ast.ClassDef, ast.Lambda)


def depth(block: ast.AST) -> int:
    """Blocks within blocks; an ``elif`` is no deeper than its ``if``, and a function within is its own."""
    found = 0
    for child in ast.iter_child_nodes(block):
        if not isinstance(child, SCOPES):
            chained = isinstance(block, ast.If) and isinstance(child, ast.If) and block.orelse == [child]
            found = max(found, depth(child) + (isinstance(child, BLOCKS) and not chained))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_functions_are_short_and_flat(path):
    """Only a kernel for Triton may be long: it is one function to its compiler."""
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    functions = [f for f in functions if "triton.jit" not in map(ast.unparse, f.decorator_list)]
    assert not [f.name for f in functions if f.end_lineno - f.lineno + 1 > LONGEST]
    assert not [f.name for f in functions if depth(f) > DEEPEST]


def test_no_room_for_everything():
    """No ``utils``, ``helpers``, ``misc`` or ``info``: a name says what is inside."""
    assert not {m.rpartition(".")[2] for m in MODULES} & {"utils", "helpers", "misc", "info", "common"}


def test_a_class_has_one_home():
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: places for name, places in homes.items() if len(places) > 1}


HOLDERS = {"ContextVar", "Counter", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "defaultdict"}


def begins_empty(value: ast.expr | None) -> bool:
    """Is this a collection without entries, or another object that functions fill?"""
    if isinstance(value, ast.Call):
        called = ast.unparse(value.func).rpartition(".")[2]
        return called in HOLDERS or called in ("dict", "list", "set") and not value.args + value.keywords
    return isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value)[1:-1]


def state_of(path: Path) -> set[str]:
    """``{"chunk_bodies.COMPILED"}``: what a module, or a class of it, holds for its functions to change."""
    name, found = module_of(path).rpartition(".")[2], set()
    body = ast.parse(path.read_text()).body
    for owner, statements in [("", body), *((n.name, n.body) for n in body if isinstance(n, ast.ClassDef))]:
        for node in statements:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and begins_empty(node.value):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                found.add(f"{name}.{owner or ast.unparse(target)}")
    return found


def test_state_of_modules_is_on_the_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## State of modules")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+\.\w+)`", table)) - {"functools.cache"}
    found = set().union(*map(state_of, FILES))
    assert found == named - {"places.Watched"}  # whose observer begins as None
