"""What bench.engine.logits_processors asks for, and its vocabulary, where there is no GPU."""

from dataclasses import replace

import torch
from msgspec import structs

from bench.engine.logits_processors import PLAIN, cases, word_tokenizer
from bench.models.model_folder import TINY
from bench.models.random_model import RandomWeights, random_checkpoint
from engine.loader import load_device_engine
from engine.settings import EngineSettings
from tests.engine.driving import answers

NUM_TOKENS = 24


def test_the_vocabulary_has_the_size_that_is_asked_for_bytes_first():
    tokenizer = word_tokenizer(2000)
    assert tokenizer.get_vocab_size() == 2000
    assert tokenizer.decode(tokenizer.encode("a ß").ids) == "a ß"


def test_what_is_asked_for_is_done_and_ends_no_answer():
    settings = EngineSettings(dtype="float32", kv_cache_nbytes=8 << 20, max_num_seqs=4, prefix_cache=False)
    device, tokenizer = torch.device("cpu"), word_tokenizer(TINY.vocab_size)
    checkpoint = replace(
        random_checkpoint("tiny", TINY), build_tokenizer=lambda: tokenizer, eos_token_ids=(TINY.vocab_size - 1,)
    )
    engine = load_device_engine(settings, checkpoint, lambda *_: None, RandomWeights(TINY, device), device)
    found = {
        case.name: answers(engine, [range(1, 40)], structs.replace(case.adjusted, max_tokens=NUM_TOKENS))[0]
        for case in cases(TINY.vocab_size)
    }
    assert all(len(tokens) == NUM_TOKENS for tokens in found.values())
    assert found["nothing"] not in (found["penalties"], found["bias of all tokens, one row"], found["JSON schema"])
    assert tokenizer.decode(found["JSON schema"]).startswith('[{"name":"')
    assert PLAIN.is_greedy
