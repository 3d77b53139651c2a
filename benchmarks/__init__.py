"""The cost of a call through tarry, compared with a hand-written loop and peer libraries.

Run it with ``python -m benchmarks``; ``--help`` lists the options.
"""
