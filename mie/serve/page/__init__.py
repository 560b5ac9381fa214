"""The web page of a server: its files, its live stream, and its questions."""
