"""Policies from the documents of other systems, as far as they map."""

from tarry.policyfile.imports.grpc import from_grpc
from tarry.policyfile.imports.istio import from_istio

__all__ = ["from_grpc", "from_istio"]
