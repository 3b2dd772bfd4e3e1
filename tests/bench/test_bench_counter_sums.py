"""The sums of counters of processes that come and go."""

from bench.serving.counter_sums import of_gateway, of_worker

METRICS = """\
# TYPE tandem_gateway_migrations_total counter
tandem_gateway_migrations_total{outcome="committed",reason="drain"} 3.0
tandem_gateway_migrations_total{outcome="committed",reason="memory"} 2.0
tandem_gateway_migrations_total{outcome="failed",reason="drain"} 1.0
tandem_gateway_replays_total 4.0
tandem_gateway_requests_total{code="ok"} 9.0
"""


def test_a_gateways_counters_are_added_up_by_their_outcome() -> None:
    assert of_gateway(METRICS) == {
        "gateway_migrations_committed": 5.0,
        "gateway_migrations_failed": 1.0,
        "gateway_replays": 4.0,
    }


def test_what_a_link_sent_as_it_was_is_not_compressed() -> None:
    levels = {"raw": {"nbytes": 5.0}, "lossless": {"nbytes": 7.0}}
    health = {"core": {"counters": {"chunks_bad": 1.0}, "links": [{"levels": levels}, {"levels": {}}]}}
    assert of_worker(health) == {"chunks_bad": 1.0, "codec_nbytes": 7.0}
