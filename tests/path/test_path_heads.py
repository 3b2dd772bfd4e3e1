"""A draft head's state goes where its blocks go, so drafts behind a move are those of one undisturbed worker. Real
engines and transports.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.models.transformers_oracle import greedy as oracle_greedy
from checkpoint import open_checkpoint
from contracts.node import WorkerRole
from engine.engine import Engine
from engine.loader import load_engine
from tests.engine import driving, tiny_models
from tests.engine.speculative.judged_drafts import Judged, judge, require_formulas
from tests.engine.speculative.tiny_heads import ReferenceDrafts, save_head, speculators
from tests.engine.speculative.tiny_mtp import TinyMtp
from tests.path.cores import SETTINGS, Cores
from tests.path.test_path_migration import PROMPTS as MOVED_PROMPTS
from tests.path.test_path_migration import Movers
from tests.worker.core.tier_rig import host, join, settled

pytestmark = pytest.mark.slow

PROMPTS = driving.random_prompts(tiny_models.VOCAB, (1, 5, 16, 17, 40, 70))
MAX_TOKENS, DRAFT_TOKENS = 30, 3
QUESTIONS = ("What is the capital of France?", "Write two sentences about rain.", "Name three colours of the rainbow.")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    folder = tmp_path_factory.mktemp("target")
    return str(folder), tiny_models.save_tiny(folder, "llama")


@pytest.fixture(scope="module")
def head(target: tuple[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("head"), speculators(), open_checkpoint(target[0]).config)


@pytest.fixture(params=["ucx", "shm", "tcp"])
def transfer(request: pytest.FixtureRequest) -> str:
    return request.param


def reference_of(target: tuple[str, Any], head: Path, num_unread: int = 0) -> ReferenceDrafts:
    return ReferenceDrafts(head, open_checkpoint(target[0]).config, target[1], num_unread)


def judged_in(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> Judged:
    assert engine.speculator is not None
    engine.speculator._is_adaptive = False  # pyright: ignore[reportPrivateUsage]
    return judge(engine, prompts, expected)


def test_decodes_first_draft_and_all_behind_are_what_the_formulas_say(target, head: Path, transfer: str) -> None:
    expected = [oracle_greedy(target[1], prompt, MAX_TOKENS) for prompt in PROMPTS]
    with Cores(target[0], transfer, speculate=str(head), draft_tokens=DRAFT_TOKENS) as pair:
        judged = judged_in(pair.decode.engine, PROMPTS, expected)
        assert pair.answers(PROMPTS, driving.greedy(MAX_TOKENS)) == expected
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert len(judged.drafts[(*prompt, answer[0])]) == DRAFT_TOKENS
        require_formulas(judged, reference_of(target, head))
        assert pair.decode.counters()["kv_handoffs_received_without_draft"] == 0


def test_a_layer_for_multi_token_prediction_takes_its_latents_along(tmp_path: Path) -> None:
    """They are a group beside the model's, of the same form."""
    tiny, prompts = TinyMtp(tmp_path, "deepseek_v3"), PROMPTS[2:]
    expected = [oracle_greedy(tiny.model, prompt, 12) for prompt in prompts]
    with Cores(str(tmp_path), "tcp", speculate="mtp", draft_tokens=DRAFT_TOKENS) as pair:
        assert [group.planes for group in pair.decode.engine.layout.groups] == [("latent",), ("latent",), ("row",)]
        judged = judged_in(pair.decode.engine, prompts, expected)
        assert pair.answers(prompts, driving.greedy(12)) == expected
        for prompt, answer in zip(prompts, expected, strict=True):
            assert len(judged.drafts[(*prompt, answer[0])]) == DRAFT_TOKENS
        require_formulas(judged, tiny)
        assert pair.decode.counters()["kv_handoffs_received_without_draft"] == 0


def test_behind_a_prefill_without_the_head_drafts_begin_with_the_answer(target, head: Path) -> None:
    prompt = PROMPTS[-1]
    expected = oracle_greedy(target[1], prompt, MAX_TOKENS)
    with Cores(
        target[0], "tcp", of_prefill={"speculate": "off"}, speculate=str(head), draft_tokens=DRAFT_TOKENS
    ) as pair:
        judged = judged_in(pair.decode.engine, [prompt], [expected])
        assert pair.answers([prompt], driving.greedy(MAX_TOKENS)) == [expected]
        assert judged.drafts[(*prompt, expected[0])] == () and any(judged.drafts.values())
        require_formulas(judged, reference_of(target, head, num_unread=len(prompt)))
        assert pair.decode.counters()["kv_handoffs_received_without_draft"] == 1


