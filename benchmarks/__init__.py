"""ckptstore beside its peers and the machine's limits, in one run: `python -m benchmarks
--help`."""
