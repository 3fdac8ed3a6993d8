"""The code on docs/trainers.md runs as it stands there, and streams."""

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.setups import decoder, parallel, tensor_parallel
from benchmarks.setups.measurement import reported
from benchmarks.zoo import interpret_bodies

PAGE = Path(__file__).parent.parent / "docs" / "trainers.md"
TITLE = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.M | re.S)
CODE = re.compile(r"```python\n(.*?)```", re.S)
LENGTH = 40


def blocks_of(text: str) -> dict[str, list[str]]:
    """The code of each section, by its title; that in front of all sections has none."""
    return {title: CODE.findall(body) for title, body in TITLE.findall("## \n" + text)}


BLOCKS = blocks_of(PAGE.read_text(encoding="utf-8"))
DDP, SHARDED, ZERO = "DistributedDataParallel", "FSDP2", "DeepSpeed"
PARALLEL, TRAINER = "Tensor, context and pipeline parallel", "Hugging Face Trainer and Accelerate"
AXOLOTL, FACTORY = "axolotl", "LLaMA-Factory"
OF_PACKAGES = {
    "TRL": "trl",
    "PEFT": "peft",
    "torchao": "torchao",
    "Lightning": "lightning",
    ZERO: "deepspeed",
    TRAINER: "accelerate",
}


def ran(title: str, index: int, **names: object) -> dict:
    """The names after a block has run."""
    exec(compile(BLOCKS[title][index], f"{PAGE.name}, {title}, block {index}", "exec"), names)
    return names


def streams(step: Callable[[], object]) -> bool:
    """Does a step stream?"""
    torch._dynamo.reset()
    with reported() as reports:
        step()
    return any(region.streamed is not None for report in reports for region in report.regions)


def test_every_section_is_known():
    own = {"", DDP, SHARDED, PARALLEL, AXOLOTL, FACTORY}
    assert {t for t, found in BLOCKS.items() if found} == own.union(OF_PACKAGES)


def in_short() -> bool:
    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    ran("", 0, trainer=types.SimpleNamespace(model=model))
    return streams(lambda: model(ids).backward())


def a_plugin() -> bool:
    """With a stand-in for the class of axolotl, which needs a GPU."""
    sys.modules["axolotl.integrations.base"] = types.SimpleNamespace(BasePlugin=object)
    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    plugin = ran(AXOLOTL, 0)["StreamBP"]()
    plugin.post_trainer_create({}, types.SimpleNamespace(model=model))
    del sys.modules["axolotl.integrations.base"]
    return streams(lambda: model(ids).backward())


def a_callback() -> bool:
    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    ran(FACTORY, 0)["StreamBP"]().on_train_begin(None, None, None, model=model)
    return streams(lambda: model(ids).backward())


def head_and_loss() -> bool:
    """A module of head and loss, shared with the recipe of layers that are compiled one by one."""
    import functools

    given = dict(torch=torch, functools=functools, cross_entropy=F.cross_entropy)
    joined = ran(SHARDED, 1, **given)["HeadAndLoss"](decoder.WIDTH, decoder.VOCABULARY, bias=False).double()
    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    names = ran(SHARDED, 3, model=model, **given)
    hidden = model.hidden(ids)
    model.head.weight.data.copy_(joined.weight)
    loss = names["loss_of"](hidden, ids)
    torch.testing.assert_close(loss, joined(hidden, ids))
    return streams(lambda: names["loss_of"](model.hidden(ids), ids).backward())


def compiled_head() -> bool:
    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    ran(SHARDED, 2, torch=torch, head=model.head)
    hidden = model.hidden(ids)
    return streams(lambda: decoder.next_token_loss(model.head(hidden), ids).backward())


