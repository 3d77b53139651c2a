"""Client certificates (mTLS): which certificate the service presents to which target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tarry.service.certificates import CertificateFiles
from tarry.service.delivery.targets import compile_lane_patterns, lane_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tarry.service.delivery.targets import Target

_FIELDS = ("client_certificates: cert_file", "client_certificates: key_file")


class ClientCertificate:
    """A client certificate of one tenant.

    `targets` are patterns of the lanes (`scheme:host:port`) to which it is presented.
    """

    def __init__(
        self, cert_file: str, key_file: str, *, tenant: str, targets: Sequence[str]
    ) -> None:
        self._paths = cert_file, key_file
        self._matches = compile_lane_patterns(tenant, targets)

    def is_for(self, tenant: str, target: Target) -> bool:
        """Return whether the certificate is presented to a target for a tenant."""
        return self._matches(lane_name(tenant, target)) is not None

    def open_files(self) -> CertificateFiles:
        """Return the files, with their own state: each caller finds out about changes."""
        return CertificateFiles(*self._paths, fields=_FIELDS)


def find_certificate(
    certificates: Iterable[ClientCertificate], tenant: str, target: Target
) -> ClientCertificate | None:
    """Return the first certificate for a target of a tenant, or None."""
    return next((each for each in certificates if each.is_for(tenant, target)), None)
