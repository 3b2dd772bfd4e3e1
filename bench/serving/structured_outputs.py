"""The benchmark of structured output: the validity of answers, and what a grammar costs a step.

    python -m bench.serving.structured_outputs --schemas 200

Random JSON schemas (seeded) are answered at temperature 1 by the engine alone and by a pair through HTTP, where the
answer starts on one worker and goes on on another. Then decode steps with and without a grammar take turns.
"""

import argparse
import asyncio
import json
import logging
import random
import statistics
import time
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
from llguidance import LLMatcher

from bench.load.client import session
from bench.report.result import ResultRow, write_result
from bench.system.local_system import System, running
from contracts.events import FinishReason
from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.engine import Engine
from engine.loader import load_engine
from engine.messages import EngineRequest
from engine.settings import EngineSettings
from kernels.cpu.isa import apply_isa, probe_isa

MAX_TOKENS, AT_ONCE, ROUNDS = 200, 16, 5
Schema = dict[str, Any]
_names = count()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parse()
    rng = random.Random(args.seed)
    schemas = [random_schema(rng) for _ in range(args.schemas)]
    settings = EngineSettings(prefix_cache=False, kv_cache_nbytes=1 << 29)
    apply_isa(probe_isa(settings.cache_dir))
    engine = load_engine(settings)
    rows = [*validity("engine alone", schemas, through_engine(engine, schemas)), *step_costs(engine)]
    for transfer in args.transfers.split(","):
        with running("--transfer", transfer) as system:
            rows += validity(f"pair, {transfer}", schemas, asyncio.run(through_http(system, schemas)))
    config = {"schemas": args.schemas, "seed": args.seed, "max_tokens": MAX_TOKENS}
    logging.info("%s", write_result(args.out, "structured", rows, config).with_suffix(".md").read_text("utf-8"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--transfers", default="ucx")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="result file")
    return parser.parse_args()


def random_schema(rng: random.Random, depth: int = 2) -> Schema:
    """Return an object with one to four properties, some of them required, up to `depth` objects deep."""
    names = rng.sample(["id", "name", "price", "tags", "kind", "is open", "größe", "x-1"], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_value(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(1, len(names))),
        "additionalProperties": False,
    }


def random_value(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(-50, 50)
    kinds: list[Schema] = [
        {"type": "string", "maxLength": rng.randint(1, 12)},
        {"type": "string", "pattern": rng.choice(["^[A-Z]{3}-[0-9]{2}$", "^(a|b)+c$", "^[^ ]{1,5}$"])},
        {"type": "string", "enum": ["red", 'gr"een', "blå"]},
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
        {"type": "number", "minimum": low, "maximum": low + rng.randint(1, 9)},
        {"type": "boolean"},
        {"type": ["null", "boolean"]},
        {"const": rng.choice([None, 7, "fixed", [1, "two"]])},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]},
    ]
    if depth > 0:
        least = rng.randint(0, 2)
        items = random_value(rng, depth - 1)
        kinds += [{"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}]
        kinds += [random_schema(rng, depth)]
    return rng.choice(kinds)


def grammar(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def through_engine(engine: Engine, schemas: list[Schema]) -> list[str | None]:
    """Return the text of each answer; None for one that ran into its limit of tokens."""
    tokenizer, answers = engine.checkpoint.tokenizer(), []
    for first in range(0, len(schemas), AT_ONCE):
        tokens: dict[RequestId, list[int]] = {}
        reasons: dict[RequestId, FinishReason] = {}
        for index, schema in enumerate(schemas[first : first + AT_ONCE], first):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=index, grammar=grammar(schema))
            name = RequestId(str(next(_names)))
            tokens[name] = []
            engine.submit(EngineRequest(name, tokenizer.encode(question(schema)).ids, sampling))
        while engine.has_work():
            output = engine.step()
            for sampled in output.sampled:
                tokens[sampled.request_id].append(sampled.token.token_id)
            reasons |= {end.request_id: end.reason for end in output.ended}
        answers += [
            tokenizer.decode(ids) if reasons[name] is FinishReason.STOP else None for name, ids in tokens.items()
        ]
    return answers


async def through_http(system: System, schemas: list[Schema]) -> list[str | None]:
    limit = asyncio.Semaphore(AT_ONCE)
    async with session() as http:
        return await asyncio.gather(*(ask(http, system, limit, seed, schema) for seed, schema in enumerate(schemas)))


async def ask(
    http: aiohttp.ClientSession, system: System, limit: asyncio.Semaphore, seed: int, schema: Schema
) -> str | None:
    body = {
        "model": system.model(),
        "messages": [{"role": "user", "content": question(schema)}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "max_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "seed": seed,
    }
    async with limit, http.post(f"{system.url}/v1/chat/completions", json=body) as response:
        reply = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {reply}, for {json.dumps(schema)}")
        choice = reply["choices"][0]
        return choice["message"]["content"] if choice["finish_reason"] == "stop" else None


def question(schema: Schema) -> str:
    return f"Answer in JSON of this form: {json.dumps(schema)}"


def validity(who: str, schemas: list[Schema], answers: list[str | None]) -> list[ResultRow]:
    finished = [(schema, text) for schema, text in zip(schemas, answers, strict=True) if text is not None]
    valid = sum(is_valid(schema, text) for schema, text in finished)
    params = {"who": who, "finished": len(finished), "schemas": len(schemas)}
    return [ResultRow("finished answers that are valid", valid, "answers", params, limit=len(finished))]


def is_valid(schema: Schema, text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        logging.warning("not valid: %s for %s: %s", text, json.dumps(schema), error)
        return False
    return True


def step_costs(engine: Engine) -> list[ResultRow]:
    """Return the median milliseconds of a decode step with a grammar, beside those without."""
    endless = grammar({"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 100})
    rows = []
    for streams in (1, 16):
        with_ms, without_ms = [], []
        for _ in range(ROUNDS):
            with_ms += step_ms(engine, streams, endless)
            without_ms += step_ms(engine, streams, "")
        with_grammar, without = statistics.median(with_ms), statistics.median(without_ms)
        params = {"streams": streams}
        rows.append(ResultRow("decode step with a grammar", with_grammar, "ms", params, None, "without", without))
    return rows


def step_ms(engine: Engine, streams: int, rule: str, steps: int = 24) -> list[float]:
    for index in range(streams):
        sampling = SamplingParams(max_tokens=steps, seed=index, temperature=0.0, ignore_eos=True, grammar=rule)
        engine.submit(EngineRequest(RequestId(str(next(_names))), list(range(10, 74)), sampling))
    taken = []
    while engine.has_work():
        start = time.perf_counter()
        output = engine.step()
        if output.num_prefill_tokens == 0:
            taken.append((time.perf_counter() - start) * 1e3)
    return taken


if __name__ == "__main__":
    main()
