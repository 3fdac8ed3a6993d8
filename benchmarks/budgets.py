"""Memory budgets: is the peak of a step what the plan predicts, and never above the budget?

    python benchmarks/budgets.py --save budgets            all models, and benchmarks/results/budgets.md
    python benchmarks/budgets.py --only llama,gpt2 --dtypes float32

Models of Hugging Face from their configurations, with random weights: four layers (or two of each kind) of
width 256, vocabulary 8192, two sequences of ``--tokens`` tokens. Budgets are parts of the default peak.
*Measured*: allocator events of one step above weights, gradients and inputs (benchmarks/memory.py); chunk
bodies are compiled. *Error*: the norm of the difference of all gradients from eager's in the same dtype, over
the norm of eager's (some gradients, of biases of keys, are nothing but rounding). A row fails whose measured
peak is over the budget, or further than 2 % from the predicted one; the number of such rows is the exit
status. Every model and dtype is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processes import first_line, last_answer  # noqa: E402
from benchmarks.tables import MIB, markdown  # noqa: E402
from benchmarks.zoo import bare, gradients, hugging_face  # noqa: E402

SIZES = dict(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    num_hidden_layers=4,
    sliding_window=512,
)
FAMILIES: dict[str, dict] = {
    "llama": {},
    "qwen3": {},
    "mistral": {},
    "gemma2": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "gpt_neox": {},
    "opt": dict(word_embed_proj_dim=256, ffn_dim=512),
    "gpt2": dict(n_embd=256, n_inner=512, n_layer=4),
}
SHARES = (0.8, 1.0, 1.5, 2.5, 4.0)  # budgets, as parts of the default plan's peak
DTYPES = ("float32", "bfloat16")
EXACT = {"float32": 1e-4, "bfloat16": 0.05}  # the largest difference from eager that rounding explains
CLOSE = 0.02  # of the measured peak: how far the predicted one may be off


def steps_of(family: str, dtype: str, tokens: int) -> list[dict]:
    """In a process of its own: the default plan, then one plan for each budget."""
    import torch

    known = dict(SIZES, **FAMILIES[family])
    model, batch, loss = hugging_face(family, batch=bare, **settable(family, known))(tokens)
    model.to(getattr(torch, dtype))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(**given):
        return loss(model, **given)

    truth = gradients(model, step, batch)
    default = planned(model, step, batch, truth, None)
    budgets = [int(share * default["predicted"]) for share in SHARES]
    return [default, *(planned(model, step, batch, truth, budget) for budget in budgets)]


def settable(family: str, wanted: dict) -> dict:
    """The settings that a family's configuration has, with a kind for each layer where it has kinds."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    configuration = CONFIG_MAPPING[family]()
    found = {name: value for name, value in wanted.items() if hasattr(configuration, name)}
    kinds = list(dict.fromkeys(getattr(configuration, "layer_types", None) or ()))
    if kinds:
        found["layer_types"] = (kinds * wanted["num_hidden_layers"])[: wanted["num_hidden_layers"]]
    return found


def planned(model, step, batch: dict, truth: list, budget: int | None) -> dict:
    """One step by the plan for a budget in bytes."""
    import torch

    from benchmarks.memory import peak
    from streambp_compile import explain

    options = {} if budget is None else {"memory_budget": budget}
    torch._dynamo.reset()
    try:
        report = explain(step, **batch, streambp_options=options)
    except Exception as error:  # noqa: BLE001 (a budget below the leanest plan, or a bug: the table says)
        return dict(budget=budget, **why_not(error))
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="streambp", options=options)
    error = difference(gradients(model, compiled, batch), truth)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    compiled(**batch).backward()
    measured = peak(lambda: compiled(**batch).backward())
    plan = "; ".join(note.partition(": ")[2].partition(": ")[2] for note in report.notes if "plan" in note)
    return dict(budget=budget, predicted=report.peak.bytes, measured=measured, error=error, plan=plan)


def difference(found: list, truth: list) -> float:
    """Of all gradients together, the norm of their difference over their norm."""
    wrong = sum((f.double() - t.double()).square().sum() for f, t in zip(found, truth, strict=True))
    return (wrong / sum(t.double().square().sum() for t in truth)).sqrt().item()


def why_not(error: Exception) -> dict:
    """A budget that no plan meets is no failure: the leanest plan is named."""
    from streambp_compile.memory.memory_limits import OverBudget

    inner = getattr(error, "inner_exception", error)
    if isinstance(inner, OverBudget):
        return dict(plan=re.search("the leanest plan .* MiB", str(inner))[0])
    return dict(failed=first_line(inner))


def run(family: str, dtype: str, chosen: argparse.Namespace) -> list[dict]:
    command = [sys.executable, str(Path(__file__).resolve()), "--row", family, "--dtypes", dtype]
    command += ["--tokens", str(chosen.tokens)]
    answer = last_answer(command, chosen.limit)
    return [dict(answer, budget=None)] if "failed" in answer else answer["rows"]


def failing(dtype: str, row: dict) -> str:
    """Why a row fails; empty if it does not."""
    if "failed" in row:
        return row["failed"]
    if "measured" not in row:
        return ""
    if row["budget"] is not None and row["measured"] > row["budget"]:
        return "over the budget"
    if abs(row["predicted"] - row["measured"]) > CLOSE * row["measured"]:
        return "prediction off"
    return "" if row["error"] <= EXACT[dtype] else "gradients off"


def table(found: dict[tuple[str, str], list[dict]]) -> str:
    heads = ("model", "dtype", "plan", "fails", "budget MiB", "predicted", "measured", "off", "error")
    lines = []
    for (family, dtype), rows in found.items():
        for row in rows:
            sizes = [row.get("budget"), row.get("predicted"), row.get("measured")]
            shown = ["–" if size is None else f"{size / MIB:.2f}" for size in sizes]
            off = f"{row['predicted'] / row['measured'] - 1:+.2%}" if "measured" in row else "–"
            error = f"{row['error']:.0e}" if "error" in row else "–"
            plan = row.get("plan") or "default"
            lines.append([family, dtype, plan, failing(dtype, row), *shown, off, error])
    return markdown(heads, lines, texts=4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=lambda t: t.split(","), default=list(FAMILIES), help="families")
    parser.add_argument("--dtypes", type=lambda t: t.split(","), default=list(DTYPES), help="of weights")
    parser.add_argument("--tokens", type=int, default=2048, help="of each sequence (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="models that run at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a model (%(default)s)")
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    parser.add_argument("--row", choices=FAMILIES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row:
        print(json.dumps(dict(rows=steps_of(chosen.row, chosen.dtypes[0], chosen.tokens))))
        return 0
    wanted = [(family, dtype) for family in chosen.only for dtype in chosen.dtypes]
    found = {}
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for key, rows in zip(wanted, pool.map(lambda key: run(*key, chosen), wanted)):
            found[key] = rows
            print(f"{' '.join(key)}: {json.dumps(rows)}", file=sys.stderr, flush=True)
    failed = sum(bool(failing(dtype, row)) for (_, dtype), rows in found.items() for row in rows)
    count = sum(len(rows) for rows in found.values())
    text = f"{table(found)}\n\n{count} rows, {failed} of them fail."
    print(text)
    if chosen.save:
        command = " ".join(["python benchmarks/budgets.py", *sys.argv[1:]])
        path = ROOT / "benchmarks" / "results" / f"{chosen.save}.md"
        path.write_text(f"`{command}`\n\n{text}\n", encoding="utf-8")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
