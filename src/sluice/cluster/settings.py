"""What can be set about the cluster: the table `cluster` of the server's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, SecretStr, model_validator

from sluice.config_types import ConfigSection, Seconds, duration_between, number_between
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
            f"must have {MIN_SECRET_LENGTH} characters or more; make one with `openssl rand -hex 32`"
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
            f"must hold {MIN_SECRET_LENGTH} characters or more; make one with `openssl rand -hex 32`"
        )
    return path


PemFile = Annotated[Path, AfterValidator(_existing_file)]
SecretFile = Annotated[Path, AfterValidator(_check_secret_file)]
LinkAddress = Annotated[Address, BeforeValidator(_address)]
PlainName = Annotated[str, AfterValidator(_check_name)]


class ClusterSettings(ConfigSection):
    """How this node meets the others. Without a coordinator it is alone, and nothing else here counts."""

    coordinator: Literal["off", "etcd", "redis"] = "off"
    name: PlainName = "sluice"  # nodes with the same one, at the same coordinator, are one cluster
    node: PlainName = (
        ""  # this node's own, which outlives a restart; empty: host name and port of the link
    )
    cells: Annotated[int, number_between(1, 4096)] = 60  # for the life of the cluster
    listen: LinkAddress = Address("127.0.0.1", 7946)  # for the other nodes
    advertise: str = ""  # the host under which the others reach this node; empty: where it listens
    advertise_link: LinkAddress | None = (
        None  # the whole address of the link, where a port is mapped
    )
    secret: Annotated[SecretStr, AfterValidator(_check_secret_length)] = SecretStr(
        ""
    )  # the same for all nodes
    secret_file: SecretFile | None = (
        None  # or the file that holds it; neither: the coordinator has one
    )
    tls_cert: PemFile | None = None  # mutual TLS on the link: all three, or none
    tls_key: PemFile | None = None
    tls_ca: PemFile | None = None
    trusted_network: bool = False  # True: the link may go beyond loopback without TLS
    etcd_endpoints: list[str] = ["127.0.0.1:2379"]
    etcd_lease_ttl: Annotated[Seconds, duration_between(1, 300)] = (
        5.0  # of a registration, in Redis as well
    )
    etcd_ca: PemFile | None = None  # given: TLS to etcd
    etcd_cert: PemFile | None = None
    etcd_key: PemFile | None = None
    heartbeat: Annotated[Seconds, duration_between(0.05, 60)] = 0.5
    silence: Annotated[Seconds, duration_between(0.2, 300)] = (
        2.0  # then a node is suspected, and put out by a majority
    )
    publish_timeout: Annotated[Seconds, duration_between(1, 300)] = (
        10.0  # a publish, settlement or subscription for a cell that does not answer is refused then
    )

    @model_validator(mode="after")
    def _check_tls_complete(self) -> ClusterSettings:
        if len({one is None for one in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError(
                "cluster.tls_cert, cluster.tls_key and cluster.tls_ca belong together; give all three or none"
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
        """Return the configured secret of the cluster; empty: the coordinator holds one."""
        if self.secret_file is not None:
            return self.secret_file.read_text().strip()
        return self.secret.get_secret_value()

    @model_validator(mode="after")
    def _check_link_security(self) -> ClusterSettings:
        """The secret proves who calls. It does not encrypt what is sent afterwards."""
        plain = self.tls_cert is None and not self.trusted_network
        if self.coordinator != "off" and plain and not self.listen.is_loopback:
            raise ValueError(
                f"cluster.listen = {self.listen} is open to other machines; give cluster.tls_cert, cluster.tls_key and "
                "cluster.tls_ca, or set cluster.trusted_network = true where nobody else can reach it"
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
                "cluster.silence is less than two of cluster.heartbeat, and nodes would be put out by chance"
            )
        return self
