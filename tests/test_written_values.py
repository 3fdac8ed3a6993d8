"""Values that are written into after they were made, and what reads them since."""

import pytest
import torch
import torch.nn.functional as F
from models import VOCABULARY, gradients, ids_of, worst_error
from torch import Tensor, nn

EXACT = 1e-10
WIDTH, LENGTH = 32, 61


class Padded(nn.Module):
    """Attention under a mask that is told by its last entries, which are written into zeros."""

    def __init__(self, mask):
        super().__init__()
        self.embed, self.head, self.mask = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY), mask
        self.mix = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(3)])
        self.out = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x, mask = self.embed(ids), self.mask(ids, lengths)
        seen = mask[:, None] if mask.dim() == 3 else mask[:, None, None, :] | ~mask[:, None, :, None]
        for mix, out in zip(self.mix, self.out):
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in mix(x).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def ends_written(ids: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros_like(ids)
    mask[torch.arange(len(ids)), lengths - 1] = 1
    return mask.flip(1).cumsum(1).flip(1).bool()


def written_twice(ids: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros_like(ids)
    mask.add_(torch.arange(ids.shape[1]))
    mask.sub_(lengths[:, None])
    return mask < 0


def view_written(ids: Tensor, lengths: Tensor) -> Tensor:
    distance = (torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])).float()
    distance = (distance * distance)[None].expand(2, -1, -1).contiguous().transpose(1, 2)
    distance.mul_(0.5).sub_(lengths[:, None, None])
    return distance < 0


MASKS = {f.__name__: f for f in (ends_written, written_twice, view_written)}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_that_is_written_into_is_made_again_in_every_layer(name, interpreted):
    """All of it: a region that is compiled whole, with the layers behind it, is an error here."""
    model, batch = Padded(MASKS[name]).double(), (ids_of(2, LENGTH), torch.tensor([LENGTH, 40]))
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16, "strict": True})
    assert (
        worst_error(gradients(model, lambda: step(*batch)), gradients(model, lambda: model(*batch))) < EXACT
    )


class Overwritten(nn.Module):
    """Reads before, between and after writes, by its name and by a view."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        y = self.into(x)
        before, part = 3 * y, y[..., :4]
        y[..., 0] = 0.5
        between = y + x.cos()
        y.mul_(2).add_(before)
        x = x + y + between + F.pad(part.cos(), (0, WIDTH - 4))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def test_reads_see_the_writes_before_them_and_no_others(interpreted):
    model, ids = Overwritten().double(), ids_of(2, LENGTH)
    step = torch.compile(model, backend="streambp", options={"chunk_size": 16})
    assert worst_error(gradients(model, lambda: step(ids)), gradients(model, lambda: model(ids))) < EXACT
