"""Which processes a system is made of, and what each is told."""

import socket
import threading
from pathlib import Path

import pytest
import redis

from contracts.errors import ConfigError
from coordinator.store.local_server import RedisServer, hide_password
from tandem.local.child import ProcessSpec
from tandem.local.run_dir import RunDir
from tandem.local.settings import UpSettings
from tandem.local.system_plan import GATEWAY, REDIS, SERVICES, plan_system, require_redis

ENVIRON = {"HOME": "/home/ann", "TANDEM_PORT": "9000", "TANDEM_SECRET": "theirs", "TANDEM_KV_CACHE_MIB": "64"}


def plan(tmp_path: Path, **settings: object) -> dict[str, ProcessSpec]:
    run_dir = RunDir(tmp_path, 8000)
    specs = plan_system(UpSettings.model_validate(settings), run_dir, 8000, "ours", ENVIRON, "/usr/bin/redis-server")
    return {spec.name: spec for spec in specs}


def option(spec: ProcessSpec, name: str) -> str:
    return spec.argv[spec.argv.index(name) + 1]


def test_a_pair_is_the_default(tmp_path: Path) -> None:
    specs = plan(tmp_path)
    assert list(specs) == ["redis", "coordinator", "prefill-0", "decode-0", "gateway"]
    assert [spec.stage for spec in specs.values()] == [REDIS, SERVICES, SERVICES, SERVICES, GATEWAY]
    assert [spec.first_stage for spec in specs.values()] == [REDIS, SERVICES, SERVICES, SERVICES, SERVICES]
    assert [name for name, spec in specs.items() if spec.is_vital] == ["redis", "gateway"]


def test_workers_are_counted_by_role(tmp_path: Path) -> None:
    specs = plan(tmp_path, prefill=2, decode=1, mixed=1)
    workers = [spec for spec in specs.values() if "--worker-id" in spec.argv]
    assert [spec.name for spec in workers] == ["prefill-0", "prefill-1", "decode-0", "mixed-0"]
    assert [option(spec, "-m") for spec in workers] == ["prefill_svc", "prefill_svc", "decode_svc", "mixed_svc"]
    assert len({option(spec, "--ready-file") for spec in workers}) == 4


def test_settings_reach_the_workers(tmp_path: Path) -> None:
    worker = plan(tmp_path, transfer="shm", dtype="float32", model="org/model")["decode-0"]
    assert option(worker, "--transfer") == "shm"
    assert option(worker, "--dtype") == "float32"
    assert option(worker, "--model") == "org/model"
    assert "--port" not in worker.argv


def test_only_the_gateway_has_the_port(tmp_path: Path) -> None:
    specs = plan(tmp_path, host="0.0.0.0")
    assert option(specs["gateway"], "--port") == "8000"
    assert option(specs["gateway"], "--host") == "0.0.0.0"
    assert not any(spec.env.get("TANDEM_PORT") for spec in specs.values() if spec.role != "redis")


def test_secrets_go_by_environment(tmp_path: Path) -> None:
    specs = plan(tmp_path, redis_url="redis://:password@elsewhere:6379/0")
    assert "redis" not in specs
    for spec in specs.values():
        assert spec.env["TANDEM_SECRET"] == "ours"
        assert spec.env["TANDEM_REDIS_URL"] == "redis://:password@elsewhere:6379/0"
        assert not any("password" in word or "ours" in word for word in spec.argv)


def test_what_is_not_ours_passes_through(tmp_path: Path) -> None:
    env = plan(tmp_path)["prefill-0"].env
    assert env["TANDEM_KV_CACHE_MIB"] == "64"
    assert env["HOME"] == "/home/ann"


def test_two_systems_share_a_redis_without_meeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = set()
    for host, port in (("ann", 8000), ("ann", 8001), ("bob", 8000)):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        specs = plan_system(UpSettings(redis_url="redis://r"), RunDir(tmp_path, port), port, "s", ENVIRON, "")
        pools.add(specs[0].env["TANDEM_POOL"])
    assert len(pools) == 3


def test_own_redis_has_a_socket_and_no_port(tmp_path: Path) -> None:
    redis = plan(tmp_path)["redis"]
    assert redis.argv[0] == "/usr/bin/redis-server"
    assert option(redis, "--port") == "0"
    assert option(redis, "--unixsocket").startswith(str(tmp_path))
    assert redis.is_ready() is None


def test_services_find_their_redis_in_a_folder_of_any_name(tmp_path: Path) -> None:
    home = tmp_path / "a b#c?d%20e"
    specs = plan(home)
    connection = redis.ConnectionPool.from_url(specs["coordinator"].env["TANDEM_REDIS_URL"]).connection_kwargs
    assert connection["path"] == option(specs["redis"], "--unixsocket") == str(home / "8000" / "redis.sock")


def test_a_folder_too_long_for_a_socket_matters_only_to_a_redis_of_our_own(tmp_path: Path) -> None:
    home = tmp_path / ("x" * 100)
    with pytest.raises(ConfigError, match=r"redis\.sock is too long for a socket.*set XDG_STATE_HOME"):
        plan(home)
    assert "redis" not in plan(home, redis_url="redis://r")


@pytest.mark.parametrize(("answer", "is_ready"), [(b"+PONG\r\n", True), (b"-LOADING it is not ready\r\n", False)])
def test_own_redis_is_ready_once_it_answers(tmp_path: Path, answer: bytes, is_ready: bool) -> None:
    redis = plan(tmp_path)["redis"]
    path = Path(option(redis, "--unixsocket"))
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        answering = threading.Thread(target=_answer, args=(server, answer))
        answering.start()
        assert redis.is_ready() == ({"url": f"unix://{path}"} if is_ready else None)
        answering.join()


def _answer(server: socket.socket, answer: bytes) -> None:
    connection, _ = server.accept()
    with connection:
        connection.recv(16)
        connection.sendall(answer)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:1/0", "redis://host:1/0"),
        ("redis://host:1/0", "redis://host:1/0"),
        ("redis://host:1/0?password=secret&ssl_ca_certs=a", "redis://host:1/0?password=...&ssl_ca_certs=a"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=..."),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert hide_password(url) == shown


def test_no_redis_is_said_with_the_reason_and_what_to_do() -> None:
    said = refusal("redis://127.0.0.1:9/0")
    assert said.startswith("Redis does not answer at redis://127.0.0.1:9/0: ") and "refused" in said
    assert said.endswith("; start it, or do without")


def test_a_redis_that_refuses_is_not_told_to_be_started() -> None:
    with RedisServer() as server:
        connection = redis.Redis.from_url(server.url)
        connection.config_set("requirepass", "right")
        where = server.url.removeprefix("redis://")
        require_redis(f"redis://:right@{where}", "do without")
        for url in (f"redis://:wrong@{where}", server.url, f"redis://:right@{where.removesuffix('0')}99"):
            said = refusal(url)
            assert said.startswith(f"Redis at {hide_password(url)} refuses: ")
            assert "start" not in said and "wrong" not in said and "redis_url" in said


def refusal(url: str) -> str:
    with pytest.raises(ConfigError) as told:
        require_redis(url, "do without")
    return str(told.value)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:six/0", "redis://127.0.0.1?socket_timeout=long"])
def test_a_redis_url_that_cannot_be_read_is_said(url: str) -> None:
    assert "can't be read" in refusal(url)
