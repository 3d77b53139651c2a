"""Policy files: a policy with its breaker, budget, limiter or hedging as one document.

A policy file is a `Defence` (module `defence`). `check` finds settings that look wrong, `explain`
describes a defence in words, `toml` writes it as a file, `export` and `imports` translate it to and
from other systems.
"""
