"""The command that trains EAGLE3 heads for a model from text that the model itself writes.

    python -m tools.eagle3.train --out HEADS [--model MODEL] [--head 768x6144 ...]

It writes prompts, lets the model answer them, trains every `--head WIDTHxVOCAB[:SHARPNESS]` on the answers (they share
what the target computes), judges each on held-out prompts beside prompt lookup, and leaves a folder for each and a
result file. On one H200 the defaults take ten minutes; on a CPU only tiny models are worth trying.
"""

import argparse
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench.report.result import ResultRow, write_result
from checkpoint import Checkpoint, open_checkpoint
from tools.eagle3.acceptance import LENGTHS, draft_hits, head_acceptance, ngram_acceptance
from tools.eagle3.corpus import Corpus
from tools.eagle3.draft_model import Eagle3Draft
from tools.eagle3.generation import Writer, Written
from tools.eagle3.head_folder import head_config, write_head
from tools.eagle3.target import TargetModel
from tools.eagle3.training import HeadTrainer, TrainingPlan, train
from tools.eagle3.writing import Conversations, Texts, WritingPlan, write_texts

_log = logging.getLogger(__name__)

NGRAM = "n-gram"
SAMPLE = 64
"""Texts by which the target's rows are measured."""
TRAINING_NBYTES = 20 << 30
"""What a step of training takes of a GPU's memory, generously."""


