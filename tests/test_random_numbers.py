"""Random numbers inside of layers: every chunk draws its own, the same ones in any chunking."""

import pytest
import torch
import torch.nn.functional as F
from models import Plain, gradients, ids_of, worst_error
from selection import representatives
from torch import Tensor

from streambp_compile.passes.normalization import random_numbers

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def bounded_by_tensors(x: Tensor) -> Tensor:
    """As NEFTune of transformers draws."""
    bound = 0.5 / torch.sqrt(torch.tensor(x.size(1) * x.size(2)))
    return x + torch.zeros_like(x).uniform_(-bound, bound)


NOISY = {
    "uniform_": lambda x: x * torch.empty_like(x).uniform_(0.9, 1.1),
    "bounds that are tensors": bounded_by_tensors,
    "randn_like": lambda x: x + 0.1 * torch.randn_like(x),
    "normal_": lambda x: x + torch.empty_like(x).normal_(0, 0.1),
    "torch.normal": lambda x: x + torch.normal(torch.zeros_like(x), 0.1),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "gumbel_softmax": lambda x: x * F.gumbel_softmax(x, dim=-1),
}


@pytest.mark.parametrize("name", representatives(NOISY, {"bounds that are tensors"}))
def test_the_same_numbers_in_chunks_of_any_length(name, interpreted):
    model, ids, found = Plain(layers=1).double(), ids_of(length=30), []

    def loss() -> Tensor:
        x = model.embed(ids)
        for layer in model.layers:
            x = layer(NOISY[name](x))
        return model.loss(x, ids)

    for chunk in (30, 7):
        torch._dynamo.reset()
        step = torch.compile(loss, backend="streambp", options={"chunk_size": chunk, "strict": True})
        torch.manual_seed(3)
        found.append(gradients(model, step))
    assert worst_error(found[1], found[0]) < 1e-12
    torch.manual_seed(4)
    assert worst_error(gradients(model, step), found[0]) > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_distributions(dtype):
    x = torch.empty(4, 5000, dtype=dtype)
    drawn = random_numbers.uniform(x, -1.0, 3.0)
    assert drawn.dtype == dtype and -1 <= drawn.min() and drawn.max() <= 3
    assert abs(drawn.double().mean() - 1) < 0.05 and abs(drawn.double().std() - 4 / 12**0.5) < 0.05
    for drawn in (
        random_numbers.normal(x, 2.0, 3.0),
        random_numbers.normal_around(torch.full_like(x, 2.0), 3.0),
        random_numbers.normal_around(2.0, torch.full_like(x, 3.0)),
        random_numbers.randn(x.shape, dtype) * 3 + 2,
    ):
        assert drawn.dtype == dtype and drawn.isfinite().all()
        assert abs(drawn.double().mean() - 2) < 0.1 and abs(drawn.double().std() - 3) < 0.1


def test_a_generator_is_asked_for_its_own_numbers():
    x, generator = torch.empty(3), torch.Generator()
    for draw in (random_numbers.uniform, random_numbers.normal, random_numbers.normal_around):
        assert draw(x, 1.0, generator=generator) is NotImplemented
