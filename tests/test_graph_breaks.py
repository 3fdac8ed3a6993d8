"""Graph breaks that are not the user's: a library that logs inside a forward must not part head and loss."""

import warnings

import pytest
import torch
import transformers

from streambp_compile import NotStreamed, StreamHint, explain

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
