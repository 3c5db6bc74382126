"""Settings of the cluster: the table `cluster` of the server's configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr, model_validator

from sluice.config.setting_types import ConfigSection, Seconds, duration_between, number_between
from sluice.units import Address, parse_address

MIN_SECRET_LENGTH: Final = 16  # characters


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not a file that exists; give the path of a PEM file")
    return path


def _address(value: object) -> object:
    return parse_address(value) if isinstance(value, str) else value


def _check_name(value: str) -> str:
    if not value.isprintable() or any(sign in value for sign in "{}/ "):
        raise ValueError("must be a word without braces and slashes")
    return value


def _check_secret_length(value: SecretStr) -> SecretStr:
    if 0 < len(value.get_secret_value()) < MIN_SECRET_LENGTH:
        raise ValueError(
            f"must have {MIN_SECRET_LENGTH} characters or more; "
            "make one with `openssl rand -hex 32`"
        )
    return value


def _check_secret_file(path: Path) -> Path:
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        raise ValueError(
            "is not a text file that can be read; put the cluster secret there"
        ) from None
    if len(text) < MIN_SECRET_LENGTH:
        raise ValueError(
            f"must hold {MIN_SECRET_LENGTH} characters or more; "
            "make one with `openssl rand -hex 32`"
        )
    return path


PemFile = Annotated[Path, AfterValidator(_existing_file)]
SecretFile = Annotated[Path, AfterValidator(_check_secret_file)]
LinkAddress = Annotated[Address, BeforeValidator(_address)]
PlainName = Annotated[str, AfterValidator(_check_name)]


class ClusterSettings(ConfigSection):
    """How this node joins a cluster.

    With `coordinator = "off"` the other settings have no effect.
    """

    coordinator: Literal["off", "etcd", "redis"] = "off"
    name: PlainName = "sluice"  # nodes with the same name and coordinator form one cluster
    # The name of this node, stable across restarts; empty: host name and port of the link.
    node: PlainName = ""
    cells: Annotated[int, number_between(1, 4096)] = 60  # fixed for the lifetime of the cluster
    listen: LinkAddress = Address("127.0.0.1", 7946)  # for links from other nodes
    advertise: str = ""  # host under which other nodes reach this one; empty: the listen host
    # The complete address of the link, if its port is mapped.
    advertise_link: LinkAddress | None = None
    # The same for all nodes. If neither `secret` nor `secret_file` is set, the nodes share a
    # secret that the coordinator stores.
    secret: Annotated[SecretStr, AfterValidator(_check_secret_length)] = SecretStr("")
    secret_file: SecretFile | None = None
    tls_cert: PemFile | None = None  # mutual TLS on the link: set all three or none
    tls_key: PemFile | None = None
    tls_ca: PemFile | None = None
    trusted_network: bool = False  # True: allow links beyond loopback without TLS
    etcd_endpoints: list[str] = ["127.0.0.1:2379"]
    # Lifetime of a registration, with Redis as coordinator too.
    etcd_lease_ttl: Annotated[Seconds, duration_between(1, 300)] = 5.0
    etcd_ca: PemFile | None = None  # set: use TLS to etcd
    etcd_cert: PemFile | None = None
    etcd_key: PemFile | None = None
    heartbeat: Annotated[Seconds, duration_between(0.05, 60)] = 0.5
    # After this time a silent node is suspected; a majority of suspecting nodes evicts it.
    silence: Annotated[Seconds, duration_between(0.2, 300)] = 2.0
    # How long loading a cell of a dead node may take while another node could try instead.
    partition_sync_timeout: Annotated[Seconds, duration_between(0.1, 3600)] = 10.0
    # Refuse a publish, settlement or subscription if its cell has not answered by then.
    publish_timeout: Annotated[Seconds, duration_between(1, 300)] = 10.0

    @model_validator(mode="after")
    def _check_tls_complete(self) -> ClusterSettings:
        if len({one is None for one in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError(
                "cluster.tls_cert, cluster.tls_key and cluster.tls_ca belong together; "
                "give all three or none"
            )
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ValueError(
                "cluster.etcd_cert and cluster.etcd_key belong together; give both or neither"
            )
        return self

    @model_validator(mode="after")
    def _check_single_secret(self) -> ClusterSettings:
        if self.secret.get_secret_value() and self.secret_file is not None:
            raise ValueError(
                "cluster.secret and cluster.secret_file are both given; give one of them"
            )
        return self

    def link_secret(self) -> str:
        """Return the configured secret; empty: the coordinator stores one."""
        if self.secret_file is not None:
            return self.secret_file.read_text().strip()
        return self.secret.get_secret_value()

    @model_validator(mode="after")
    def _check_link_security(self) -> ClusterSettings:
        """Require TLS beyond loopback: the secret authenticates a peer but encrypts nothing."""
        plain = self.tls_cert is None and not self.trusted_network
        if self.coordinator != "off" and plain and not self.listen.is_loopback:
            raise ValueError(
                f"cluster.listen = {self.listen} is open to other machines; give cluster.tls_cert, "
                "cluster.tls_key and cluster.tls_ca, or set cluster.trusted_network = true if only "
                "trusted machines can reach it"
            )
        return self

    @model_validator(mode="after")
    def _check_advertised_host(self) -> ClusterSettings:
        if (
            self.coordinator != "off"
            and self.listen.host in ("0.0.0.0", "::")
            and not self.advertise
        ):
            raise ValueError(
                "cluster.listen names no host that others could call; set cluster.advertise"
            )
        return self

    @model_validator(mode="after")
    def _check_silence(self) -> ClusterSettings:
        if self.silence < 2 * self.heartbeat:
            raise ValueError(
                "cluster.silence is less than two of cluster.heartbeat, so that live nodes would "
                "be evicted by chance; raise cluster.silence"
            )
        return self
