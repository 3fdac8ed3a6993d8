"""What adapters (PEFT) make of a graph, written in plain torch; tests/trainers has the real package."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, LlamaLike, gradients, ids_of, worst_error
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from streambp_compile import explain
from streambp_compile.passes.ir import cannot_tell

VIRTUAL = 8


class Prompted(LlamaLike):
    """Learned rows before those of the tokens; labels are padded, as Hugging Face's losses do."""

    def __init__(self, looked_up: bool):
        super().__init__()
        self.prompt, self.looked_up = nn.Parameter(torch.randn(VIRTUAL, 64)), looked_up

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.prompt[torch.arange(VIRTUAL)] if self.looked_up else self.prompt
        x = torch.cat((rows.expand(len(ids), -1, -1), self.embed(ids)), 1)
        cos = torch.ones(x.shape[1], 2 * self.half, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, cos, 0.5 * cos)
        logits = self.head(self.norm(x))
        labels = F.pad(torch.cat((torch.full((len(ids), VIRTUAL), -100), ids), 1), (0, 1), value=-100)
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels[:, 1:].reshape(-1))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:streambp cannot stream a region")
@pytest.mark.parametrize("looked_up", [True, False])
def test_layers_and_head_stream_behind_learned_rows(looked_up, interpreted):
    model, ids = Prompted(looked_up).double(), ids_of(2, 61)
    report = explain(model, ids, streambp_options={"chunk_size": 16})
    assert [r.streamed is not None for r in report.regions] == [
        True,
        False,
        True,
        True,
    ]  # learned rows are joined with the others in a region of their own
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < 1e-10


def test_a_size_that_divides_by_another_less_one_is_told():
    """Sizes like this come from reshapes of fragments between graph breaks."""
    env = ShapeEnv()
    tokens, features, unknown = (
        env.create_symintnode(env.create_symbol(n, source=source_of(name)), hint=n)
        for name, n in (("tokens", 97), ("features", 64), ("unknown", 31))
    )
    assert cannot_tell([tokens, features], [features // (tokens - 1), tokens * features]) == []
    assert cannot_tell([tokens, features], [unknown // (tokens - 1)]) != []


def source_of(name: str):
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)
