"""What is particular to a state that many ranks hold: who they are, and which boxes of its tensors are here."""