def split_layers() -> bool:
    """In a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = WithLoss()
        names = dict(
            torch=torch,
            model=model,
            batch={"ids": decoder.ids_of(LENGTH)},
            mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)),
            plan={"model.layers.*.mlp.up": ColwiseParallel(), "model.layers.*.mlp.down": RowwiseParallel()},
            parallelize_module=parallelize_module,
            loss_parallel=loss_parallel,
        )
        return streams(lambda: ran(PARALLEL, 0, **names))
    finally:
        dist.destroy_process_group()


class WithLoss(torch.nn.Module):
    """A model that returns its loss by name."""

    def __init__(self):
        super().__init__()
        self.model = tensor_parallel.Model(checkpointed=False)

    def forward(self, ids):
        return types.SimpleNamespace(loss=self.model(ids))


@pytest.mark.parametrize(
    "recipe",
    [
        in_short,
        a_plugin,
        a_callback,
        pytest.param(head_and_loss, marks=pytest.mark.slow),
        compiled_head,
        split_layers,
    ],
)
def test_recipes_of_one_process(recipe, interpreted):
    assert recipe()


def ddp() -> bool:
    names = ran(
        DDP,
        0,
        torch=torch,
        model=decoder.decoder(),
        DistributedDataParallel=torch.nn.parallel.DistributedDataParallel,
    )
    return streams(lambda: names["step"](decoder.ids_of(LENGTH)).backward())


def fsdp2() -> bool:
    from torch.distributed.fsdp import fully_shard

    names = ran(SHARDED, 0, torch=torch, model=decoder.decoder(), fully_shard=fully_shard)
    return streams(lambda: names["step"](decoder.ids_of(LENGTH)).backward())


def pipeline() -> bool:
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, ids = dist.get_rank(), decoder.ids_of(LENGTH)
    given = dict(PipelineStage=PipelineStage, ScheduleGPipe=ScheduleGPipe, loss=decoder.next_token_loss)
    names = ran(
        PARALLEL,
        1,
        module=parallel.Stage(decoder.decoder(), first=rank == 0),
        rank=rank,
        world=dist.get_world_size(),
        device=torch.device("cpu"),
        **given,
    )
    run = names["schedule"].step
    return streams(lambda: run(ids) if rank == 0 else run(target=ids, losses=[]))


def zero() -> bool:
    """Both blocks, in the order in which they run."""
    import deepspeed

    from benchmarks.setups import deepspeed_zero

    deepspeed_zero.name_process()
    model = decoder.decoder(joined=True)
    given = dict(deepspeed=deepspeed, model=model, Block=decoder.Block, HeadAndLoss=decoder.HeadAndLoss)
    ran(ZERO, 1, **given)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    config = deepspeed_zero.configuration(stage=3, micro_batches=1)
    names = ran(ZERO, 0, optimizer=optimizer, config=config, **given)
    return streams(lambda: names["engine"].backward(names["engine"](decoder.ids_of(LENGTH))))


def by_process(name: str) -> bool:
    """In a process of the group."""
    interpret_bodies()
    return globals()[name]()


@pytest.mark.parametrize("recipe", [pytest.param(r, marks=pytest.mark.slow) for r in (ddp, fsdp2, pipeline)])
def test_recipes_of_several_processes(recipe, ranks):
    assert all(ranks.run(by_process, recipe.__name__))


def test_deepspeed(ranks):
    pytest.importorskip("deepspeed")
    assert all(ranks.run(by_process, zero.__name__))


def adapters() -> bool:
    import peft

    from benchmarks.setups.adapters import llama

    names = ran(
        "PEFT", 0, torch=torch, base=llama(), get_peft_model=peft.get_peft_model, LoraConfig=peft.LoraConfig
    )
    ids = decoder.ids_of(LENGTH)
    return streams(lambda: names["step"](input_ids=ids, labels=ids, use_cache=False).loss.backward())


def quantised() -> bool:
    import peft
    from torchao import quantization

    from benchmarks.setups.adapters import llama

    given = {name: getattr(quantization, name) for name in ("quantize_", "Int8WeightOnlyConfig")}
    given |= {name: getattr(peft, name) for name in ("get_peft_model", "LoraConfig")}
    step = ran("torchao", 0, torch=torch, model=llama().float(), **given)["step"]
    ids = decoder.ids_of(LENGTH)
    return streams(lambda: step(input_ids=ids, labels=ids, use_cache=False).loss.backward())


def lightning_module() -> bool:
    import lightning

    from streambp_compile.trainer import enable

    model, ids = decoder.decoder(), decoder.ids_of(LENGTH)
    module = ran("Lightning", 0, lightning=lightning, enable=enable)["Module"](model)
    return streams(lambda: module.model(ids).backward())


def trainer(folder: str) -> bool:
    from transformers import Trainer

    from benchmarks.setups import adapters, trainers
    from streambp_compile.trainer import enable

    given = dict(Trainer=Trainer, enable=enable, model=adapters.llama(), data=trainers.rows(LENGTH))
    return streams(lambda: ran(TRAINER, 0, arguments=trainers.arguments_in(folder), **given))


def trainer_of_trl(folder: str) -> bool:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from benchmarks.setups import adapters, trl_trainers
    from streambp_compile.trainer import enable

    recipe = trl_trainers.Recipe(SFTTrainer, SFTConfig, trl_trainers.texts)
    given = dict(
        SFTTrainer=SFTTrainer,
        enable=enable,
        model=adapters.llama(),
        arguments=recipe.arguments(folder),
        data=Dataset.from_list(recipe.rows(LENGTH)),
        tokenizer=trl_trainers.tokenizer(),
    )
    return streams(lambda: ran("TRL", 0, **given))


RECIPES = {
    "PEFT": lambda folder: adapters(),
    "torchao": lambda folder: quantised(),
    "Lightning": lambda folder: lightning_module(),
    TRAINER: trainer,
    "TRL": trainer_of_trl,
}


@pytest.mark.parametrize("title", RECIPES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_recipes_of_packages(title, interpreted, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip(OF_PACKAGES[title])
    assert RECIPES[title](str(tmp_path))
