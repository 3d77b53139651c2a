"""Exporters: translate a defence to documents of other systems, and list what is lost."""

from tarry.policyfile.export.envoy import to_envoy
from tarry.policyfile.export.gateway import to_gateway_api
from tarry.policyfile.export.grpc import to_grpc
from tarry.policyfile.export.istio import to_istio

__all__ = ["to_envoy", "to_gateway_api", "to_grpc", "to_istio"]