@pytest.mark.parametrize(("of_prefill", "has_read"), [({}, True), ({"speculate": "off"}, False)])
def test_a_draft_models_kv_crosses_or_is_computed_of_the_text(target, transfer: str, of_prefill, has_read) -> None:
    """The model drafts for itself, so each guess is right."""
    expected = [oracle_greedy(target[1], prompt, MAX_TOKENS) for prompt in PROMPTS]
    both = {"speculate": target[0], "draft_tokens": DRAFT_TOKENS}
    with Cores(target[0], transfer, of_prefill=of_prefill, **both) as pair:
        judged, read = judged_in(pair.decode.engine, PROMPTS, expected), list[int]()
        drafter: Any = judged._drafter  # pyright: ignore[reportPrivateUsage]
        forward = drafter._runner.forward
        drafter._runner.forward = lambda pieces: (read.extend(piece.num_tokens for piece in pieces), forward(pieces))[1]
        assert pair.answers(PROMPTS, driving.greedy(MAX_TOKENS)) == expected
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            assert judged.drafts[(*prompt, answer[0])] == tuple(answer[1 : 1 + DRAFT_TOKENS])
        assert (max(read) < max(map(len, PROMPTS))) == has_read
        counted = pair.decode.counters()["kv_handoffs_received_without_draft"]
        assert counted == (0 if has_read else len(PROMPTS))


@pytest.fixture
def movers(target, head: Path) -> Iterator[Movers]:
    roles = (WorkerRole.DECODE, WorkerRole.DECODE)
    made = Movers(target[0], roles, speculate=str(head), draft_tokens=DRAFT_TOKENS)
    yield made
    for worker in made.workers:
        worker.node.close()


def test_an_answer_that_moves_is_drafted_as_if_it_had_stayed(movers: Movers, target, head: Path) -> None:
    a, b = movers.workers
    prompt, sampling = MOVED_PROMPTS["greedy"], driving.greedy(150)
    expected = oracle_greedy(target[1], prompt, 150)
    movers.until(lambda: a.node.ensure_link(b.ref))
    judged = [judged_in(worker.engine, [prompt], [expected]) for worker in (a, b)]
    job = movers.begin("greedy", a, sampling)
    movers.until(lambda: movers.has("greedy", 5))
    movers.move(job, a, b)
    movers.until(lambda: movers.is_over("greedy"))
    assert [token.token_id for token in movers.tokens("greedy")] == expected
    assert a.counters()["migrations_committed"] == 1
    first = min(judged[1].drafts, key=len)
    assert len(judged[1].drafts[first]) == DRAFT_TOKENS
    for each in judged:
        require_formulas(each, reference_of(target, head))


def test_a_prompt_that_a_tier_gives_back_is_drafted_as_before(target, head: Path) -> None:
    settings = driving.settings(model=target[0], speculate=str(head), draft_tokens=DRAFT_TOKENS, adapts_drafts=False)
    nbytes = 12 * load_engine(settings).layout.block_nbytes
    engine = load_engine(replace(settings, kv_cache_nbytes=nbytes))
    tiers = join(engine, host(engine))
    try:
        prompts = driving.random_prompts(tiny_models.VOCAB, (97, 113, 120))
        expected = [oracle_greedy(target[1], prompt, 20) for prompt in prompts]
        judged = judged_in(engine, prompts, expected)
        for index in (0, 1, 2, 0):
            judged.drafts.clear()
            assert driving.answers(engine, [prompts[index]], driving.greedy(20)) == [expected[index]]
            settled(tiers)
        assert tiers.counters()["kv_loaded_blocks"] > 0
        assert len(judged.drafts[(*prompts[0], expected[0][0])]) == DRAFT_TOKENS
        require_formulas(judged, reference_of(target, head))
    finally:
        tiers.close()


@pytest.fixture(scope="module")
def alone() -> tuple[list[list[int]], list[list[int]], tuple[int, tuple[int, ...]]]:
    """Prompts for the default model, and answers and counters of one worker with the head that comes with it."""
    settings = driving.settings(
        model="default",
        speculate="eagle3",
        draft_tokens=DRAFT_TOKENS,
        adapts_drafts=False,
        max_batched_tokens=SETTINGS["max_batched_tokens"],  # the same sums as in a pair, to the bit
    )
    engine = load_engine(settings)
    tokenizer = engine.checkpoint.tokenizer()
    chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in QUESTIONS]
    prompts = [tokenizer.encode(chat).ids for chat in chats]
    answers = [driving.answers(engine, [prompt], driving.greedy(30))[0] for prompt in prompts]
    stats = engine.stats()
    return prompts, answers, (stats.num_drafts, stats.num_accepted_by_place)


@pytest.mark.timeout(400)
def test_a_pair_accepts_of_the_shipped_heads_drafts_what_one_worker_does(alone) -> None:
    prompts, expected, counted = alone
    with Cores("default", "shm", speculate="eagle3", draft_tokens=DRAFT_TOKENS, kv_cache_mib=128) as pair:
        speculator = pair.decode.engine.speculator
        assert speculator is not None
        speculator._is_adaptive = False  # pyright: ignore[reportPrivateUsage]
        assert [pair.answers([prompt], driving.greedy(30))[0] for prompt in prompts] == expected
        stats = pair.decode.engine.stats()
        assert (stats.num_drafts, stats.num_accepted_by_place) == counted
        assert sum(counted[1]) > 0
