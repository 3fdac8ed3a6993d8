"""The Hugging Face models that torch's own benchmark of Dynamo trains: is each exact, and what streams?

    python benchmarks/dynamo_models.py --save dynamo-models      all, and benchmarks/results/dynamo-models.md
    python benchmarks/dynamo_models.py --only XLNetLMHeadModel,GoogleFnet

The names are those of pytorch's ``benchmarks/dynamo/huggingface_models_list.txt``; models that it only
generates text with are left out. They are built small, with random weights, from their configuration classes,
and get the inputs that its ``huggingface.py`` makes: token ids and labels without a mask, one label of a
sequence, or the first and last token of an answer. *Error* and *exact* are those of ``benchmarks/zoo.py``, in
float64 at a length and a chunk length of which neither divides the other. Chunk bodies run node by node
(``--inductor`` compiles them); every model is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.processes import first_line, last_answer  # noqa: E402
from benchmarks.zoo import Row, bare, exactness, hugging_face, interpret_bodies, remarks  # noqa: E402


def answers(config, length: int) -> dict:
    """Token ids, and the first and the last token of an answer."""
    import torch

    batch = bare(config, length)
    make = torch.Generator().manual_seed(3)
    first, last = (torch.randint(length, (2,), generator=make) for _ in range(2))
    return dict(input_ids=batch["input_ids"], start_positions=first, end_positions=last)


def classes(config, length: int) -> dict:
    """Token ids, and a class of each sequence."""
    import torch

    return dict(input_ids=bare(config, length)["input_ids"], labels=torch.tensor([0, 1]))


def row(family: str, head: str, **given) -> Row:
    """A model class of a family, with the batch that its task wants."""
    batch = bare
    if head.endswith("QuestionAnswering"):
        batch = answers
    if head.endswith("SequenceClassification"):
        batch = classes
    return Row("encoder", hugging_face(family, head, batch=batch, **given))


FAMILIES: dict[str, tuple[str, dict, tuple[str, ...]]] = {
    "Albert": ("albert", {}, ("ForMaskedLM", "ForQuestionAnswering")),
    "Bart": ("bart", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "Bert": ("bert", {}, ("ForMaskedLM", "ForQuestionAnswering")),
    "Blenderbot": ("blenderbot", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "BlenderbotSmall": ("blenderbot-small", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "DebertaV2": ("deberta-v2", {}, ("ForMaskedLM", "ForQuestionAnswering")),
    "DistilBert": ("distilbert", {}, ("ForMaskedLM", "ForQuestionAnswering")),
    "Electra": ("electra", {}, ("ForCausalLM", "ForQuestionAnswering")),
    "GPT2": ("gpt2", {}, ("ForSequenceClassification",)),
    "GPTJ": ("gptj", {}, ("ForCausalLM", "ForQuestionAnswering")),
    "GPTNeo": (
        "gpt_neo",
        dict(attention_types=[[["global", "local"], 1]], window_size=32),
        ("ForCausalLM", "ForSequenceClassification"),
    ),
    "LayoutLM": ("layoutlm", {}, ("ForMaskedLM", "ForSequenceClassification")),
    "M2M100": ("m2m_100", {}, ("ForConditionalGeneration",)),
    "MBart": ("mbart", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "MT5": ("mt5", {}, ("ForConditionalGeneration",)),
    "MegatronBert": ("megatron-bert", {}, ("ForCausalLM", "ForQuestionAnswering")),
    "MobileBert": ("mobilebert", dict(intra_bottleneck_size=32), ("ForMaskedLM", "ForQuestionAnswering")),
    "OPT": ("opt", {}, ("ForCausalLM",)),
    "PLBart": ("plbart", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "Pegasus": ("pegasus", {}, ("ForCausalLM", "ForConditionalGeneration")),
    "Roberta": ("roberta", {}, ("ForCausalLM", "ForQuestionAnswering")),
    "T5": ("t5", dict(decoder_start_token_id=0), ("ForConditionalGeneration",)),
    "TrOCR": ("trocr", {}, ("ForCausalLM",)),
    "XGLM": ("xglm", {}, ("ForCausalLM",)),
    "XLNet": ("xlnet", dict(d_inner=96), ("LMHeadModel",)),
}
MODELS: dict[str, Row] = {
    f"{name}{task}": row(family, f"{name}{task}", **given)
    for name, (family, given, tasks) in FAMILIES.items()
    for task in tasks
} | {
    "AllenaiLongformerBase": row("longformer", "LongformerForMaskedLM", attention_window=[32, 32]),
    "CamemBert": row("camembert", "CamembertForMaskedLM"),
    "DistillGPT2": row("gpt2", "GPT2LMHeadModel"),
    "GoogleFnet": row("fnet", "FNetForMaskedLM"),
    "T5Small": row("t5", "T5ForConditionalGeneration", num_layers=3, decoder_start_token_id=0),
    "YituTechConvBert": row("convbert", "ConvBertForMaskedLM"),
}


def measured(name: str) -> dict:
    """One model: error, regions streamed and all, keys, reasons."""
    import torch

    torch.set_num_threads(1)
    return exactness(MODELS[name])


def is_exact(name: str, answer: dict) -> bool:
    return answer.get("error", float("inf")) <= max(MODELS[name].exact, answer.get("noise", 0.0))


def run(name: str, limit: float, inductor: bool) -> dict:
    """One model in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--row", name]
    command += ["--inductor"] if inductor else []
    return last_answer(command, limit)


