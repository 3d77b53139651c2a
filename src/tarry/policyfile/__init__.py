"""Policy files: a policy with its breaker, budget, limiter or hedging as one document.

A policy file is a `Defence` (module `defence`). `explain` describes a defence in words and finds
settings that look wrong, `toml` writes it as a file. `envoy`, `gateway`, `grpc` and `istio`
translate it to and from other systems.
"""
