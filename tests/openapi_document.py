"""Print the OpenAPI document of a service that requires API keys, for generated clients."""

from __future__ import annotations

import json

from tests.service.api.harness import ApiHarness, run_with_api


async def _get_document(api: ApiHarness) -> object:
    return (await api.request("GET", "/openapi.json")).json


if __name__ == "__main__":
    print(json.dumps(run_with_api(_get_document, keys=True), indent=2))
