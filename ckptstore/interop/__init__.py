"""How are other libraries' formats and protocols read and written? Each in a folder of its own."""
