"""LoRA adapters on FSDP, compared with peft in one process: training, weight sync, export, and resuming."""

from pathlib import Path

import pytest
import torch
from devices import need
from reference import ReferenceGRPO, small_llama
from shard_helpers import assembled, assert_same, read_shards
from torch.distributed.checkpoint import FileSystemReader
from train_helpers import begin, distance, gradients, learn, saved, whole_weights

from single_controller import Broadcast, Dispatch, RayClassWithInitArgs, RayWorkerGroup, WorkerError, register
from workers.lora import BASE_DIGEST, LoraSettings
from workers.rollout.engines.hf_engine import HFEngine
from workers.rollout.engines.rollout_engine import SamplingParams
from workers.rollout.rollout_manager import RolloutManager
from workers.rollout.rollout_worker import RolloutWorker
from workers.train.args import TrainArgsError, read_args
from workers.train.args_checks import role_args

pytestmark = pytest.mark.timeout(180)

LORA = {"lora_rank": 4, "lora_alpha": 8}
TARGETS = ["v_proj", "down_proj", "lm_head", "embed_tokens"]
RANDOM = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
CASE = {"one": {"lr": 1e6}}
PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 1, 30, 12]]


class Engines(RolloutWorker):
    """A rollout worker whose engine can be replaced."""

    @register(Dispatch.ONE_TO_ALL)
    def use(self, model, **options):
        self.engine.close()
        self.engine = HFEngine(model, **options)
        self.weight_version = 0


@pytest.fixture(scope="module")
def rollout(train_pool, fsdp_groups):
    need(3)
    made = RayClassWithInitArgs(Engines, HFEngine, RANDOM)
    with RayWorkerGroup(train_pool[2:3], made, name_prefix="lora_rollout_", collectives=False) as group:
        yield group
        fsdp_groups(2).set_rollout_manager(None)  # other files use the group


def with_peft(adapter, **options):
    """The base model in peft, with the tensors of an adapter file."""
    import peft  # takes a second, which only one of the processes of pytest-xdist needs

    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(small_llama(), config)
    loaded = peft.set_peft_model_state_dict(model, adapter)
    assert not loaded.unexpected_keys and not [name for name in loaded.missing_keys if "lora_" in name]
    return model.eval()


def frozen(group):
    """The whole frozen parameters, as rank 0 gathers them, under the names of the base model."""

    def of(worker):
        parameters = worker.model.module.named_parameters()
        return {name: value.full_tensor() for name, value in parameters if not value.requires_grad}

    found = group.worker_group.execute_with_func_generator(of)[0]
    return {name.replace(".base_layer", ""): value for name, value in found.items()}


def sent(group):
    return assembled(
        group.worker_group.execute_with_func_generator(lambda worker: read_shards(worker.model.hf_shards()))
    )


@pytest.mark.parametrize(
    ("targets", "lr", "memory"),
    [(["all-linear"], 30.0, {}), (TARGETS, 2.0, {"gradient_checkpointing": True, "fsdp_cpu_offload": True})],
)
def test_gradients_match_peft(fsdp_groups, llama_folder, data, targets, lr, memory):
    """Steps of plain gradient descent: an Adam step of lr / eps * gradient, to one part in a million. The first one is
    so large that A has gradients too: B is 0 before it."""
    data = data[:12]
    group = fsdp_groups(2)
    exposed = {"lr": lr * 1e6, "adam_eps": 1e6, "adam_beta1": 0.0, "clip_grad": 0.0, "kl_loss_coef": 0.1}
    begin(
        group,
        {"hf_checkpoint": llama_folder, **LORA, "lora_target_modules": targets, **exposed, **memory},
        with_ref=True,
    )
    options = {"target_modules": "all-linear" if targets == ["all-linear"] else targets}
    plain = ReferenceGRPO(with_peft(whole_weights(group), **options), kl_coef=0.1, clip_grad=0)
    ref = plain.log_probs(data)
    torch.testing.assert_close(ref, ReferenceGRPO(small_llama()).log_probs(data), atol=1e-6, rtol=0)
    plain.optimizer = torch.optim.SGD((p for p in plain.model.parameters() if p.requires_grad), lr=lr)
    assert learn(group, 0, data)["loss"] == pytest.approx(plain.step(data)["loss"], abs=1e-5)
    torch.testing.assert_close(group.worker_group.compute_ref_log_prob(data), ref, atol=1e-5, rtol=0)
    parts = group.worker_group.execute_with_func_generator(gradients, Broadcast(data), Broadcast(CASE), 1000)
    assert parts[0]["one"][0]["loss"] == pytest.approx(plain.step(data)["loss"], abs=1e-5)
    found = assembled([part["one"][1] for part in parts])
    expected = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in plain.model.named_parameters()
        if parameter.requires_grad
    }
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=0, msg=name)
    assert min(gradient.abs().max() for gradient in expected.values()) > 1e-5
    assert_same(frozen(group), dict(small_llama().named_parameters()))


