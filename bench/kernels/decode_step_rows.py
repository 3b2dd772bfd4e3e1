"""The decode step at each batch size, and what each of its choices is worth."""

import torch

from bench.kernels.decode_step import Model, Step, check_replay, floor_ms, measure, variants
from bench.kernels.figure import Row, show
from kernels.registry import Registry

BATCHES = (1, 8, 32, 64, 128, 256)


def rows(registry: Registry) -> list[Row]:
    model = Model()
    result: list[Row] = []
    for batch in BATCHES:
        result += [show(row) for row in batch_rows(model, registry, batch)]
        torch.cuda.empty_cache()
    return result


def batch_rows(model: Model, registry: Registry, batch: int) -> list[Row]:
    step = Step(model, registry, batch)
    base = measure(step)
    limit = floor_ms(batch)
    rows = [Row("decode_step", dict(batch=batch, head="fp8"), base, "ms", limit / base)]
    rows.append(Row("decode_step_replay_equal", dict(batch=batch), check_replay(step), "bool"))
    for name, other in variants(step, registry).items():
        value = measure(other)
        if name == "bf16_head":
            rows.append(Row("decode_step", dict(batch=batch, head="bf16"), value, "ms", limit / value))
        else:
            rows.append(Row("decode_step_without", dict(batch=batch, trick=name), value, "ms", None, "with", base))
    again = measure(step)
    rows.append(Row("decode_step_again", dict(batch=batch), again, "ms", limit / again, "first", base))
    return rows
