"""The program that has Helm's engine render the chart, and Kubernetes' schemas judge what comes out.

It runs in the environment build/deploy. Reads JSON: `cases`, names with values, and `secret`, the data of one that the
cluster has. Writes JSON: `cases` with `documents`, `refused` (why the values were not taken), `wrong` (what linter and
schemas say against it) and `unknown` (kinds without a schema); `secret`, that data after an upgrade.
"""

import functools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubernetes_validate.utils as kubernetes
import yaml
from helm_python import Chart, Config, HelmError
from helm_python.chart import lint

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tandem"
VERSION = "1.37"
NAME, NAMESPACE = "tandem", "llm"
kubernetes.schema_contents = functools.cache(kubernetes.schema_contents)  # megabytes of JSON, else read per document


def main() -> None:
    chart, asked = Chart.load(CHART), json.load(sys.stdin)
    cases = {case: judged(chart, values) for case, values in asked["cases"].items()}
    print(json.dumps({"cases": cases, "secret": upgraded(chart, asked["secret"])}))


def judged(chart: Chart, values: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = chart.render(values, name=NAME, namespace=NAMESPACE)
    except HelmError as error:
        return {"refused": str(error)}
    del rendered["tandem/templates/NOTES.txt"]
    documents = [found for text in rendered.values() for found in yaml.safe_load_all(text) if found]
    wrong, unknown = [], set()
    for document in documents:
        try:
            kubernetes.validate(document, VERSION, strict=True)
        except kubernetes.ValidationError as error:
            wrong.append(f"{document['kind']}: {error.message}")
        except kubernetes.SchemaNotFoundError:
            unknown.add(document["kind"])
    report = lint(CHART, values, strict=True)
    wrong += [found["error"] for found in report["messages"] if found["severity"] > 1] + report["errors"]
    return {"documents": documents, "wrong": wrong, "unknown": sorted(unknown)}


def upgraded(chart: Chart, data: dict[str, str]) -> dict[str, str]:
    """Return the data of the chart's Secret where the cluster has one with `data`, which Helm's `lookup` asks for."""
    with cluster_with_secret(data) as url, Config(kube_apiserver=url, kubeconfig_content="kind: Config") as config:
        rendered = config.render(chart, name=NAME, namespace=NAMESPACE, is_upgrade=True)
    return yaml.safe_load(rendered["tandem/templates/secret.yaml"])["data"]


@contextmanager
def cluster_with_secret(data: dict[str, str]) -> Iterator[str]:
    """Yield the URL of as much of Kubernetes' API as the look-up of one Secret takes."""
    kinds = [{"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get"]}]
    metadata = {"name": NAME, "namespace": NAMESPACE}
    answers = {
        "/api/v1": {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": kinds},
        f"/api/v1/namespaces/{NAMESPACE}/secrets/{NAME}": {
            "kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": data
        },
    }  # fmt: skip

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


if __name__ == "__main__":
    main()
