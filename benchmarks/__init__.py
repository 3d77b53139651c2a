"""What a call through tarry costs, beside a hand-written loop and the peers, in one run.

Run it with ``python -m benchmarks``; ``--help`` lists the choices.
"""
