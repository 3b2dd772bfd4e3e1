"""A pair whose caches differ: prefill computes KV in bf16, decode reads it in e4m3. It is placed, and it answers."""

import random

from contracts.ids import GatewayId, RequestId
from contracts.node import NodeInfo, WorkerRole
from contracts.sampling import SamplingParams
from coordinator.placement.placer import Placer, PlaceRequest
from testing.memory_store import MemoryStore
from tests.engine import tiny_models
from tests.nodes import node_info
from tests.path.cores import Cores, Worker

FUSIBLE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
PROMPTS = [random.Random(i).choices(range(2, 256), k=5 + 90 * i) for i in range(3)]
SAMPLING = SamplingParams(max_tokens=6, seed=0, temperature=0.0, ignore_eos=True)


def info(worker: Worker, role: WorkerRole) -> NodeInfo:
    return node_info(
        worker_id=worker.ref.worker_id,
        incarnation=worker.ref.incarnation,
        role=role,
        layout_id=worker.engine.layout.layout_id,
        layout=worker.engine.layout,
        ways=worker.node.capabilities,
        capacity_tokens=worker.engine.capacity_tokens,
        max_model_len=worker.engine.max_model_len,
    )


async def test_a_bf16_prefill_and_an_e4m3_decode_are_placed_and_answer(tmp_path):
    tiny_models.save_tiny(tmp_path, "llama", **FUSIBLE, head_dim=32)
    with Cores(str(tmp_path), "ucx", ("bfloat16", "float8")) as pair:
        store = MemoryStore()
        for worker, role in ((pair.prefill, WorkerRole.PREFILL), (pair.decode, WorkerRole.DECODE)):
            await store.join(info(worker, role))
        asked = PlaceRequest(
            request_id=RequestId("r"), gateway_id=GatewayId("g"), num_tokens=10, max_tokens=6, lease_s=1.0
        )
        route = await Placer(store).place(asked)
        assert (route.prefill.worker_id, route.decode.worker_id) == ("prefill", "decode")
        assert (
            pair.prefill.engine.layout.only_group.dtype == "bfloat16"
            and pair.decode.engine.layout.only_group.dtype == "float8_e4m3fn"
        )
        answers = pair.answers(PROMPTS, SAMPLING)
        assert [len(answer) for answer in answers] == [6] * len(PROMPTS)
        assert pair.answers(PROMPTS, SAMPLING)[0][0] == answers[0][0]
        assert pair.prefill.counters()["handoffs_committed"] == 2 * len(PROMPTS)
        assert {link.num_bad for link in pair.decode.node.stats()} == {0}
        for worker in (pair.prefill, pair.decode):
            worker.engine.check()
