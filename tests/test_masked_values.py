"""Values written where a mask is true: mask tokens, and images among the tokens of a text."""

import pytest
import torch
from models import Plain, gradients, worst_error
from selection import representatives
from torch import Tensor, nn

from streambp_compile import explain

pytestmark = pytest.mark.usefixtures("interpreted")
EXACT = 1e-12
WIDTH, LENGTH = 32, 43


class Masked(Plain):
    """Hidden states, of which some are replaced before the layers."""

    def __init__(self, write):
        super().__init__(width=WIDTH)
        self.inputs, self.token, self.project = (
            nn.Linear(12, WIDTH),
            nn.Parameter(torch.randn(WIDTH)),
            nn.Linear(8, WIDTH),
        )
        self.write = write

    def forward(self, x: Tensor, mask: Tensor, image: Tensor, labels: Tensor) -> Tensor:
        x = self.write(self.inputs(x), mask, self.token, self.project(image))
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, labels)


def row(x, mask, token, image):
    x[mask] = token
    return x


def one_of_many(x, mask, token, image):
    x[mask] = token[None]
    return x


def number(x, mask, token, image):
    x = x.clone()
    x[~mask] = 0.5
    return x


def in_columns(x, mask, token, image):
    x[:, mask[0]] = token
    return x


def of_each_sequence(x, mask, token, image):
    x[:, mask[0]] = torch.stack([token, 2 * token])[:, None]
    return x


def features(x, mask, token, image):
    x[..., token > 0.3] = 0.0
    return x


def with_more_dimensions(x, mask, token, image):
    """More than the result of the look-up has: it is left to torch, which broadcasts it all the same."""
    x[mask] = token[None, None]
    return x


def in_a_copy(x, mask, token, image):
    return torch.index_put(x, (mask,), token)


def scattered(x, mask, token, image):
    return x.masked_scatter(mask[..., None].expand_as(x), image)


def scattered_by_columns(x, mask, token, image):
    return x.masked_scatter(mask[..., None], image.flatten(0, 1))


def scattered_in_place(x, mask, token, image):
    x.masked_scatter_(mask.unsqueeze(-1).expand_as(x), image)
    return x


def as_many_rows(x, mask, token, image):
    x[mask] = image.flatten(0, 1)
    return x


def rows_added(x, mask, token, image):
    """As Qwen3-VL adds features of an image behind its first layers."""
    x = x.clone()
    x[mask, :] = x[mask, :] + image.flatten(0, 1).to(x.dtype)
    return x


def rows_mixed(x, mask, token, image):
    x[mask] = 0.5 * x[mask] * token - image.flatten(0, 1)
    return x


def rows_added_after_a_write(x, mask, token, image):
    picked = x[mask]
    x[:, 3:9] = 0.0
    x[mask] = picked + image.flatten(0, 1)
    return x


SPELLINGS = {
    f.__name__: f
    for f in (row, one_of_many, number, in_columns, of_each_sequence, features, in_a_copy, scattered)
    + (scattered_by_columns, scattered_in_place, as_many_rows, with_more_dimensions)
    + (rows_added, rows_mixed, rows_added_after_a_write)
}


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Inputs; a mask of 16 tokens, in runs of different length; 16 rows of an image; labels."""
    make = torch.Generator().manual_seed(1)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, 3:13] = mask[1, 20:26] = True
    x, image = (torch.randn(2, n, w, generator=make, dtype=dtype) for n, w in ((LENGTH, 12), (8, 8)))
    return x, mask, image, torch.randint(100, (2, LENGTH), generator=make)


@pytest.mark.parametrize("name", representatives(SPELLINGS, {"row", "of_each_sequence", "scattered"}))
def test_gradients_are_exact(name):
    """A warning is an error here: nothing runs unchunked."""
    model, inputs = Masked(SPELLINGS[name]).double(), batch()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    expected = gradients(model, lambda: model(*inputs))
    assert worst_error(gradients(model, lambda: step(*inputs)), expected) < EXACT


@pytest.mark.parametrize("name", ("row", "scattered"))
def test_no_operator_whose_index_depends_on_the_data_is_left(name):
    report = explain(Masked(SPELLINGS[name]), *batch(torch.float32))
    assert all(region.streamed for region in report.regions)


def test_other_masks_write_other_rows():
    """The mask is an operand: another one compiles nothing again."""
    model, (x, mask, image, labels) = Masked(scattered).double(), batch()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16}, fullgraph=True)
    for shift in (0, 5, 17):
        inputs = x, mask.roll(shift, 1), image, labels
        expected = gradients(model, lambda: model(*inputs))
        with torch._dynamo.config.patch(error_on_recompile=True) if shift else torch.enable_grad():
            ours = gradients(model, lambda: step(*inputs))
        assert worst_error(ours, expected) < EXACT


def test_no_mask_is_true():
    model, (x, mask, image, labels) = Masked(scattered).double(), batch()
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    inputs = x, torch.zeros_like(mask), image, labels
    expected = gradients(model, lambda: model(*inputs))
    assert worst_error(gradients(model, lambda: step(*inputs)), expected) < EXACT


def test_rows_that_the_mask_leaves_reach_no_gradient():
    """They are NaN, as those of padding may be."""
    x, mask, _, _ = batch()
    x[1, 30:] = torch.nan
    make = torch.Generator().manual_seed(2)
    token, image = (torch.randn(*n, generator=make, dtype=x.dtype) for n in ((12,), (2, 8, 12)))
    token.requires_grad_()

    def loss(x):
        made = rows_mixed(x.clone(), mask, token, image)
        return torch.where(mask[..., None], made, 0.0).square().sum()

    compiled = torch.compile(loss, backend="streambp")
    expected, ours = (torch.autograd.grad(f(x), token)[0] for f in (loss, compiled))
    assert expected.isfinite().all()
    torch.testing.assert_close(ours, expected)
