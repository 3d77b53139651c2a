"""Policy files: a policy or hedging, with its breaker, budget and limiter, as one document.

A policy file describes a `Defence` (module `defence`). `explain` describes a defence in words and
finds settings that are probably mistakes. `toml` writes a policy file. `envoy` and `gateway` export
a defence to other systems; `grpc` and `istio` also import it.
"""
