"""Train an EAGLE-3 head on recorded states: the training-time test of arXiv:2503.01840.

From every row of an answer the head goes `steps` rows on from its own states, as it does where it drafts. The rows'
tokens are those of the answer. Its distributions are compared with the target's.
"""

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from edgespec.backends.torch.eagle import EagleHead
from edgespec.backends.torch.loading import decoder_layers
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention
from transformers import LlamaConfig

from edgespec.errors import ModelError
from edgespec.machine.files import write_whole
from heads.answers import Sample
from heads.target import Target, computing

DECAY = 0.8  # weight of a step's loss, relative to the step before
WARM_UP = 0.05  # part of the training
CLIP = 0.5
BETAS = (0.9, 0.95)
WIDTH = 512  # of a row's values, at least
FROM_BOTH = ("q_proj.weight", "k_proj.weight", "v_proj.weight")  # take a token's embedding and a state
GROUPS = 16  # batches among which answers of similar length are put together
RATE = 0.6  # learning rate times the head's width
SHOWN = 20  # times that the held-out answers are measured


@dataclass(frozen=True, slots=True)
class Settings:
    """
    Attributes:
        steps: tokens that are drafted from a row.
        epochs: times that each answer is trained on.
        batch: answers in an optimiser's step.
        rate: highest learning rate.
    """

    epochs: int
    rate: float
    steps: int = 5
    batch: int = 4


@dataclass(frozen=True, slots=True)
class Lesson:
    """A sample with its recorded states.

    Attributes:
        token_ids: [n].
        states: [n, 4 * target's width], as `record` writes them.
        first: of `Sample`.
    """

    token_ids: Any
    states: Any
    first: int

    @property
    def rows(self) -> int:
        return len(self.token_ids) - 2


def lesson(sample: Sample, states: Any) -> Lesson:
    return Lesson(torch.tensor(sample.token_ids), states, sample.first)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The target's embeddings, and its output matrix for the draft vocabulary."""

    embeddings: Any
    output: Any
    softcap: float | None


@dataclass(frozen=True, slots=True)
class Lessons:
    """Lessons of one pass, their first rows below each other: prompts are filled up before, answers behind.

    Attributes:
        before: rows before the first that is trained on.
        tokens: [lessons, rows + 1], of the rows, and what the last one predicts.
        states: [lessons, rows, 3 * width], inputs of the target's layers.
        last: [lessons, rows - before, width], the target's normed states at the rows' tokens.
        places: [lessons, rows], positions of the tokens.
        valid: [lessons, rows], False for what is filled up.
    """

    before: int
    tokens: Any
    states: Any
    last: Any
    places: Any
    valid: Any


def stack(lessons: Sequence[Lesson], device: Any) -> Lessons:
    before = max(one.first for one in lessons)
    rows = before + max(one.rows - one.first for one in lessons)
    width = lessons[0].states.shape[1] // 4
    tokens = torch.zeros(len(lessons), rows + 1, dtype=torch.int64)
    states = torch.zeros(len(lessons), rows, 3 * width)
    last = torch.zeros(len(lessons), rows, width)
    places, valid = (
        torch.zeros(len(lessons), rows, dtype=torch.int64),
        torch.zeros(len(lessons), rows, dtype=torch.bool),
    )
    for i, one in enumerate(lessons):
        begin = before - one.first
        end = begin + one.rows
        tokens[i, begin : end + 1] = one.token_ids[1:]
        states[i, begin:end] = one.states[:-2, : 3 * width]
        last[i, begin:end] = one.states[1:-1, 3 * width :]
        places[i, begin:end] = torch.arange(1, one.rows + 1)
        valid[i, begin:end] = True
    moved = (one.to(device) for one in (tokens, states, last[:, before:], places, valid))
    return Lessons(before, *moved)