@dataclass(frozen=True)
class HeadChoice:
    """The width of the feed-forward, the number of drafted tokens, and how sharp its loss is."""

    width: int
    draft_vocab: int
    sharpness: float

    @property
    def name(self) -> str:
        return f"{self.width}x{self.draft_vocab}-{self.sharpness:g}"


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(message)s")
    args = _arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    checkpoint = open_checkpoint(args.model)
    target = TargetModel(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    texts = _write(checkpoint, target, args)
    corpus = Corpus(texts.training, device)
    _log.info("corpus: %d texts, %d tokens, %d of them written", len(corpus), corpus.num_tokens, corpus.num_written)
    plan = TrainingPlan(
        passes=args.passes,
        budget_s=args.train_s,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        steps=args.steps,
        step_weight=args.step_weight,
        kept_nbytes=_kept_nbytes(args.keep_gib, device),
        compiled=args.compile and device.type == "cuda",
        seed=args.seed,
    )
    trainers = {
        choice: HeadTrainer(_head(target, corpus, choice), target, replace(plan, sharpness=choice.sharpness))
        for choice in args.head
    }
    spent = train(target, {choice.name: trainer for choice, trainer in trainers.items()}, corpus, plan)
    _log.info("trained: %s", spent)
    rows = [row for kind, held in texts.held_out.items() for row in _ngram_rows(kind, held)]
    for choice, trainer in trainers.items():
        trainer.draft.fold()
        draft = trainer.draft.to(target.dtype)
        write_head(args.out / choice.name, draft, args.verifier, ["LlamaForCausalLM"])
        rows += _head_rows(draft, target, texts.held_out, choice, rows)
    config = vars(args) | {"head": [choice.name for choice in args.head], "spent": spent, "device_name": _name(device)}
    config |= {"corpus": {"texts": len(corpus), "tokens": corpus.num_tokens, "written": corpus.num_written}}
    file = write_result(args.out / "eagle3-head.json", "eagle3-head", rows, config)
    _log.info("%s\n%s", file, file.with_suffix(".md").read_text(encoding="utf-8"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for the heads and the result file")
    parser.add_argument("--model", default="", help="folder, GGUF file or hub id; the default model if empty")
    parser.add_argument("--verifier", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="the model's name on the hub")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--head", type=_choice, nargs="+", default=[_choice("768x6144")], metavar="WIDTHxVOCAB[:S]")
    parser.add_argument("--prompts", type=int, default=60_000, help="first turns")
    parser.add_argument("--held-out", type=int, default=100, help="prompts of each kind to judge by")
    parser.add_argument("--write-s", type=float, default=float("inf"), help="seconds of writing at most")
    parser.add_argument("--train-s", type=float, default=float("inf"), help="seconds of training at most")
    parser.add_argument("--slots", type=int, default=2048, help="sequences that are written at once")
    parser.add_argument("--max-len", type=int, default=1024, help="tokens of a sequence at most")
    parser.add_argument("--max-new", type=int, default=384, help="tokens of an answer at most")
    parser.add_argument("--passes", type=int, default=10, help="over the corpus")
    parser.add_argument("--batch-tokens", type=int, default=24_576)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=3, help="drafts deep")
    parser.add_argument("--keep-gib", type=float, default=96, help="GiB for what the target computes, between passes")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="the loss, on a GPU")
    parser.add_argument(
        "--step-weight", type=float, default=0.8, help="of a draft's loss, times that of the one before"
    )
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def _choice(text: str) -> HeadChoice:
    size, _, sharpness = text.partition(":")
    width, _, vocab = size.partition("x")
    return HeadChoice(int(width), int(vocab), float(sharpness or 0.5))


def _write(checkpoint: Checkpoint, target: TargetModel, args: argparse.Namespace) -> Texts:
    """Let the model write; what the writer holds on the device is free again afterwards."""
    began = time.monotonic()
    plan = WritingPlan(prompts=args.prompts, held_out=args.held_out, max_new=args.max_new, budget_s=args.write_s)
    capacity = args.prompts + len(LENGTHS) * args.held_out * 4 + 16
    writer = Writer(target, checkpoint.eos_token_ids, args.slots, args.max_len, capacity, args.seed)
    texts = write_texts(Conversations(checkpoint), writer, plan, args.seed)
    _log.info("written in %.1f s", time.monotonic() - began)
    del writer
    if target.device.type == "cuda":
        torch.cuda.empty_cache()
    return texts


def _head(target: TargetModel, corpus: Corpus, choice: HeadChoice) -> Eagle3Draft:
    """Return an untrained head; the stop tokens are drafted too, since answers end with them."""
    drafted = corpus.frequent(choice.draft_vocab, target.config.vocab_size)
    config = head_config(target.config, choice.width, choice.draft_vocab)
    draft = Eagle3Draft(config, target.embedding, drafted).to(target.device)
    draft.start_from(target, corpus.batch(range(min(len(corpus), SAMPLE))).tokens)
    size = sum(weight.numel() for weight in draft.parameters())
    share = corpus.share_of(drafted)
    _log.info("%s: %.2f M weights; %.2f %% of what was written can be drafted", choice.name, size / 1e6, 100 * share)
    return draft


def _ngram_rows(kind: str, texts: list[Written]) -> list[ResultRow]:
    found = {k: ngram_acceptance(texts, k) for k in LENGTHS}
    return [
        ResultRow("acceptance length", found[k].length, "tokens", {"drafter": NGRAM, "text": kind, "k": k})
        for k in LENGTHS
    ]


def _head_rows(
    draft: Eagle3Draft, target: TargetModel, held_out: dict[str, list[Written]], choice: HeadChoice,
    peers: list[ResultRow],
) -> list[ResultRow]:  # fmt: skip
    """Return the acceptance lengths of a head beside those of prompt lookup."""
    beside = {(row.params["text"], row.params["k"]): row.value for row in peers if row.params["drafter"] == NGRAM}
    rows = []
    for kind, texts in held_out.items():
        hits = draft_hits(draft, target, texts, max(LENGTHS))
        for k in LENGTHS:
            length = head_acceptance(hits, texts, k).length
            params = {"drafter": f"head {choice.name}", "text": kind, "k": k}
            rows.append(ResultRow("acceptance length", length, "tokens", params, None, NGRAM, beside[kind, k]))
    return rows


def _kept_nbytes(wanted_gib: float, device: torch.device) -> int:
    """Return how much may be kept between passes: no more than leaves room for training itself."""
    if device.type != "cuda":
        return int(wanted_gib * 2**30)
    free, _ = torch.cuda.mem_get_info(device)
    return max(0, min(int(wanted_gib * 2**30), free - TRAINING_NBYTES))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    main()
