"""Importers: build a defence from documents of other systems, and list what is lost."""

from tarry.policyfile.imports.grpc import from_grpc
from tarry.policyfile.imports.istio import from_istio

__all__ = ["from_grpc", "from_istio"]
