"""Check whether two GGUF files make a pair: refusals and warnings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.backends.llamacpp.ggml.files import check_whole, llama_cpp, load_model, parts, read_tensors
from edgespec.backends.llamacpp.head_files import check_target
from edgespec.backends.llamacpp.recurrent import is_recurrent, why_not
from edgespec.backends.llamacpp.vocab import load_vocab
from edgespec.errors import EdgespecError, ModelError, VocabMismatch
from edgespec.loop.same_vocab import check_same_vocab
from edgespec.loop.text import chat_text
from edgespec.machine.memory import format_size
from edgespec.models.gguf_header import check_model, header_values
from edgespec.models.heads import is_head

LARGEST_SHARE = 1 / 8  # of the target's bytes; a larger draft seldom pays
LARGEST_OF_MEMORY = 1 / 4
TOKENIZER = "tokenizer.ggml."
IDS = tuple(f"{TOKENIZER}{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding"))
ADDED = tuple(f"{TOKENIZER}add_{name}" for name in ("bos_token", "eos_token", "space_prefix"))
TALK = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And the weather in Vienna?"},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


@dataclass(frozen=True, slots=True)
class Verdict:
    refusals: list[str]
    warnings: list[str]


def check_pair(target: str, draft: str, *, context_length: int, memory: int) -> Verdict:
    """Look at the headers of two files.

    Args:
        target: a GGUF; of a split one, the first part.
        draft: the same.
        context_length: tokens of text that are wanted.
        memory: bytes that may be used.
    """
    try:
        check_target(target)
        check_model(draft)
        refusals = [no_states(draft)] if is_head(draft) else []
    except ModelError as error:
        refusals = [str(error)]
    if refusals := refusals or [why for path in dict.fromkeys((target, draft)) if (why := unusable(path))]:
        return Verdict(refusals, [])
    vocabs = load_vocab(target), load_vocab(draft)
    try:
        check_same_vocab(*vocabs)
    except VocabMismatch as error:
        return Verdict([str(error)], [])
    headers = header_values(target, ""), header_values(draft, "")
    warnings = [*_tokenizer(*headers), *_kinds(*vocabs), *_templates(*vocabs)]
    warnings += [*_positions(target, draft, *headers, context_length), *_sizes(target, draft, memory)]
    return Verdict([], warnings)


def no_states(draft: str) -> str:
    return (
        f"{draft}: drafts from states of its target, which recorded answers do not hold: edgespec bench "
        f"PROMPTS.jsonl --model TARGET --draft {draft} measures it"
    )


def unusable(path: str) -> str:
    """Reason that a file can be neither target nor draft, or ""."""
    try:
        check_whole(path)
        model = load_model(path, vocab_only=True)
    except EdgespecError as error:
        return str(error)
    try:
        if is_recurrent(model) and (reason := why_not(model)):
            return f"{path}: {reason}"
    finally:
        llama_cpp.llama_model_free(model)
    return ""


def _tokenizer(target: dict[str, Any], draft: dict[str, Any]) -> list[str]:
    found = []
    for key in (f"{TOKENIZER}model", f"{TOKENIZER}pre", *IDS, *ADDED):
        left, right = target.get(key), draft.get(key)
        if left != right:
            harmless = "; harmless: the tokenizer of the target is used"
            tail = ", so they may end sequences differently" if key in IDS else harmless
            name = key.removeprefix(TOKENIZER)
            found.append(f"{name} is {_said(left)} in the target and {_said(right)} in the draft{tail}")
    return found


def _said(value: Any) -> str:
    return "not given" if value is None else repr(value)


def _kinds(target: Any, draft: Any) -> list[str]:
    common = min(target.size, draft.size)
    about = [[(vocab.token_text(token), vocab.kind(token)) for token in range(common)] for vocab in (target, draft)]
    other = [token for token, (left, right) in enumerate(zip(*about, strict=True)) if left != right]
    if not other:
        return []
    names = ", ".join(repr(target.token_text(token)) for token in other[:3])
    return [f"{len(other)} tokens have another name or kind (control, normal, …) in the draft, such as {names}"]


def _templates(target: Any, draft: Any) -> list[str]:
    if target.chat_template == draft.chat_template:
        return []
    differ = []
    for name, tools in (("a talk with a system message", None), ("a talk with tools", [TOOL])):
        texts = []
        for vocab in (target, draft):
            try:
                texts.append(chat_text(vocab, TALK, answer=True, tools=tools))
            except EdgespecError as error:
                texts.append(f"{type(error).__name__}")
        if texts[0] != texts[1]:
            differ.append(name)
    if not differ:
        return []
    return [f"the chat templates write {' and '.join(differ)} differently: was the draft tuned for other texts?"]


def _positions(target: str, draft: str, left: dict[str, Any], right: dict[str, Any], context_length: int) -> list[str]:
    found = []
    arch, of_draft = (str(header.get("general.architecture", "")) for header in (left, right))
    trained = int(right.get(f"{of_draft}.context_length", 0))
    if trained and trained < context_length:
        found.append(
            f"the draft was trained for {trained} tokens, not {context_length}: beyond them its draft tokens are bad"
        )
    names = [{tensor.name for part in parts(path) for tensor in read_tensors(part)} for path in (target, draft)]
    if arch == of_draft and "rope_freqs.weight" in names[0] - names[1]:
        found.append(
            "the draft's file lacks the factors for long texts (rope_freqs) that the target's has: an old file?"
        )
    return found


def _sizes(target: str, draft: str, memory: int) -> list[str]:
    found = []
    large, small = (sum(Path(part).stat().st_size for part in parts(path)) for path in (target, draft))
    if small > large * LARGEST_SHARE:
        found.append(
            f"the draft has {small / large:.2f} of the target's bytes; above {LARGEST_SHARE:.3f} it seldom pays"
        )
    if small > memory * LARGEST_OF_MEMORY:
        found.append(f"the draft takes {format_size(small)} of {format_size(memory)} of memory, and stays there")
    return found
