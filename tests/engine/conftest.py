"""A patched Megatron actor in this process, on a model small enough to check by hand."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.utils import tensordict_utils as tu
from verl.workers.config import HFModelConfig, McoreCheckpointConfig, McoreOptimizerConfig

from vcpo import VCPOConfig

GROUPS, GROUP_SIZE, VOCABULARY, LEARNING_RATE = 3, 4, 64, 10.0


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 checkpoint with random weights and a tokenizer of one token per character."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    tokens = {chr(i + 32): i for i in range(VOCABULARY - 2)} | {"<eos>": VOCABULARY - 2, "<pad>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=VOCABULARY - 2,
        pad_token_id=VOCABULARY - 1,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(path)
    return path


@pytest.fixture
def make_engine(process_group: None, checkpoint: Path) -> Callable[[], Any]:
    """Builds a freshly loaded engine; SGD, so that an update is the gradient times the learning rate."""
    from verl_vcpo.cpu.config import CPUMcoreEngineConfig
    from verl_vcpo.cpu.engine import CPUVCPOMegatronEngine

    def make() -> Any:
        engine = CPUVCPOMegatronEngine(
            model_config=HFModelConfig(path=str(checkpoint), load_tokenizer=True),
            engine_config=CPUMcoreEngineConfig(
                dtype="float32",
                vanilla_mbridge=True,
                use_distributed_optimizer=False,  # Megatron's has no SGD
                override_transformer_config={"attention_backend": "auto"},
            ),
            optimizer_config=McoreOptimizerConfig(
                optimizer="sgd",
                lr=LEARNING_RATE,
                weight_decay=0.0,
                clip_grad=1e9,
                lr_warmup_steps=0,
                total_training_steps=100,
                override_optimizer_config={"sgd_momentum": 0.0},
            ),
            checkpoint_config=McoreCheckpointConfig(),
        )
        engine.initialize()
        return engine

    return make


def make_batch(seed: int = 0, prompt: int = 5) -> TensorDict:
    """GROUPS x GROUP_SIZE sequences of uneven length as they arrive from verl, groups interleaved."""
    rng = random.Random(seed)
    rows = []
    for _ in range(GROUPS * GROUP_SIZE):
        length = rng.randint(2, 12)
        prompts = torch.tensor([rng.randrange(VOCABULARY - 2) for _ in range(prompt)])
        responses = torch.tensor([rng.randrange(VOCABULARY - 2) for _ in range(length)])
        reward = torch.zeros(length)
        reward[-1] = float(rng.random() < 0.5)
        rows.append(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses]),
                "position_ids": torch.arange(prompt + length),
                "response_mask": torch.ones(length, dtype=torch.int64),
                "loss_mask": torch.ones(length, dtype=torch.int64),
                "rollout_log_probs": torch.tensor([-5.0 + rng.random() for _ in range(length)]),
                "rm_scores": reward,
                "advantages": torch.full((length,), rng.random() - 0.5),
            }
        )
        rows[-1]["old_log_probs"] = rows[-1]["rollout_log_probs"].clone()
    tensors: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([row[name] for row in rows], layout=torch.jagged) for name in rows[0]
    }
    tensors["uid"] = [f"{i % GROUPS:032x}" for i in range(len(rows))]
    settings = {
        "temperature": 1.0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 4,
        "use_remove_padding": True,
        "global_batch_size": len(rows),
    }
    return tu.get_tensordict(tensors, settings)


def loss_function(vcpo: VCPOConfig, loss_agg_mode: str = "seq-mean-token-mean") -> Any:
    """verl's loss as the engine receives it: a partial that carries the actor's configuration."""
    from verl.workers.utils.losses import ppo_loss

    from verl_vcpo.workers.config.actor import VCPOActorConfig

    config = VCPOActorConfig(
        strategy="megatron",
        rollout_n=GROUP_SIZE,
        ppo_micro_batch_size_per_gpu=4,
        loss_agg_mode=loss_agg_mode,
        vcpo=vcpo,
    )
    return partial(ppo_loss, config=config)
