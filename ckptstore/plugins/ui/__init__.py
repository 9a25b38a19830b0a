"""The web page of `ckptstore ui`: views of stores as JSON, a server for them, and their export."""
