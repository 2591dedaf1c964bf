"""The files under docs/deploy name only metrics, options and variables that exist."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from token_id_capture.cli.main import app
from token_id_capture.server.http.metrics import GatewayMetrics

DEPLOY = Path(__file__).parents[1] / "docs" / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.name != "README.md")
YAML = [path for path in FILES if path.suffix == ".yaml"]
METRIC = re.compile(r"\btokcap_[a-z_]+")


def serve_options() -> tuple[set[str], set[str]]:
    """The options of ``tokcap serve`` and the variables that stand for them."""
    group: Any = typer.main.get_command(app)
    command = group.get_command(typer.Context(group), "serve")
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    variables = {str(parameter.envvar) for parameter in command.params if parameter.envvar}
    return options, variables


def metrics() -> set[str]:
    """Every name that a scrape of the gateway gives, with the suffixes of counters and histograms."""
    gateway = GatewayMetrics()
    gateway.count("marked", "call_lost")
    gateway.count_refusal("request_too_large")
    gateway.count_continuity("spliced")
    text = gateway.render(wal_bytes=1, upstreams={"http://engine:8000": True}).decode()
    return set(re.findall(r"^(tokcap_\w+)", text, re.MULTILINE))


def expressions() -> list[tuple[str, str]]:
    """The queries of the alert rules and of the dashboard, with where they stand."""
    rules = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    alerts = [(rule["alert"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]
    panels = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [(one["name"], one["query"]) for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return [*alerts, *panels, *variables]


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_queries_name_only_metrics_that_exist(where: str, expression: str) -> None:
    named = set(METRIC.findall(expression))
    assert named, where
    assert named <= metrics()


def test_outcomes_in_queries_are_those_that_the_gateway_counts() -> None:
    known = set(re.findall(r'tokcap_calls_total\{outcome="(\w+)"', GatewayMetrics().render(None, {}).decode())) | {
        "marked"
    }
    for _, expression in expressions():
        for outcomes in re.findall(r'outcome=~?"([\w|]+)"', expression):
            assert set(outcomes.split("|")) <= known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_variables_are_those_of_the_gateway(path: Path) -> None:
    _, variables = serve_options()
    assert set(re.findall(r"\bTOKCAP_[A-Z_]+", path.read_text())) <= variables


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_is_yaml(path: Path) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all(path.read_text()))


def test_the_options_of_serve_exist_wherever_it_is_started() -> None:
    options, _ = serve_options()
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text()))
    unit = (DEPLOY / "tokcap.service").read_text()
    slurm = (DEPLOY / "slurm.sh").read_text().replace("\\\n", " ")
    postgresql = yaml.safe_load((DEPLOY / "compose-postgresql.yaml").read_text())
    started = [
        compose["services"]["gateway"]["command"],
        postgresql["services"]["gateway-1"]["command"],
        manifests[1]["spec"]["template"]["spec"]["containers"][0]["args"],
        shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart="))),
        shlex.split(next(line for line in slurm.splitlines() if line.startswith("tokcap serve"))),
    ]
    used = {word for command in started for word in command if word.startswith("--")}
    assert used
    assert used <= options


@pytest.mark.parametrize("name", ["compose.yaml", "compose-postgresql.yaml"])
def test_each_key_of_a_service_is_a_secret_that_it_mounts(name: str) -> None:
    compose = yaml.safe_load((DEPLOY / name).read_text())
    files = [secret["file"] for secret in compose["secrets"].values()]
    assert len(set(files)) == len(files)
    for service in compose["services"].values():
        keys = {value for variable, value in service["environment"].items() if variable.endswith("FILE")}
        assert keys == {f"/run/secrets/{secret}" for secret in service["secrets"]}
        assert set(service["secrets"]) <= set(compose["secrets"])


@pytest.mark.parametrize(
    "name", ["compose.yaml", "compose-postgresql.yaml", "tokcap.service", "kubernetes/gateway.yaml"]
)
def test_agents_trainers_and_operators_have_a_key_each(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert all(f"TOKCAP_{whose}_KEY_FILE" in text for whose in ("API", "HAND_OFF", "OPERATOR"))


def test_the_image_can_use_postgresql() -> None:
    (extras,) = re.findall(r'"\.\[([a-z,]+)\]"', (DEPLOY / "Dockerfile").read_text())
    assert "postgres" in extras.split(",")


def test_probes_are_paths_of_the_gateway() -> None:
    manifests = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "gateway.yaml").read_text()))
    container = manifests[1]["spec"]["template"]["spec"]["containers"][0]
    probes = {container[name]["httpGet"]["path"] for name in ("readinessProbe", "livenessProbe")}
    assert probes == {"/readyz", "/healthz"}


def test_the_job_is_a_shell_script() -> None:
    assert subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sh")], check=False).returncode == 0


def test_each_file_is_described() -> None:
    page = (DEPLOY / "README.md").read_text()
    assert all(f"({path.relative_to(DEPLOY)})" in page for path in FILES)


def test_prometheus_sends_the_key_that_metrics_need() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yaml").read_text())["scrape_configs"]
    assert job["authorization"]["credentials_file"]
    assert "metrics_path" not in job, "/metrics is Prometheus's own default"
