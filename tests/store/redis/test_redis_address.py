"""Tests of the addresses of a store in Redis."""

from __future__ import annotations

import pytest

from sluice.errors import StoreError
from sluice.process.logs import hide_secrets
from sluice.store.redis.connection import RedisAddress


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("redis://h", "redis://h:6379/"),
        ("redis://h:1/3", "redis://h:1/3"),
        (
            "rediss://user:p%40ss@h:1?ssl_ca_certs=%2Fca",
            "rediss://user:p%40ss@h:1/?ssl_ca_certs=%2Fca",
        ),
        ("redis://[::1]:7", "redis://[::1]:7/"),
        ("redis://[::1]", "redis://[::1]:6379/"),
    ],
)
def test_address_of_one_server(url: str, server: str) -> None:
    address = RedisAddress.parse(url)
    assert not address.master
    assert [address.server_url(host) for host in address.hosts] == [server]


def test_address_of_several_nodes() -> None:
    address = RedisAddress.parse("redis://:secret@a:1,b,[::1]:3")
    assert address.hosts == ("a:1", "b:6379", "[::1]:3")
    assert address.server_url(address.hosts[1]) == "redis://:secret@b:6379/"


def test_address_of_sentinels() -> None:
    address = RedisAddress.parse(
        "rediss+sentinel://u:p@s1,s2:2/main/5?sentinel_password=x%2Fy&ssl_ca_certs=/ca"
    )
    assert (address.master, address.hosts) == ("main", ("s1:26379", "s2:2"))
    assert address.server_url("m:9") == "rediss://u:p@m:9/5?ssl_ca_certs=%2Fca"
    assert address.sentinel_url("s1:26379") == "rediss://:x%2Fy@s1:26379/?ssl_ca_certs=%2Fca"


@pytest.mark.parametrize(
    "url",
    ["redis://", "redis+sentinel://a:1", "redis+sentinel:///main", "http://h", "redis://a,,b"],
)
def test_address_that_is_none_is_refused_with_the_possible_forms(url: str) -> None:
    with pytest.raises(StoreError, match="not one of Redis") as refusal:
        RedisAddress.parse(url)
    assert "redis+sentinel://HOST:PORT,HOST:PORT/MASTER" in refusal.value.remedy


def test_passwords_of_an_address_are_hidden_in_logs() -> None:
    shown = hide_secrets("redis+sentinel://u:secret@a:1,b:2/main?sentinel_password=hidden&x=1")
    assert shown == "redis+sentinel://u:***@a:1,b:2/main?sentinel_password=***&x=1"
