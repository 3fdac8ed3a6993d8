"""Ways to compile and to call a model; each is a row of benchmarks/engines.py."""

import pytest
import torch
from selection import representatives

from benchmarks.setups import compilation
from benchmarks.setups.decoder import decoder, ids_of
from benchmarks.setups.measurement import gradients, measured, streamed, worst_error
from streambp_compile import StreamHint


@pytest.mark.parametrize("name", representatives(compilation.SETUPS, {"dynamic=True"}))
def test_everything_streams(name, interpreted):
    row = measured(compilation.SETUPS[name])
    assert row.error < 1e-12
    assert (row.layers, row.head, row.notes) == (True, True, ())


@pytest.mark.slow
def test_compiled_autograd_is_exact_and_hinted_at(interpreted):
    model, ids = decoder(), ids_of(61)
    model(ids).backward()
    truth = {n: g.clone() for n, g in gradients(model).items()}
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        pytest.warns(StreamHint, match="Compiled autograd"),
    ):
        step = streamed(lambda ids: model(ids).backward())  # only a backward inside is compiled
        for _ in range(2):
            model.zero_grad()
            step(ids)
    assert worst_error(gradients(model), truth) < 1e-12
