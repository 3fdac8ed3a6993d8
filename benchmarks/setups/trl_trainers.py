"""Trainers of TRL, unchanged, on a small Llama; what must agree are its weights after two steps."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast
from trl.experimental import cpo, orpo

from streambp_compile.trainer import enable

from .adapters import llama
from .decoder import VOCABULARY, ids_of
from .measurement import STREAMING, Way
from .trainers import BATCH, PLAIN, STEPS, trained_by

SPECIAL = {"<pad>": 0, "<eos>": 1, "<unk>": 2}


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``w0``, ``w1``, and so on, each a token."""
    words = {f"w{i}": i + len(SPECIAL) for i in range(VOCABULARY - len(SPECIAL))}
    plain = Tokenizer(models.WordLevel({**SPECIAL, **words}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def words(count: int, seed: int) -> str:
    return " ".join(f"w{i % 1000}" for i in ids_of(count, seed, batch=1)[0].tolist())


def texts(length: int) -> list[dict]:
    return [{"text": words(length - 3 * i, i)} for i in range(STEPS * BATCH)]


def chosen_and_rejected(length: int) -> list[dict]:
    return [
        {
            "prompt": words(10, i) + " ",
            "chosen": words(length - 10 - 2 * i, 100 + i),
            "rejected": words(length - 15, 200 + i),
        }
        for i in range(STEPS * BATCH)
    ]


def rated(length: int) -> list[dict]:
    return [
        {"prompt": words(10, i), "completion": words(length - 10 - 2 * i, 100 + i), "label": i % 2 == 0}
        for i in range(STEPS * BATCH)
    ]


def prompts(length: int) -> list[dict]:
    return [{"prompt": words(length - 10 * i, i)} for i in range(STEPS * BATCH)]


def number_of_words(completions: list[str], **ignored: object) -> list[float]:
    """A reward: different for completions of different words."""
    return [float(sum(map(len, text.split())) % 7) for text in completions]


@dataclass(frozen=True)
class Recipe:
    """A trainer of TRL with its data.

    trainer, config  classes
    rows             makes a data set of sequences of so many tokens
    options          of the config
    given            further arguments of the trainer
    reference        is the trainer given a reference model?
    early            does the trainer compute with its models while it is made? Then they stream before
    """

    trainer: type
    config: type
    rows: Callable[[int], list[dict]]
    options: dict[str, object] = field(default_factory=dict)
    given: dict[str, object] = field(default_factory=dict)
    reference: bool = False
    early: bool = False

    def __call__(self, model: nn.Module, way: Way, length: int) -> None:
        """Train in two steps."""
        models = {"ref_model": llama()} if self.reference else {}
        for each in (model, *models.values()) if way is Way.STREAMED and self.early else ():
            enable(each, **STREAMING["options"])
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(
                model,
                args=self.arguments(folder, gradient_checkpointing=way is Way.CHECKPOINTED),
                train_dataset=Dataset.from_list(self.rows(length)),
                processing_class=tokenizer(),
                **models,
                **self.given,
            )
            if way is Way.STREAMED and not self.early:
                enable(trainer, **STREAMING["options"])
            trainer.train()

    def arguments(self, folder: str, **options: object) -> object:
        return self.config(
            output_dir=folder,
            max_steps=STEPS,
            learning_rate=0.1,
            logging_steps=1,
            bf16=False,
            **PLAIN,
            **self.options,
            **options,
        )


def setup(
    trainer: type,
    config: type,
    rows: Callable,
    given: dict | None = None,
    reference: bool = False,
    build: Callable[[], nn.Module] = llama,
    early: bool = False,
    **options: object,
) -> functools.partial:
    """A setup, by a `Recipe` and a function that makes the model."""
    recipe = Recipe(trainer, config, rows, options, given or {}, reference, early)
    return functools.partial(trained_by, train=recipe, build=build)


sft = functools.partial(setup, trl.SFTTrainer, trl.SFTConfig, texts)
dpo = functools.partial(setup, trl.DPOTrainer, trl.DPOConfig, chosen_and_rejected, reference=True)
online = dict(num_generations=2, max_completion_length=24)
grpo = functools.partial(
    setup, trl.GRPOTrainer, trl.GRPOConfig, prompts, {"reward_funcs": number_of_words}, **online
)
SETUPS = {
    "TRL, SFT": sft(),
    "TRL, SFT, dft": sft(loss_type="dft"),
    "TRL, SFT, packing": sft(packing=True, max_length=64),
    "TRL, SFT, padding-free": sft(padding_free=True, max_length=None),
    "TRL, SFT, label smoothing": sft(label_smoothing_factor=0.1),
    "TRL, DPO": dpo(),
    "TRL, DPO, IPO loss": dpo(loss_type="ipo"),
    "TRL, DPO, padding-free": dpo(padding_free=True),
    "TRL, DPO, reference computed first": dpo(precompute_ref_log_probs=True, early=True),
    "TRL, KTO": setup(trl.KTOTrainer, trl.KTOConfig, rated, reference=True),
    "TRL, ORPO": setup(orpo.ORPOTrainer, orpo.ORPOConfig, chosen_and_rejected),
    "TRL, CPO": setup(cpo.CPOTrainer, cpo.CPOConfig, chosen_and_rejected),
    "TRL, GRPO": grpo(),
    "TRL, GRPO, GSPO's ratio": grpo(importance_sampling_level="sequence"),
    "TRL, RLOO": setup(
        trl.RLOOTrainer, trl.RLOOConfig, prompts, {"reward_funcs": number_of_words}, beta=0.0, **online
    ),
    "TRL, reward": setup(
        trl.RewardTrainer,
        trl.RewardConfig,
        chosen_and_rejected,
        build=functools.partial(llama, "LlamaForSequenceClassification", num_labels=1),
    ),
}

REASONS = {"TRL, reward": "(a score per sequence: there are no logits)"}
