"""A sampler in bfloat16 beside a trainer in float32: the noise of its weights is of the kind that is simulated."""

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab.stability.preset import TASKS

ANSWERS, LONGEST = 32, 16


def log_probs(model: torch.nn.Module, tokens: Tensor, seen: Tensor) -> Tensor:
    """[B, T, V] of what follows each token; `seen` [B, T] is 0 on padding."""
    position = (seen.cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=tokens, attention_mask=seen, position_ids=position).logits.float().log_softmax(dim=-1)


@pytest.mark.nightly  # of a published policy, which no change of the code moves
@torch.inference_mode()
def test_log_ratios_are_independent_and_weights_have_the_mean_1(assets: Path) -> None:
    """The published first policy has an RMS of 0.011 per token."""
    policy = TASKS["countdown"].published
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(policy, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float32, torch.bfloat16)
    )
    tokenizer = AutoTokenizer.from_pretrained(policy)
    chats = map(list, pd.read_parquet(assets / "data/train.parquet")["prompt"])
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    read = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    tokens, seen = (read[name].repeat_interleave(ANSWERS, 0) for name in ("input_ids", "attention_mask"))
    prompt, draw = tokens.shape[1], torch.Generator().manual_seed(0)
    alive, recorded, masks = torch.ones(len(tokens), dtype=torch.bool), list[Tensor](), list[Tensor]()
    for _ in range(LONGEST):
        sampler = log_probs(rounded, tokens, seen)[:, -1]
        token = torch.multinomial(sampler.exp(), 1, generator=draw)
        recorded.append(sampler.gather(1, token))
        masks.append(alive)
        tokens, seen = torch.cat([tokens, token], dim=1), torch.cat([seen, alive[:, None].long()], dim=1)
        alive = alive & (token[:, 0] != tokenizer.eos_token_id)
    trainer = log_probs(exact, tokens, seen)[:, prompt - 1 : -1].gather(2, tokens[:, prompt:, None])[..., 0]
    mask = torch.stack(masks, dim=1)
    log_ratio = torch.where(mask, trainer - torch.cat(recorded, dim=1), 0.0).double()
    mean_square, log_weight = (log_ratio.square().sum() / mask.sum()).item(), log_ratio.sum(dim=1)
    assert mean_square**0.5 == pytest.approx(0.011, abs=0.003)
    alone = mean_square * mask.sum(dim=1).double().mean().item()
    assert log_weight.var().item() == pytest.approx(alone, rel=0.2), "a sum of independent differences"
    assert log_weight.exp().mean().item() == pytest.approx(1, abs=4 * (alone / len(tokens)) ** 0.5)
