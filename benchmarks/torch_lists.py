"""Torch's own lists of optimizers, modules and operators through the backend, in float64, against eager.

    python -m benchmarks.torch_lists optim_db                  every optimizer, in all its configurations
    python -m benchmarks.torch_lists module_db op_db           modules and operators, forward and gradients
    python -m benchmarks.torch_lists op_db --only cumsum,add   some of them, anew
    python -m benchmarks.torch_lists --page                    write the page, run nothing

An entry has several cases: sample inputs, layouts, in-place variants, options. A case that eager cannot run,
or in which eager differs from itself, says nothing. Where values or gradients differ from eager's, or an
error is raised, stock Inductor runs the same case: what it does as well is not counted against this backend.
What is compiled runs node by node, which takes seconds where code generation takes minutes; ``--compiled``
compiles it. Inputs are small: a dimension of two entries may be tokens here, in chunks of two.

Answers are kept in ``out/torch-lists``, and a run goes on where the last one ended. The page is
``benchmarks/results/torch-lists.md``. The exit status is the number of cases that are wrong, or raise an
error where Inductor does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import processes
from benchmarks.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
KEPT, PAGE = ROOT / "out" / "torch-lists", ROOT / "benchmarks" / "results" / "torch-lists.md"
LISTS = ("optim_db", "module_db", "op_db")
RELATIVE, ABSOLUTE = 1e-7, 1e-9
SAMPLES = 3  # inputs of an operator
INPUTS = 6  # of a module
STEPS = 3  # of an optimizer
CHUNK = 2  # tokens

EQUAL, WRONG, CRASH = "equal", "wrong", "crash"
SAME = "as Inductor"  # which is wrong, or raises an error, too
CANNOT, RANDOM = "eager cannot", "eager differs from itself"
VERDICTS = (EQUAL, SAME, CANNOT, RANDOM, WRONG, CRASH)

Compile = Callable[[Callable], Callable]


def eager(function: Callable) -> Callable:
    return function


@dataclass(frozen=True)
class Case:
    """One program: a function of how to compile, which returns values to compare."""

    name: str
    values: Callable[[Compile], list[object]]


# Operators


def leaves_of(value: object) -> list:
    import torch
    from torch.utils._pytree import tree_leaves

    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor) and v.is_leaf and v.requires_grad]


def with_gradients(results: object, leaves: list) -> list[object]:
    """The results, and the gradients of a fixed weighted sum of them."""
    import torch
    from torch.utils._pytree import tree_leaves

    results = [v for v in tree_leaves(results) if isinstance(v, (torch.Tensor, bool, int, float, complex))]
    ends = [v for v in results if isinstance(v, torch.Tensor) and v.requires_grad]
    gradients = []
    if ends and leaves:
        weights = [torch.arange(v.numel()).cos().reshape(v.shape).to(v.dtype) for v in ends]
        gradients = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
    return [*(v.detach() if isinstance(v, torch.Tensor) else v for v in results), *gradients]


def transposed(value: object) -> object:
    """The same values with the last two dimensions of each matrix the other way round in memory."""
    import torch
    from torch.utils._pytree import tree_map

    def turn(v: object) -> object:
        if not isinstance(v, torch.Tensor) or v.dim() < 2 or v.layout is not torch.strided:
            return v
        turned = v.detach().mT.contiguous().mT
        return turned.requires_grad_(v.requires_grad)

    return tree_map(turn, value)


def operator_cases(op) -> Iterator[Case]:
    import torch

    def sample(index: int, layout: str):
        torch.manual_seed(0)
        samples = op.sample_inputs("cpu", torch.float64, requires_grad=op.supports_autograd)
        found = next(itertools.islice(samples, index, None))
        if layout == "strided":
            found = found.noncontiguous()
        given = (found.input, *found.args), dict(found.kwargs)
        return transposed(given) if layout == "transposed" else given

    def case(index: int, layout: str, inplace: bool) -> Case:
        def values(compiled: Compile) -> list[object]:
            args, kwargs = sample(index, layout)
            function = op.get_inplace() if inplace else op.op

            def run(*args):
                given = (args[0].clone(), *args[1:]) if inplace else args
                return function(*given, **kwargs)

            torch.manual_seed(1)
            return with_gradients(compiled(run)(*args), leaves_of((args, kwargs)))

        return Case(f"sample {index}, {layout}{', in place' * inplace}", values)

    torch.manual_seed(0)
    count = len(list(itertools.islice(op.sample_inputs("cpu", torch.float64), SAMPLES)))
    for index in range(count):
        yield case(index, "contiguous", False)
    for layout in ("transposed", "strided") if count else ():
        yield case(0, layout, False)
    if count and op.get_inplace() is not None:
        yield case(0, "contiguous", True)


# Modules


def module_cases(info) -> Iterator[Case]:
    import torch

    def inputs():
        torch.manual_seed(0)
        return info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=True)

    def case(index: int, layout: str) -> Case:
        given = inputs()[index]

        def values(compiled: Compile) -> list[object]:
            found = inputs()[index]
            torch.manual_seed(0)
            module = info.module_cls(*found.constructor_input.args, **found.constructor_input.kwargs)
            module = module.to(torch.float64).train()
            args, kwargs = found.forward_input.args, found.forward_input.kwargs
            if layout == "transposed":
                args, kwargs = transposed((args, kwargs))
            torch.manual_seed(1)
            results = compiled(module)(*args, **kwargs)
            leaves = [*leaves_of((args, kwargs)), *(p for p in module.parameters() if p.requires_grad)]
            return [*with_gradients(results, leaves), *(b.clone() for b in module.buffers())]

        return Case(f"input {index}{f' ({given.desc})' * bool(given.desc)}, {layout}", values)

    for index in [i for i, found in enumerate(inputs()) if found.forward_input is not None][:INPUTS]:
        for layout in ("contiguous", "transposed"):
            yield case(index, layout)


# Optimizers


def optimizer_cases(info) -> Iterator[Case]:
    import torch

    options = [found.kwargs for found in info.optim_inputs_func(device="cpu")]
    options += [{"lr": torch.tensor(0.01), "capturable": True}] * info.has_capturable_arg
    options += [{"lr": torch.tensor(0.01)}, {"groups": 2}]
    for given in options:
        foreach = [{"foreach": v} for v in (False, True)] if "foreach" in info.supported_impls else [{}]
        fused = [{"fused": True}] if "cpu" in info.supports_fused_on else []
        for way in (*foreach, *fused):
            yield Case(
                ", ".join(f"{k}={v}" for k, v in {**given, **way}.items()) or "default",
                steps_of(info, {**given, **way}),
            )


def steps_of(info, options: dict) -> Callable[[Compile], list[object]]:
    import torch

    def values(compiled: Compile) -> list[object]:
        torch.manual_seed(0)
        given = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        groups = given.pop("groups", 1)
        if compiled is eager:  # which takes this option on a GPU alone, and computes the same without it
            given.pop("capturable", None)
        shapes = [(5, 3), (4, 4)] if info.optim_cls is torch.optim.Muon else [(5, 3), (7,), (2, 3, 2)]
        weights = [torch.nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in shapes]
        parts = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:]}]
        if info.optim_cls in (torch.optim.Rprop, torch.optim.LBFGS, torch.optim.SparseAdam):
            parts[0].pop("weight_decay")
        optimizer = info.optim_cls(parts if groups == 2 else weights, **given)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((w - 1).square().sum() for w in weights)
            loss.backward()
            return loss

        needs = info.step_requires_closure
        step = compiled(lambda: optimizer.step(closure) if needs else optimizer.step())
        for i in range(STEPS):
            for weight in () if needs else weights:
                grad = torch.randn_like(weight) + i
                weight.grad = grad.to_sparse() if info.only_supports_sparse_grads else grad
            step()
        states = [optimizer.state[w] for w in weights]
        kept = [s[k] for s in states for k in sorted(s) if isinstance(s[k], torch.Tensor)]
        return [v.detach().clone() for v in (*weights, *kept)]

    return values


# One entry, in a worker


def entries(name: str) -> dict[str, Callable[[], Iterator[Case]]]:
    """The entries of a list: the name of each → its cases."""
    if name == "optim_db":
        from torch.testing._internal.common_optimizers import optim_db

        return {o.optim_cls.__name__: lambda o=o: optimizer_cases(o) for o in optim_db}
    if name == "module_db":
        from torch.testing._internal.common_modules import module_db

        return {m.name: lambda m=m: module_cases(m) for m in module_db}
    import torch
    from torch.testing._internal.common_methods_invocations import op_db

    known = [o for o in op_db if torch.float64 in o.supported_dtypes("cpu")]
    return {o.formatted_name: lambda o=o: operator_cases(o) for o in known}


def difference(found: list[object], expected: list[object]) -> str:
    """How two lists of values differ; empty if they do not."""
    import torch

    if len(found) != len(expected):
        return f"{len(found)} values for {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected)):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if (
                type(a) is not type(b)
                or a is not None
                and not torch.allclose(torch.tensor(a), torch.tensor(b), RELATIVE, ABSOLUTE, equal_nan=True)
            ):
                return f"value {i} is {a} for {b}"
        elif (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
            return f"value {i} is {list(a.shape)} {a.dtype} for {list(b.shape)} {b.dtype}"
        else:
            a, b = (v.to_dense() if v.layout is not torch.strided else v for v in (a, b))
            if not torch.allclose(a, b, RELATIVE, ABSOLUTE, equal_nan=True):
                return f"value {i} is off by {(a.double() - b.double()).abs().max():.0e}"
    return ""


def tried(case: Case, expected: list[object], backend: str, options: dict | None) -> tuple[str, str]:
    """A verdict on one backend, and its cause."""
    import torch

    torch._dynamo.reset()
    try:
        found = case.values(lambda f: torch.compile(f, backend=backend, dynamic=False, options=options))
    except Exception as error:  # noqa: BLE001 (the page says what broke)
        return CRASH, processes.first_line(error.__cause__ or error)
    differs = difference(found, expected)
    return (WRONG, differs) if differs else (EQUAL, "")


def verdict(case: Case) -> tuple[str, str]:
    try:
        expected, again = case.values(eager), case.values(eager)
    except Exception as error:  # noqa: BLE001
        return CANNOT, processes.first_line(error)
    if difference(again, expected):
        return RANDOM, ""
    found, why = tried(case, expected, "streambp", {"chunk_size": CHUNK})
    if found == EQUAL:
        return found, why
    stock, other = tried(case, expected, "inductor", None)
    if stock == EQUAL or stock == WRONG and found == CRASH:
        return found, why
    return SAME, f"{found}: {why}" if why == other else f"{found}: {why}; Inductor, {stock}: {other}"


def serve(name: str, compiled: bool, quick: bool) -> None:
    """Answer requests for entries, one a line."""
    stream = processes.answers()
    import torch

    from streambp_compile.dynamo.reading import token_axes
    from streambp_compile.regions import candidate

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)  # of step counters, too: others compute with them in float32
    warnings.simplefilter("ignore")
    candidate.SHORTEST_STREAMED = token_axes.SHORTEST_STREAMED = CHUNK
    if not compiled:
        from benchmarks.zoo import interpret_bodies

        interpret_bodies()
    known = entries(name)
    processes.send(stream, {"entries": list(known)})
    for line in sys.stdin:
        entry = json.loads(line)["entry"]
        asked = itertools.islice(known[entry](), 1 if quick else None)
        cases = [(case.name, *verdict(case)) for case in asked]
        processes.send(stream, {"entry": entry, "cases": cases, "quick": quick})


# The process of the lists


def answers_of(name: str) -> dict[str, dict]:
    path = KEPT / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {answer["entry"]: answer for answer in map(json.loads, lines)}


def sweep(name: str, chosen: argparse.Namespace) -> None:
    """Ask for the entries of a list that have no answer yet, or for those that are named."""
    KEPT.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.torch_lists",
        name,
        "--serve",
        *["--compiled"] * chosen.compiled,
        *["--quick"] * chosen.quick,
    ]
    log = KEPT / f"{name}.log"

    def worker() -> tuple[processes.Worker, list[str]]:
        started = processes.start(command, log)
        return started, started.answer(600)["entries"]

    running, names = worker()
    only = set(chosen.only.split(",")) if chosen.only else set()
    known = {} if only else answers_of(name)
    known = {n: a for n, a in known.items() if chosen.quick or not a.get("quick")}
    for entry in [n for n in names if n not in known and (not only or n in only)]:
        running.ask({"entry": entry})
        answer = running.answer(chosen.limit)
        if "error" in answer:
            answer = {"entry": entry, "cases": [("all", CRASH, answer["error"])], "quick": chosen.quick}
            running, _ = worker()
        with (KEPT / f"{name}.jsonl").open("a") as kept:
            print(json.dumps(answer), file=kept)
        count = Counter(v for _, v, _ in answer["cases"])
        print(f"{name} {entry}: {', '.join(f'{n} {v}' for v, n in count.items())}", flush=True)
        for case, found, why in answer["cases"]:
            if found in (WRONG, CRASH):
                print(f"    {found}: {case}: {why}", flush=True)
    running.stop()


def page() -> str:
    """The answers of all lists: counts, what is this backend's alone, and what Inductor does as well."""
    known = {name: answers_of(name) for name in LISTS}
    rows, failures, shared, quick = [], [], [], 0
    for name, answers in known.items():
        count = Counter(v for a in answers.values() for _, v, _ in a["cases"])
        held = f"{len(answers)} of {len(entries(name))}"
        rows.append([name, held, str(count.total()), *(str(count[v]) for v in VERDICTS)])
        quick += sum(a.get("quick", False) for a in answers.values())
        for entry, answer in answers.items():
            for found, into in ((WRONG, failures), (CRASH, failures), (SAME, shared)):
                cases = [(case, why) for case, v, why in answer["cases"] if v == found]
                if cases:
                    into.append([name, entry, f"{found}, {len(cases)}×", f"{cases[0][0]}: {cases[0][1]}"])
    heads = ["list", "entry", "cases", "the first of them, and its cause"]
    parts = [markdown(["list", "entries", "cases", *VERDICTS], rows)]
    parts += [f"Of {quick} entries, only the first case has run (`--quick`)."] * bool(quick)
    parts += [
        "## Wrong, or an error where Inductor has none",
        markdown(heads, failures, 4) if failures else "None.",
    ]
    parts += ["## What Inductor does as well", markdown(heads, shared, 4) if shared else "None."]
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("lists", nargs="*", choices=[*LISTS, []], help="what to run")
    parser.add_argument("--only", default="", help="entries by name, with commas between; they run anew")
    parser.add_argument("--quick", action="store_true", help="the first case of each entry")
    parser.add_argument("--compiled", action="store_true", help="compile what runs node by node otherwise")
    parser.add_argument("--limit", type=float, default=900, metavar="SECONDS", help="for one entry")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.lists[0], chosen.compiled, chosen.quick)
        return
    for name in chosen.lists:
        sweep(name, chosen)
    text = page()
    print(text)
    if chosen.page or chosen.lists and not chosen.only:
        command = f"`python -m benchmarks.torch_lists {' '.join(LISTS)}`"
        PAGE.write_text(f"{command}\n\nCPU, float64.\n\n{text}\n", encoding="utf-8")
    counts = (v for name in chosen.lists for a in answers_of(name).values() for _, v, _ in a["cases"])
    sys.exit(min(100, sum(v in (WRONG, CRASH) for v in counts)))


if __name__ == "__main__":
    main()
