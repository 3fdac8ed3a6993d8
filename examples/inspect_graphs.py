"""What became of a training step: the report, and one region's facts and chunk bodies as graphs to read.

python examples/inspect_graphs.py                   the layer of a small Qwen3-shaped model
python examples/inspect_graphs.py --region NAME     another region of the report
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import streambp_compile


def distinct(regions: Sequence) -> list:
    """Each region once, in order: equal layers share one."""
    return list({id(region): region for region in regions}.values())


def layer_of(regions: Sequence):
    """The streamed region that the model repeats most often; among equals, the one with the largest joint
    graph."""
    count = Counter(id(region) for region in regions)
    streamed = [
        r for r in distinct(regions) if r.refusal is None and r.joint is not None and r.backward is not None
    ]
    if not streamed:
        raise SystemExit("no region of this step was streamed; the report above says why")
    return max(streamed, key=lambda r: (count[id(r)], len(r.joint.graph.nodes)))


def headline(text: str) -> None:
    print(f"\n{'─' * 8} {text} {'─' * max(0, 100 - len(text))}\n")


def show(region) -> None:
    """Print a region's facts and the graph module of every chunk body."""
    headline(f"{region.name}: what each value of the joint graph is along the token axis")
    print(region.analysis.table())
    for name, schedule in (("forward", region.forward), ("backward", region.backward)):
        for number, body in enumerate(schedule.bodies if schedule is not None else (), 1):
            headline(f"{region.name}: {name}, chunk body {number} of {len(schedule.bodies)}")
            print(body.graph.print_readable(print_output=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=512, help="length of the sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="depth of the model (%(default)s)")
    parser.add_argument("--region", help="name of the region to print (the layer)")
    chosen = parser.parse_args()

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=chosen.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        use_cache=False,
    )
    model = Qwen3ForCausalLM(config).train()
    ids = torch.randint(0, config.vocab_size, (1, chosen.tokens))

    report = streambp_compile.explain(lambda ids: model(input_ids=ids, labels=ids).loss, ids)
    print(report)

    if chosen.region is None:
        show(layer_of(report.regions))
        return
    named = {region.name: region for region in distinct(report.regions)}
    if chosen.region not in named:
        parser.error(f"no region is called {chosen.region!r}; there are {', '.join(named)}")
    if named[chosen.region].refusal is not None:
        raise SystemExit(f"{chosen.region} is not streamed: {named[chosen.region].refusal}")
    show(named[chosen.region])


if __name__ == "__main__":
    main()
