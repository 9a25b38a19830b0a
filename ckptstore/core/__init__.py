"""The nouns: frozen values and arithmetic without I/O and without torch."""
