"""Other libraries' formats and protocols, each in a file of its own."""
