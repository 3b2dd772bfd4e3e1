"""The Helm chart as Helm's own engine renders it, judged by Kubernetes' schemas and our settings."""

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from coordinator.settings import CoordinatorSettings
from gateway.settings import GatewaySettings
from service.settings import read_settings
from tandem.local.preflight import read_up_settings
from tests.docs.fences import DOCS, ROOT
from tests.environment import plain_environment
from tools.separate_environment import install, python_of
from worker.settings import WorkerSettings

DEPLOY = ROOT / "deploy" / "helm"
FILES = sorted(path.stem.removeprefix("values-") for path in DEPLOY.glob("values-*.yaml"))
MIXED: dict[str, Any] = {
    "model": {"name": "Qwen/Qwen3-0.6B", "hub": {"claim": "hub", "existingSecret": "hub-token"}},
    "redis": {"url": "redis://redis.data:6379/0"},
    "gateway": {
        "settings": {"TANDEM_MAX_BODY_NBYTES": 33554432, "TANDEM_DEFAULT_CHAT_TEMPLATE_KWARGS": {"think": True}}
    },
    "workers": {
        "defaults": {"settings": {"TANDEM_TRANSFER": "tcp"}},
        "prefill": {"replicas": 0},
        "decode": {"replicas": 0},
        "mixed": {
            "autoscaling": {"enabled": True},
            "extraEnv": [{"name": "TANDEM_KV_STORE", "valueFrom": {"secretKeyRef": {"name": "store", "key": "url"}}}],
        },
    },
    "autoscaling": {"prometheus": "http://prometheus:9090"},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a value that is none": ({"gateway": {"replica": 2}}, "'/gateway': additional properties 'replica'"),
    "a setting that is none": ({"gateway": {"settings": {"TANDEM_PORTS": 1}}}, "'TANDEM_PORTS' not allowed"),
    "a setting of the chart's": ({"gateway": {"settings": {"TANDEM_PORT": 1}}}, "'TANDEM_PORT' not allowed"),
    "a setting's value": (
        {"workers": {"decode": {"settings": {"TANDEM_TRANSFER": "rdma"}}}},
        "TANDEM_TRANSFER': value",
    ),
    "a secret in clear": ({"gateway": {"extraEnv": [{"name": "TANDEM_API_KEY", "value": "k"}]}}, "'valueFrom'"),
    "two Redis": ({"redis": {"url": "redis://r", "existingSecret": "r"}}, "redis.url and redis.existingSecret"),
    "a model nowhere": ({"model": {"name": "/models/m"}}, "set model.claim, model.hostPath or model.image"),
    "one side": ({"workers": {"decode": {"replicas": 0}}}, "set workers.prefill.replicas and workers.decode.replicas"),
    "no Prometheus": ({"workers": {"decode": {"autoscaling": {"enabled": True}}}}, "set autoscaling.prometheus"),
    "no GPU named": ({"sharedGpus": {"count": 2}}, "workers.prefill.settings.TANDEM_DEVICE"),
    "no picker": ({"inferencePool": {"enabled": True}}, "set inferencePool.endpointPicker.name"),
}
GENERATED = {"secret": "b2xk", "redis-password": "b2xkIHRvbw=="}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def verdict() -> dict[str, Any]:
    """Return what judge_chart says of all cases, and of the generated Secret after an upgrade."""
    try:
        install("deploy")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"requirements/deploy.lock can't be installed: {error}")
    cases = {name: yaml.safe_load((DEPLOY / f"values-{name}.yaml").read_text()) for name in FILES}
    cases |= {"as it is": {}, "mixed": MIXED} | {case: values for case, (values, _) in REFUSED.items()}
    command = [python_of("deploy"), ROOT / "tests" / "deploy" / "judge_chart.py"]
    asked = json.dumps({"cases": cases, "secret": GENERATED})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def judged(verdict: dict[str, Any]) -> dict[str, Any]:
    return verdict["cases"]


@pytest.fixture(scope="module", params=[*FILES, "as it is", "mixed"])
def documents(request: pytest.FixtureRequest, judged: dict[str, Any]) -> list[Document]:
    found = judged[request.param]
    assert found.get("refused") is None
    return found["documents"]


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    return [document for document in documents if document["kind"] in kinds]


