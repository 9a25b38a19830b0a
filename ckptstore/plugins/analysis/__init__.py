"""Questions about tensors over many commits: statistics, runs that part, averages, charts."""
