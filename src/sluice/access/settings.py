"""What can be set about who comes in: the tables `auth` and `webhooks` of the server's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, model_validator

from sluice.config_types import ConfigSection, Seconds, duration_between


def _existing_file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError("is not a file that exists; make it first, or correct the path")
    return path


ExistingFile = Annotated[Path, AfterValidator(_existing_file)]


class JwtSettings(ConfigSection):
    """Tokens that somebody else signs. They are taken when one of the two key files is given."""

    secret_file: ExistingFile | None = (
        None  # HS256: a secret of 32 bytes or more that the signer knows too
    )
    key_file: ExistingFile | None = None  # RS256, ES256: public keys, as PEM or as a JWKS (JSON)
    issuer: str = ""  # given: what `iss` must be
    audience: str = ""  # given: what `aud` must be, or hold
    leeway: Annotated[Seconds, duration_between(0, 600)] = 30.0  # by which clocks may differ
    user_claim: str = "sub"
    role_claim: str = "role"  # viewer, operator or admin: for the admin doors
    client_claim: str = ""  # given: a token with this claim is for that MQTT client id only

    @model_validator(mode="after")
    def _check_single_key(self) -> JwtSettings:
        if self.secret_file is not None and self.key_file is not None:
            raise ValueError(
                "auth.jwt takes secret_file or key_file, not both: a token has one kind of signer"
            )
        return self

    @property
    def is_configured(self) -> bool:
        return self.secret_file is not None or self.key_file is not None


class AuthSettings(ConfigSection):
    allow_anonymous: bool | None = None  # None: on loopback only, and not once there are users
    users: ExistingFile | None = None  # made by `sluice user add`
    tokens: ExistingFile | None = None  # made by `sluice token add`
    rules: ExistingFile | None = (
        None  # who may do what; without it, whoever comes in may do what its role allows
    )
    certificate_user: Literal["off", "cn", "san"] = (
        "off"  # take a verified client certificate's name as the user
    )
    jwt: JwtSettings = JwtSettings()
