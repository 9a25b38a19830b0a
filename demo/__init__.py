"""A training run that is killed and resumed, and a fine-tune of its result: `make demo`."""
