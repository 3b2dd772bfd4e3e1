"""The benchmark of answers that move: their tokens, their pauses, and what survives which kill.

    python -m bench.serving.migration [--parts moves drain memory kills] [--moves 1000] [--answers 64] [--out FILE]

Parts: `moves` moves answers with all kinds of state under load, and compares each token with one worker that nothing
disturbs; `drain` ends a worker of many answers, beside a kill and a wait; `memory` lets a worker run out of KV, beside
preemption; `kills` kills and freezes each service at each point of a move.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import decoders

from bench.load.client import VOCABULARY
from bench.models.model_folder import TINY, wide_tokenizer, write_folder
from bench.report.result import ResultRow, write_result
from bench.serving.migration import moves
from bench.serving.migration.drain import measure_drains
from bench.serving.migration.halting_core import POINTS
from bench.serving.migration.kills import TARGETS, KillsReport, cases, kill_at_points
from bench.serving.migration.memory import measure_memory
from bench.serving.migration.movable_requests import KINDS, StreamedReply
from bench.serving.migration.moves import SETTINGS, START_TIMEOUT_S, MovesRun, move_under_load, right_replies
from bench.serving.migration.moving_services import MovingServices

PARTS = ("moves", "drain", "memory", "kills")
FEW_MOVES = 60
"""Moves of answers that are alone: between two workers that have nothing else to do."""
KILL_ROLES = {"m0": ("--role", "mixed"), "m1": ("--role", "mixed")}


def main(arguments: list[str]) -> int:
    """Measure and write the result. Returns 1 if anything that must not be was."""
    args = _parser().parse_args(arguments)
    rows: list[ResultRow] = []
    is_passed = True
    with tempfile.TemporaryDirectory(prefix="tandem-migration-") as name:
        folder, right = Path(name), list[StreamedReply]()
        settings, vocabulary = SETTINGS, VOCABULARY
        if args.small_model:
            _write_small_model(folder / "model")
            settings, vocabulary = SETTINGS | {"TANDEM_MODEL": str(folder / "model")}, TINY.vocab_size
        if {"moves", "kills"} & set(args.parts):
            count, num_tokens = args.requests, args.tokens
            right = asyncio.run(right_replies(folder / "right", settings, count, num_tokens, vocabulary, args.seed))
            print(f"the right answers to {count} requests are known", file=sys.stderr, flush=True)
        if "moves" in args.parts:
            alone, loaded = asyncio.run(_moves(folder / "moves", settings, right, args))
            rows += moves.rows(alone, "alone") + moves.rows(loaded, "loaded")
            rows += [ResultRow(f"moves under load of: {kind}", loaded.moves_of[kind], "") for kind in KINDS]
            is_passed &= not (alone.wrong or loaded.wrong or alone.held or loaded.held)
        if "drain" in args.parts:
            drains = measure_drains(args.answers, args.drain_tokens)
            rows += drains.rows()
            is_passed &= drains.is_passed
            _tell("drained", drains.moved.differences(drains.undisturbed))
        if "memory" in args.parts:
            memory = measure_memory(args.answers // 2, args.drain_tokens)
            rows += memory.rows()
            is_passed &= memory.is_passed
            for way, words in zip(("moves for memory", "preemption"), memory.differences(), strict=True):
                _tell(way, words)
        if "kills" in args.parts:
            report = asyncio.run(_kills(folder / "kills", settings, right, args))
            rows += report.rows()
            is_passed &= report.is_passed
            _tell("kills", [*report.wrong, *report.lost, *report.held, *report.unreached])
    config = {option: value for option, value in vars(args).items() if option != "out"}
    print(write_result(args.out, "migration", rows, config).with_suffix(".md").read_text("utf-8"))
    return int(not is_passed)


def _tell(part: str, faults: Sequence[str]) -> None:
    for words in faults:
        print(f"{part}: {words}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--moves", type=int, default=1000, help="moves under load")
    parser.add_argument("--at-once", type=int, default=8, help="answers at once under load")
    parser.add_argument("--requests", type=int, default=3 * len(KINDS), help="different requests, of all kinds in turn")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--answers", type=int, default=64, help="of the worker that is drained")
    parser.add_argument("--drain-tokens", type=int, default=200, help="of an answer whose worker is drained")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="what is killed and frozen")
    parser.add_argument("--points", nargs="+", choices=POINTS, default=POINTS, help="of a move, where it is")
    parser.add_argument("--small-model", action="store_true", help="for moves and kills a random one: a busy machine")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--machine", default="quiet", help="what else it does, for the result file")
    parser.add_argument("--out", type=Path)
    return parser


def _write_small_model(folder: Path) -> None:
    """Write a model with random weights, whose tokenizer is one that grammars can be compiled for."""
    write_folder(folder, TINY, torch.device("cpu"))
    tokenizer = wide_tokenizer(TINY.vocab_size)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1}), "utf-8")


async def _moves(
    folder: Path, settings: dict[str, str], right: Sequence[StreamedReply], args: argparse.Namespace
) -> tuple[MovesRun, MovesRun]:
    folder.mkdir()
    with MovingServices(folder, moves.ROLES, **settings) as services:
        await services.start_all(START_TIMEOUT_S)
        share = moves.SMALL_SHARE if args.small_model else moves.SHARE
        alone = await move_under_load(services, right, min(FEW_MOVES, args.moves), 1, share)
        return alone, await move_under_load(services, right, args.moves, args.at_once, share)


async def _kills(
    folder: Path, settings: dict[str, str], right: Sequence[StreamedReply], args: argparse.Namespace
) -> KillsReport:
    folder.mkdir()
    with MovingServices(folder, KILL_ROLES, **settings) as services:
        await services.start_all(START_TIMEOUT_S)
        return await kill_at_points(services, right, cases(args.targets, args.points))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
