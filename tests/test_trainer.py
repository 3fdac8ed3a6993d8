"""`streambp_compile.trainer.enable`: a model, or what holds one."""

import types

import pytest
import torch
from models import Plain, gradients, ids_of, worst_error

from streambp_compile.trainer import enable


def test_a_model_streams_in_place(interpreted):
    model, ids = Plain().double(), ids_of(2, 61)
    truth, names = gradients(model, lambda: model(ids, ids)), set(model.state_dict())
    assert enable(model, chunk_size=16) is model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_call_impl", None)  # what would run it uncompiled
        assert worst_error(gradients(model, lambda: model(ids, ids)), truth) < 1e-10
    assert set(model.state_dict()) == names


def test_models_of_a_trainer_are_found(interpreted):
    trainer = types.SimpleNamespace(model=Plain(), ref_model=Plain())
    enable(trainer, chunk_size=16)
    assert trainer.model._compiled_call_impl and trainer.ref_model._compiled_call_impl


@pytest.mark.parametrize("name", ["past_key_values", "cache", "cache_params"])
def test_calls_with_a_cache_are_left_alone(name, interpreted):
    model, x = Plain(), torch.ones(3)
    model.forward = lambda x, **given: x + torch.compiler.is_compiling()
    enable(model)
    assert torch.equal(model(x, **{name: object()}), x)
    assert torch.equal(model(x, **{name: None}), x + 1)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="Unknown streambp option 'chunksize'"):
        enable(Plain(), chunksize=16)
    with pytest.raises(TypeError, match="got int"):
        enable(3)
