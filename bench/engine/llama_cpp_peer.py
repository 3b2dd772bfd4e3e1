"""The peer process of `bench.engine.native` and `.agreement`: llama.cpp, by llama-cpp-python.

It stands alone: the interpreter that runs it has llama_cpp and numpy, and none of Tandem. Each line of its standard
input is a measurement as JSON, each line of its output the tokens per second, or 0 where the answer is a file.
"""

import json
import sys
import time

import llama_cpp as api
import numpy as np

CONTEXT, BATCH = 1280, 1024
"""The tokens of each stream's context, which llama.cpp divides evenly, and those of a call."""


class LlamaCpp:
    """One model and one context, as many sequences in it as streams are asked for."""

    def __init__(self, path: str, threads: int, streams: int) -> None:
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT * streams, BATCH, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max = streams
        self._context = api.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, streams)

    def prefill(self, num_tokens: int) -> float:
        tokens = self._random(num_tokens)
        self._clear()
        start = time.perf_counter()
        self._run([(token, position, 0) for position, token in enumerate(tokens)], {num_tokens - 1})
        return num_tokens / (time.perf_counter() - start)

    def decode(self, streams: int, prompt: int, num_tokens: int) -> float:
        """Answers side by side, the likeliest token each time."""
        self._clear()
        for stream in range(streams):
            tokens = self._random(prompt, stream)
            self._run([(token, position, stream) for position, token in enumerate(tokens)], {prompt - 1})
        newest = [1] * streams
        start = time.perf_counter()
        for step in range(num_tokens):
            self._run([(newest[s], prompt + step, s) for s in range(streams)], set(range(streams)))
            newest = [int(self._logits(stream).argmax()) for stream in range(streams)]
        return streams * num_tokens / (time.perf_counter() - start)

    def forced_logits(self, prompt: list[int], answer: list[int], file: str) -> float:
        """Write the logits that led to each token of an answer, `[len(answer), vocab]`, as a .npy file.

        They are computed as in serving: the prompt at once, the answer token by token.
        """
        self._clear()
        end = len(prompt)
        self._run([(token, position, 0) for position, token in enumerate(prompt)], {end - 1})
        rows = [self._logits(end - 1).copy()]
        for position, token in enumerate(answer[:-1], end):
            self._run([(token, position, 0)], {0})
            rows.append(self._logits(0).copy())
        np.save(file, np.stack(rows))
        return 0.0

    def _logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), (self._vocab,))

    def _run(self, entries: list[tuple[int, int, int]], wanted: set[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for row, (token, position, sequence) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row in wanted
        if api.llama_decode(self._context, batch) != 0:
            raise SystemExit("llama_decode failed")
        api.llama_synchronize(self._context)

    def _random(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng(seed).integers(0, self._vocab, count).tolist()

    def _clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self._context), True)


def main() -> None:
    path, threads, streams = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr
    peer = LlamaCpp(path, threads, streams)
    print(json.dumps({"version": api.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        call = json.loads(line)
        found = getattr(peer, call.pop("what"))(**call)
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
