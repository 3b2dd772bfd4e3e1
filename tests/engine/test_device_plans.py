"""Tile sizes that were tuned for a card reach the kernels of the workers on it."""

import pytest
import torch

from checkpoint import open_checkpoint
from engine.cuda.loader import DeviceBackendBuilder
from engine.cuda.model.tuned_plans import agreed_plans
from engine.cuda.runtime.process_group import ProcessGroup
from engine.model_loader.checkpoint_weights import open_weights
from engine.model_loader.tensor_parallel_shards import Shard
from kernels import caps
from kernels.plans import TunedPlans, cache_path, save
from tests.engine.driving import settings
from tests.engine.tiny_models import save_tiny

CAPS = caps.detect("cpu")
PLANS = TunedPlans({"gemm_fp8/hopper|x": {8: {"bw": 64}}})
OTHERS = TunedPlans({"gemm_fp8/hopper|x": {8: {"bw": 128}}})


class Member(ProcessGroup):
    """One of two, which exchange by a table that they share."""

    def __init__(self, rank: int, table: dict[str, list[bytes]]) -> None:
        self.shard, self._table = Shard(rank, 2), table

    def exchange(self, name: str, told: bytes) -> list[bytes]:
        self._table.setdefault(name, []).append(told)
        return self._table[name]


def test_what_was_tuned_is_read_at_start(tmp_path):
    save(cache_path(tmp_path / "kernels", CAPS), PLANS, CAPS)
    save_tiny(tmp_path, "llama")
    chosen = settings(model=str(tmp_path), cache_dir=tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    builder = DeviceBackendBuilder(chosen, checkpoint, open_weights(checkpoint), torch.device("cpu"))
    assert builder._registry.plans == PLANS


def test_the_first_process_of_a_group_reads_for_all(tmp_path):
    table: dict[str, list[bytes]] = {}
    for folder, plans in ((tmp_path / "first", PLANS), (tmp_path / "second", OTHERS)):
        save(cache_path(folder / "kernels", CAPS), plans, CAPS)
    found = [agreed_plans(tmp_path / name, CAPS, Member(rank, table)) for rank, name in enumerate(("first", "second"))]
    assert found == [PLANS, PLANS]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_file_of_another_card_or_version_is_left_with_a_warning(tmp_path, caplog, is_damaged):
    path = cache_path(tmp_path / "kernels", CAPS)
    save(path, PLANS, caps.Caps("cpu", torch=(1, 0, 0)))
    if is_damaged:
        path.write_text("{")
    assert agreed_plans(tmp_path, CAPS, ProcessGroup()) == TunedPlans()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "run python -m kernels.tune again" in warning


def test_nothing_tuned_is_nothing_said(tmp_path, caplog):
    assert agreed_plans(tmp_path, CAPS, ProcessGroup()) == TunedPlans()
    assert not caplog.records
