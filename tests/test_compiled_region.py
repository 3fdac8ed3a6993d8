"""One distinct region, compiled."""

import contextlib

import pytest
import torch

from streambp_compile import compiled_region
from streambp_compile.passes.ir import CannotStream, Refusal


@pytest.mark.parametrize("product", [False, True])
def test_a_refused_fragment_without_products_costs_no_warning(product, interpreted, monkeypatch):
    """As a loss behind a graph break has it: values of flat rows go back into the shape of a batch."""

    def refuse(*args):
        raise CannotStream(Refusal("a region", "It is refused here", "Nothing"))

    monkeypatch.setattr(compiled_region.CompiledRegion, "stream", refuse)
    rows, mask = torch.randn(126, 4, requires_grad=True), torch.rand(2, 63, 1) > 0.5

    def fragment(rows, mask):
        rows = rows @ rows.new_ones(4, 4) if product else rows
        return rows.view(2, 63, 4).masked_fill(~mask, 0)

    strict = torch.compile(fragment, backend="streambp", options={"strict": True})
    with pytest.raises(Exception, match="It is refused here") if product else contextlib.nullcontext():
        assert torch.equal(strict(rows, mask), fragment(rows, mask))
