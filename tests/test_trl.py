"""TRL's own code, unmodified, on a compiled model: its functions of ``outputs.logits``, and whole
trainers."""

import os
import random

import pytest
import torch
from models import total_error, truth_of, worst_error

pytest.importorskip("trl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402
from trl.trainer.utils import entropy_from_logits, selective_log_softmax  # noqa: E402

from benchmarks.memory import peak  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
VOCABULARY = 2048


def small_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "dtype, kept",
    [(torch.float64, {"logits_to_keep": 41}), (torch.bfloat16, {}), (torch.bfloat16, {"logits_to_keep": 41})],
)
def test_grpo_log_probabilities(dtype, kept):
    """What GRPO does with logits: completion rows, a temperature in place, log-probabilities and entropy."""
    model, ids = small_model().to(dtype), torch.randint(0, VOCABULARY, (3, 64))
    weight = torch.linspace(-1, 1, 40)

    def loss(step):
        logits = step(input_ids=ids, use_cache=False, **kept).logits
        logits = logits[:, :-1, :][:, -40:, :]
        logits.div_(0.9)
        logps = selective_log_softmax(logits, ids[:, -40:])
        with torch.no_grad():
            entropies = entropy_from_logits(logits)
        return (logps * weight).sum(), entropies

    step = torch.compile(model, backend="streambp", options={"chunk_size": 8})
    (ours, entropy), (truth, true_entropy) = loss(step), loss(model)
    tolerance = 1e-5 if dtype == torch.float64 else 5e-2
    torch.testing.assert_close(entropy, true_entropy, rtol=tolerance, atol=0)
    if dtype == torch.float64:
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=0)
        assert worst_error(gradients(model, ours), gradients(model, truth)) < tolerance
    else:  # no larger an error than eager bfloat16 makes
        exact = truth_of(model, lambda m: loss(m)[0])
        assert total_error(gradients(model, ours), exact) < 1.1 * total_error(gradients(model, truth), exact)
    model.zero_grad()
    assert peak(lambda: loss(step)[0].backward()) < 0.5 * peak(lambda: loss(model)[0].backward())


def words(count: int, seed: int) -> str:
    source = random.Random(seed)
    return " ".join(f"w{source.randrange(VOCABULARY - 3)}" for _ in range(count))


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    plain = Tokenizer(
        models.WordLevel({**special, **{f"w{i}": i + 3 for i in range(VOCABULARY - 3)}}, unk_token="<unk>")
    )
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


SFT = [{"text": words(60 + i, i)} for i in range(4)]
PAIRS = [
    {"prompt": words(10, i), "chosen": words(40 + i, 100 + i), "rejected": words(35 + i, 200 + i)}
    for i in range(4)
]


def trained(trainer, config, rows, folder, compiled: bool) -> tuple[list, dict]:
    """Two steps: the losses that were logged, and the weights after them."""
    torch._dynamo.reset()
    model = small_model()
    args = config(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=128,
        learning_rate=1e-3,
        report_to=[],
        logging_steps=1,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    run = trainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
    if compiled:
        run.model.compile(backend="streambp")
    run.train()
    return [line["loss"] for line in run.state.log_history if "loss" in line], {
        n: p.detach().clone() for n, p in model.named_parameters()
    }


@pytest.mark.parametrize(
    "trainer, config, rows",
    [(SFTTrainer, SFTConfig, SFT), (ORPOTrainer, ORPOConfig, PAIRS)],
    ids=["SFT", "ORPO"],
)
@pytest.mark.filterwarnings("ignore")
def test_trainers(trainer, config, rows, tmp_path):
    losses, weights = trained(trainer, config, rows, tmp_path, True)
    true_losses, true_weights = trained(trainer, config, rows, tmp_path, False)
    assert losses == pytest.approx(true_losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, true_weights[name], rtol=0, atol=2e-4)
