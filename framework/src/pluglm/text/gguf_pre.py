"""How byte-level GGUF vocabularies cut text into words, by the file's `tokenizer.ggml.pre`. Knows no vocabulary.

The patterns are part of each model's published tokenizer.json; the names are those that GGUF writers use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tokenizers import Regex, pre_tokenizers

from pluglm.kernel.errors import TokenizerError

Rules = Literal["transformers", "published"]

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+"

PATTERNS = {
    "llama3": CONTRACTION + "|" + LEAD + r"\p{L}+|\p{N}{1,3}" + PUNCTUATION + r"[\r\n]*" + SPACES,
    "qwen2": CONTRACTION + "|" + LEAD + r"\p{L}+|\p{N}" + PUNCTUATION + r"[\r\n]*" + SPACES,
    "tekken": f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*" + r"|\p{N}" + PUNCTUATION + r"[\r\n/]*" + SPACES,
    "gpt-4o": (
        f"{LEAD}{UPPER}*{LOWER}+{CONTRACTION}?|{LEAD}{UPPER}+{LOWER}*{CONTRACTION}?"
        r"|\p{N}{1,3}" + PUNCTUATION + r"[\r\n/]*" + SPACES
    ),
}
FAMILIES = {
    "gpt2": ("default", "gpt-2", "gpt2", "mpt", "olmo", "jais"),
    "digits": ("smollm", "starcoder", "refact", "command-r", "codeshell"),
    "llama3": ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"),
    "qwen2": ("qwen2", "deepseek-r1-qwen", "megrez"),
    "tekken": ("tekken",),
    "gpt-4o": ("gpt-4o", "llama4"),
}


def family(pre: str, file: Path) -> str:
    """The rule family of a `tokenizer.ggml.pre` value. Raises TokenizerError listing the known values."""
    for name, members in FAMILIES.items():
        if pre in members:
            return name
    known = ", ".join(sorted(member for members in FAMILIES.values() for member in members))
    raise TokenizerError(f"{file}: tokenizer.ggml.pre is {pre!r}, which is not known; known: {known}")


def pre_tokenizer(family_name: str, rules: Rules) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of one rule family.

    For the `digits` family the model's own tokenizer.json cuts every digit out first, while transformers' GGUF
    reader has GPT-2's pattern alone; the ids differ where two or more spaces stand before a digit.
    """
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family_name == "gpt2" or (family_name == "digits" and rules == "transformers"):
        return gpt2
    if family_name == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[family_name]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
