"""The training of heads on a corpus; several at once share what the target computes."""

import logging
import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.eagle3.corpus import Corpus, TextBatch
from tools.eagle3.draft_model import Eagle3Draft
from tools.eagle3.losses import CHUNK, ChunkLoss, chunk_loss, draft_loss, wanted_of
from tools.eagle3.target import TargetModel

_log = logging.getLogger(__name__)

WARMUP, LEAST_RATE, CLIP, DECAY = 0.03, 0.02, 1.0, 0.01
"""The part of training in which the learning rate rises, the part of its peak that it ends at, the norm that gradients
are cut to, and weight decay."""
BATCHES_A_LINE = 100


@dataclass(frozen=True)
class TrainingPlan:
    """How a head is trained.

    `passes` over the corpus, or `budget_s` seconds if that is less. `steps` drafts deep, each weighted by
    `step_weight` of the one before. `sharpness`: see losses.wanted_of. Up to `kept_nbytes` of what the target computes
    are kept for further passes. `compiled`: the loss is one kernel.
    """

    passes: int = 3
    budget_s: float = float("inf")
    batch_tokens: int = 24_576
    learning_rate: float = 1e-3
    steps: int = 3
    step_weight: float = 0.8
    sharpness: float = 0.5
    kept_nbytes: int = 0
    compiled: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Lesson:
    """A batch and what the target knows of it.

    `aux` `[B, T, fc_width]`. M rows after which a draft is asked for, in whole chunks: `rows` `[M]` are their flat
    indexes, `depths` `[M]` how many drafts deep each can be, -1 where a row only fills a chunk, `final` `[M, H]` what
    the target's output head reads there and `best` `[M]` what it chooses.
    """

    batch: TextBatch
    aux: Tensor
    rows: Tensor
    depths: Tensor
    final: Tensor
    best: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.aux, self.rows, self.depths, self.final, self.best))


class Lessons:
    """The batches of a corpus and what the target computes of them, kept as far as there is room."""

    def __init__(self, target: TargetModel, corpus: Corpus, plan: TrainingPlan) -> None:
        self._target = target
        self._batches = list(corpus.batches(plan.batch_tokens, plan.seed))
        self._kept: dict[int, Lesson] = {}
        self._room = plan.kept_nbytes

    def __len__(self) -> int:
        return len(self._batches)

    def shuffled(self, seed: int) -> Iterator[Lesson]:
        """Yield all lessons in an order that the seed draws."""
        order = list(range(len(self)))
        random.Random(seed).shuffle(order)
        for index in order:
            yield self._lesson(index)

    @torch.no_grad()
    def _lesson(self, index: int) -> Lesson:
        if (kept := self._kept.get(index)) is not None:
            return kept
        batch = self._batches[index]
        computed = self._target.rows(batch.tokens)
        rows = batch.predicted()
        depths = batch.first_drafts(rows)
        missing = -len(rows) % CHUNK if self._target.device.type == "cuda" else 0
        rows, depths = F.pad(rows, (0, missing)), F.pad(depths, (0, missing), value=-1)
        final = computed.final.flatten(0, 1).index_select(0, rows)
        best = torch.cat([self._target.logits(part).argmax(-1) for part in final.split(CHUNK)])
        lesson = Lesson(batch, computed.aux, rows, depths, final, best)
        if lesson.nbytes <= self._room:
            self._kept[index] = lesson
            self._room -= lesson.nbytes
        return lesson


class HeadTrainer:
    """One head with its optimizer."""

    def __init__(self, draft: Eagle3Draft, target: TargetModel, plan: TrainingPlan) -> None:
        self.draft, self._plan = draft, plan
        self.losses: list[Tensor | float] = [0.0] * plan.steps
        self._target_head = target.head[draft.drafted]
        self._of_chunk = _compiled_loss(draft) if plan.compiled else chunk_loss
        matrices = [weight for weight in draft.parameters() if weight.dim() > 1]
        gains = [weight for weight in draft.parameters() if weight.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": gains, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))

    def step(self, lesson: Lesson, progress: float) -> None:
        """Take one step, `progress` of the way through training."""
        draft, plan, device = self.draft, self._plan, lesson.aux.device
        with torch.no_grad():
            logits = lesson.final @ self._target_head.t()
            wanted, is_drafted = wanted_of(logits, lesson.best, draft.drafted, plan.sharpness)
        counts = is_drafted & (lesson.depths >= 0)
        share = 1 / counts.sum().clamp(min=1)
        with torch.autocast(device.type, torch.bfloat16, enabled=lesson.aux.dtype is torch.bfloat16):
            total = torch.zeros((), device=device)
            for step, rows in enumerate(draft.rows(lesson.aux, lesson.batch.tokens, plan.steps)):
                # Row i says token i + 2 + step, which follows row i + 1 + step.
                said = rows.flatten(0, 1).index_select(0, (lesson.rows - 1 - step).clamp(min=0))
                weights = (counts & (lesson.depths >= step)) * share
                loss = draft_loss(said, draft.lm_head.weight, wanted, weights, self._of_chunk)
                total = total + plan.step_weight**step * loss
                self.losses[step] = loss.detach()
        for group in self._optimizer.param_groups:
            group["lr"] = plan.learning_rate * rate(progress)
        self._optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), CLIP)
        self._optimizer.step()


def _compiled_loss(draft: Eagle3Draft) -> ChunkLoss:
    """Return the loss as one kernel, or as it is where no compiler works."""
    compiled = torch.compile(chunk_loss, dynamic=False)
    logits = torch.zeros(CHUNK, draft.config.draft_vocab_size, device=draft.drafted.device, dtype=torch.bfloat16)
    try:
        compiled(logits, logits, logits[:, :1].float())
    except Exception as error:  # a compiler has many ways to be missing
        _log.warning("the loss is not compiled: %s", error)
        return chunk_loss
    return compiled


def rate(progress: float) -> float:
    """Return the learning rate's part of its peak: a line up, then half a cosine down."""
    if progress < WARMUP:
        return max(progress, 1e-3) / WARMUP
    return max(LEAST_RATE, 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP)))))


def train(
    target: TargetModel, trainers: dict[str, HeadTrainer], corpus: Corpus, plan: TrainingPlan
) -> dict[str, float]:
    """Train all heads at once; return how long it took and how much was seen."""
    began, seen, num_batches = time.monotonic(), 0, 0
    lessons = Lessons(target, corpus, plan)
    for index in range(plan.passes):
        for lesson in lessons.shuffled(plan.seed + index):
            elapsed = time.monotonic() - began
            progress = max(num_batches / (plan.passes * len(lessons)), elapsed / plan.budget_s)
            if progress >= 1:
                break
            for trainer in trainers.values():
                trainer.step(lesson, progress)
            seen, num_batches = seen + lesson.batch.tokens.numel(), num_batches + 1
            if num_batches % BATCHES_A_LINE == 1:
                _log.info("%s", _line(trainers, num_batches, progress, elapsed))
    passes = num_batches / max(1, len(lessons))
    return {"batches": num_batches, "passes": passes, "tokens_seen": seen, "seconds": time.monotonic() - began}


def _line(trainers: dict[str, HeadTrainer], num_batches: int, progress: float, elapsed: float) -> str:
    losses = {name: [round(float(loss), 3) for loss in trainer.losses] for name, trainer in trainers.items()}
    return f"batch {num_batches}, {progress:.0%}, {elapsed:.0f} s, loss by draft {losses}"
