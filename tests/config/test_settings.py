"""Tests of settings: defaults, sources and errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from sluice.config.settings import SESSION_NEVER_EXPIRES, Settings
from sluice.config.sources import load_settings
from sluice.errors import ConfigError
from sluice.units import Address

MQTT_FLAG = ("--mqtt", ("listen", "mqtt"))


def from_file(tmp_path: Path, text: str, environ: Mapping[str, str] | None = None) -> Settings:
    file = tmp_path / "sluice.toml"
    file.write_text(text)
    return load_settings(file, environ or {}, {})


def refusal_of(tmp_path: Path, text: str = "", environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refusal:
        from_file(tmp_path, text, environ)
    return str(refusal.value)


def test_default_is_a_broker_on_loopback_with_nothing_else_open() -> None:
    settings = load_settings(None, {}, {})
    assert settings.listen.mqtt == Address("127.0.0.1", 1883)
    assert (settings.listen.mqtts, settings.listen.ws, settings.listen.wss) == (None, None, None)
    assert (settings.store, settings.data, settings.queues.enabled) == (
        "embedded",
        Path("sluice-data"),
        True,
    )
    assert settings.auth.allow_anonymous is None
    assert (settings.log.level, settings.log.format) == ("info", "text")
    assert (settings.mqtt.max_session_expiry, settings.mqtt.max_qos) == (SESSION_NEVER_EXPIRES, 2)


def test_flag_precedes_environment_and_environment_precedes_file(tmp_path: Path) -> None:
    file = tmp_path / "sluice.toml"
    file.write_text(
        '[listen]\nmqtt = "127.0.0.1:1"\nws = "127.0.0.1:1"\nwss = "off"\n[mqtt]\nmax_qos = 0'
    )
    environ = {
        "SLUICE_LISTEN__MQTT": "127.0.0.1:2",
        "SLUICE_LISTEN__WS": "127.0.0.1:2",
        "HOME": "elsewhere",
    }
    settings = load_settings(file, environ, {MQTT_FLAG: "127.0.0.1:3"})
    assert settings.listen.mqtt == Address("127.0.0.1", 3)
    assert settings.listen.ws == Address("127.0.0.1", 2)
    assert settings.mqtt.max_qos == 0
    assert settings.mqtt.receive_maximum == 1024


def test_omitted_flag_changes_nothing() -> None:
    assert load_settings(
        None, {"SLUICE_LISTEN__MQTT": "[::1]:0"}, {MQTT_FLAG: None}
    ).listen.mqtt == Address("::1", 0)


def test_environment_can_name_the_file_but_the_flag_wins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("data = 'a'")
    (tmp_path / "b.toml").write_text("data = 'b'")
    environ = {"SLUICE_CONFIG": str(tmp_path / "a.toml")}
    assert load_settings(None, environ, {}).data == Path("a")
    assert load_settings(tmp_path / "b.toml", environ, {}).data == Path("b")


def test_off_closes_a_listener_that_is_on_by_default() -> None:
    assert load_settings(None, {"SLUICE_HTTP": "off"}, {MQTT_FLAG: "off"}).listen.mqtt is None


def test_environment_accepts_numbers_booleans_durations_and_lists() -> None:
    settings = load_settings(
        None,
        {
            "SLUICE_MQTT__MAX_PACKET_SIZE": "4096",
            "SLUICE_MQTT__RETAIN_AVAILABLE": "false",
            "SLUICE_MQTT__CONNECT_TIMEOUT": "200ms",
            "SLUICE_MQTT__REFUSED_FILTERS": '["#", "secret/+"]',
            "SLUICE_AUTH__ALLOW_ANONYMOUS": "true",
        },
        {},
    )
    assert settings.mqtt.max_packet_size == 4096
    assert settings.mqtt.retain_available is False
    assert settings.mqtt.connect_timeout == pytest.approx(0.2)
    assert settings.mqtt.refused_filters == ["#", "secret/+"]
    assert settings.auth.allow_anonymous is True


@pytest.mark.parametrize(
    ("text", "seconds"), [("never", SESSION_NEVER_EXPIRES), ("7d", 604800), ("200ms", 1), ("0s", 0)]
)
def test_session_expiry_is_whole_seconds_or_never(tmp_path: Path, text: str, seconds: int) -> None:
    assert (
        from_file(tmp_path, f'[mqtt]\nmax_session_expiry = "{text}"').mqtt.max_session_expiry
        == seconds
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[mqtt]\nmax_qos = 3",
            ["mqtt.max_qos = 3", "sluice.toml", "from 0 to 2", "the default, 2"],
        ),
        ("[mqtt]\nmax_qos = 'high'", ["mqtt.max_qos = high", "integer", "from 0 to 2"]),
        ("[mqtt]\nreceive_maximum = 0", ["mqtt.receive_maximum", "from 1 to 65535"]),
        ("[mqtt]\nmax_packet_size = 268435461", ["mqtt.max_packet_size", "from 64 to 268435460"]),
        ("[mqtt]\nmax_queued_bytes = -1", ["mqtt.max_queued_bytes", "1 or more"]),
        ("[mqtt]\nconnect_timeout = '2h'", ["mqtt.connect_timeout = 2h", "from 10ms to 1h"]),
        ("[mqtt]\nconnect_timeout = 10", ["mqtt.connect_timeout", '"10s"', "from 10ms to 1h"]),
        ("[mqtt]\nmax_session_expiry = 'ever'", ["mqtt.max_session_expiry", '"7d"', '"never"']),
        ("[mqtt]\nrefused_filters = ['a/#/b']", ["mqtt.refused_filters", "'a/#/b'", "last level"]),
        (
            "[mqtt]\nws_origins = ['app.example.org/x']",
            ["mqtt.ws_origins", "https://app.example.org"],
        ),
        ("[mqtt]\nretain_available = 'maybe'", ["mqtt.retain_available", "boolean"]),
        ("[mqtt]\nmax_qso = 1", ["mqtt.max_qso", "is not a setting", "mqtt.max_qos"]),
        ("[mqqt]\n", ["mqqt", "is not a setting"]),
        ("zzz = 1", ["zzz", "is not a setting", "listen, tls"]),
        ("mqtt = 5", ["mqtt = 5"]),
        ("[listen]\nmqtt = '1883'", ["listen.mqtt = 1883", "127.0.0.1:1883"]),
        ("[listen]\nmqtt = 1883", ["listen.mqtt = 1883"]),
        ("[log]\nlevel = 'loud'", ["log.level = loud", "'warning'"]),
        ("[tls]\ncert = 'no-such.pem'", ["tls.cert = no-such.pem", "PEM"]),
        ("store = 'sqlite'", ["store = sqlite", "redis://"]),
        ("store = 'redis+sentinel://h:1'", ["name of the master", "HOST:PORT,HOST:PORT/MASTER"]),
        ("[redis]\nmin_replicas = 1", ["redis.min_replicas = 1", "needs a store in Redis"]),
        (
            "store = 'redis://h'\n[redis]\nreplica_ack = 'disk'",
            ["redis.replica_ack = disk", "redis.min_replicas"],
        ),
        (
            "store = 'redis://h'\n[redis]\nmin_replicas = 1\nreplica_timeout = '5s'",
            ["redis.replica_timeout", "redis.answer_timeout"],
        ),
        ("[listen]\nwss = '127.0.0.1:0'", ["listen.wss", "tls.cert", "tls.key"]),
        ("[cluster]\ncoordinator = 'etcd'", ["cluster.coordinator", "redis://HOST:PORT"]),
        (
            "store = 'redis://h'\n[cluster]\ncoordinator = 'etcd'\nlisten = '10.0.0.1:7946'",
            ["cluster.listen = 10.0.0.1:7946", "cluster.tls_ca", "cluster.trusted_network"],
        ),
        ("[cluster]\nsilence = '600ms'", ["cluster.silence", "cluster.heartbeat"]),
        (
            "[cluster]\nsecret = 'hunter2'",
            ["cluster.secret = ***", "16 characters", "openssl rand -hex 32"],
        ),
        ("[cluster]\nsecret_file = 'no-such'", ["cluster.secret_file = no-such", "can be read"]),
        ("[mqtt]\nmax_qos = \n", ["sluice.toml is not TOML", "line 2"]),
    ],
)
def test_error_names_the_key_the_allowed_values_and_a_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    refusal = refusal_of(tmp_path, text)
    assert [word for word in words if word not in refusal] == [], refusal


def test_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("-")
    assert "tls.cert and tls.key belong together" in refusal_of(
        tmp_path, f"[tls]\ncert = '{tmp_path}/cert.pem'"
    )


def test_all_errors_are_reported_at_once_with_their_source(tmp_path: Path) -> None:
    refusal = refusal_of(tmp_path, "[mqtt]\nmax_qos = 3", {"SLUICE_MQTT__MAX_INFLIGHT": "0"})
    assert "mqtt.max_qos = 3" in refusal
    assert "(SLUICE_MQTT__MAX_INFLIGHT)" in refusal


def test_missing_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"cannot read no-such\.toml: No such file"):
        load_settings(Path("no-such.toml"), {}, {})


@pytest.mark.parametrize(
    ("variable", "words"),
    [
        ("SLUICE_MQTT_MAX_QOS", "Did you mean mqtt.max_qos (environment: SLUICE_MQTT__MAX_QOS)?"),
        ("SLUICE_MQTT__MAX_QSO", "Did you mean mqtt.max_qos"),
        ("SLUICE_DATAA", "Did you mean data"),
        ("SLUICE_MQTT__REFUSED_FILTERS", "is not a list"),
    ],
)
def test_unknown_variable_is_refused(tmp_path: Path, variable: str, words: str) -> None:
    assert words in refusal_of(tmp_path, environ={variable: "1 2"})


@pytest.mark.parametrize(
    "variable",
    [
        "SLUICE_PORT",
        "SLUICE_SERVICE_HOST",
        "SLUICE_SERVICE_PORT_MQTT",
        "SLUICE_PORT_1883_TCP_ADDR",
        "SLUICE_MQTT_PORT_1883_TCP",
        "SLUICE_PURE",
    ],
)
def test_variables_set_by_others_with_our_prefix_are_ignored(variable: str) -> None:
    assert load_settings(None, {variable: "tcp://10.0.0.1:1883"}, {}) == Settings()


def test_error_does_not_show_a_password(tmp_path: Path) -> None:
    refusal = refusal_of(
        tmp_path, "store = 'mongodb://sluice:hunter2@db'\n[cluster]\nsecret = 'hunter2'"
    )
    assert "hunter2" not in refusal
    assert "mongodb://sluice:***@db" in refusal


def test_cluster_secret_comes_from_the_environment_or_a_file_and_is_not_shown(
    tmp_path: Path,
) -> None:
    given = load_settings(None, {"SLUICE_CLUSTER__SECRET": "0123456789abcdef"}, {})
    assert given.cluster.link_secret() == "0123456789abcdef"
    assert "0123456789abcdef" not in repr(given)
    (tmp_path / "secret").write_text("fedcba9876543210\n")
    in_file = {"SLUICE_CLUSTER__SECRET_FILE": str(tmp_path / "secret")}
    assert load_settings(None, in_file, {}).cluster.link_secret() == "fedcba9876543210"
    assert load_settings(None, {}, {}).cluster.link_secret() == ""
    both = refusal_of(tmp_path, "[cluster]\nsecret = '0123456789abcdef'", in_file)
    assert "both given; give one of them" in both
    (tmp_path / "secret").write_text("short\n")
    assert "must hold 16 characters or more" in refusal_of(tmp_path, "", in_file)


def test_settings_are_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().store = "memory"
