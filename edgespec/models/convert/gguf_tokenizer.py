"""A GGUF's vocabulary as tokenizer.json and tokenizer_config.json.

The token ids are llama.cpp's: Unicode is not normalised, and digits split as in llama.cpp.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.errors import ModelError
from edgespec.loop.backend import Vocab

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # llama_token_type in llama.h
SPACE = "▁"

# Split patterns of llama.cpp (llama-vocab.cpp), by `tokenizer.ggml.pre`.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "llama3": [LLAMA3],
    "llama-v3": [LLAMA3],
    "qwen2": [QWEN2],
    "deepseek-r1-qwen": [QWEN2],
    "tekken": [TEKKEN],
}
WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a piece that is a token is not merged up to it

SAMPLE = (
    "Hello, world!  I'll say it's 12345.67, don't I?\n\n\tdef f(x):\n        return x ** 2  # ok\r\n"
    "Ünïcödé naïve café. Привет, мир! 你好，世界。 日本語のテキスト مرحبا بالعالم नमस्ते 한국어 e\u0301 ½ ² ١٢٣ "
    "🤷🏽‍♂️👍🏿 https://example.org/a?b=c&d=%20   trailing   "
)


def build_tokenizer(metadata: Mapping[str, Any], vocab: Vocab) -> "Tokenizer":
    """The tokenizer a header describes, proved equal to llama.cpp's on a sample.

    Args:
        metadata: the header, `tokenizer.*` keys complete.
        vocab: the same file's, from llama.cpp.

    Raises:
        ModelError: a kind of tokenizer not known here, or one that comes out different.
    """
    from tokenizers import AddedToken, processors

    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(
            f"its tokenizer is of the kind {kind!r}; supported are 'gpt2' (BPE) and 'llama' (SentencePiece)"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ModelError("its vocabulary holds the same token twice")
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens)
    types = metadata.get("tokenizer.ggml.token_type", [])
    for wanted in (CONTROL, USER_DEFINED):
        added = [token for token, type_ in zip(tokens, types, strict=False) if type_ == wanted]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=wanted == CONTROL) for token in added])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelError(f"its vocabulary has {len(tokens)} tokens, but {tokenizer.get_vocab_size()} came out")

    bare, framed = (vocab.encode("a", add_bos=add, parse_special=False) for add in (False, True))
    before = framed[: len(framed) - len(bare)] if framed[-len(bare) :] == bare else framed[: framed.index(bare[0])]
    after = framed[len(before) + len(bare) :]
    if before or after:
        pieces = [*(tokens[i] for i in before), "$A", *(tokens[i] for i in after)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*pieces[: len(before)], "$A", *pieces[len(before) + 1 :]],
            special_tokens=[(tokens[i], i) for i in {*before, *after}],
        )
    check_tokenizer(tokenizer, vocab, [SAMPLE, *(f"{token}x {token}" for token in tokenizer_specials(metadata))])
    return tokenizer


def check_tokenizer(tokenizer: "Tokenizer", vocab: Vocab, texts: Sequence[str]) -> None:
    """Compare with llama.cpp.

    Raises:
        ModelError: names the first text whose token ids differ.
    """
    for text in texts:
        ours = tokenizer.encode(text, add_special_tokens=False).ids
        theirs = vocab.encode(text, add_bos=False, parse_special=True)
        if ours != theirs:
            place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
            raise ModelError(
                f"the tokenizer comes out different: of {text[:40]!r}… token {place} is "
                f"{ours[place : place + 3]}… in the folder and {theirs[place : place + 3]}… in llama.cpp"
            )


def tokenizer_specials(metadata: Mapping[str, Any]) -> dict[str, str]:
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {new: metadata.get(f"tokenizer.ggml.{old}_token_id") for old, new in names.items()}
    return {f"{new}_token": tokens[i] for new, i in ids.items() if i is not None and i < len(tokens)}


def tokenizer_config(metadata: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    template: Any = metadata.get("tokenizer.chat_template")
    if tool_use := metadata.get("tokenizer.chat_template.tool_use"):
        named = {"default": template, "tool_use": tool_use}
        template = [{"name": name, "template": one} for name, one in named.items() if one]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **tokenizer_specials(metadata),
        **({"chat_template": template} if template else {}),
    }


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    kind = metadata.get("tokenizer.ggml.pre", "default")
    if kind not in PATTERNS:
        raise ModelError(f"its pre-tokenizer is {kind!r}; supported are {', '.join(PATTERNS)}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=kind in WHOLE_WORDS_FIRST))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[kind]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocab = {token: i for i, token in enumerate(tokens)}
    merges = _merges(vocab, metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if prefix else []), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found = [
        (-scores[i], i, token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(found)]
