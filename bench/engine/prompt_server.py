"""An engine that a benchmark drives by lines of JSON, one process for each way of serving.

It runs from another checkout as well, for the peer of a run: what that may lack is imported only if it is asked for.

in:  {"tokens": [...], "max_tokens": 1, "settle": true}
out: {"token_nbytes": 23040} once it serves, and for each request
     {"ttft_s": 0.1, "cached_tokens": 0, "tokens": [...]}
"""

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from contracts.ids import RequestId
from contracts.sampling import SamplingParams
from engine.loader import load_engine
from engine.messages import EngineRequest, StepOutput
from engine.settings import EngineSettings

SETTLE_TIMEOUT_S = 120.0
IDLE_WAIT_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--pool-nbytes", type=int, required=True)
    parser.add_argument("--kv-host-gib", type=float, default=0.0)
    parser.add_argument("--kv-disk", type=Path)
    parser.add_argument("--kv-store", default="")
    options = parser.parse_args()
    server = PromptServer(options)
    print(json.dumps({"token_nbytes": server.token_nbytes}), flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        print(json.dumps(server.answer(command["tokens"], command["max_tokens"])), flush=True)
        if command["settle"]:
            server.settle()
    server.close()


class PromptServer:
    """One engine, and the tiers below it if any are asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._engine = load_engine(EngineSettings(model=options.model, kv_cache_nbytes=options.pool_nbytes))
        self._woken = threading.Event()
        self._rate = 0.0
        self._num_requests = 0
        self._tiers = None
        if options.kv_host_gib or options.kv_disk or options.kv_store:
            # Late: the checkout of a peer may have no tiers.
            from worker.core.open_tiers import open_tiers
            from worker.settings import WorkerSettings

            asked = {name: getattr(options, name) for name in ("model", "kv_host_gib", "kv_disk", "kv_store")}
            settings = WorkerSettings.model_validate({"worker_id": "bench", **asked})
            self._rate = self._engine.measure_prefill_rate()
            self._tiers = open_tiers(settings, self._engine, lambda: self._rate, self._woken.set)
            self._engine.use_lower_tiers(self._tiers)

    @property
    def token_nbytes(self) -> int:
        """Return the bytes of KV of one token."""
        return self._engine.layout.block_nbytes // self._engine.layout.block_size

    def answer(self, token_ids: list[int], max_tokens: int) -> dict[str, Any]:
        """Serve one request alone; return the seconds to its first token, its prefix hit, and its tokens."""
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=1, temperature=0.0, ignore_eos=True)
        begin_s = time.perf_counter()
        self._engine.submit(EngineRequest(RequestId(str(self._num_requests)), token_ids, sampling))
        ttft_s, num_cached, tokens = 0.0, 0, list[int]()
        while self._engine.has_work():
            output = self._step()
            num_cached += sum(started.cached_tokens for started in output.started)
            tokens += [sampled.token.token_id for sampled in output.sampled]
            if output.sampled and not ttft_s:
                ttft_s = time.perf_counter() - begin_s
        return {"ttft_s": ttft_s, "cached_tokens": num_cached, "tokens": tokens}

    def settle(self) -> None:
        """Wait until all that is new is kept below. Raises TimeoutError."""
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while self._tiers is not None and not self._tiers.is_idle:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"the tiers are not done within {SETTLE_TIMEOUT_S:.0f} s")
            time.sleep(0.005)

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        self._engine.close()

    def _step(self) -> StepOutput:
        self._woken.clear()
        output = self._engine.step()
        if output.num_prefill_tokens >= 256 and output.span_s:
            self._rate = output.num_prefill_tokens / output.span_s
        if output == StepOutput() and self._tiers is not None:
            limit_s = self._tiers.seconds_to_deadline()
            self._woken.wait(IDLE_WAIT_S if limit_s is None else min(limit_s, IDLE_WAIT_S))
        return output


if __name__ == "__main__":
    main()