def workloads(documents: list[Document]) -> Iterator[tuple[str, Document, Document]]:
    """Yield component, pod and its one container."""
    for document in of_kind(documents, "Deployment", "StatefulSet"):
        template = document["spec"]["template"]
        (container,) = template["spec"]["containers"]
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], template["spec"], container


def variables(container: Document) -> dict[str, str]:
    """Return the settings of a container; those by reference with a text of the kind that they are."""
    told = {"TANDEM_REDIS_URL": "redis://r", "TANDEM_KV_STORE": "redis://r", "TANDEM_ADVERTISE_HOST": "10.1.2.3"}
    given = {one["name"]: one.get("value", told.get(one["name"], "x")) for one in container["env"]}
    return {name: value for name, value in given.items() if name.startswith("TANDEM_")}


def settings_of(component: str, container: Document, monkeypatch: pytest.MonkeyPatch) -> Any:
    kinds = {"gateway": GatewaySettings, "coordinator": CoordinatorSettings}
    kind, given = kinds.get(component, WorkerSettings), variables(container)
    assert {name.removeprefix("TANDEM_").lower() for name in given} - kind.model_fields.keys() == set()
    with monkeypatch.context() as patch:
        for name in plain_environment().keys() ^ os.environ.keys():
            patch.delenv(name)
        for name, value in given.items():
            patch.setenv(name, value)
        return read_settings(kind, [])


@pytest.mark.parametrize("case", [*FILES, "as it is", "mixed"])
def test_helm_and_the_schemas_of_kubernetes_find_nothing_wrong(case: str, judged: dict[str, Any]) -> None:
    assert judged[case].get("wrong") == []
    assert set(judged[case]["unknown"]) <= {"InferencePool", "ScaledObject", "ServiceMonitor"}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_value_is_refused_by_name(case: str, judged: dict[str, Any]) -> None:
    assert REFUSED[case][1] in judged[case].get("refused", "")


