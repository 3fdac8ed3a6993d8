"""Classes of transformers get a small model, inputs and labels by machine, and a page."""

import pytest
import torch

from benchmarks import transformers_classes as sweep
from benchmarks.transformers_classes import Class

SOME = (
    Class("multiple-choice", "albert", "AlbertForMultipleChoice"),
    Class("sequence-to-sequence", "t5", "T5ForConditionalGeneration"),
    Class("image-classification", "vit", "ViTForImageClassification"),
    Class("time-series", "patchtst", "PatchTSTForRegression"),
)


@pytest.mark.parametrize("row", SOME, ids=lambda row: row.kind)
def test_a_class_is_built_and_runs(row):
    assert row in sweep.classes()
    found = sweep.chosen(row)
    assert len(found.batches) == 2
    shapes = [[v.shape for v in batch.values()] for batch in found.batches]
    assert shapes[0] != shapes[1] or "one length" in found.notes
    assert torch.isfinite(sweep.loss_of(found.model, **found.batches[0]))


@pytest.mark.quick
def test_widths_of_stages_and_of_parts_are_small():
    assert sweep.narrowed((512,) * 3 + (1500,)) == [16, 16, 16, 46]
    assert sweep.narrowed((1, 2, 64)) == [1, 2, 64]
    assert sweep.small_of("speech_encoder_layers") == 2
    assert sweep.small_of("head_dim") is None and sweep.small_of("conv_kernel_dim") is None
    assert list(sweep.without_one(dict(a=1, b=2))) == [dict(b=2), dict(a=1)]


@pytest.mark.quick
def test_kinds_come_in_turn():
    rows = [Class("causal", str(i), "A") for i in range(2)] + [Class("ctc", "2", "A")]
    assert [row.family for row in sweep.in_turn(rows)] == ["0", "2", "1"]


@pytest.mark.quick
def test_the_page_counts_what_failed():
    rows = [Class("causal", family, "A") for family in ("exact", "wrong", "broken", "inductor's", "no eager")]
    ran = dict(regions=2, streamed=2, graphs=1, breaks=0, seconds=[3.0], aot_eager=dict(graphs=1, breaks=0))
    answers = dict(
        zip(
            (row.key for row in rows),
            (
                dict(ran, error=1e-9, peak=1, eager_peak=4, checkpointed_peak=2),
                dict(ran, error=1e-2, streamed=1, reasons=["op at x.py:1: It moves rows. Do not"]),
                dict(ran, error=0.0, crash="Broken: it"),
                dict(ran, error=0.0, crash="Broken: it", aot_eager=dict(crash="Broken: it")),
                dict(missing="not built"),
            ),
        )
    )
    text = sweep.page(rows, answers)
    assert "4 of them in eager: 1 exact, 1 crash or time out, 1 with all regions streamed" in text
    assert "0.25" in text and "0.50" in text and "**no**" in text and text.count("**crash**") == 1
    assert "It moves rows" in text