def test_adapter_reaches_the_rollout_and_disk(fsdp_groups, llama_folder, rollout, data, tmp_path):
    group = fsdp_groups(2)
    args = {"hf_checkpoint": llama_folder, **LORA, "lr": 1e-2, "save": str(tmp_path / "save"), "load":
            str(tmp_path / "save"), "save_hf": str(tmp_path / "hf")}  # fmt: skip
    begin(group, args)
    for step in range(2):
        learn(group, step, data)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_text("of an earlier export")
    group.save_model(1)
    adapter = whole_weights(group)

    # The engine computes what the trainer computes, from the adapter alone.
    rollout.use(llama_folder, lora=LoraSettings.from_args(read_args(args)))
    manager = RolloutManager(rollout, SamplingParams(8), lambda prompt, completion: 0.0, samples_per_prompt=2, seed=4)
    group.set_rollout_manager(manager)
    group.weight_version = 0
    group.update_weights(verify="full")
    tensors = sent(group)
    assert tensors.pop(BASE_DIGEST).dtype == torch.int64
    assert_same(tensors, adapter)
    reports = group.worker_group.execute_with_func_generator(lambda worker: worker.sync_report)
    assert sum(report.nbytes for report in reports) == sum(tensor.nbytes for tensor in adapter.values()) + 8
    assert {report.proved for report in reports} == {"engine"}
    generated = manager.generate(PROMPTS)
    counts = generated["loss_mask"] != 0
    log_probs = group.worker_group.compute_log_prob(generated)
    assert (log_probs - generated["rollout_log_probs"])[counts].abs().max() < 1e-5
    assert (log_probs - ReferenceGRPO(small_llama()).log_probs(generated))[counts].abs().max() > 1e-2

    # peft loads the export.
    import peft

    assert sorted(file.name for file in (tmp_path / "hf").iterdir()) == ["adapter_config.json",
                                                                        "adapter_model.safetensors"]  # fmt: skip
    loaded = peft.PeftModel.from_pretrained(small_llama(), str(tmp_path / "hf")).eval()
    assert loaded.peft_config["default"].base_model_name_or_path == llama_folder
    found = ReferenceGRPO(loaded).log_probs(generated)
    torch.testing.assert_close(found[counts], log_probs[counts], atol=1e-5, rtol=0)

    # A resumed run continues exactly. Base weights are not in the checkpoint.
    learn(group, 2, data)
    expected = whole_weights(group)
    assert begin(group, args) == [2, 2]
    assert distance(whole_weights(group), adapter) == 0.0
    learn(group, 2, data)
    assert distance(whole_weights(group), expected) == 0.0
    (folder,) = (path for path in Path(args["save"]).iterdir() if path.is_dir())
    names = FileSystemReader(next(folder.rglob(".metadata")).parent).read_metadata().state_dict_metadata
    assert not [name for name in names if "lora_" not in name and "param_groups" not in name]
    other = saved(small_llama(seed=9), tmp_path / "other")
    with pytest.raises(WorkerError, match="has a LoRA adapter of another base model"):
        group.worker_group.init({**args, "hf_checkpoint": other}, "actor")


def test_engine_needs_the_trainers_base_model(fsdp_groups, rollout, data):
    """Random weights, tied, in bfloat16."""
    group = fsdp_groups(2)
    args = read_args({"hf_config": RANDOM, "seed": 7, "param_dtype": "bf16", "lr": 1e-2, **LORA})
    begin(group, args)
    assert {value.dtype for value in frozen(group).values()} == {torch.bfloat16}
    options = {"param_dtype": "bf16", "lora": LoraSettings.from_args(args)}
    rollout.use(RANDOM, seed=8, **options)
    manager = RolloutManager(rollout, SamplingParams(8), lambda prompt, completion: 0.0, seed=4)
    group.set_rollout_manager(manager)
    group.weight_version = 0
    with pytest.raises(WorkerError, match="the base model under this engine's adapter has other weights than the"):
        group.update_weights()
    rollout.use(RANDOM, seed=7, param_dtype="bf16")
    with pytest.raises(
        WorkerError,
        match=r"the engine has no weight 'base_model\.model\.model\.layers\.0.*lora_A.*HFEngine takes it with",
    ):
        group.update_weights()
    rollout.use(RANDOM, seed=7, **options)
    learn(group, 0, data)
    group.update_weights()
    generated = manager.generate(PROMPTS)
    log_probs = group.worker_group.compute_log_prob(generated)
    assert (log_probs - generated["rollout_log_probs"])[generated["loss_mask"] != 0].abs().max() < 0.02


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"train_backend": "megatron"}, "lora_rank=4 needs train_backend='fsdp'"),
        ({"ref_load": "folder"}, "ref_load='folder' does not go with lora_rank=4"),
        ({"lora_target_modules": []}, "names of target_modules"),
        ({"lora_target_modules": ["all-linear", "lm_head"]}, "stands alone"),
        ({"lora_dropout": 1.0}, "lora_dropout=1.0: expected a number"),
    ],
)
def test_wrong_settings_are_refused(args, said):
    with pytest.raises(TrainArgsError, match=said):
        read_args({**LORA, **args})


def test_critic_is_trained_whole():
    args = read_args({**LORA, "advantage_estimator": "gae"})
    assert (role_args(args, "actor").lora_rank, role_args(args, "critic").lora_rank) == (4, 0)


def test_modules_that_cannot_have_an_adapter(fsdp_groups):
    workers = fsdp_groups(2).worker_group
    args = {"hf_config": RANDOM, **LORA}
    with pytest.raises(WorkerError, match="shares its weight with the embeddings"):
        workers.init({**args, "lora_target_modules": ["lm_head"]}, "actor")
    with pytest.raises(WorkerError, match="no_such_module"):
        workers.init({**args, "lora_target_modules": ["no_such_module"]}, "actor")