def test_kubectl_reads_what_workloads_there_are(documents: list[Document]) -> None:
    """Offline, with Kubernetes' own types: it ends with an error at a field of another type."""
    text = yaml.safe_dump_all(of_kind(documents, "Deployment", "StatefulSet"))
    command = [python_of("deploy").parent / "kubectl", "set", "env", "--local", "--list", "--filename=-"]
    done = subprocess.run(
        command, input=text, env={"KUBECONFIG": "/dev/null"}, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TANDEM_PORT=") == text.count("name: TANDEM_PORT")


def test_every_setting_is_one_and_is_taken(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    """The services' own settings read them, and the ports are those of the pod."""
    for component, _, container in workloads(documents):
        if component == "redis":
            continue
        settings = settings_of(component, container, monkeypatch)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert settings.port == ports["http"] and settings.host == "0.0.0.0"
        if isinstance(settings, WorkerSettings):
            assert settings.transfer_port == ports["transfer"] and settings.advertised_host == "10.1.2.3"
            assert container["args"] == [f"{component}_svc"]
        else:
            assert container["args"] == [component]


def test_ports_are_those_that_the_services_have_elsewhere(judged: dict[str, Any]) -> None:
    composed = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for component, _, container in workloads(judged["as it is"]["documents"]):
        if component != "redis":
            expected = composed[component]["environment"]
            assert variables(container)["TANDEM_PORT"] == str(expected["TANDEM_PORT"])
            assert variables(container).get("TANDEM_TRANSFER_PORT") == (
                str(expected["TANDEM_TRANSFER_PORT"]) if "TANDEM_TRANSFER_PORT" in expected else None
            )
    assert composed["gateway"]["environment"]["TANDEM_PORT"] == GatewaySettings.model_fields["port"].default


SECRET = {"TANDEM_SECRET", "TANDEM_API_KEY", "TANDEM_KV_STORE", "REDISCLI_AUTH", "REDIS_PASSWORD", "HF_TOKEN"}


def test_secrets_are_named_and_never_written(documents: list[Document]) -> None:
    """What is generated is what is referred to: nothing where the values name a Secret."""
    referred: set[str] = set()
    for component, _, container in workloads(documents):
        env = {one["name"]: one for one in container["env"]}
        by_reference = {name: one["valueFrom"].get("secretKeyRef") for name, one in env.items() if "valueFrom" in one}
        assert all(by_reference.get(name) for name in SECRET & env.keys())
        assert component == "redis" or {"TANDEM_SECRET", "TANDEM_REDIS_URL"} <= env.keys()
        url = env.get("TANDEM_REDIS_URL", {}).get("value", "")
        assert "@" not in url.replace(":$(REDIS_PASSWORD)@", "")
        referred |= {one["key"] for one in by_reference.values() if one and one["name"] == "tandem"}
    assert referred == {key for secret in of_kind(documents, "Secret") for key in secret["data"]}


def test_an_upgrade_keeps_what_was_generated(verdict: dict[str, Any]) -> None:
    """Half of the pods would have another secret than the other half otherwise."""
    assert verdict["secret"] == GENERATED


def test_probes_mean_what_the_endpoints_mean(documents: list[Document]) -> None:
    for component, _, container in workloads(documents):
        if component != "redis":
            probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
            paths = {kind: probe["path"] for kind, probe in probes.items()}
            assert paths == {"startup": "/health", "liveness": "/health", "readiness": "/ready"}
            assert {probe["port"] for probe in probes.values()} == {"http"}


def test_there_is_time_to_drain(documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> None:
    for component, pod, container in workloads(documents):
        if component == "gateway":
            command = container["lifecycle"]["preStop"]["exec"]["command"]
            assert (ROOT / command[2]).exists()
            waits = [float(word.partition("=")[2]) for word in command if word.endswith(tuple("0123456789"))]
            assert len(waits) == 2 and sum(waits) + 5 < pod["terminationGracePeriodSeconds"]
        elif component not in ("coordinator", "redis"):
            settings = settings_of(component, container, monkeypatch)
            assert settings.drain_timeout_s + 20 < pod["terminationGracePeriodSeconds"]


def test_a_container_can_do_no_more_than_it_must(documents: list[Document]) -> None:
    for component, pod, container in workloads(documents):
        can = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"] and can["readOnlyRootFilesystem"]
        assert not can["allowPrivilegeEscalation"] and can["capabilities"]["drop"] == ["ALL"]
        assert not pod["automountServiceAccountToken"]
        assert pod["enableServiceLinks"] is False, "a Service's own TANDEM_PORT would be taken for the setting"
        assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert container["resources"]["limits"]["memory"], component
        assert bool(pod.get("hostPID")) != bool(pod.get("shareProcessNamespace")) or component == "redis"
        names = {volume["name"] for volume in pod["volumes"]}
        claims = {"kv"} & {mount["name"] for mount in container["volumeMounts"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names | claims


def test_selectors_find_their_pods(documents: list[Document]) -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in of_kind(documents, "Deployment", "StatefulSet")]

    def found(labels: dict[str, str]) -> int:
        return sum(labels.items() <= pod.items() for pod in pods)

    for document in of_kind(documents, "Service"):
        assert found(document["spec"]["selector"]) == 1
    for document in of_kind(documents, "Deployment", "StatefulSet", "PodDisruptionBudget", "InferencePool"):
        assert found(document["spec"]["selector"]["matchLabels"]) == 1
    services = {document["metadata"]["name"] for document in of_kind(documents, "Service")}
    assert {document["spec"]["serviceName"] for document in of_kind(documents, "StatefulSet")} <= services
    scaled = {document["spec"]["scaleTargetRef"]["name"]: document for document in of_kind(documents, "ScaledObject")}
    for document in of_kind(documents, "StatefulSet"):
        assert ("replicas" in document["spec"]) != (document["metadata"]["name"] in scaled)


def test_the_network_policies_open_what_the_services_offer(documents: list[Document]) -> None:
    """Each component is under one policy. It opens ports by number, and for UCX all between workers."""
    policies = of_kind(documents, "NetworkPolicy")
    for document in of_kind(documents, "Service"):
        labels = document["spec"]["selector"]
        (policy,) = [one for one in policies if selects(one["spec"]["podSelector"], labels)]
        rules = policy["spec"].get("ingress", [])
        opened = {port["port"] for rule in rules for port in rule.get("ports", [])}
        offered = {port["port"] for port in document["spec"]["ports"]}
        without = [rule for rule in rules if "ports" not in rule]
        assert opened == offered or (without and opened == offered - {9001})
        for rule in without:
            (peer,) = rule["from"]
            assert selects(peer["podSelector"], labels) and not selects(
                peer["podSelector"], labels | {"app.kubernetes.io/component": "gateway"}
            )
        assert labels["app.kubernetes.io/component"] == "gateway" or all(rule["from"] for rule in rules)


def selects(selector: Document, labels: dict[str, str]) -> bool:
    some = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in some)
    return selector["matchLabels"].items() <= labels.items() and all(
        labels[one["key"]] in one["values"] for one in some
    )


def test_monitoring_and_scaling_ask_for_metrics_that_exist(judged: dict[str, Any]) -> None:
    """They are on the operations page, which other tests hold against the services."""
    known = set(re.findall(r"`(tandem_[a-z_]+)`", (DOCS / "operations.md").read_text()))
    scaled = [one for case in ("nodes", "mixed") for one in of_kind(judged[case]["documents"], "ScaledObject")]
    queries = [trigger["metadata"]["query"] for one in scaled for trigger in one["spec"]["triggers"]]
    assert len(queries) == 3
    for query in queries:
        asked = set(re.findall(r"tandem_[a-z_]+", query))
        assert asked and asked <= known
    jobs = {one["job_name"] for one in prometheus_jobs()}
    (monitor,) = of_kind(judged["nodes"]["documents"], "ServiceMonitor")
    services = of_kind(judged["as it is"]["documents"], "Service")
    label = monitor["spec"]["jobLabel"]
    assert {one["metadata"]["labels"][label] for one in services if one["spec"]["ports"][0]["name"] == "http"} <= jobs


def prometheus_jobs() -> list[Document]:
    return yaml.safe_load((ROOT / "docker" / "observability" / "prometheus.yml").read_text())["scrape_configs"]


def test_gpus_are_given_once(judged: dict[str, Any]) -> None:
    pods = {component: (pod, container) for component, pod, container in workloads(judged["two-gpus"]["documents"])}
    devices = [variables(pods[role][1])["TANDEM_DEVICE"] for role in ("prefill", "decode")]
    (claim,) = of_kind(judged["two-gpus"]["documents"], "ResourceClaim")
    assert devices == ["cuda:0", "cuda:1"]
    assert claim["spec"]["devices"]["requests"][0]["exactly"]["count"] == len(devices)
    for role in ("prefill", "decode"):
        pod, container = pods[role]
        assert pod["hostIPC"] and pod["hostPID"]
        assert [one["resourceClaimName"] for one in pod["resourceClaims"]] == [claim["metadata"]["name"]]
        assert [one["name"] for one in container["resources"]["claims"]] == [pod["resourceClaims"][0]["name"]]
    for component, _, container in workloads(judged["nodes"]["documents"]):
        if component in ("prefill", "decode"):
            num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
            assert variables(container)["TANDEM_TENSOR_PARALLEL"] == str(num_gpus)


def test_numbers_are_written_out(judged: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Helm's own numbers are floats, which it would write as 3.3554432e+07."""
    found = {component: container for component, _, container in workloads(judged["mixed"]["documents"])}
    settings = settings_of("gateway", found["gateway"], monkeypatch)
    assert settings.max_body_nbytes == 33554432 and settings.default_chat_template_kwargs == {"think": True}


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((DEPLOY / "tandem" / "Chart.yaml").read_text())
    assert chart["appVersion"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_pod_of_kserve_is_a_system_that_starts() -> None:
    """What it is called with is what `tandem up` takes, and the port is the one that is asked."""
    manifest = yaml.safe_load((ROOT / "deploy" / "kserve" / "inferenceservice.yaml").read_text())
    (container,) = manifest["spec"]["predictor"]["containers"]
    program, command, *words = container["args"]
    settings = read_up_settings(words)
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert (program, command, settings.host) == ("tandem", "up", "0.0.0.0")
    assert {settings.port} == {container["ports"][0]["containerPort"], *(probe["port"] for probe in probes)}
    assert container["name"] == "kserve-container", "by which name KServe finds it"