def serve(name: str, inductor: bool) -> None:
    """One model's answer as the last line of stdout."""
    if not inductor:
        interpret_bodies()
    try:
        answer = measured(name)
    except Exception as error:  # noqa: BLE001 (the table says what broke)
        answer = dict(failed=first_line(error))
    print(json.dumps(answer))


def table(found: dict[str, dict]) -> str:
    lines = [
        "| model | error | exact | streamed | not streamed, and notes |",
        "| --- | ---: | --- | ---: | --- |",
    ]
    for name, answer in sorted(found.items()):
        error = f"{answer['error']:.0e}" if "error" in answer else "–"
        streamed = f"{answer['streamed']}/{answer['regions']}" if "regions" in answer else "–"
        exact = "yes" if is_exact(name, answer) else "**no**"
        lines.append(f"| {name} | {error} | {exact} | {streamed} | {remarks(answer)} |")
    exact = sum(is_exact(n, a) for n, a in found.items())
    whole = sum("regions" in a and a["streamed"] == a["regions"] for a in found.values())
    return "\n".join([*lines, "", f"{len(found)} models: {exact} exact, {whole} with all regions streamed."])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", type=lambda t: t.split(","), default=list(MODELS), help="names of models")
    parser.add_argument("--jobs", type=int, default=1, help="models that run at a time (%(default)s)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a model (%(default)s)")
    parser.add_argument("--inductor", action="store_true", help="compile chunk bodies")
    parser.add_argument("--save", metavar="NAME", help="also write the table to benchmarks/results/NAME.md")
    parser.add_argument("--row", choices=MODELS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.row:
        serve(chosen.row, chosen.inductor)
        return 0
    unknown = [n for n in chosen.only if n not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]!r}; there are {', '.join(MODELS)}")
    with ThreadPoolExecutor(chosen.jobs) as pool:
        found = {}
        for name, answer in zip(
            chosen.only, pool.map(lambda n: run(n, chosen.limit, chosen.inductor), chosen.only)
        ):
            found[name] = answer
            print(f"{name}: {json.dumps(answer)}", file=sys.stderr, flush=True)
    print(table(found))
    if chosen.save:
        command = " ".join(["python benchmarks/dynamo_models.py", *sys.argv[1:]])
        path = ROOT / "benchmarks" / "results" / f"{chosen.save}.md"
        path.write_text(f"`{command}`\n\n{table(found)}\n", encoding="utf-8")
    return 0 if all(is_exact(n, a) for n, a in found.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
