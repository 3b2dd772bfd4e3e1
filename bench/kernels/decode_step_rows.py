"""The rows of the decode step at each batch size, and of what each of its choices is worth."""

import torch

from bench.kernels.decode_step import Model, Step, check_replay, floor_ms, measure, variants
from bench.kernels.figure import Figure, show
from kernels.registry import Registry

BATCHES = (1, 8, 32, 64, 128, 256)


def rows(registry: Registry) -> list[Figure]:
    model = Model()
    result: list[Figure] = []
    for batch in BATCHES:
        result += [show(row) for row in batch_rows(model, registry, batch)]
        torch.cuda.empty_cache()
    return result


def batch_rows(model: Model, registry: Registry, batch: int) -> list[Figure]:
    step = Step(model, registry, batch)
    base = measure(step)
    limit = floor_ms(batch)
    rows = [Figure("decode_step", dict(batch=batch, head="fp8"), base, "ms", limit / base)]
    rows.append(Figure("decode_step_replay_equal", dict(batch=batch), check_replay(step), "bool"))
    for name, other in variants(step, registry).items():
        value = measure(other)
        if name == "bf16_head":
            rows.append(Figure("decode_step", dict(batch=batch, head="bf16"), value, "ms", limit / value))
        else:
            rows.append(Figure("decode_step_without", dict(batch=batch, trick=name), value, "ms", None, "with", base))
    again = measure(step)
    rows.append(Figure("decode_step_again", dict(batch=batch), again, "ms", limit / again, "first", base))
    return rows
