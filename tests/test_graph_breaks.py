"""Graph breaks that are not the user's: a library that logs inside a forward must not part head and loss."""

import functools
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers
from models import Plain, ids_of

from streambp_compile import NotStreamed, StreamHint, explain, internals

LOG = logging.getLogger("loss")

SIZES = {
    "GPT2": dict(n_layer=1, n_embd=32, n_head=2, vocab_size=64, use_cache=False),
    "Bert": dict(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=64
    ),
}
CLASSES = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}


@pytest.mark.parametrize("name", ["GPT2", pytest.param("Bert", marks=pytest.mark.slow)])
def test_a_warning_of_transformers_breaks_no_graph(name, interpreted):
    config = getattr(transformers, f"{name}Config")(**SIZES[name])
    model, ids = getattr(transformers, CLASSES[name])(config), torch.randint(0, 64, (2, 24))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotStreamed)
        warnings.simplefilter("error", StreamHint)
        report = explain(lambda ids: model(input_ids=ids, labels=ids).loss, ids)
    assert len(report.steps) == 1, "one graph holds the step"


def test_a_library_that_is_imported_after_the_backend_breaks_no_graph(monkeypatch, interpreted):
    """It adds a method to loggers, which Dynamo could not trace."""
    model, ids = Plain(layers=1), ids_of(1, 32)

    def loss(ids):
        logits = model.head(model.norm(model.layers[0](model.embed(ids))))
        LOG.warning_once("here")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    internals.ignore_library_logging_from_now_on()  # as the backend does when it is imported
    method = functools.lru_cache(None)(lambda self, *args: None)
    monkeypatch.setattr(logging.Logger, "warning_once", method, raising=False)
    step = torch.compile(loss, backend="streambp", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StreamHint)
        step(ids).backward()
