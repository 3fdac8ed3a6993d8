"""Heads that a trainer computes in tiles of its own, in an autograd function that Dynamo does not trace."""

import types

import pytest
import torch
from models import gradients, worst_error

from benchmarks.setups.decoder import VOCABULARY, Decoder, decoder, ids_of
from benchmarks.setups.measurement import is_head, reported
from streambp_compile import StreamHint
from streambp_compile.tools import tiled_heads
from streambp_compile.trainer import enable


class Tiled(torch.autograd.Function):
    """Log-probabilities of targets. Tiles of words are written into parts of a buffer."""

    @staticmethod
    def forward(ctx, hidden, weight, targets):
        tile, half = hidden.new_empty(len(hidden), 1 + len(weight)), len(weight) // 2
        torch.mm(hidden, weight[:half].t(), out=tile[:, :half])
        torch.mm(hidden, weight[half:].t(), out=tile[:, half:-1])
        log_p = tile[:, :-1].log_softmax(-1)
        ctx.save_for_backward(hidden, weight, targets, log_p)
        return (log_p.gather(1, targets[:, None])[:, 0],)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, targets, log_p = ctx.saved_tensors
        d = gradient[:, None] * (torch.nn.functional.one_hot(targets, len(weight)) - log_p.exp())
        return d @ weight, d.t() @ hidden, None


def doubled(ctx, hidden, weight, targets, forward=Tiled.forward):
    return (2 * forward(ctx, hidden, weight, targets)[0],)


def formula(hidden, weight, targets):
    return ((hidden @ weight.t()).log_softmax(-1).gather(1, targets[:, None])[:, 0],)


def needs_rows_with_labels() -> bool:
    return True


def loss_of(self, ids):
    """The forward that a trainer gives a model: what it calls is looked up among its globals."""
    hidden, targets = self.hidden(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    if needs_rows_with_labels():
        hidden, targets = hidden[targets >= 0], targets[targets >= 0]  # breaks the graph
    return -Tiled.apply(hidden, self.head.weight, targets)[0].mean()


def examples() -> list[tuple]:
    rows = torch.linspace(-1, 1, 8).view(2, 4)
    return [(rows.clone().requires_grad_(), rows.cos().requires_grad_(), torch.tensor([1, 0]))]


def given_a_forward(monkeypatch, **names) -> Decoder:
    """A model as a trainer leaves it, whose forward looks names up in globals of its own."""
    row = tiled_heads.TiledHead(f"{__name__}.Tiled", formula, examples, {"needs_rows_with_labels": False})
    monkeypatch.setattr(tiled_heads, "HEADS", (row,))
    model = decoder()
    model.layers = model.layers[:1]
    for name in ("Tiled", "needs_rows_with_labels"):
        monkeypatch.setitem(globals(), name, names.get(name, globals()[name]))
    model.forward = types.MethodType(loss_of, model)
    return model


def test_the_formula_is_traced_and_streams(monkeypatch, interpreted):
    model, ids = given_a_forward(monkeypatch), ids_of(61)
    truth = gradients(model, lambda: model(ids))
    enable(model, chunk_size=16)
    with reported() as reports:
        assert worst_error(gradients(model, lambda: model(ids)), truth) < 1e-10
    assert len(reports) == 1  # one graph
    assert all(region.streamed is not None for region in reports[0].regions)
    assert needs_rows_with_labels() is True  # eager calls ask as ever


def redirected(model, method):
    """A trainer's call of a method of its own through the forward of the model, which it gives back."""
    forward = model.forward

    def wrapped(*args):
        model.forward = forward
        return method(*args)

    def call(*args):
        model.forward = wrapped
        return model(*args)

    return call


class Calling:
    """A trainer whose loss is a method; the function with the tiled head is further away."""

    def compute_loss(self, model, ids):
        return loss_of(model, ids)


def test_a_head_behind_a_forward_that_is_given_for_each_call(monkeypatch, interpreted):
    model, ids = given_a_forward(monkeypatch), ids_of(61)
    del model.forward
    step = redirected(model, Calling().compute_loss)
    truth = gradients(model, lambda: step(model, ids))
    enable(model, chunk_size=16)
    with torch.no_grad():
        model(ids)  # first without it, as in generation
    with reported() as reports:
        assert worst_error(gradients(model, lambda: step(model, ids)), truth) < 1e-10
    assert any(region.streamed is not None and is_head(region, VOCABULARY) for region in reports[0].regions)


def test_a_function_of_that_name_that_computes_something_else_is_no_formula(monkeypatch, interpreted):
    other = type("Tiled", (Tiled,), {"forward": staticmethod(doubled), "__module__": __name__})
    model, ids = given_a_forward(monkeypatch, Tiled=other), ids_of(61)
    truth = gradients(model, lambda: model(ids))
    enable(model, chunk_size=16)
    with pytest.warns(StreamHint, match=r"calls test_tiled_heads\.Tiled, which breaks the graph"):
        found = gradients(model, lambda: model(ids))
    assert worst_error(found, truth) < 1e-10
