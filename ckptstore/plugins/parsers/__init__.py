"""Where in the files of other programs do tensors lie? Nothing that a file holds is run."""
