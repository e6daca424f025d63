"""Speed and memory, with a peer or a floor beside every figure. See `python -m benchmarks -h`."""
