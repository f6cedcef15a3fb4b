"""Projected optimizers inside a Trainer, and in two processes."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from hf_offload.methods.param_groups import param_groups
from hf_offload.methods.projected import ApolloConfig, FrugalConfig, GaLoreConfig, ProjectedAdamW
from tests.helpers.gloo_processes import assert_done, run_in_processes
from tests.helpers.tiny_models import ExampleDataset, tiny_batch, tiny_model, weights

METHODS = (
    GaLoreConfig(rank=4, update_proj_gap=3),
    ApolloConfig(rank=4, update_proj_gap=3),
    FrugalConfig(projection="random", update_proj_gap=3),
)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_trainer_resumes_with_the_same_bits(method, tmp_path):
    def train(resume=None):
        model = tiny_model("llama", dropout=0.1)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=8,
            save_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            warmup_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        settings = {"params": param_groups(model, weight_decay=0.1), "method": method, "lr": arguments.learning_rate}
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=ExampleDataset("llama", 32),
            optimizer_cls_and_kwargs=(ProjectedAdamW, settings),
        )
        trainer.train(resume_from_checkpoint=resume)
        return weights(model)

    whole = train()
    resumed = train(resume=str(tmp_path / "checkpoint-4"))
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


def replicas_stay_equal(rank, _folder):
    for method in METHODS:
        torch.manual_seed(rank)
        model = tiny_model("llama", dropout=0.0)
        wrapped = DistributedDataParallel(model)
        optimizer = ProjectedAdamW(param_groups(model), method, lr=1e-2)
        before = weights(model)
        for step in range(7):
            wrapped(**tiny_batch("llama", seed=10 * rank + step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = [value for state in optimizer.state.values() for value in state.values()]
        for value in [*weights(model).values(), *states]:
            everywhere = [torch.empty_like(value) for _ in range(2)]
            dist.all_gather(everywhere, value.contiguous())
            assert torch.equal(*everywhere), method
        assert not torch.equal(before["lm_head.weight"], model.lm_head.weight)


def test_replicas_of_two_processes_stay_equal(tmp_path):
    run_in_processes([replicas_stay_equal], 2, tmp_path)
    assert_done(replicas_stay_equal, 2, tmp_path)
