"""A 512-token byte-level tokenizer: for Countdown trained offline on its text, for any other rows without merges."""

import json
import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from recipe.tasks.countdown.problems import Difficulty, generate

VOCAB_SIZE = 512
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CORPUS_PROBLEMS = 256

# The fixed parts of the prompt, and the answer's tags, cost one token each. They are added tokens because BPE cannot
# make them: beside a Qwen2 model, AutoTokenizer always installs Qwen2's own word splitting, whatever is saved. For the
# same reason the class is Qwen2Tokenizer; with any other, a reloaded checkpoint would read different tokens.
PHRASES = (
    "Using the numbers ",
    ", ",
    " and ",
    ", write an expression that equals ",
    ". Use each number exactly once, with + - * / and parentheses. Answer as <answer>expression</answer>.",
    "<answer>",
    "</answer>",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(difficulty: Difficulty, seed: int = 0) -> Qwen2Tokenizer:
    """Train a ChatML tokenizer with exactly VOCAB_SIZE tokens; the same for the same arguments.

    In an expression each character is a token. Unused ids are <|reserved_i|>. Raises ValueError if the difficulty
    allows no problem.
    """
    return _tokenizer(_corpus(difficulty, seed), PHRASES)


def byte_tokenizer(phrases: Sequence[str]) -> Qwen2Tokenizer:
    """Return a ChatML tokenizer of VOCAB_SIZE tokens for any text: a token per byte, and one per phrase.

    Nothing is merged, so a text has one tokenization, and a model that writes the text character by character writes
    these tokens.
    """
    return _tokenizer([], phrases)


def phrase_tokenizer(phrases: Sequence[str]) -> Qwen2Tokenizer:
    """Return a ChatML tokenizer of VOCAB_SIZE tokens: one per phrase and for each role's name, and a token per byte."""
    return _tokenizer(["user", "assistant"], phrases)


def _tokenizer(corpus: Sequence[str], phrases: Sequence[str]) -> Qwen2Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(phrases),
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=None,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    # Not special: decoding with skip_special_tokens, as verl does, must keep the answer's tags.
    tokenizer.add_tokens([AddedToken(phrase, special=False, normalized=False) for phrase in phrases])
    reserved = range(VOCAB_SIZE - len(tokenizer))
    tokenizer.add_tokens([AddedToken(f"<|reserved_{i}|>", special=True, normalized=False) for i in reserved])
    return tokenizer


def response_text(expression: str) -> str:
    """Return the text that the assistant writes, without the end-of-turn token."""
    return f"<answer>{expression}</answer>"


def prompt_text(tokenizer: PreTrainedTokenizerBase, messages: str | list[dict[str, str]]) -> str:
    """Return the whole prompt of a chat or of the user's only message, up to the start of the assistant's turn."""
    chat = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)


def _corpus(difficulty: Difficulty, seed: int) -> list[str]:
    # No responses: an expression must have one tokenization, so no operators may merge.
    rng = random.Random(f"tokenizer/{seed}")
    texts: list[str] = []
    for _ in range(CORPUS_PROBLEMS):
        (problem,) = generate(difficulty, 1, rng)
        texts += ["user", problem.prompt, "assistant"]
    return texts
