"""``torch.compiler.nested_compile_region``: Dynamo keeps one graph for equal layers and calls it for each."""

import pytest
import torch
from models import Plain, gradients, ids_of, worst_error
from torch import nn

from streambp_compile.backend import Reporting
from streambp_compile.config import Config
from streambp_compile.reporting.report import Report

pytestmark = pytest.mark.usefixtures("interpreted")


class Nested(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.layer(x)


def model() -> Plain:
    made = Plain(layers=3).double()
    made.layers = nn.ModuleList(map(Nested, made.layers))
    return made


def test_nested_regions_stream():
    """As equal layers do that nobody marked: the same bodies serve all. A warning is an error here."""
    nested, ids, report = model(), ids_of(2, 61), Report()
    step = torch.compile(nested, backend=Reporting(Config(chunk_size=16), report))
    truth = gradients(nested, lambda: nested(ids, ids))
    assert worst_error(gradients(nested, lambda: step(ids, ids)), truth) < 1e-10
    assert [r.times for r in report.regions] == [1, 3, 1]
    assert all(r.refusal is None for r in report.regions)


@pytest.mark.long
def test_nested_regions_under_autocast():
    """What is computed again, to know the layers apart, has the dtypes of autocast."""
    nested, ids = model().float(), ids_of(2, 61)

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            return step(ids, ids)

    step = nested
    truth = gradients(nested, loss)
    step = torch.compile(nested, backend="streambp", options={"chunk_size": 16, "strict": True})
    assert worst_error(gradients(nested, loss), truth) < 0.05
