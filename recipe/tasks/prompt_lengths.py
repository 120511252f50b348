"""How many tokens prompts have."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prompt_lengths(tokenizer: "PreTrainedTokenizerBase", chats: list[Any], **template: Any) -> list[int]:
    """Tokens of each prompt in the model's chat template, as the sampler gets it.

    Args:
        chats: lists of messages.
        template: further arguments of the chat template.
    """
    if not chats:
        return []
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False, **template)
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
