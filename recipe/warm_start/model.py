"""A Qwen2 model of about a million parameters or fewer, and sampling from it."""

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

# The size of a head, the smallest that vLLM's CPU attention supports.
HEAD_SIZE = 32
MAX_RESPONSE_TOKENS = 32


def build_model(tokenizer: PreTrainedTokenizerBase, layers: int = 4, heads: int = 4) -> Qwen2ForCausalLM:
    """Build a freshly initialised float32 model; seed torch first. Two query heads share a key-value head."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=heads * HEAD_SIZE,
        intermediate_size=4 * heads * HEAD_SIZE,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        use_sliding_window=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    return model


@torch.no_grad()
def respond(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    sample: bool,
    batch_size: int = 512,
    most_tokens: int | None = None,
) -> list[str]:
    """Return one response per prompt, without special tokens: the most likely one, or one drawn at temperature 1.

    most_tokens: the most tokens of a response; default MAX_RESPONSE_TOKENS.
    """
    model.eval()
    responses: list[str] = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            list(prompts[start : start + batch_size]), return_tensors="pt", padding=True, padding_side="left"
        )
        tokens = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=most_tokens or MAX_RESPONSE_TOKENS,
            do_sample=sample,
            # None switches off the library's top-k of 50; temperature must be unset when nothing is drawn.
            temperature=1.0 if sample else None,
            top_k=0 if sample else None,
        )
        new_tokens = tokens[:, batch["input_ids"].shape[1] :]
        responses += tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
    return responses
