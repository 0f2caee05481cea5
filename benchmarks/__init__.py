"""What the decoding engine costs and gains on this machine: steps, throughput, and others beside it.

python -m benchmarks run        # or `make bench`
"""
