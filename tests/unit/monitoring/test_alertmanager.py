"""Who is told of what, judged by Alertmanager's own program, which says where an alert goes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from gpufleet.monitoring import alertmanager
from gpufleet.monitoring.rules.files import groups
from gpufleet.settings.monitoring_settings import Alertmanager
from tests.unit.monitoring.programs import program

GOLDEN = Path(__file__).parent / "golden"
EVERYTHING = Alertmanager.model_validate(
    {
        "page": {"pagerduty_key_file": "pd", "webhook_url_file": "page-url"},
        "ticket": {"slack_url_file": "slack", "slack_channel": "#gpu", "email_to": "a@example.net"},
        "heartbeat": {"webhook_url_file": "beat-url"},
        "mail": {
            "smarthost": "mail.example.net:587",
            "sender": "alerts@example.net",
            "username": "alerts",
            "password_file": "mail",
        },
    }
)
URLS = {
    "credentials/page-webhook": "https://hook.example.net/page",
    "credentials/heartbeat-webhook": "https://hook.example.net/beat",
}


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("prometheus-alertmanager", "usr/bin/amtool"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """The configuration with every kind of receiver, as a Debian 12 node gets it."""
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager.alertmanager_yml(EVERYTHING, URLS, "/etc/gpufleet/alertmanager/"))
    return path


def test_debians_alertmanager_takes_every_kind_of_receiver(written: Path) -> None:
    done = amtool("check-config", written)
    assert done.returncode == 0, done.stdout
    assert "4 receivers" in done.stdout


def test_debians_alertmanager_takes_no_webhook_from_a_file(tmp_path: Path) -> None:
    """The reason for URLs in the configuration: once this fails, they can go into files."""
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager.alertmanager_yml(EVERYTHING))
    done = amtool("check-config", path)
    assert done.returncode != 0
    assert "url_file not found" in done.stdout


def test_a_configuration_without_any_receiver_is_taken_too(tmp_path: Path) -> None:
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager.alertmanager_yml(Alertmanager()))
    assert amtool("check-config", path).returncode == 0


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (["alertname=X", "severity=page"], "page"),
        (["alertname=X", "severity=ticket"], "ticket"),
        (["alertname=X"], "ticket"),
        ([f"alertname={alertmanager.ALIVE}", "severity=ticket"], "heartbeat"),
    ],
)
def test_alerts_go_where_they_belong(written: Path, labels: list[str], receiver: str) -> None:
    done = amtool("config", "routes", "test", f"--config.file={written}", *labels)
    assert done.stdout.splitlines()[-1] == receiver


def test_without_a_receiver_the_sign_of_life_goes_to_nobody(tmp_path: Path) -> None:
    """As a ticket it would be one that never ends."""
    path = tmp_path / "alertmanager.yml"
    path.write_text(alertmanager.alertmanager_yml(Alertmanager()))
    labels = (f"alertname={alertmanager.ALIVE}", "severity=ticket")
    done = amtool("config", "routes", "test", f"--config.file={path}", *labels)
    assert done.stdout.splitlines()[-1] == "nobody"


def test_secrets_are_named_and_never_written_but_urls_of_webhooks(written: Path) -> None:
    assert alertmanager.secret_files(EVERYTHING) == {
        "credentials/page-webhook": "page-url",
        "credentials/page-pagerduty": "pd",
        "credentials/ticket-slack": "slack",
        "credentials/heartbeat-webhook": "beat-url",
        "credentials/mail-password": "mail",
    }
    assert set(alertmanager.webhooks(EVERYTHING)) == set(URLS)
    named = {
        value
        for receiver in yaml.safe_load(written.read_text())["receivers"]
        for configs in receiver.values()
        if isinstance(configs, list)
        for config in configs
        for key, value in config.items()
        if key.endswith("_file")
    }
    assert {each.rpartition("/")[2] for each in named} == {"page-pagerduty", "ticket-slack"}


@pytest.mark.parametrize("name", [alertmanager.NODE_DOWN, alertmanager.ALIVE])
def test_alerts_that_routes_know_by_name_exist(name: str) -> None:
    known = {alert.name for group in groups({}) for alert in group.alerts}
    assert name in known


def test_a_page_about_one_gpu_hides_no_ticket_about_another() -> None:
    """Each inhibition asks that what both are about is the same, the node among it."""
    rules = yaml.safe_load(alertmanager.alertmanager_yml(Alertmanager()))["inhibit_rules"]
    for rule in rules:
        assert "instance" in rule["equal"]
        if 'severity="page"' in rule["source_matchers"]:
            (label,) = set(rule["equal"]) - {"instance"}
            assert f'{label}=~".+"' in rule["source_matchers"]
            assert f'{label}=~".+"' in rule["target_matchers"]


def test_the_configuration_is_the_one_that_was_looked_at(written: Path) -> None:
    assert written.read_text() == (GOLDEN / "alertmanager.yml").read_text()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"page": {}}, "receiver has no destination"),
        ({"ticket": {"email_to": "a@example.net"}}, "ticket: `email_to` is set, but `mail` is not"),
        ({"ticket": {"slack_url_file": "x"}}, "slack_channel"),
    ],
)
def test_receivers_that_cannot_work_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Alertmanager.model_validate(wrong)
