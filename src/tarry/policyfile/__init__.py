"""Policy files: a policy with its breaker, budget, limiter or hedging as one document.

`defence` is the document itself. `check` finds settings that look wrong, `explain` describes a
document in words, `toml` writes it, `export` and `imports` translate it to and from other systems.
"""