class Unrolled:
    """Attention while drafts of all rows are computed at once.

    The first call has every row, and a row sees the valid rows to itself. Call k has the k-th draft after the rows from
    `before` on: it sees what its first row sees, and the drafts between.
    """

    def __init__(self, lessons: Lessons) -> None:
        rows = lessons.valid.shape[1]
        causal = torch.ones(rows, rows, dtype=torch.bool, device=lessons.valid.device).tril()
        own = torch.eye(rows, dtype=torch.bool, device=causal.device)  # so that a row that is filled up sees something
        self._sees = ((causal & lessons.valid[:, None]) | own)[:, None]
        self._before = lessons.before
        self._keys, self._values = list[Any](), list[Any]()

    def __call__(self, query: Any, key: Any, value: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        self._keys.append(key.repeat_interleave(groups, 1))
        self._values.append(value.repeat_interleave(groups, 1))
        if len(self._keys) == 1:
            return scaled_dot_product_attention(query, self._keys[0], self._values[0], self._sees)
        count, scale = query.shape[2], query.shape[3] ** -0.5
        sees = self._sees[:, :, self._before : self._before + count]
        text = (query @ self._keys[0].transpose(2, 3) * scale).float().masked_fill(~sees, -torch.inf)
        own = [(query * keys[:, :, :count]).sum(-1, keepdim=True) * scale for keys in self._keys[1:]]
        weights = torch.softmax(torch.cat([text, *own], -1), -1).to(query.dtype)
        width = text.shape[-1]
        found = weights[..., :width] @ self._values[0]
        for i, values in enumerate(self._values[1:]):
            found = found + weights[..., width + i, None] * values[:, :, :count]
        return found


def unroll(head: EagleHead, frozen: Frozen, lessons: Lessons, steps: int) -> Iterator[Any]:
    """
    Yields:
        The head's states, step by step, [lessons, rows - before - step, width]. Index i of step k is the state after k
        draft tokens from the row before + i.
    """
    attend, before = Unrolled(lessons), lessons.before
    embedded = embedding(lessons.tokens[:, :-1], frozen.embeddings)
    states = head(embedded, head.fuse(lessons.states), lessons.places, attend)[:, before:]
    for step in range(steps):
        if step:
            begin = before + step
            if begin >= embedded.shape[1]:
                return
            states = head(embedded[:, begin:], states[:, :-1], lessons.places[:, begin:], attend)
        yield states


def loss_of(head: EagleHead, frozen: Frozen, lessons: Lessons, steps: int) -> Any:
    """Cross-entropy of the head's distributions against the target's over the draft vocabulary.

    Rows whose next token is not in the draft vocabulary are left out.
    """
    with torch.no_grad():
        logits = linear(lessons.last, frozen.output).float()
        if frozen.softcap:
            logits = torch.tanh(logits / frozen.softcap) * frozen.softcap
        wanted = torch.softmax(logits, -1)
    rows = (lessons.valid & head.t2d[lessons.tokens[:, 1:]])[:, lessons.before :]
    total, weights = None, 0.0
    for step, states in enumerate(unroll(head, frozen, lessons, steps)):
        chosen = rows[:, step:]
        if not chosen.any():
            continue
        loss = DECAY**step * cross_entropy(head.draft_logits(states[chosen]).float(), wanted[:, step:][chosen])
        total, weights = loss if total is None else total + loss, weights + DECAY**step
    return total / weights if total is not None else None


def agreement(head: EagleHead, frozen: Frozen, lessons: Lessons, steps: int) -> Any:
    """Number of draft tokens whose ancestors are right, and of those that are right, too, by depth: [2, steps]."""
    counts = torch.zeros(2, steps, dtype=torch.int64)
    so_far = lessons.valid[:, lessons.before :]
    with torch.no_grad():
        for step, states in enumerate(unroll(head, frozen, lessons, steps)):
            best = head.draft_ids[head.draft_logits(states).argmax(-1)]
            before = so_far[:, : best.shape[1]] & lessons.valid[:, lessons.before + step :]
            so_far = before & (best == lessons.tokens[:, lessons.before + step + 1 :])
            counts[0, step], counts[1, step] = before.sum(), so_far.sum()
    return counts


def draft_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int) -> Any:
    """Ascending ids of the answers' most frequent tokens; of equally frequent ones the lower, which are commoner."""
    counts = Counter(token for sample in samples for token in sample.token_ids[sample.start :])
    ids = sorted(range(vocab_size), key=lambda token: (-counts[token], token))[:size]
    return torch.tensor(sorted(ids))


