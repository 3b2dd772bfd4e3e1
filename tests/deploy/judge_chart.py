"""The program that has Helm's engine render the chart, and Kubernetes' schemas judge what comes out.

It runs in the environment build/deploy. Reads JSON: case -> values. Writes JSON: case -> `documents`, `refused` (why
the values were not taken), `wrong` (what linter and schemas say against it) and `unknown` (kinds without a schema).
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate.utils as kubernetes
import yaml
from helm_python import Chart, HelmError
from helm_python.chart import lint

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tandem"
VERSION = "1.37"
kubernetes.schema_contents = functools.cache(kubernetes.schema_contents)  # megabytes of JSON, else read per document


def main() -> None:
    chart = Chart.load(CHART)
    print(json.dumps({case: judged(chart, values) for case, values in json.load(sys.stdin).items()}))


def judged(chart: Chart, values: dict[str, Any]) -> dict[str, Any]:
    try:
        rendered = chart.render(values, name="tandem", namespace="llm")
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


if __name__ == "__main__":
    main()
