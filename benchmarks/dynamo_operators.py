"""Operators of torch's record of Hugging Face training, and which of them the table of operators knows.

    python benchmarks/dynamo_operators.py --save dynamo-operators    also to benchmarks/results

``dynamo_operators.txt`` lists the operators of the logs in pytorch's
``benchmarks/dynamo/microbenchmarks/operator_inp_logs/hf_train``: 26 of its 41 files, with one at least of
every family of models (``sum.SymInt`` and ``im2col_backward``, which torch no longer has, are
``sum.dim_IntList`` and ``col2im``). An operator *has a row*,
or is *rewritten* before the table is asked: decomposed as Inductor does, or an in-place operator that
AOTAutograd makes functional.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST = Path(__file__).with_suffix(".txt")
BEFORE_AUTOGRAD = {"aten.convolution.default"}  # short ones along tokens: sums of shifted rows


def operators() -> list[str]:
    return LIST.read_text(encoding="utf-8").split()


def known(name: str) -> str:
    """``"row"``, ``"rewritten"`` or ``"none"``."""
    import torch

    from streambp_compile import internals
    from streambp_compile.passes.rules import TABLE, find_rule

    _, packet, overload = name.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    if op in TABLE or torch.Tag.pointwise in op.tags and op._schema.name[-1] != "_":
        return "row"
    mutates = op._schema.is_mutable and find_rule(op) is not None
    decomposed = op in internals.decompositions() or op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    )
    return "rewritten" if mutates or decomposed or name in BEFORE_AUTOGRAD else "none"


def table(found: dict[str, str]) -> str:
    count = {kind: sum(k == kind for k in found.values()) for kind in ("row", "rewritten", "none")}
    lines = [
        f"{len(found)} operators: {count['row']} have a row, {count['rewritten']} are rewritten before, "
        f"{count['none']} have none.",
        "",
        "| operator | known |",
        "| --- | --- |",
        *(f"| {name} | {kind} |" for name, kind in found.items() if kind != "row"),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    text = table({name: known(name) for name in operators()})
    print(text)
    if chosen.save:
        command = " ".join(["python benchmarks/dynamo_operators.py", *sys.argv[1:]])
        path = ROOT / "benchmarks" / "results" / f"{chosen.save}.md"
        path.write_text(f"`{command}`\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