def new_head(target: Target, draft_ids: Any) -> EagleHead:
    """A head that begins as the target's last layer behind the highest of the three inputs.

    Its output matrix stays the target's. Its rotation is plain, whatever the target's: both need not agree.
    """
    config, width = target.config, target.config.hidden_size
    heads = config.num_attention_heads
    d = getattr(config, "head_dim", None) or width // heads
    about = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"], vocab_size=len(target.embeddings), hidden_size=width,
        intermediate_size=config.intermediate_size, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=key_heads(heads, getattr(config, "num_key_value_heads", None) or heads, d), head_dim=d,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(config)}, tie_word_embeddings=False,
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, draft_vocab_size=len(draft_ids),
        target_hidden_size=width, eagle_aux_hidden_state_layer_ids=list(target.layers), dtype="float16",
    )  # fmt: skip
    torch.manual_seed(0)
    head = EagleHead(about, target.layers).to(target.device)
    head.set_draft_ids(draft_ids.to(target.device))
    with torch.no_grad():
        for module in head.midlayer.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, 0.02)
        head.fc.weight.zero_()[:, -width:] = torch.eye(width)
        head.lm_head.weight.copy_(target.output[draft_ids.to(target.device)])
        layer = decoder_layers(target.model)[-1]
        for ours, theirs in (
            (head.norm, getattr(target.model.get_decoder(), "norm", None)),
            (head.midlayer.hidden_norm, getattr(layer, "input_layernorm", None)),
            (head.midlayer.post_attention_layernorm, getattr(layer, "post_attention_layernorm", None)),
        ):
            if theirs is not None and getattr(theirs, "bias", None) is None:
                ours.weight.copy_(theirs(torch.ones(1, width, device=target.device))[0])  # Gemma's add 1 to the weight
        theirs = dict(layer.named_parameters())
        for name, weight in head.midlayer.named_parameters():
            found = theirs.get(name)
            if weight.ndim == 2 and found is not None and found.shape == weight.shape:
                weight.copy_(found)
            elif name.endswith(FROM_BOTH) and found is not None and found.shape[1] * 2 == weight.shape[1]:
                by_head = found.unflatten(0, (-1, d)).repeat_interleave(len(weight) // len(found), 0)
                weight[:, width:] = by_head.flatten(0, 1)  # the other half is the embedding's
    head.lm_head.requires_grad_(False)
    return head


def _rope_theta(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    return float(rope.get("full_attention", rope).get("rope_theta", 10000.0))


def key_heads(heads: int, theirs: int, d: int) -> int:
    """At least the target's, and as many as carry a token's embedding: all that a row learns of it are its values."""
    return next(n for n in range(theirs, heads + 1) if heads % n == 0 and (n * d >= WIDTH or n == heads))


class Trainer:
    """Trains a head, and keeps what it needs to go on in `path`."""

    def __init__(
        self, head: EagleHead, frozen: Frozen, lessons: Sequence[Lesson], held_out: Sequence[Lesson],
        settings: Settings, path: Path,
    ) -> None:  # fmt: skip
        self._head, self._frozen, self._lessons, self._held_out = head, frozen, lessons, held_out
        self._settings, self._path = settings, path
        self._weights = [weight for weight in head.parameters() if weight.requires_grad]
        self._optimiser = torch.optim.AdamW(self._weights, lr=settings.rate, betas=BETAS, weight_decay=0.0)
        per_epoch = -(-len(lessons) // settings.batch)
        self.step, self.total = 0, settings.epochs * per_epoch
        self._per_epoch, self._epoch, self._device = per_epoch, -1, head.fc.weight.device
        if path.exists():
            try:
                kept = torch.load(path, map_location=self._device, weights_only=True)
                head.load_state_dict(kept["head"])
                self._optimiser.load_state_dict(kept["optimiser"])
                self.step = kept["step"]
            except (EOFError, KeyError, RuntimeError, UnpicklingError, ValueError) as error:
                raise ModelError(f"{path}: is damaged; remove it, and the training begins again") from error

    def run(self, progress: Callable[[int, int, float], None], say: Callable[[int, list[float]], None]) -> list[float]:
        """Train to the end.

        Args:
            progress: called with steps done, steps in all, and the loss.
            say: called with the step and the agreement of the held-out answers, as `agreement` returns it.

        Returns:
            The agreement at the end.

        Raises:
            KeyboardInterrupt: after Ctrl-C; the next trainer goes on from here.
        """
        every = max(1, self.total // SHOWN)
        with _ctrl_c() as pressed:
            while self.step < self.total:
                loss = self._train()
                progress(self.step, self.total, loss)
                if pressed():
                    self._keep()
                    raise KeyboardInterrupt
                if self.step % every == 0 and self.step < self.total:
                    self._keep()
                    say(self.step, self.measure())
        self._keep()
        found = self.measure()
        say(self.step, found)
        return found

    def measure(self) -> list[float]:
        """Shares of held-out draft tokens that are right if those before them are, by depth."""
        counts = torch.zeros(2, self._settings.steps, dtype=torch.int64)
        for first in range(0, len(self._held_out), self._settings.batch):
            batch = stack(self._held_out[first : first + self._settings.batch], self._device)
            with computing(self._device):
                counts += agreement(self._head, self._frozen, batch, self._settings.steps)
        return [int(right) / max(1, int(tried)) for tried, right in counts.T]

    def _train(self) -> float:
        epoch, number = divmod(self.step, self._per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._in_batches(epoch)
        for group in self._optimiser.param_groups:
            group["lr"] = self._settings.rate * schedule(self.step, self.total)
        lessons = stack([self._lessons[i] for i in self._batches[number]], self._device)
        with computing(self._device):
            loss = loss_of(self._head, self._frozen, lessons, self._settings.steps)
        if loss is not None:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._weights, CLIP)
            self._optimiser.step()
            self._optimiser.zero_grad()
        self.step += 1
        return float(loss.detach()) if loss is not None else 0.0

    def _in_batches(self, epoch: int) -> list[list[int]]:
        generator, size = torch.Generator().manual_seed(epoch), self._settings.batch
        order, batches = torch.randperm(len(self._lessons), generator=generator).tolist(), list[list[int]]()
        for first in range(0, len(order), GROUPS * size):
            group = sorted(order[first : first + GROUPS * size], key=lambda i: self._lessons[i].first)
            batches += [group[begin : begin + size] for begin in range(0, len(group), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]

    def _keep(self) -> None:
        state, data = {"head": self._head.state_dict(), "optimiser": self._optimiser.state_dict()}, BytesIO()
        torch.save(state | {"step": self.step}, data)  # into a file, a full disk would be a RuntimeError
        write_whole(self._path, data.getvalue())


def schedule(step: int, total: int) -> float:
    """Part of the highest learning rate: it rises evenly, and falls by a cosine to a twentieth."""
    warm = max(1, round(WARM_UP * total))
    if step < warm:
        return (step + 1) / warm
    return 0.05 + 0.475 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is only noted, so that no step is left half done."""
    pressed = list[int]()
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
