"""What the benchmark of start and memory counts, and the file of random weights that it loads."""

from dataclasses import replace

from bench.engine.start import Facts, LoadedWorker, result_rows
from bench.models.random_gguf import QWEN2_05B, write_q4_k_m
from checkpoint import open_checkpoint

SMALL = replace(QWEN2_05B, vocab_size=640, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=2)
FACTS: Facts = {"load_s": 1.5, "import_s": 2.0, "cpu_s": 3.0, "rss": 4 << 20, "pss": 3 << 20, "own": 2 << 20}


def test_a_random_file_is_a_model_that_a_worker_can_load(tmp_path):
    file = write_q4_k_m(tmp_path / "random.gguf", SMALL)
    config = open_checkpoint(str(file)).config
    assert (config.num_layers, config.vocab_size, config.num_kv_heads, config.qkv_bias) == (2, 640, 2, True)
    with LoadedWorker("native", str(file)) as worker:
        facts, memory = worker.answer(), worker.memory()
    assert facts["file_nbytes"] == file.stat().st_size and facts["load_s"] > 0
    assert 0 < memory["own"] <= memory["pss"] <= memory["rss"]


def test_a_figure_stands_beside_the_other_paths():
    sizes: Facts = {"file_nbytes": 5 << 20, "kv_nbytes": 6 << 20}
    found: dict[str, Facts] = {
        "native": FACTS | sizes,
        "mixed4": {name: 2 * value for name, value in FACTS.items()} | sizes,
    }
    rows = {row.name: row for row in result_rows(found, "mixed4")}
    assert rows["load to ready, warm"].value == 1.5 and rows["load to ready, warm"].peer_value == 3.0
    assert (rows["resident memory of a worker"].value, rows["resident memory of a worker"].unit) == (4.0, "MiB")
    assert all(row.params == {"file MiB": 5, "KV MiB": 6} for row in rows.values())
