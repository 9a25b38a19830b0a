"""How a state goes from one process to another over HTTP: only chunks that it lacks, from any
number of peers (docs/torchft.md)."""
