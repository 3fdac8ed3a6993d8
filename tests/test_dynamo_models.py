"""The Hugging Face models of torch's benchmark of Dynamo are exact; operators of its logs are known."""

import warnings

import pytest
from selection import representatives

from benchmarks import dynamo_models, dynamo_operators

REPRESENTATIVES = {"DistilBertForQuestionAnswering"}


@pytest.mark.long
@pytest.mark.parametrize("name", representatives(dynamo_models.MODELS, REPRESENTATIVES))
def test_a_model_is_exact(name, interpreted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = dynamo_models.measured(name)
    assert dynamo_models.is_exact(name, answer), answer


@pytest.mark.quick
def test_there_are_as_many_models_as_in_the_list():
    assert len(dynamo_models.MODELS) == 48


@pytest.mark.quick
def test_the_table_counts():
    found = {
        "GoogleFnet": dict(error=1e-12, regions=3, streamed=2, reasons=["x"], note=""),
        "OPTForCausalLM": dict(failed="broke"),
    }
    text = dynamo_models.table(found)
    assert "| GoogleFnet | 1e-12 | yes | 2/3 | x |" in text
    assert "| OPTForCausalLM | – | **no** | – | broke |" in text
    assert text.endswith("2 models: 1 exact, 0 with all regions streamed.")


@pytest.mark.quick
def test_operators_of_the_list_are_known():
    unknown = {name for name in dynamo_operators.operators() if dynamo_operators.known(name) == "none"}
    assert unknown == {"aten._fft_c2c.default"}
