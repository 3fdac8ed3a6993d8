"""Trainers of Hugging Face, TRL and Lightning, unchanged, on a small Llama; what must agree are its weights
after two steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from streambp_compile.trainer import enable

from .adapters import llama
from .decoder import ids_of
from .measurement import STREAMING, Job, Way

STEPS, BATCH = 2, 2
PLAIN: dict = dict(  # arguments of every trainer: no scaling of gradients, and nothing written
    per_device_train_batch_size=BATCH,
    optim="sgd",
    max_grad_norm=0,
    report_to=[],
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
)


def rows(length: int, count: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Examples of equal length, as data sets of tokens give them."""
    return [{"input_ids": row, "labels": row} for row in ids_of(length, batch=count)]


def weights(model: nn.Module, before: dict[str, Tensor]) -> dict[str, Tensor]:
    """How much each weight has changed."""
    return {n: p.detach() - before[n] for n, p in model.named_parameters()}


def trained_by(way: Way, train, build: Callable[[], nn.Module] = llama) -> Job:
    """A job of a function that trains a model on sequences of so many tokens.

    build  makes the model, the same in every call
    """
    models = []

    def step(length: int) -> None:
        models[:] = [build()]
        train(models[0], way, length)

    before = {n: p.detach().clone() for n, p in build().named_parameters()}
    return Job(step, lambda: weights(models[0], before))


def hugging_face(model: nn.Module, way: Way, length: int, evaluated: bool = False, **options: object) -> None:
    """`transformers.Trainer`, made to stream by `enable`."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = arguments_in(folder, gradient_checkpointing=way is Way.CHECKPOINTED, **options)
        trainer = Trainer(model, arguments, train_dataset=rows(length), eval_dataset=rows(length, 2))
        if way is Way.STREAMED:
            enable(trainer, **STREAMING["options"])
        trainer.train()
        if evaluated:
            trainer.evaluate()


def arguments_in(folder: str, **options: object) -> TrainingArguments:
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=1,
        learning_rate=0.1,
        **PLAIN,
        **options,
    )


def accelerate(model: nn.Module, way: Way, length: int) -> None:
    """A loop of one's own with `accelerate.Accelerator`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    if way is Way.CHECKPOINTED:
        model.gradient_checkpointing_enable()
    if way is Way.STREAMED:
        enable(model, **STREAMING["options"])
    loader = torch.utils.data.DataLoader(rows(length), batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch).loss)
        optimizer.step()


def lightning(model: nn.Module, way: Way, length: int) -> None:
    """`lightning.Trainer` with a module that holds the model."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    if way is Way.CHECKPOINTED:
        model.gradient_checkpointing_enable()
    if way is Way.STREAMED:
        enable(model, **STREAMING["options"])
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(rows(length), batch_size=BATCH))


def by(train, **options: object):
    return functools.partial(trained_by, train=functools.partial(train, **options))


SETUPS = {
    "Trainer": by(hugging_face),
    "Trainer, label smoothing": by(hugging_face, label_smoothing_factor=0.1),
    "Trainer, gradient accumulation": by(hugging_face, gradient_accumulation_steps=2),
    # Chunks draw other random numbers than eager code: noise that is too small to see.
    "Trainer, NEFTune": by(hugging_face, neftune_noise_alpha=1e-7),
    "Trainer, evaluation": by(hugging_face, evaluated=True),
    "Accelerate": by(accelerate),
    "Lightning": by(lightning),
}
