"""One causal layer, followed through every pass: what docs/architecture.md shows.

python examples/one_layer.py                               print all of it
python examples/one_layer.py --write docs/architecture.md  renew the printed parts of that page
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import streambp_compile

TOKENS, WIDTH, CHUNK = 512, 32, 128
MARKED = re.compile(r"(<!-- one_layer: (\w+) -->\n```\w*\n).*?(\n```)", re.DOTALL)


class Layer(nn.Module):
    """Causal attention with one head, and a residual."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        """Hidden states to hidden states, ``[1, tokens, width]``."""
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.squeeze(1))


def sections() -> Mapping[str, str]:
    """What each pass makes of the layer, as text."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    report = streambp_compile.explain(layer, x, streambp_options={"chunk_size": CHUNK})
    (region,) = report.regions
    (forward,) = region.forward.bodies
    return {
        "joint": code(region.streamed.joint),
        "facts": region.analysis.table(),
        "plan": f"forward\n{region.forward.program}\n\nbackward\n{region.backward.program}",
        "report": str(region),
        "body": code(forward.graph),
    }


def code(module) -> str:
    """The Python code of a graph, without the statements that free its values."""
    text = module.graph.python_code("self").src.replace("torch.ops.", "")
    lines = (re.sub(r"; *\w+(?: = \w+)* = None.*", "", line).rstrip() for line in text.splitlines())
    return "\n".join(line for line in lines if line)


def renewed(page: str, texts: Mapping[str, str]) -> str:
    """A page with the text of every marked block replaced by what is printed today."""
    return MARKED.sub(lambda found: found[1] + texts[found[2]] + found[3], page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, help="a page whose marked blocks are renewed")
    chosen = parser.parse_args()
    texts = sections()
    if chosen.write is not None:
        chosen.write.write_text(renewed(chosen.write.read_text(encoding="utf-8"), texts), encoding="utf-8")
        return
    for title, text in texts.items():
        print(f"──── {title} ────\n\n{text}\n")


if __name__ == "__main__":
    main()
