"""Real packages, unchanged: `make test-trainers` installs them. Each row is one of benchmarks/setups."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from benchmarks.setups import adapters, quantized, trainers  # noqa: E402
from benchmarks.setups.measurement import measured  # noqa: E402

pytestmark = pytest.mark.usefixtures("interpreted")
SINGLE = 1e-5  # models of Hugging Face compute norms and losses in float32


MODELS = {**adapters.SETUPS, **quantized.SETUPS}


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
@pytest.mark.parametrize("name", MODELS)
def test_adapters_and_quantised_weights(name):
    row = measured(MODELS[name])
    assert row.error < SINGLE
    assert row.layers and row.head
    assert row.notes == ()


@pytest.mark.parametrize("name", trainers.SETUPS)
def test_trainers(name):
    row = measured(trainers.SETUPS[name], lengths=(64,))
    assert row.error < SINGLE
    assert row.layers and row.head
    assert row.notes == ()


def test_generation_runs_eagerly():
    from streambp_compile.trainer import enable

    model = adapters.llama(use_cache=True)
    ids = torch.randint(2, 100, (1, 12))
    expected = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
    torch._dynamo.utils.counters.clear()
    enable(model, chunk_size=16)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=4, do_sample=False), expected)
    assert not torch._dynamo.utils.counters["stats"]
